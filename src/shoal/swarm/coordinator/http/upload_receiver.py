"""Receives uploads: copies bytes from a socket into the local object store, and counts and hashes them on the way.

Its own threads look up the upload and wait for the disk, so that the event loop never does.
"""

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
"""Concurrent uploads of one lease: one that stalled and the one that replaces it."""
PIECE_BYTES = 256 << 10
"""Bytes that are gathered for one write to the disk."""
DISK_THREADS = 16


@dataclass(slots=True, eq=False)
class UploadInProgress:
    """An upload whose body is being received."""

    expected: ExpectedUpload
    timeout: asyncio.Timeout | None = None
    """Ends the wait for the next bytes; None while none are waited for."""
    replaced: bool = False
    """Whether the node has declared other bytes for the lease since."""

    def end(self) -> None:
        """Ends the upload at once, or after the write to the disk that is in progress."""
        self.replaced = True
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(0.0)


class Receiver:
    """Receives uploads of one run."""

    def __init__(self, coordinator: Coordinator, writer: Writer) -> None:
        self._coordinator, self._writer = coordinator, writer
        # By lease: a lease gets a new token for each digest that its node declares, so a count by token limits nothing.
        self._arriving: defaultdict[str, list[UploadInProgress]] = defaultdict(list)
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
        arriving = self._begin(expected)
        try:
            incoming = store.receive(token, expected.sha256, expected.num_bytes)
            await self._copy(receive, incoming, arriving)
        finally:
            others = self._arriving[expected.lease_id]
            others.remove(arriving)
            if not others:
                del self._arriving[expected.lease_id]
        await self._writer.run(partial(uploads.mark_stored, self._coordinator, expected))
        return Response(status_code=204)

    def _begin(self, expected: ExpectedUpload) -> UploadInProgress:
        """Counts a new upload of a lease and ends those that it replaces. Raises Rejected if too many are in progress."""
        here = self._arriving.get(expected.lease_id, [])
        for other in here:
            if other.expected.asked_at_s < expected.asked_at_s:
                other.end()
        if len(here) >= UPLOADS_AT_ONCE:
            raise Rejected(
                "request.too_many",
                f"{len(here)} uploads of this lease are in progress already, at most {UPLOADS_AT_ONCE}",
                retry_after_s=1.0,
            )
        arriving = UploadInProgress(expected)
        self._arriving[expected.lease_id].append(arriving)
        return arriving

    def _find_expected(self, token: str) -> ExpectedUpload:
        with self._coordinator.database.read() as db:
            return uploads.find_expected(db, token, self._coordinator.clock())

    async def _copy(self, receive: Receive, incoming: Incoming, arriving: UploadInProgress) -> None:
        """Copies the body to the disk; removes what was written if the upload breaks off or is replaced, or its lease ends."""
        complete, clock = False, asyncio.get_running_loop().time
        end_s = clock() + arriving.expected.expires_at_s - self._coordinator.clock()
        try:
            more, pieces, held = True, [], 0
            while more:
                # A write to the disk is not interrupted: its thread would go on, and create the file again that `discard` deletes.
                async with asyncio.timeout_at(min(end_s, clock() + UPLOAD_IDLE_S)) as arriving.timeout:
                    message = await receive()
                arriving.timeout = None
                if message["type"] == "http.disconnect" or arriving.replaced or clock() >= end_s:
                    raise TimeoutError
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
