"""Receiving uploads: bytes from a socket into the store, counted and hashed on the way, under a name we gave out.

What is expected under a name is remembered since it was given out, and the disk is waited for by threads of its own: an upload of
some kilobytes is one visit to them, and one to the desk.
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
from shoal.swarm.coordinator.leases import uploads
from shoal.swarm.coordinator.leases.pending_upload import Expected
from shoal.swarm.coordinator.store.needs import Needs
from shoal.swarm.coordinator.store.writer import Desk
from shoal.wire.codes import Rejected

UPLOAD_IDLE_S = 30.0
"""An upload that stands still for so long is given up; the client may begin it again."""
UPLOADS_AT_ONCE = 2
"""Per name: one that stalled and the one that replaces it."""
PIECE_BYTES = 256 << 10
"""Written at once."""
DISK_THREADS = 16


class Receiver:
    def __init__(self, coordinator: Coordinator, desk: Desk) -> None:
        self._coordinator, self._desk = coordinator, desk
        self._arriving: Counter[str] = Counter()
        self._disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")

    def close(self) -> None:
        self._disk.shutdown(wait=False)

    async def take(self, token: str, length: str, receive: Receive) -> Response:
        """The answer to a PUT of `token` with a body that is said to be of `length`."""
        store = self._coordinator.store
        if not isinstance(store, LocalStore):
            raise Rejected("request.not_found", "uploads of this run go to its object store")
        expected = self._coordinator.expected.get(token)
        if expected is None or self._coordinator.clock() > expected.expires_at_s:
            expected = await self._on_disk(self._look_up, token)
        check_length(length, expected.num_bytes)
        if self._arriving[token] >= UPLOADS_AT_ONCE:
            raise Rejected("request.too_many", "this upload is under way already", retry_after_s=1.0)
        self._arriving[token] += 1
        try:
            landing = Landing(partial(store.receive, token, expected.sha256, expected.num_bytes))
            await self._receive(receive, landing, expected.expires_at_s - self._coordinator.clock())
        finally:
            self._arriving[token] -= 1
            if not self._arriving[token]:
                del self._arriving[token]
        needs = Needs(lease_id=expected.lease_id, upload=True)
        await self._desk.do(partial(uploads.mark_stored, self._coordinator, expected), needs)
        # Another upload under this name must look what became of the lease meanwhile.
        self._coordinator.expected.forget(token)
        return Response(status_code=204)

    def _look_up(self, token: str) -> Expected:
        with self._coordinator.database.read() as db:
            return uploads.expected_under(db, token, self._coordinator.clock())

    async def _receive(self, receive: Receive, landing: "Landing", left_s: float) -> None:
        """Every byte to the disk; nothing stays behind if it breaks off or outlasts its lease."""
        complete, clock = False, asyncio.get_running_loop().time
        end_s = clock() + left_s
        try:
            async with asyncio.timeout_at(min(end_s, clock() + UPLOAD_IDLE_S)) as patience:
                more, pieces, held = True, [], 0
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise TimeoutError
                    patience.reschedule(min(end_s, clock() + UPLOAD_IDLE_S))
                    more = message.get("more_body", False)
                    pieces.append(message.get("body", b""))
                    held += len(pieces[-1])
                    if more and held >= PIECE_BYTES:
                        await self._on_disk(landing.write, b"".join(pieces))
                        pieces, held = [], 0
            await self._on_disk(landing.end, b"".join(pieces))
            complete = True
        except TimeoutError:
            raise Rejected("request.wrong_digest", "the upload broke off") from None
        finally:
            if not complete:
                landing.discard()

    async def _on_disk(self, act: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._disk, act, *arguments)


class Landing:
    """One upload on its way to the disk, by a disk's thread from its first byte on."""

    def __init__(self, begin: Callable[[], Incoming]) -> None:
        self._begin = begin
        self._incoming: Incoming | None = None

    def write(self, piece: bytes) -> None:
        if self._incoming is None:
            self._incoming = self._begin()
        self._incoming.write(piece)

    def end(self, last: bytes) -> None:
        self.write(last)
        assert self._incoming is not None, "something was written, if only no bytes"
        self._incoming.finish()

    def discard(self) -> None:
        if self._incoming is not None:
            self._incoming.discard()


def check_length(declared: str, max_bytes: int) -> None:
    """By the declared length, before a byte is read."""
    if not declared.isascii() or not declared.isdecimal() or len(declared) > 15:
        raise Rejected("request.malformed", f"Content-Length is {declared[:32]!r}, expected a number")
    if int(declared) > max_bytes:
        raise Rejected("request.too_large", f"{declared} bytes announced, {max_bytes} allowed here")
