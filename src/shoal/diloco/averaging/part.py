"""One owner's part of a round: chunks come in from every member, each sum goes out to all as soon as it is complete."""

import asyncio
import itertools
from collections.abc import Sequence

from blake3 import blake3

from shoal.diloco.averaging.averager import RoundFailed
from shoal.diloco.codec import CodecName, Coded, reduce_chunk

CHUNK = 1 << 18
"""Values per chunk: 1 MiB of float32. Coding, sending and summing overlap from chunk to chunk."""


def part_bounds(num_values: int, num_owners: int) -> list[tuple[int, int]]:
    """Who sums what: equal runs of whole chunks where there are enough of them, else of values."""
    unit = CHUNK if num_values >= num_owners * CHUNK else 1
    units = -(-num_values // unit)
    cuts = [min(num_values, unit * (units * at // num_owners)) for at in range(num_owners + 1)]
    return list(itertools.pairwise(cuts))


def chunk_bounds(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + CHUNK, end)) for at in range(start, end, CHUNK)]


class Part:
    """The sums of one part. Lives on one event loop."""

    def __init__(
        self, codec: CodecName, members: Sequence[str], weights: Sequence[float], lengths: Sequence[int]
    ) -> None:
        self.codec = codec
        self.members, self.weights, self.lengths = tuple(members), tuple(weights), tuple(lengths)
        self.heard: set[str] = set()
        """Members whose chunks have begun to come."""
        self.num_done = 0
        self.failed = ""
        self._came: list[dict[str, Coded]] = [{} for _ in lengths]
        self._sums: list[tuple[Coded, bytes]] = []
        self._news = asyncio.Event()

    def put(self, peer: str, at: int, coded: Coded) -> None:
        """Chunk `at` of `peer`. Sums whatever is complete, in order."""
        self.heard.add(peer)
        self._came[at][peer] = coded
        while self.num_done < len(self.lengths) and len(self._came[self.num_done]) == len(self.members):
            came = self._came[self.num_done]
            try:
                total = reduce_chunk(
                    self.codec,
                    [came[member] for member in self.members],
                    self.weights,
                    self.lengths[self.num_done],
                )
            except ValueError as error:
                self.fail(str(error))
                return
            self._sums.append((total, blake3(total).digest()))
            self._came[self.num_done] = {}
            self.num_done += 1
            self._tell()

    def fail(self, reason: str) -> None:
        self.failed = self.failed or reason
        self._tell()

    async def sum(self, at: int) -> tuple[Coded, bytes]:
        """The coded mean of chunk `at` and its digest; raises RoundFailed."""
        while at >= len(self._sums):
            if self.failed:
                raise RoundFailed(self.failed)
            await self._news.wait()
        return self._sums[at]

    def missing(self) -> list[str]:
        """Members that the next sum still waits for."""
        if self.num_done == len(self.lengths):
            return []
        return [member for member in self.members if member not in self._came[self.num_done]]

    def _tell(self) -> None:
        # Whoever waits now is woken; whoever comes later looks before it waits.
        self._news.set()
        self._news = asyncio.Event()
