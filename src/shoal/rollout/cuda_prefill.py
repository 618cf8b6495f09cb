"""Whole prompts on a CUDA device, laid end to end, with the kernels of a decode step: no padding, one pass for all."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model import kernels, prompt_kernels
from shoal.model.cache import KVCache
from shoal.model.fused import FusedWeights
from shoal.model.segments import attend_segments, laid_end_to_end
from shoal.rollout.rows import Prompt
from shoal.rollout.slots import upload


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
    shape, eps, device = weights.shape, weights.shape.norm_eps, weights.embed_VH.device
    lengths = [len(prompt) for prompt in prompts]
    table_3T = upload(_table(prompts, places), device)
    segments = laid_end_to_end(lengths, device, weights.embed_VH.dtype)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    x_TH = F.embedding(table_3T[0], weights.embed_VH)
    delta_TH: Tensor | None = None
    for number, layer in enumerate(weights.layers):
        normed_TH = kernels.add_norm(x_TH, delta_TH, layer.input_norm_H, eps)
        qkv_1TQD = prompt_kernels.spread(
            F.linear(normed_TH, layer.qkv_QH, layer.qkv_bias_Q),
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            table_3T=table_3T,
            kept=(kept.keys_LSCKD[number], kept.values_LSCKD[number]),
        )[None]
        q_1TND, k_1TKD, v_1TKD = torch.split(qkv_1TQD, [heads, kv_heads, kv_heads], dim=2)
        mixed_TQ = attend_segments(q_1TND, k_1TKD, v_1TKD, segments).reshape(len(x_TH), -1)
        normed_TH = kernels.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(kernels.silu_mul(F.linear(normed_TH, layer.gate_up_FH)), layer.down_HF)
        yield None
    assert delta_TH is not None
    last_P = upload(np.cumsum(lengths) - 1, device)
    last_PH = kernels.add_norm(x_TH[last_P], delta_TH[last_P], weights.norm_H, eps)
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
