"""The exchange of one round: every member sends each owner its chunks of that owner's part and gets the sums back.

Every stream is opened by the member, so a peer that cannot be reached takes part like any other. An owner sums each
chunk in the order of the members and codes it once; all members, the owner too, decode the same bytes.

An owner refuses values that are not finite or exceed the norm that their peer declared; members refuse sums that exceed
what the declared norms allow. Both fail the attempt and name the peer, which is left out of the next one.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from blake3 import blake3

from shoal.diloco.averaging.averager import AveragingGroup, Reduced, RoundFailed
from shoal.diloco.averaging.membership import Membership, Ping
from shoal.diloco.averaging.peer_messages import PartRequest, PeerRequest
from shoal.diloco.codec import CodecName, Coded, coded_bytes, decode, encode
from shoal.diloco.outer import Vector, is_finite
from shoal.diloco.robust import BadChunk, PartAverager, RobustSettings, squared_norm
from shoal.diloco.transport.mesh import Mesh
from shoal.diloco.transport.stream import Stream, StreamBroken

CHUNK = 1 << 18
"""Values per chunk: 1 MiB of float32. Coding, sending and summing overlap from chunk to chunk."""
PROGRESS_EVERY_S = 1.0
"""Seconds between two checks that chunks still arrive."""
BULK_BYTES = 1 << 20
"""Bytes from which setting up a direct link costs less than it saves."""


def part_bounds(num_values: int, num_owners: int) -> list[tuple[int, int]]:
    """Returns start and end of each owner's part: equal numbers of whole chunks if there are enough, else of values."""
    unit = CHUNK if num_values >= num_owners * CHUNK else 1
    units = -(-num_values // unit)
    cuts = [min(num_values, unit * (units * at // num_owners)) for at in range(num_owners + 1)]
    return list(itertools.pairwise(cuts))


def chunk_bounds(start: int, end: int) -> list[tuple[int, int]]:
    """Returns start and end of each chunk of a part."""
    return [(at, min(at + CHUNK, end)) for at in range(start, end, CHUNK)]


class PartReduction:
    """The sums of one owner's part. Each sum is available as soon as every member's chunk is there. One event loop."""

    def __init__(
        self,
        averager: PartAverager,
        members: Sequence[str],
        lengths: Sequence[int],
        refuse: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self.members, self.lengths = tuple(members), tuple(lengths)
        self._averager, self._refuse = averager, refuse
        self.num_done = 0
        self.failed = ""
        self._received: list[dict[str, Coded]] = [{} for _ in lengths]
        self._sums: list[tuple[Coded, bytes]] = []
        self._changed = asyncio.Event()

    def put(self, peer: str, at: int, coded: Coded) -> None:
        """Adds chunk `at` of `peer`, and computes the sums that are now complete, in order."""
        try:
            # A chunk of another size is not kept: until the others' chunks are there, a member could fill this peer's memory.
            self._averager.check_size(peer, coded, self.lengths[at])
            self._received[at][peer] = coded
            while self.num_done < len(self.lengths) and not self.missing():
                received = self._received[self.num_done]
                total = self._averager.average(
                    [received[member] for member in self.members], self.lengths[self.num_done]
                )
                self._sums.append((total, blake3(total).digest()))
                self._received[self.num_done] = {}
                self.num_done += 1
                self._notify()
        except BadChunk as bad:
            self._refuse(bad.peer)
            self.fail(str(bad))

    def fail(self, reason: str) -> None:
        """Makes `sum` raise RoundFailed with the first reason given."""
        self.failed = self.failed or reason
        self._notify()

    async def sum(self, at: int) -> tuple[Coded, bytes]:
        """Waits for the coded mean of chunk `at` and returns it with its digest. Raises RoundFailed."""
        while at >= len(self._sums):
            if self.failed:
                raise RoundFailed(self.failed)
            await self._changed.wait()
        return self._sums[at]

    def missing(self) -> list[str]:
        """Returns the members whose chunk the next sum waits for."""
        if self.num_done == len(self.lengths):
            return []
        return [member for member in self.members if member not in self._received[self.num_done]]

    def _notify(self) -> None:
        # Wakes the present waiters; later ones check the sums before they wait on the new event.
        self._changed.set()
        self._changed = asyncio.Event()


class Reducer:
    """Takes this peer's part in exchanges, as a member and as an owner, on the peer's event loop."""

    def __init__(
        self,
        mesh: Mesh,
        membership: Membership,
        ping: Ping,
        *,
        codec: CodecName,
        robust: RobustSettings,
        stall_s: float,
    ) -> None:
        self._mesh, self._membership, self._ping = mesh, membership, ping
        self._codec: CodecName = codec
        self._robust = robust
        self._stall_s = stall_s
        self._parts: dict[str, PartReduction] = {}
        self._registered = asyncio.Condition()

    async def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        """Exchanges with all owners at once and returns the average. Raises RoundFailed."""
        bounds = part_bounds(len(delta_N), len(group.owners))
        average_N = np.empty_like(delta_N)
        tasks: list[asyncio.Task[tuple[list[bytes], int]]] = []
        for owner, (start, end) in zip(group.owners, bounds, strict=True):
            chunks = chunk_bounds(start, end)
            if not chunks:
                continue
            if owner == self._mesh.peer:
                work = self._reduce_own_part(group, chunks, delta_N, average_N)
            else:
                work = self._exchange_with(owner, group, chunks, delta_N, average_N, deadline_s)
            tasks.append(asyncio.create_task(work))
        try:
            async with asyncio.timeout(deadline_s):
                done = await asyncio.gather(*tasks)
        except TimeoutError:
            raise RoundFailed(f"the exchange took longer than {deadline_s:.0f} s") from None
        finally:
            for task in tasks:
                task.cancel()
            # `delta_N` and `average_N` must not be used by a task after this returns.
            await asyncio.gather(*tasks, return_exceptions=True)
        digest = blake3(b"".join(digest for digests, _ in done for digest in digests)).hexdigest()
        return Reduced(average_N=average_N, digest=digest, num_bytes=sum(sent for _, sent in done))

    async def handle(self, request: PartRequest, stream: Stream) -> None:
        """Receives a member's chunks of the part that this peer owns, and sends it the sums."""
        part = await self._find_part(request)
        if part is None or request.peer not in part.members:
            await _send_refusal(stream, f"this peer owns no part of group {request.group[:8]}")
            return
        reading = asyncio.create_task(self._read_chunks(part, request.peer, stream))
        try:
            for at in range(len(part.lengths)):
                total, digest = await part.sum(at)
                await stream.send(total, digest)
        except RoundFailed as failed:
            await _send_refusal(stream, str(failed))
        except StreamBroken:
            pass  # the member disconnected; its vote will be missing
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def forget(self, group: str) -> None:
        """Drops the sums of a group."""
        self._parts.pop(group, None)

    async def _find_part(self, request: PartRequest) -> PartReduction | None:
        """Returns this group's part. Waits for it, since a member may learn of the group before the owner does."""
        try:
            async with asyncio.timeout(min(request.wait_s, 30.0)), self._registered:
                await self._registered.wait_for(lambda: request.group in self._parts)
        except TimeoutError:
            return None
        return self._parts.get(request.group)

    async def _read_chunks(self, part: PartReduction, peer: str, stream: Stream) -> None:
        try:
            for at in range(len(part.lengths)):
                coded = await stream.receive()
                part.put(peer, at, coded)
        except StreamBroken as broken:
            self._membership.suspect(peer, time.monotonic())
            part.fail(f"{peer} disconnected: {broken}")

    async def _reduce_own_part(
        self, group: AveragingGroup, chunks: list[tuple[int, int]], delta_N: Vector, average_N: Vector
    ) -> tuple[list[bytes], int]:
        """Returns the digests of this peer's own sums, and the bytes that it sends to the others with them."""
        averager = PartAverager(self._codec, group.members, group.weights, group.norms, self._robust)
        part = PartReduction(averager, group.members, [end - start for start, end in chunks], self._refuse)
        async with self._registered:
            self._parts[group.id] = part
            self._registered.notify_all()
        watching = asyncio.create_task(self._watch_part(part))
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
            part.fail(f"{self._mesh.peer} cancelled this attempt")
            raise
        finally:
            watching.cancel()

    async def _watch_part(self, part: PartReduction) -> None:
        """Pings members whose chunks do not arrive, and fails the part if a member is gone or it stalls."""
        done, since_s = -1, time.monotonic()
        while not part.failed and part.missing():
            await asyncio.sleep(PROGRESS_EVERY_S)
            if part.num_done != done:
                done, since_s = part.num_done, time.monotonic()
                continue
            stalled = time.monotonic() - since_s > self._stall_s
            for peer in part.missing():
                if peer == self._mesh.peer:
                    continue
                if stalled:
                    self._membership.suspect(peer, time.monotonic())
                if stalled or not await self._ping(peer):
                    part.fail(
                        f"{peer} sent nothing for {self._stall_s:.0f} s" if stalled else f"{peer} is gone"
                    )

    async def _exchange_with(
        self,
        owner: str,
        group: AveragingGroup,
        chunks: list[tuple[int, int]],
        delta_N: Vector,
        average_N: Vector,
        deadline_s: float,
    ) -> tuple[list[bytes], int]:
        """Sends an owner its chunks and receives the sums; returns their digests and the bytes sent."""
        try:
            num_bytes = coded_bytes(self._codec, chunks[-1][1] - chunks[0][0])
            stream = await self._mesh.open(owner, bulk=num_bytes >= BULK_BYTES)
        except StreamBroken as broken:
            self._membership.suspect(owner, time.monotonic())
            raise RoundFailed(f"{owner} is unreachable: {broken}") from None
        sending: asyncio.Task[None] | None = None
        try:
            request = PartRequest(peer=self._mesh.peer, group=group.id, wait_s=deadline_s)
            await stream.send(PeerRequest(ask=request).canonical())
            sending = asyncio.create_task(self._send_chunks(stream, chunks, delta_N))
            digests = await self._receive_sums(stream, owner, chunks, average_N)
            self._check_sums(owner, group, average_N[chunks[0][0] : chunks[-1][1]])
            await sending
            return digests, stream.num_sent
        except StreamBroken as broken:
            self._membership.suspect(owner, time.monotonic())
            self._mesh.mark_broken(owner)
            raise RoundFailed(f"{owner} disconnected: {broken}") from None
        finally:
            stream.close()  # before the await below, because nothing after it runs if the task is cancelled there
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _send_chunks(self, stream: Stream, chunks: list[tuple[int, int]], delta_N: Vector) -> None:
        for start, end in chunks:
            await stream.send(encode(self._codec, delta_N[start:end]))

    async def _receive_sums(
        self, stream: Stream, owner: str, chunks: list[tuple[int, int]], average_N: Vector
    ) -> list[bytes]:
        digests = []
        for start, end in chunks:
            total, digest = await stream.receive_with_digest()
            if not total:
                reason = await stream.receive()
                raise RoundFailed(f"{owner}: {reason.decode(errors='replace')[:300]}")
            try:
                average_N[start:end] = decode(self._codec, total, end - start)
            except ValueError as error:
                raise RoundFailed(f"{owner}: {error}") from None
            digests.append(digest)
        return digests

    def _check_sums(self, owner: str, group: AveragingGroup, part_N: Vector) -> None:
        """Raises RoundFailed if an owner's sums are not finite, or larger than any average of the members can be."""
        largest = self._robust.largest_average(group.norms)
        if is_finite(part_N) and math.sqrt(squared_norm(part_N)) <= largest:
            return
        self._refuse(owner)
        raise RoundFailed(
            f"{owner}: its sums are not finite, or above the largest possible norm, {largest:.3g}"
        )

    def _refuse(self, peer: str) -> None:
        self._membership.refuse(peer, time.monotonic())


async def _send_refusal(stream: Stream, reason: str) -> None:
    """Sends an empty frame, which no sum is, and the reason in the next one."""
    with contextlib.suppress(StreamBroken):
        await stream.send(b"")
        await stream.send(reason.encode())
