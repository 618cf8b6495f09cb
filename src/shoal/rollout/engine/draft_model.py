"""Drafts by a small model: it draws with the uniforms of the rows that it drafts for, so it often draws the same token.

The small model has a decode step of its own, in which each row has a slot. A row starts there with its prompt and everything
drawn so far as the prompt. After a verification it returns to the last accepted token; keys and values of later positions are
overwritten.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.model.packed_prefill import upload
from shoal.model.shape import Shape
from shoal.model.tokenizer import Tokenizer
from shoal.rollout.engine.api import GenerationRequest
from shoal.rollout.engine.block_pool import BLOCK, blocks_for
from shoal.rollout.engine.drafting import DRAFT_TOKENS, DraftRow
from shoal.rollout.engine.kv_slots import SlotField
from shoal.rollout.engine.scheduler import CacheSize, Scheduler

if TYPE_CHECKING:
    from shoal.rollout.engine.step_cpu import CpuStep
    from shoal.rollout.engine.step_cuda import CudaStep

    Step = CpuStep | CudaStep


PROBED_TOKENS = range(256)
"""Tokens that two tokenizers must decode to the same text to count as equal."""


def check_same_tokenizer(small: Tokenizer, large: Tokenizer, source: str) -> None:
    """Raises ValueError if the draft model's tokens mean something else: hardly any draft would be right."""
    mine, theirs = ((one.decode(PROBED_TOKENS), one.end_tokens) for one in (small, large))
    if mine != theirs:
        raise ValueError(
            f"--draft {source}: its tokenizer is not that of the model; use a small model of the same family, or --draft lookup"
        )


@dataclass(slots=True)
class _SlotRow:
    """A row that has a slot of the draft model."""

    first: int
    """Tokens that were drawn when it started; all but the newest are in its prompt."""
    num_prompt: int
    num_drawn: int = 0
    """Tokens that were drawn when the last draft was made."""
    draft: Sequence[int] = ()

    def continues(self, drawn: npt.NDArray[np.int64]) -> bool:
        """Returns whether all tokens but the newest were fed: those between two drafts must be the draft's own."""
        between = drawn[self.num_drawn : -1].tolist()
        return not self.num_drawn or between == list(self.draft[: len(between)])


