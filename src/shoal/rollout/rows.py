"""Which row sits in which slot: the engine's bookkeeping, in plain Python and NumPy.

Running rows fill slots 0 .. num_running-1 without a gap, so a step computes exactly the rows that still run. When
rows finish, the last ones move into the holes; the caller moves their tensors alike.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.rollout.engine import Request

Ints = npt.NDArray[np.int64]


class Rows:
    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.seeds_S = np.zeros(max_rows, dtype=np.uint64)
        self.prompt_lens_S = np.zeros(max_rows, dtype=np.int64)
        self.caps_S = np.zeros(max_rows, dtype=np.int64)
        self.counts_S = np.zeros(max_rows, dtype=np.int64)
        """Tokens drawn so far."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self) -> list[Request]:
        """Move waiting requests into the free slots behind the running ones; returns them in slot order."""
        first = self.num_running
        num_new = min(self.max_rows - first, len(self.waiting))
        admitted = [self.waiting.popleft() for _ in range(num_new)]
        self.running += admitted
        for slot, request in enumerate(admitted, start=first):
            self.seeds_S[slot] = request.sample_seed
            self.prompt_lens_S[slot] = len(request.prompt_tokens)
            self.caps_S[slot] = request.max_new_tokens
            self.counts_S[slot] = 0
        return admitted

    def fed_positions(self) -> Ints:
        """Where each running row's newest token stands: the one that the next decode step feeds."""
        running = slice(0, self.num_running)
        positions: Ints = self.prompt_lens_S[running] + self.counts_S[running] - 1
        return positions

    def remove(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Take finished rows out. Returns the moves (from slot, to slot) that close the gaps."""
        gone = set(slots)
        num_left = self.num_running - len(gone)
        holes = sorted(slot for slot in gone if slot < num_left)
        movers = [slot for slot in range(num_left, self.num_running) if slot not in gone]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
            for array in (self.seeds_S, self.prompt_lens_S, self.caps_S, self.counts_S):
                array[target] = array[source]
        del self.running[num_left:]
        return moves


def distinct_prompts(requests: Sequence[Request]) -> dict[tuple[int, ...], list[int]]:
    """For each different prompt the places in `requests` that have it; shortest prompt first."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(request.prompt_tokens, []).append(place)
    return dict(sorted(places.items(), key=lambda item: len(item[0])))


def prefill_batches(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Cut prompts, sorted by length, into batches of at most `max_tokens` when padded (one prompt may exceed it)."""
    batches: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if batches and (len(batches[-1]) + 1) * len(prompt) <= max_tokens:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches
