"""The exchange of one round: every member sends each owner its chunks of that part and gets the sums back.

Each stream is opened by the member, so a peer that can only reach out takes part like any other. An owner sums each
chunk in the order of the members and codes it once; everybody, the owner too, decodes those same bytes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
from blake3 import blake3

from shoal.diloco.averaging.averager import Group, Reduced, RoundFailed
from shoal.diloco.averaging.part import Part, chunk_bounds, part_bounds
from shoal.diloco.averaging.peer_messages import Asked, PartAsk
from shoal.diloco.averaging.roster import Roster
from shoal.diloco.codec import CodecName, coded_bytes, decode, encode
from shoal.diloco.outer import Vector
from shoal.diloco.transport.mesh import Broken, Mesh, Stream

LOOK_S = 1.0
BULK = 1 << 20
"""Bytes from which a link of its own is worth a round trip."""
Ping = Callable[[str], Awaitable[bool]]
"""Whether a peer may be taken to live."""


class Reducer:
    """Lives on the peer's event loop."""

    def __init__(self, mesh: Mesh, roster: Roster, ping: Ping, *, codec: CodecName, stall_s: float) -> None:
        self._mesh, self._roster, self._ping = mesh, roster, ping
        self._codec: CodecName = codec
        self._stall_s = stall_s
        self._parts: dict[str, Part] = {}
        self._registered = asyncio.Condition()

    async def reduce(self, group: Group, delta_N: Vector, *, deadline_s: float) -> Reduced:
        bounds = part_bounds(len(delta_N), len(group.owners))
        average_N = np.empty_like(delta_N)
        jobs: list[Awaitable[tuple[list[bytes], int]]] = []
        for owner, (start, end) in zip(group.owners, bounds, strict=True):
            chunks = chunk_bounds(start, end)
            if not chunks:
                continue
            if owner == self._mesh.peer:
                jobs.append(self._own(group, chunks, delta_N, average_N))
            else:
                jobs.append(self._send(group, owner, chunks, delta_N, average_N, deadline_s))
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            async with asyncio.timeout(deadline_s):
                done = await asyncio.gather(*tasks)
        except TimeoutError:
            raise RoundFailed(f"the exchange took longer than {deadline_s:.0f} s") from None
        finally:
            for task in tasks:
                task.cancel()
            # Frames for the owners' own handlers that are still writing sums out stay until those are done.
            await asyncio.gather(*tasks, return_exceptions=True)
        digest = blake3(b"".join(digest for digests, _ in done for digest in digests)).hexdigest()
        return Reduced(average_N=average_N, digest=digest, num_bytes=sum(sent for _, sent in done))

    async def handle(self, ask: PartAsk, stream: Stream) -> None:
        """A member's chunks for the part that this peer owns."""
        part = await self._part(ask)
        if part is None or ask.peer not in part.members:
            await _refuse(stream, "this peer sums nothing for that group")
            return
        reading = asyncio.create_task(self._read(part, ask.peer, stream))
        try:
            for at in range(len(part.lengths)):
                total, digest = await part.sum(at)
                await stream.send(total, digest)
        except RoundFailed as failed:
            await _refuse(stream, str(failed))
        except Broken:
            pass  # the member is gone: the ballot will miss its vote
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def forget(self, group: str) -> None:
        self._parts.pop(group, None)

    async def _part(self, ask: PartAsk) -> Part | None:
        """This group's part; a member may know of the group a moment before its owner does."""
        try:
            async with asyncio.timeout(min(ask.wait_s, 30.0)), self._registered:
                await self._registered.wait_for(lambda: ask.group in self._parts)
        except TimeoutError:
            return None
        return self._parts.get(ask.group)

    async def _read(self, part: Part, peer: str, stream: Stream) -> None:
        try:
            for at in range(len(part.lengths)):
                coded = await stream.receive()
                part.put(peer, at, coded)
        except Broken as broken:
            self._roster.suspect(peer, time.monotonic())
            part.fail(f"{peer} broke off: {broken}")

    async def _own(
        self, group: Group, chunks: list[tuple[int, int]], delta_N: Vector, average_N: Vector
    ) -> tuple[list[bytes], int]:
        """The digests of this peer's own sums, and the bytes that go out to the others with them."""
        part = Part(self._codec, group.members, group.weights, [end - start for start, end in chunks])
        async with self._registered:
            self._parts[group.id] = part
            self._registered.notify_all()
        watching = asyncio.create_task(self._watch(part))
        try:
            for at, (start, end) in enumerate(chunks):
                part.put(self._mesh.peer, at, encode(self._codec, delta_N[start:end]))
                await asyncio.sleep(0)
            digests, num_bytes = [], 0
            for at, (start, end) in enumerate(chunks):
                total, digest = await part.sum(at)
                average_N[start:end] = decode(self._codec, total, end - start)
                digests.append(digest)
                num_bytes += len(total)
            return digests, num_bytes * (len(group.members) - 1)
        except asyncio.CancelledError:
            part.fail(f"{self._mesh.peer} gave up this attempt")
            raise
        finally:
            watching.cancel()

    async def _watch(self, part: Part) -> None:
        """Ask those whose chunks do not come whether they live; give up on a part that stands still."""
        done, since_s = -1, time.monotonic()
        while not part.failed and part.missing():
            await asyncio.sleep(LOOK_S)
            if part.num_done != done:
                done, since_s = part.num_done, time.monotonic()
                continue
            stalled = time.monotonic() - since_s > self._stall_s
            for peer in part.missing():
                if peer == self._mesh.peer:
                    continue
                if stalled:
                    self._roster.suspect(peer, time.monotonic())
                if stalled or not await self._ping(peer):
                    part.fail(f"{peer} stands still" if stalled else f"{peer} is gone")

    async def _send(
        self,
        group: Group,
        owner: str,
        chunks: list[tuple[int, int]],
        delta_N: Vector,
        average_N: Vector,
        deadline_s: float,
    ) -> tuple[list[bytes], int]:
        try:
            num_bytes = coded_bytes(self._codec, chunks[-1][1] - chunks[0][0])
            stream = await self._mesh.open(owner, bulk=num_bytes >= BULK)
        except Broken as broken:
            self._roster.suspect(owner, time.monotonic())
            raise RoundFailed(f"{owner} cannot be reached: {broken}") from None
        sending: asyncio.Task[None] | None = None
        try:
            ask = PartAsk(peer=self._mesh.peer, group=group.id, wait_s=deadline_s)
            await stream.send(Asked(ask=ask).canonical())
            sending = asyncio.create_task(self._send_chunks(stream, chunks, delta_N))
            digests = await self._receive_sums(stream, owner, chunks, average_N)
            await sending
            return digests, stream.num_sent
        except Broken as broken:
            self._roster.suspect(owner, time.monotonic())
            self._mesh.broke(owner)
            raise RoundFailed(f"{owner} broke off: {broken}") from None
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            stream.close()

    async def _send_chunks(self, stream: Stream, chunks: list[tuple[int, int]], delta_N: Vector) -> None:
        for start, end in chunks:
            await stream.send(encode(self._codec, delta_N[start:end]))

    async def _receive_sums(
        self, stream: Stream, owner: str, chunks: list[tuple[int, int]], average_N: Vector
    ) -> list[bytes]:
        digests = []
        for start, end in chunks:
            total, digest = await stream.receive_digested()
            if not total:
                reason = await stream.receive()
                raise RoundFailed(f"{owner}: {reason.decode(errors='replace')[:300]}")
            try:
                average_N[start:end] = decode(self._codec, total, end - start)
            except ValueError as error:
                raise RoundFailed(f"{owner}: {error}") from None
            digests.append(digest)
        return digests


async def _refuse(stream: Stream, reason: str) -> None:
    try:
        await stream.send(b"")
        await stream.send(reason.encode())
    except Broken:
        pass
