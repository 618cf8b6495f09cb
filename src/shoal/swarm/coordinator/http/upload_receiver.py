"""Receives uploads: copies bytes from a socket into the local object store, and counts and hashes them on the way.

Its own threads look up the upload and wait for the disk, so that the event loop never does.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from shoal.net.object_store import Incoming, LocalStore
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http.router import check_length
from shoal.swarm.coordinator.leases import uploads
from shoal.swarm.coordinator.leases.lease_rows import ExpectedUpload
from shoal.swarm.coordinator.store.writer import Writer
from shoal.wire.codes import Rejected

UPLOAD_IDLE_S = 30.0
"""Seconds without a byte after which an upload is given up; the client may start it again."""
UPLOADS_AT_ONCE = 2
"""Concurrent uploads of one token: one that stalled and the one that replaces it."""
PIECE_BYTES = 256 << 10
"""Bytes that are gathered for one write to the disk."""
DISK_THREADS = 16


class Receiver:
    """Receives uploads of one run."""

    def __init__(self, coordinator: Coordinator, writer: Writer) -> None:
        self._coordinator, self._writer = coordinator, writer
        self._arriving: Counter[str] = Counter()
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")

    def close(self) -> None:
        self._disk.shutdown(wait=False)

    async def receive(self, token: str, length: str, receive: Receive) -> Response:
        """Answers a PUT of `token` with a body of the declared `length`."""
        store = self._coordinator.store
        if not isinstance(store, LocalStore):
            raise Rejected("request.not_found", "uploads of this run go to its object store")
        expected = await self._on_disk(self._find_expected, token)
        check_length(length, expected.num_bytes)
        if self._arriving[token] >= UPLOADS_AT_ONCE:
            raise Rejected("request.too_many", "this upload is in progress already", retry_after_s=1.0)
        self._arriving[token] += 1
        try:
            incoming = LazyIncoming(partial(store.receive, token, expected.sha256, expected.num_bytes))
            await self._copy(receive, incoming, expected.expires_at_s - self._coordinator.clock())
        finally:
            self._arriving[token] -= 1
            if not self._arriving[token]:
                del self._arriving[token]
        await self._writer.run(partial(uploads.mark_stored, self._coordinator, expected))
        return Response(status_code=204)

    def _find_expected(self, token: str) -> ExpectedUpload:
        with self._coordinator.database.read() as db:
            return uploads.find_expected(db, token, self._coordinator.clock())

    async def _copy(self, receive: Receive, incoming: "LazyIncoming", left_s: float) -> None:
        """Copies the body to the disk; removes what was written if the upload breaks off or its lease ends."""
        complete, clock = False, asyncio.get_running_loop().time
        end_s = clock() + left_s
        try:
            async with asyncio.timeout_at(min(end_s, clock() + UPLOAD_IDLE_S)) as timeout:
                more, pieces, held = True, [], 0
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise TimeoutError
                    timeout.reschedule(min(end_s, clock() + UPLOAD_IDLE_S))
                    more = message.get("more_body", False)
                    pieces.append(message.get("body", b""))
                    held += len(pieces[-1])
                    if more and held >= PIECE_BYTES:
                        await self._on_disk(incoming.write, b"".join(pieces))
                        pieces, held = [], 0
            await self._on_disk(incoming.finish, b"".join(pieces))
            complete = True
        except TimeoutError:
            raise Rejected("request.incomplete", "the upload broke off") from None
        finally:
            if not complete:
                incoming.discard()

    async def _on_disk(self, act: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._disk, act, *arguments)


class LazyIncoming:
    """An upload that opens its file at the first write, in a disk thread."""

    def __init__(self, begin: Callable[[], Incoming]) -> None:
        self._begin = begin
        self._incoming: Incoming | None = None

    def write(self, piece: bytes) -> None:
        if self._incoming is None:
            self._incoming = self._begin()
        self._incoming.write(piece)

    def finish(self, last: bytes) -> None:
        self.write(last)
        assert self._incoming is not None, "`write` opened it"
        self._incoming.finish()

    def discard(self) -> None:
        if self._incoming is not None:
            self._incoming.discard()
