"""Whole rows on a CUDA device, laid end to end, with the kernels of a decode step: what a validator runs, and an engine over prompts.

Nothing is padded. Values are rounded where the decoder rounds them, so that states differ from its by the
order of sums alone. T tokens of all rows.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedWeights, fuse
from shoal.model.segments import attend_segments, laid_end_to_end

_FUSED: WeakKeyDictionary[Decoder, FusedWeights] = WeakKeyDictionary()
"""A decoder's matrices are joined once; loading other weights into it fills them in place."""


def packed_states(decoder: Decoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """States after the final norm of all tokens of all rows, [T, H]."""
    lengths, device = [len(row) for row in rows], decoder.model.norm.weight.device
    table_3T = _table(rows, lengths, device)
    if device.type != "cuda":  # no kernels: the decoder itself, with a mask
        segments_T = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
        states_1TH: Tensor = decoder(table_3T[:1], table_3T[1:2], segments_BT=segments_T[None])
        return states_1TH[0]
    if decoder not in _FUSED:
        _FUSED[decoder] = fuse(decoder)
    return _fused_states(_FUSED[decoder], table_3T, lengths)


def _fused_states(weights: FusedWeights, table_3T: Tensor, lengths: Sequence[int]) -> Tensor:
    from shoal.model import kernels

    nowhere = (weights.embed_VH, weights.embed_VH)  # no place is 0 or above: keys and values are not kept
    for x_TH, delta_TH in fused_layers(weights, table_3T, lengths, kept=[nowhere] * len(weights.layers)):
        last = x_TH, delta_TH  # one layer's at a time: all of them would be the larger part of the memory
    return kernels.add_norm(*last, weights.norm_H, weights.shape.norm_eps)


def fused_layers(
    weights: FusedWeights, table_3T: Tensor, lengths: Sequence[int], *, kept: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """After each layer, what has come in and what the layer adds to it, [T, H] both. A token's keys and values go to its place in
    that layer's `kept`. `table_3T` has a column for each token: its id, its position, its place or less than 0 for none."""
    from shoal.model import kernels, prompt_kernels

    shape, eps = weights.shape, weights.shape.norm_eps
    segments = laid_end_to_end(lengths, weights.embed_VH.device, weights.embed_VH.dtype)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    x_TH = F.embedding(table_3T[0], weights.embed_VH)
    delta_TH: Tensor | None = None
    for layer, layer_kept in zip(weights.layers, kept, strict=True):
        normed_TH = kernels.add_norm(x_TH, delta_TH, layer.input_norm_H, eps)
        qkv_1TQD = prompt_kernels.spread(
            F.linear(normed_TH, layer.qkv_QH, layer.qkv_bias_Q),
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            table_3T=table_3T,
            kept=layer_kept,
        )[None]
        q_1TND, k_1TKD, v_1TKD = torch.split(qkv_1TQD, [heads, kv_heads, kv_heads], dim=2)
        mixed_TQ = attend_segments(q_1TND, k_1TKD, v_1TKD, segments).reshape(len(x_TH), -1)
        normed_TH = kernels.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(kernels.silu_mul(F.linear(normed_TH, layer.gate_up_FH)), layer.down_HF)
        yield x_TH, delta_TH


def _table(rows: Sequence[Sequence[int]], lengths: Sequence[int], device: torch.device) -> Tensor:
    """A column for each token: its id, its position, and -1 for no place in a cache."""
    total, starts = sum(lengths), np.cumsum([0, *lengths[:-1]])
    table_3T = np.full((3, total), -1, dtype=np.int64)
    table_3T[0] = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=total)
    table_3T[1] = np.arange(total) - np.repeat(starts, lengths)
    table = torch.from_numpy(table_3T)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
