"""Prompts that have been computed once, for all rows that start from them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.model.decoder import Decoder, KVCache
from shoal.model.packed_prefill import upload
from shoal.rollout.engine.rows import Prompt


class ShelfSize(NamedTuple):
    tokens: int
    """Prompt tokens computed at once: enough to fill the device, few enough that activations stay small."""
    prompts: int
    """Prompts computed at once, however short."""
    shelves: int = 1
    """Two: while rows start from the prompts of one, those of the next are computed."""


SHELF_SIZES = {"cpu": ShelfSize(2048, 16), "cuda": ShelfSize(8192, 32, shelves=2)}


class Batch(NamedTuple):
    prompts: list[Prompt]
    cache: KVCache | None
    """None if rows find the prompts elsewhere."""
    logits_PV: Tensor
    """After each prompt's last token."""


class Ahead(Protocol):
    """Prompts that are being computed."""

    @property
    def prompts(self) -> Sequence[Prompt]: ...

    def go_on(self) -> None:
        """Do a small part of the work, if any is left."""

    def finish(self) -> list[Batch]:
        """Do the rest of it."""


class Computed(NamedTuple):
    """Prompts that were computed at once."""

    prompts: Sequence[Prompt]
    batches: list[Batch]

    def go_on(self) -> None:
        pass

    def finish(self) -> list[Batch]:
        return self.batches


class Shelf:
    """The prompts of the next rows. `homes` says where each stands: (batch, place in the batch)."""

    def __init__(self) -> None:
        self.homes: dict[Prompt, tuple[int, int]] = {}
        self.batches: list[Batch] = []
        self.ahead: Ahead | None = None
        """For when these are used up."""

    def stock(self, batches: Sequence[Batch]) -> None:
        """Hold these prompts; what stood here before goes."""
        self.clear()
        self.batches = list(batches)
        for number, batch in enumerate(batches):
            self.homes |= {prompt: (number, place) for place, prompt in enumerate(batch.prompts)}

    def clear(self) -> None:
        self.homes, self.batches, self.ahead = {}, [], None


def prefill(decoder: Decoder, prompts: Sequence[Prompt]) -> Batch:
    """Keys and values of whole prompts, and their last logits; at most a shelf of tokens, padding included, at a time."""
    norm = decoder.model.norm.weight
    lengths = np.array([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    # Padding stands behind the tokens, where nothing looks at it before it is overwritten.
    padded = np.zeros((len(prompts), width), dtype=np.int64)
    for place, prompt in enumerate(prompts):
        padded[place, : len(prompt)] = prompt
    tokens_PT, last_P = upload(padded, norm.device), upload(lengths - 1, norm.device)
    cache = KVCache(
        decoder.shape, num_slots=len(prompts), max_context=width, dtype=norm.dtype, device=norm.device
    )
    last_PH = norm.new_empty(len(prompts), decoder.shape.hidden_size)
    chunk = max(1, SHELF_SIZES[norm.device.type].tokens // len(prompts))
    for start in range(0, width, chunk):
        cache.context = min(start + chunk, width)
        positions_PT = torch.arange(start, cache.context, device=norm.device).expand(len(prompts), -1)
        hidden_PTH = decoder(tokens_PT[:, start : cache.context], positions_PT, cache=cache)
        at_P = (last_P - start).clamp(0, hidden_PTH.shape[1] - 1)
        here_P1 = ((last_P >= start) & (last_P < cache.context))[:, None]
        last_PH = torch.where(
            here_P1, hidden_PTH[torch.arange(len(prompts), device=norm.device), at_P], last_PH
        )
    return Batch(list(prompts), cache, decoder.logits(last_PH))
