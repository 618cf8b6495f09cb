"""Prompts that were computed once, for all rows that start from them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.model.decoder import Decoder, KVCache, run_prompts
from shoal.rollout.engine.block_pool import Prompt
from shoal.rollout.engine.scheduler import Admission


class PrefillSize(NamedTuple):
    """How many prompts are computed together."""

    tokens: int
    """Prompt tokens computed at once: enough to fill the device, few enough that activations stay small."""
    prompts: int
    """Prompts computed at once, however short."""
    batches: int = 1
    """2: while rows start from the prompts of one batch, those of the next are computed."""


PREFILL_SIZES = {"cpu": PrefillSize(2048, 16), "cuda": PrefillSize(8192, 32, batches=2)}


MIN_PROMPT_TOKENS = 64
"""Prompts with fewer tokens in total stay in one batch."""
MAX_PADDING = 1.25
"""A batch's longest prompt has at most this many times the tokens of its shortest, plus PADDING_TOKENS."""
PADDING_TOKENS = 16


class PromptBatch(NamedTuple):
    """Prompts that were computed together."""

    prompts: list[Prompt]
    cache: KVCache | None
    """Their keys and values; None if the step has stored them already."""
    logits_PV: Tensor
    """After each prompt's last token."""


class PendingPrefill(Protocol):
    """Prompts that are being computed."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    def advance(self) -> None:
        """Does a small part of the work, if any is left."""

    def finish(self) -> list[PromptBatch]:
        """Does the rest of the work and returns the computed prompts."""

    def cancel(self) -> None:
        """Drops the prompts. Work that uses their memory later waits for the part that was launched."""


class FinishedPrefill(NamedTuple):
    """A PendingPrefill with nothing left to do, for steps that compute prompts at once."""

    prompts: Sequence[Prompt]
    batches: list[PromptBatch]

    def advance(self) -> None:
        pass

    def finish(self) -> list[PromptBatch]:
        return self.batches

    def cancel(self) -> None:
        pass


class PromptCache:
    """The computed prompts that the next rows start from, and the prefill for the rows after those."""

    def __init__(self) -> None:
        self._lines: dict[Prompt, tuple[int, int]] = {}
        """Number of the batch and line in it, of each prompt."""
        self._batches: list[PromptBatch] = []
        self.pending: PendingPrefill | None = None

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._lines

    def replace(self, batches: Sequence[PromptBatch]) -> None:
        """Holds these prompts, which were the pending ones, instead of the previous ones."""
        self.pending = None
        self.clear()
        self._batches = list(batches)
        for number, batch in enumerate(batches):
            self._lines |= {prompt: (number, line) for line, prompt in enumerate(batch.prompts)}

    def clear(self) -> None:
        if self.pending is not None:
            self.pending.cancel()
        self._lines, self._batches, self.pending = {}, [], None

    def first_draws(self, admitted: Sequence[Admission]) -> list[tuple[PromptBatch, list[list[int]]]]:
        """Returns each batch that rows start from, with the lines of its logits and the slots of these rows."""
        draws: dict[int, list[list[int]]] = {}
        for row in admitted:
            number, line = self._lines[row.request.prompt_tokens]
            lines, slots = draws.setdefault(number, [[], []])
            lines.append(line)
            slots.append(row.slot)
        return [(self._batches[number], draw) for number, draw in draws.items()]


def prefill(decoder: Decoder, prompts: Sequence[Prompt]) -> PromptBatch:
    """Computes keys, values and last logits of whole prompts on a CPU, at most PrefillSize.tokens with padding at a time."""
    cache = KVCache(decoder, num_slots=len(prompts), max_context=max(map(len, prompts)))
    chunk = max(1, PREFILL_SIZES["cpu"].tokens // len(prompts))
    last_PH = run_prompts(decoder, prompts, cache, chunk=chunk)
    return PromptBatch(list(prompts), cache, decoder.logits(last_PH))


def batch_by_length(prompts: Iterable[Prompt]) -> list[list[Prompt]]:
    """Sorts prompts by length into batches with little padding."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=len):
        if batches and len(prompt) <= MAX_PADDING * len(batches[-1][0]) + PADDING_TOKENS:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def split_prompts(batches: Sequence[Sequence[Prompt]], num_threads: int) -> list[list[Prompt]]:
    """Divides batches that have more than a thread's share of the tokens. Returns the largest batch first."""
    if num_threads > 1:
        total = sum(len(prompt) for batch in batches for prompt in batch)
        most = max(MIN_PROMPT_TOKENS, -(-total // num_threads))
        batches = [part for batch in batches for part in _split_batch(batch, most)]
    return sorted(map(list, batches), key=lambda batch: -sum(map(len, batch)))


def _split_batch(batch: Sequence[Prompt], max_tokens: int) -> list[list[Prompt]]:
    parts: list[list[Prompt]] = []
    tokens_left = 0
    for prompt in batch:
        if not parts or len(prompt) > tokens_left:
            parts.append([])
            tokens_left = max_tokens
        parts[-1].append(prompt)
        tokens_left -= len(prompt)
    return parts
