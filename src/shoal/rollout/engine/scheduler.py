"""Decides which rows run in which slot, which prompts are computed next, and which blocks of the cache they use. No torch.

Scheduler     waiting rows, running rows, their slots and blocks
CacheSize     how many rows, prompts and blocks the caches hold, and what fits into memory

Rows get blocks as they grow, so memory limits the tokens that rows have, not those that they might draw. When no block is free,
the row that started last is preempted: it waits again and is later computed from its beginning. Its tokens follow from prompt,
weights and seed, so they come out the same.
"""

import heapq
from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.model.shape import Shape
from shoal.rollout.engine.api import GenerationRequest
from shoal.rollout.engine.block_pool import BLOCK, BlockPool, PlacedPrompts, Prompt, PromptPlaces, blocks_for

GROW_STEPS = 16
"""Rows get blocks for this many steps at once: on a GPU each change of the tables costs several launches."""


class Admission(NamedTuple):
    """A waiting row that starts now."""

    slot: int
    request: GenerationRequest
    prompt_place: int
    prompt_blocks: Sequence[int] = ()
    first_block: int = 0
    """Where the row's first new tokens are stored."""
    first_draw: int = 0
    """Number of its first draw; above 0 in a draft model, which starts in the middle of a row."""


class RemovedRow(NamedTuple):
    """A row that left its slot."""

    request: GenerationRequest
    number: int
    """Counts admissions: a row that is preempted and starts again gets another number."""


@dataclass(slots=True)
class RunningRow:
    """A row in its slot."""

    request: GenerationRequest
    number: int
    first_step: int
    slot_since: int
    """First decode step in its slot; above `first_step` if it was moved."""
    blocks: list[int]
    ahead: int = 0
    """Tokens that it was fed beyond one a step, by drafts."""

    def fed(self, step: int) -> int:
        """Returns how many new tokens the row was fed before decode step `step`, if it has not ended."""
        return min(step - self.first_step + self.ahead, self.request.max_new_tokens - 1)


