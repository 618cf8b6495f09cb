"""Whole prompts on a CUDA device, laid end to end, with the kernels of a decode step: no padding, one pass for all."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.model.decoder import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.kernels import elementwise
from shoal.model.packed_prefill import TokenRun, fused_layers, upload
from shoal.rollout.engine.rows import Prompt


def prefill(weights: FusedWeights, prompts: Sequence[Prompt], places: Sequence[int], kept: KVCache) -> Tensor:
    """The logits after the prompts' last tokens, [P, V]; their keys and values go to their `places` in `kept`.

    A place below 0: they stand somewhere already, and rows may be looking at them.
    """
    *_, logits_PV = prefill_by_layer(weights, prompts, places, kept)
    assert logits_PV is not None
    return logits_PV


def prefill_by_layer(
    weights: FusedWeights, prompts: Sequence[Prompt], places: Sequence[int], kept: KVCache
) -> Iterator[Tensor | None]:
    """The same with a break after each layer: to launch all of them takes the host as long as ten decode steps. The last item
    are the logits."""
    device, lengths = weights.embed_VH.device, [len(prompt) for prompt in prompts]
    table_3T = upload(_table(prompts, places), device)
    by_layer = list(zip(kept.keys_LSCKD, kept.values_LSCKD, strict=True))
    for x_TH, delta_TH in fused_layers(weights, table_3T, [*map(TokenRun, lengths)], kept=by_layer):
        last = x_TH, delta_TH
        yield None
    last_P = upload(np.cumsum(lengths) - 1, device)
    x_PH, delta_PH = (each_TH[last_P] for each_TH in last)
    last_PH = elementwise.add_norm(x_PH, delta_PH, weights.norm_H, weights.shape.norm_eps)
    yield torch.mm(last_PH, weights.head_VH.t())


def _table(
    prompts: Sequence[Prompt], places: Sequence[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """A column for each token: its id, its position, its prompt's place."""
    columns = [
        np.stack((prompt, np.arange(len(prompt)), np.full(len(prompt), place)))
        for prompt, place in zip(prompts, places, strict=True)
    ]
    return np.concatenate(columns, axis=1, dtype=np.int64)
