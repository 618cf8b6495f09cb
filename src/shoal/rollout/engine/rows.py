"""Which row sits in which slot, and which prompts come next: the engine's bookkeeping, in plain Python.

A row keeps its slot until it is taken out; the next waiting row takes the lowest free one. Where rows behind a gap cost
something, `compact` says which rows to move so that the running ones fill slots 0 .. num_running-1.
"""

import heapq
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping

from shoal.rollout.engine.api import Request

Prompt = tuple[int, ...]


class Rows:
    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self._since: dict[int, int] = {}
        self._free: list[int] = []
        self._num_slots = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def end(self) -> int:
        """One past the highest slot in use."""
        return max(self.running, default=-1) + 1

    def open_slots(self, num_slots: int) -> None:
        """There are this many slots from now on; never fewer than before."""
        assert num_slots >= self._num_slots
        for slot in range(self._num_slots, num_slots):
            heapq.heappush(self._free, slot)
        self._num_slots = num_slots

    def submit(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def admit(self, ready: Collection[Prompt], *, step: int) -> dict[int, Request]:
        """Seat waiting rows, in their order, as long as slots are free and their prompts are `ready`.

        `step` is the first decode step that they take part in: see `finished`.
        """
        admitted: dict[int, Request] = {}
        while self._free and self.waiting and self.waiting[0].prompt_tokens in ready:
            slot = heapq.heappop(self._free)
            admitted[slot] = self.waiting.popleft()
            self._since[slot] = step
        self.running |= admitted
        return admitted

    def finished(self, ended: Collection[int], *, step: int) -> list[int]:
        """Slots whose rows have ended, by what the device had to say after decode step `step`.

        `ended` are the slots it named. What it said before a row came concerns the slot's last row, not this one.
        """
        return [slot for slot in ended if slot in self.running and self._since[slot] <= step]

    def remove(self, slots: Iterable[int]) -> list[Request]:
        """Take rows out; their slots are free at once."""
        for slot in slots:
            heapq.heappush(self._free, slot)
        return [self.running.pop(slot) for slot in slots]

    def compact(self) -> list[tuple[int, int]]:
        """Close all gaps. Returns the moves (from slot, to slot), whose order does not matter."""
        holes = [slot for slot in range(self.num_running) if slot not in self.running]
        movers = sorted(slot for slot in self.running if slot >= self.num_running)
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running.pop(source)
            self._since[target] = self._since.pop(source)
        if moves:
            self._free = list(range(self.num_running, self._num_slots))
        return moves


def next_prompts(
    waiting: Iterable[Request], *, max_tokens: int, max_prompts: int, but: Container[Prompt] = ()
) -> list[Prompt]:
    """The distinct prompts of the next rows, as many as have `max_tokens` together; one may have more than that.

    `but`: those left out.
    """
    chosen: dict[Prompt, None] = {}
    total = 0
    last: Prompt = ()
    for request in waiting:
        prompt = request.prompt_tokens
        if prompt is last:  # samples of one prompt come together; to look up a long one takes a while
            continue
        last = prompt
        if prompt not in chosen and prompt not in but:
            total += len(prompt)
            if chosen and (total > max_tokens or len(chosen) == max_prompts):
                break
            chosen[prompt] = None
    return list(chosen)


def prompts_at_hand(waiting: Iterable[Request], ready: Container[Prompt]) -> set[Prompt]:
    """Those of the next rows that can start from what is `ready`: up to the first row that cannot."""
    found: set[Prompt] = set()
    last: Prompt = ()
    for request in waiting:
        prompt = request.prompt_tokens
        if prompt is not last:
            if prompt not in ready:
                break
            found.add(prompt)
            last = prompt
    return found


def length_batches(prompts: Iterable[Prompt], max_padding: float) -> list[list[Prompt]]:
    """Prompts by length, in batches whose longest is at most `max_padding` times the shortest (and 16 more)."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=len):
        if batches and len(prompt) <= max_padding * len(batches[-1][0]) + 16:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def by_batch(
    admitted: Mapping[int, Request], homes: Mapping[Prompt, tuple[int, int]]
) -> dict[int, list[tuple[int, int]]]:
    """For each prefilled batch the (place in it, slot) pairs of the rows that start from it."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for slot, request in admitted.items():
        batch, place = homes[request.prompt_tokens]
        pairs.setdefault(batch, []).append((place, slot))
    return pairs