class DraftModel:
    """Draws drafts with a small model (a drafting.DraftSource)."""

    def __init__(
        self, shape: Shape, make_step: "Callable[[CacheSize], Step]", *, max_rows: int, vocab_size: int
    ) -> None:
        """`make_step` returns a step of the small model; `vocab_size` is that of the model that is drafted for."""
        self._shape, self._make_step, self._vocab_size = shape, make_step, vocab_size
        self._max_rows = max_rows
        self._scheduler = Scheduler(max_rows)
        self._size: CacheSize | None = None
        self._step: Step | None = None
        self._rows: dict[int, _SlotRow] = {}
        """The rows by their number, which is the `prompt_index` of its request in this scheduler."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Returns a draft for each row, and removes all rows that are not among these."""
        fitting = [row for row in rows if self._fits(row)]
        asked = {row.number: row for row in fitting}
        self._remove(
            [n for n, known in self._rows.items() if n not in asked or not known.continues(asked[n].drawn)]
        )
        self._start([row for row in fitting if row.number not in self._rows])
        drafts = self._draw(fitting) if fitting else {}
        return [drafts.get(row.number, []) for row in rows]

    def _fits(self, row: DraftRow) -> bool:
        """Returns whether a draft is wanted and fits: the small model's context must hold the longest answer and one more draft.

        Models of one family may have vocabularies of different sizes: a token that only the large one has cannot be fed here.
        """
        prompt = row.request.prompt_tokens
        longest = len(prompt) + row.request.max_new_tokens + DRAFT_TOKENS + 1
        largest = max(*prompt, int(row.drawn.max()))
        return row.num > 0 and longest <= self._shape.max_positions and largest < self._shape.vocab_size

    def _slots(self) -> dict[int, int]:
        return {row.request.prompt_index: slot for slot, row in self._scheduler.running.items()}

    def _remove(self, numbers: Sequence[int]) -> None:
        if not numbers or self._step is None:
            return
        slots = [slot for number, slot in self._slots().items() if number in numbers]
        self._scheduler.remove(slots)
        self._step.remove_rows(slots)
        for number in numbers:
            del self._rows[number]
        wanted = self._step.wants_compact(self._scheduler.num_running, self._scheduler.end)
        if wanted and (moves := self._scheduler.compact(step=0)):  # no ended rows are reported here
            self._step.move_rows(moves)

    def _start(self, rows: Sequence[DraftRow]) -> None:
        """Computes the prompts and drawn tokens of rows that are new here."""
        if not rows:
            return
        requests = [
            replace(
                row.request,
                prompt_index=row.number,
                prompt_tokens=(*row.request.prompt_tokens, *(int(token) for token in row.drawn[:-1])),
                max_new_tokens=row.request.max_new_tokens - len(row.drawn) + DRAFT_TOKENS + 3,
            )
            for row in rows
        ]
        step, scheduler = self._step_for(self._size_for(requests)), self._scheduler
        firsts = {row.number: len(row.drawn) - 1 for row in rows}
        scheduler.submit(requests)
        prompts, placed = scheduler.place_prompts(
            scheduler.next_prompts(max_tokens=self._shape.max_positions * len(rows), max_prompts=len(rows))
        )
        step.prefill(prompts, placed, scheduler.places).finish()
        admitted = scheduler.admit(set(prompts), step=0)
        step.start_rows([row._replace(first_draw=firsts[row.request.prompt_index]) for row in admitted])
        given = scheduler.grow(step=self._shape.max_positions)  # all blocks at once
        assert given is not None and not scheduler.waiting, "the draft's cache is too small for its rows"
        step.slots.give_blocks(given)
        for request in requests:
            self._rows[request.prompt_index] = _SlotRow(
                firsts[request.prompt_index], len(request.prompt_tokens)
            )

    def _size_for(self, requests: Sequence[GenerationRequest]) -> CacheSize:
        """Returns a size in which `max_rows` rows as long as these fit at their longest."""
        longest = max(len(request.prompt_tokens) for request in requests)
        new_tokens = max(request.max_new_tokens for request in requests)
        row_blocks, prompt_blocks = blocks_for(new_tokens), blocks_for(longest)
        return CacheSize(
            rows=self._max_rows,
            row_positions=row_blocks * BLOCK,
            new_tokens=new_tokens,
            prompts=self._max_rows,
            prompt_positions=prompt_blocks * BLOCK,
            blocks=self._max_rows * (row_blocks + prompt_blocks + 2),  # two that the scheduler holds back
            least_blocks=1,
        )

    def _step_for(self, size: CacheSize) -> "Step":
        """Returns a step whose slots are large enough. A new step has no rows: those of the old one start again later."""
        size = size if self._size is None else size.union(self._size)
        if self._step is None or size != self._size:
            self._remove(list(self._rows))
            self._scheduler = Scheduler(self._max_rows)
            self._scheduler.resize(size)
            self._step, self._size = self._make_step(size), size
        return self._step

    def _draw(self, rows: Sequence[DraftRow]) -> dict[int, list[int]]:
        """Draws one token more than the longest draft has, so that all its tokens are fed."""
        step, slots_of = self._step, self._slots()
        rows = [row for row in rows if row.number in slots_of]
        if step is None or not rows:
            return {}
        slots = step.slots
        lines = []
        for row in rows:
            known = self._rows[row.number]
            own = len(row.drawn) - known.first
            lines.append((slots_of[row.number], known.num_prompt + own - 1, own, row.drawn[-1], 0))
        host_5R = np.array(lines, dtype=np.int64).T
        slots_R, positions_R, own_R, newest_R, zeros_R = upload(host_5R, slots.device)
        slots.fields_6S[SlotField.POSITION, slots_R] = positions_R
        slots.fields_6S[SlotField.NUM_DRAWN, slots_R] = own_R
        slots.fields_6S[SlotField.MAX_DRAWN, slots_R] = zeros_R + slots.size.new_tokens + 1
        slots.fields_6S[SlotField.ENDED, slots_R] = zeros_R
        slots.newest_S[slots_R] = newest_R
        num = max(row.num for row in rows)
        for _ in range(num + 1):
            step.decode(self._scheduler.end)
        numbers_RT = own_R[:, None] + upload(np.arange(num), slots.device)
        tokens_RT = slots.tokens_SN[slots_R[:, None], numbers_RT].tolist()
        drafts: dict[int, list[int]] = {}
        for row, tokens in zip(rows, tokens_RT, strict=True):
            known = self._rows[row.number]
            known.num_drawn, known.draft = len(row.drawn), tokens
            drafts[row.number] = [token for token in tokens[: row.num] if token < self._vocab_size]
        return drafts