class Scheduler:
    """Keeps rows in submission order and gives each one the lowest free slot.

    A row keeps its slot until it is removed or preempted. `compact` moves rows so that the running ones fill slots
    0 .. num_running-1, for steps in which unused slots cost time.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows={max_rows} must be at least 1")
        self.max_rows = max_rows
        self.waiting: deque[GenerationRequest] = deque()
        self.pool = BlockPool()
        self.places = PromptPlaces(self.pool)
        self.num_preempted = 0
        self.num_short = 0
        """How often a row or prompt had to wait, or a row was preempted, because too few blocks were free."""
        self.running: dict[int, RunningRow] = {}
        """The running rows by slot."""
        self._num_admitted = 0
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
        """Adds slots, prompt places and blocks up to `size`. None of them ever becomes fewer."""
        assert size.rows >= self._num_slots
        for slot in range(self._num_slots, size.rows):
            heapq.heappush(self._free_slots, slot)
        self._num_slots = size.rows
        self.places.grow(size.prompts)
        self.pool.grow(size.blocks)

    def restart(self) -> None:
        """Preempts every row and forgets all slots, prompts and blocks, so that `resize` may allow for fewer."""
        while self.running:
            self.preempt()
        self.pool = BlockPool()
        self.places = PromptPlaces(self.pool)
        self._free_slots, self._num_slots = [], 0

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        self.waiting.extend(requests)

    def admit(self, ready: Container[Prompt], *, step: int) -> list[Admission]:
        """Starts waiting rows in order, while slots and blocks are free and the next row's prompt is `ready`.

        `step` is the first decode step that the rows take part in.
        """
        admitted: list[Admission] = []
        while self._free_slots and self.waiting and self.waiting[0].prompt_tokens in ready:
            if self.pool.num_free < 1 + self._reserve():
                self.num_short += 1
                break
            slot, request = heapq.heappop(self._free_slots), self.waiting.popleft()
            blocks = self.pool.take(1)
            place = self.places.acquire(request.prompt_tokens)
            prompt_blocks = self.places.blocks(request.prompt_tokens)
            admitted.append(Admission(slot, request, place, prompt_blocks, blocks[0]))
            self.running[slot] = RunningRow(request, self._num_admitted, step, step, blocks)
            self._num_admitted += 1
        return admitted

    def grow(self, *, step: int) -> list[tuple[int, int, int]] | None:
        """Gives running rows the blocks that they fill in the GROW_STEPS steps from `step` on.

        Returns the row's slot, the number of blocks that it had before, and the block, for each block. Returns None, and gives none, if they are not all free: then evict prompts or preempt a row, and call it again.
        """
        wanted = [
            (slot, index)
            for slot, row in self.running.items()
            for index in range(len(row.blocks), blocks_for(row.fed(step + GROW_STEPS)))
        ]
        if len(wanted) > self.pool.num_free:
            return None
        blocks = self.pool.take(len(wanted))
        for (slot, _), block in zip(wanted, blocks, strict=True):
            self.running[slot].blocks.append(block)
        return [(*at, block) for at, block in zip(wanted, blocks, strict=True)]

    def set_drawn(self, slots: Sequence[int], counts: Sequence[int], *, step: int) -> None:
        """Notes how many tokens rows have drawn before decode step `step`, after drafts."""
        for slot, count in zip(slots, counts, strict=True):
            row = self.running[slot]
            row.ahead = count - 1 - (step - row.first_step)

    def preempt(self) -> tuple[int, int]:
        """Stops the row that started last and puts it in front of the waiting rows. Returns its slot and number."""
        slot = max(self.running, key=lambda slot: self.running[slot].number)
        (row,) = self.remove([slot])
        self.waiting.appendleft(row.request)
        self.num_preempted += 1
        self.num_short += 1
        return slot, row.number

    def finished(self, ended: Collection[int], *, step: int) -> list[int]:
        """Returns the slots in `ended` whose current row took part in decode step `step`, in that slot.

        The device reports ended slots some steps late: a report from before a row came is about the slot's previous row.
        """
        return [slot for slot in ended if slot in self.running and self.running[slot].slot_since <= step]

    def remove(self, slots: Sequence[int]) -> list[RemovedRow]:
        """Removes rows. Their slots and blocks are free at once."""
        rows = [self.running.pop(slot) for slot in slots]
        for slot, row in zip(slots, rows, strict=True):
            heapq.heappush(self._free_slots, slot)
            self.places.release(row.request.prompt_tokens)
            self.pool.give_back(row.blocks)
        return [RemovedRow(row.request, row.number) for row in rows]

    def compact(self, *, step: int) -> list[tuple[int, int]]:
        """Closes all gaps between running rows before decode step `step`. Returns the moves (from slot, to slot), valid in any order."""
        holes = [slot for slot in range(self.num_running) if slot not in self.running]
        movers = sorted(slot for slot in self.running if slot >= self.num_running)
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running.pop(source)
            self.running[target].slot_since = step
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

    def place_prompts(
        self, prompts: Sequence[Prompt], *, keep: Container[Prompt] = ()
    ) -> tuple[list[Prompt], PlacedPrompts]:
        """Stores as many of the prompts as there are places and free blocks. Returns these prompts and their places."""
        self.places.evict(keep=keep)
        blocks, places = self.pool.num_free - self._reserve(), self.places.num_free
        fitting: list[Prompt] = []
        for prompt in prompts:
            if prompt not in self.places:
                blocks, places = blocks - blocks_for(len(prompt)), places - 1
                if blocks < 1 or places < 0:  # one block is for the first row that starts from the prompt
                    self.num_short += 1
                    break
            fitting.append(prompt)
        return fitting, self.places.place(fitting, keep=keep)

    def startable_prompts(self, ready: Container[Prompt]) -> set[Prompt]:
        """Returns the prompts of the next rows that can start from `ready`, up to the first row that cannot."""
        found: set[Prompt] = set()
        for prompt in self._waiting_prompts():
            if prompt not in ready:
                break
            found.add(prompt)
        return found

    def _reserve(self) -> int:
        """Returns how many blocks stay free when rows or prompts are added: one for each running row to grow into.

        Without it a row that was preempted would start again at once, and be preempted again.
        """
        return len(self.running)

    def _waiting_prompts(self) -> Iterable[Prompt]:
        """Yields the prompts of waiting rows, consecutive samples of one prompt once: hashing a long prompt is slow."""
        last: Prompt = ()
        for request in self.waiting:
            if request.prompt_tokens is not last:
                last = request.prompt_tokens
                yield last


class CacheSize(NamedTuple):
    """The sizes of the caches of running rows and of prompts."""

    rows: int
    row_positions: int
    """Positions that a row may have: its new tokens. Prompts are stored apart."""
    new_tokens: int
    """Tokens that the longest row may draw."""
    prompts: int
    """Prompts, each stored once for all rows that start from it."""
    prompt_positions: int
    blocks: int
    """Blocks for rows and prompts together; at most what all of them need at their longest."""
    least_blocks: int
    """Blocks that the longest row and its prompt need."""

    def union(self, other: "CacheSize") -> "CacheSize":
        return CacheSize(*(max(pair) for pair in zip(self, other, strict=True)))


def cache_size_for(
    requests: Iterable[GenerationRequest], num_rows: int, *, computed_prompts: int
) -> CacheSize:
    """Returns the size that any `num_rows` of these rows need at once.

    `computed_prompts` is the largest number of prompts that are computed before a row starts from them.
    """
    longest_prompt, new_tokens, least = 1, 1, 1
    prompts: dict[Prompt, None] = {}
    for request in requests:
        row_blocks = blocks_for(len(request.prompt_tokens)) + blocks_for(request.max_new_tokens)
        longest_prompt = max(longest_prompt, len(request.prompt_tokens))
        new_tokens, least = max(new_tokens, request.max_new_tokens), max(least, row_blocks)
        prompts[request.prompt_tokens] = None
    stored = min(len(prompts), num_rows) + min(len(prompts), computed_prompts)
    blocks = num_rows * blocks_for(new_tokens) + stored * blocks_for(longest_prompt)
    return CacheSize(
        rows=num_rows,
        row_positions=blocks_for(new_tokens) * BLOCK,
        new_tokens=new_tokens,
        prompts=stored,
        prompt_positions=blocks_for(longest_prompt) * BLOCK,
        blocks=blocks + num_rows,  # what `Scheduler` holds back for growing rows
        least_blocks=least,
    )


def block_bytes(shape: Shape, value_bytes: int) -> int:
    """Returns the bytes of one block: keys and values of BLOCK positions in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes * BLOCK


