"""Decides which rows run in which slot, which prompts are computed next, and how much memory that takes. No torch.

Scheduler     waiting rows, running rows and their slots
PromptPlaces  where each prompt's keys and values are stored, once for all rows that start from it
CacheSize     how many rows and prompts the caches hold, and what fits into memory
"""

import heapq
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.model.shape import Shape
from shoal.rollout.engine.api import GenerationRequest

Prompt = tuple[int, ...]

POSITION_STEP = 128
"""Cache lengths are rounded up to a multiple of this, so that slightly longer prompts need no new allocation."""


class Admission(NamedTuple):
    """A waiting row that starts now."""

    slot: int
    request: GenerationRequest
    prompt_place: int


class PlacedPrompts(NamedTuple):
    """Result of `PromptPlaces.place`."""

    added: dict[Prompt, int]
    """Places of the prompts that were not stored before. Their keys and values must be computed."""
    freed: list[int]
    """Places whose prompt was evicted. Some may be in `added` again."""


class Scheduler:
    """Keeps rows in submission order and gives each one the lowest free slot.

    A row keeps its slot until it is removed. `compact` moves rows so that the running ones fill slots
    0 .. num_running-1, for steps in which unused slots cost time.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self.waiting: deque[GenerationRequest] = deque()
        self.running: dict[int, GenerationRequest] = {}
        self.places = PromptPlaces()
        self._first_step: dict[int, int] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    @property
    def end(self) -> int:
        """Returns one more than the highest slot in use."""
        return max(self.running, default=-1) + 1

    def resize(self, size: "CacheSize") -> None:
        """Adds slots and prompt places up to `size`. The number of slots never shrinks."""
        assert size.rows >= self._num_slots
        for slot in range(self._num_slots, size.rows):
            heapq.heappush(self._free_slots, slot)
        self._num_slots = size.rows
        self.places.grow(size.prompts)

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        self.waiting.extend(requests)

    def admit(self, ready: Container[Prompt], *, step: int) -> list[Admission]:
        """Starts waiting rows in order, while slots are free and the next row's prompt is `ready`.

        `step` is the first decode step that the rows take part in; `finished` needs it.
        """
        admitted: list[Admission] = []
        while self._free_slots and self.waiting and self.waiting[0].prompt_tokens in ready:
            slot, request = heapq.heappop(self._free_slots), self.waiting.popleft()
            admitted.append(Admission(slot, request, self.places.acquire(request.prompt_tokens)))
            self.running[slot] = request
            self._first_step[slot] = step
        return admitted

    def finished(self, ended: Collection[int], *, step: int) -> list[int]:
        """Returns the slots in `ended` whose current row took part in decode step `step`.

        The device reports ended slots some steps late: a report from before a row started is about the slot's previous row.
        """
        return [slot for slot in ended if slot in self.running and self._first_step[slot] <= step]

    def remove(self, slots: Sequence[int]) -> list[GenerationRequest]:
        """Removes rows and returns their requests. Their slots are free at once."""
        requests = [self.running.pop(slot) for slot in slots]
        for slot, request in zip(slots, requests, strict=True):
            heapq.heappush(self._free_slots, slot)
            self.places.release(request.prompt_tokens)
        return requests

    def compact(self) -> list[tuple[int, int]]:
        """Closes all gaps between running rows. Returns the moves (from slot, to slot), valid in any order."""
        holes = [slot for slot in range(self.num_running) if slot not in self.running]
        movers = sorted(slot for slot in self.running if slot >= self.num_running)
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running.pop(source)
            self._first_step[target] = self._first_step.pop(source)
        if moves:
            self._free_slots = list(range(self.num_running, self._num_slots))
        return moves

    def next_prompts(
        self, *, max_tokens: int, max_prompts: int, exclude: Container[Prompt] = ()
    ) -> list[Prompt]:
        """Returns the distinct prompts of the next waiting rows, up to `max_tokens` in total.

        The first prompt is returned even if it is longer than that.
        """
        chosen: dict[Prompt, None] = {}
        total = 0
        for prompt in self._waiting_prompts():
            if prompt not in chosen and prompt not in exclude:
                total += len(prompt)
                if chosen and (total > max_tokens or len(chosen) == max_prompts):
                    break
                chosen[prompt] = None
        return list(chosen)

    def startable_prompts(self, ready: Container[Prompt]) -> set[Prompt]:
        """Returns the prompts of the next rows that can start from `ready`, up to the first row that cannot."""
        found: set[Prompt] = set()
        for prompt in self._waiting_prompts():
            if prompt not in ready:
                break
            found.add(prompt)
        return found

    def _waiting_prompts(self) -> Iterable[Prompt]:
        """Yields the prompts of waiting rows, consecutive samples of one prompt once: hashing a long prompt is slow."""
        last: Prompt = ()
        for request in self.waiting:
            if request.prompt_tokens is not last:
                last = request.prompt_tokens
                yield last


class PromptPlaces:
    """Assigns places 0 .. num_places-1 to prompts. A prompt keeps its place while a running row uses it."""

    def __init__(self, num_places: int = 0) -> None:
        self._num_places = num_places
        self._place: dict[Prompt, int] = {}
        self._num_rows: dict[Prompt, int] = {}
        self._free = list(range(num_places))

    def __getitem__(self, prompt: Prompt) -> int:
        return self._place[prompt]

    def grow(self, num_places: int) -> None:
        for place in range(self._num_places, num_places):
            heapq.heappush(self._free, place)
        self._num_places = max(self._num_places, num_places)

    def place(self, prompts: Iterable[Prompt], *, keep: Container[Prompt] = ()) -> PlacedPrompts:
        """Gives each prompt a place. Evicts prompts that no running row uses first, except those in `keep`."""
        unused = [prompt for prompt, rows in self._num_rows.items() if rows == 0 and prompt not in keep]
        freed = [self._place.pop(prompt) for prompt in unused]
        for prompt, place in zip(unused, freed, strict=True):
            heapq.heappush(self._free, place)
            del self._num_rows[prompt]
        added: dict[Prompt, int] = {}
        for prompt in prompts:
            if prompt not in self._place:
                assert self._free, "more prompts are computed at once than CacheSize.prompts allows for"
                added[prompt] = self._place[prompt] = heapq.heappop(self._free)
                self._num_rows[prompt] = 0
        return PlacedPrompts(added, freed)

    def acquire(self, prompt: Prompt) -> int:
        """Counts one more running row of the prompt and returns its place."""
        self._num_rows[prompt] += 1
        return self._place[prompt]

    def release(self, prompt: Prompt) -> None:
        """Counts one running row of the prompt less."""
        self._num_rows[prompt] -= 1


class CacheSize(NamedTuple):
    """How much the caches of running rows and of prompts hold."""

    rows: int
    row_positions: int
    """Positions of each row: its new tokens. Prompts are stored apart."""
    new_tokens: int
    """Tokens that the longest row may draw."""
    prompts: int
    """Prompts, each stored once for all rows that start from it."""
    prompt_positions: int

    def union(self, other: "CacheSize") -> "CacheSize":
        return CacheSize(*(max(pair) for pair in zip(self, other, strict=True)))


def cache_size_for(
    requests: Iterable[GenerationRequest], num_rows: int, *, computed_prompts: int
) -> CacheSize:
    """Returns the size that any `num_rows` of these rows need at once.

    `computed_prompts` is the largest number of prompts that are computed before a row starts from them.
    """
    longest_prompt, new_tokens = 1, 1
    prompts: set[Prompt] = set()
    for request in requests:
        longest_prompt = max(longest_prompt, len(request.prompt_tokens))
        new_tokens = max(new_tokens, request.max_new_tokens)
        prompts.add(request.prompt_tokens)
    stored = min(len(prompts), num_rows) + min(len(prompts), computed_prompts)
    return CacheSize(num_rows, _rounded(new_tokens), new_tokens, stored, _rounded(longest_prompt))


def fit_rows(shape: Shape, size: CacheSize, *, value_bytes: int, budget_bytes: int) -> CacheSize:
    """Returns `size` with as many rows as the budget allows. Raises ValueError if not even one fits."""
    position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes
    new_token = 2 * shape.hidden_size + 8 + 8 + 4  # state, uniform, token id and log-prob
    row = position * size.row_positions + new_token * size.new_tokens
    left = budget_bytes - position * size.prompt_positions * size.prompts
    rows = min(size.rows, left // row)
    if rows < 1:
        raise ValueError(
            f"one row of {size.row_positions} positions needs {row / 1e9:.2f} GB, {left / 1e9:.2f} GB are free; "
            "lower max_new_tokens or free memory"
        )
    return size._replace(rows=rows)


def _rounded(positions: int) -> int:
    return -(-positions // POSITION_STEP) * POSITION_STEP


def free_memory_bytes() -> int:
    """Returns the memory that the operating system can still hand out; 4 GiB where /proc is missing (not Linux)."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30