def fit_blocks(
    shape: Shape,
    size: CacheSize,
    *,
    value_bytes: int,
    state_tokens: int,
    budget_bytes: int,
    whole_rows: bool = False,
) -> CacheSize:
    """Returns `size` with as many blocks as the budget allows. Raises ValueError if the longest row does not fit.

    A row also has `state_tokens` states and, for each token that it may draw, a uniform, a token id and a log-prob. If these
    leave less than half of the budget, there are fewer rows. With `whole_rows` the addresses of all positions of a row count, as
    under a limit of the address space.
    """
    row = 2 * shape.hidden_size * state_tokens + (8 + 8 + 4) * size.new_tokens
    block = block_bytes(shape, value_bytes)
    rows = max(1, min(size.rows, budget_bytes // 2 // row))
    if whole_rows:
        rows = max(1, min(rows, budget_bytes // (row + size.row_positions // BLOCK * block)))
    blocks = min(size.blocks, (budget_bytes - rows * row) // block)
    if blocks < size.least_blocks:
        raise ValueError(
            f"the longest row and its prompt need {(size.least_blocks * block + row) / 1e6:,.0f} MB, "
            f"{budget_bytes / 1e6:,.0f} MB are free for the cache; lower max_new_tokens or free memory"
        )
    return size._replace(rows=rows, blocks=blocks)
