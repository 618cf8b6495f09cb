"""Rows on a CUDA device, laid end to end, with the kernels of a decode step: what a validator runs, and an engine over prompts.

Nothing is padded, and a prompt that rows share is run once. Values are rounded where the decoder rounds them, so that states differ
from its by the order of sums alone. T tokens of all rows, R runs of them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder
from shoal.model.fused import FusedWeights, fuse
from shoal.model.host_to_device import flat, upload
from shoal.model.packed_segments import attend_spans, runs_kernel
from shoal.model.shape import Shape

_FUSED: WeakKeyDictionary[Decoder, FusedWeights] = WeakKeyDictionary()
"""A decoder's matrices are joined once; loading other weights into it fills them in place."""

Tokens = Sequence[int]


class Run(NamedTuple):
    """Tokens that stand side by side."""

    length: int
    follows: int | None = None
    """Number of the run that comes before it in its row, a prompt; None if it begins the row."""


def packed_states(decoder: Decoder, rows: Sequence[tuple[Tokens, Tokens]]) -> list[Tensor]:
    """For each row, a prompt and what follows it: states after the final norm of the prompt's last token and of all that follow,
    [1 + N, H]. For 16-bit floats on a CUDA device."""
    from shoal.model.kernels import elementwise

    if decoder not in _FUSED:
        _FUSED[decoder] = fuse(decoder)
    weights = _FUSED[decoder]
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(row[0]) for row in rows))}
    homes = [prompts[tuple(prompt)] for prompt, _ in rows]
    runs = [
        *map(Run, map(len, prompts)),
        *(Run(len(row[1]), home) for row, home in zip(rows, homes, strict=True)),
    ]
    table_3T = upload(_table([*prompts, *(row[1] for row in rows)], runs), weights.embed_VH.device)
    nowhere = (weights.embed_VH, weights.embed_VH)  # no place is 0 or above: keys and values are not kept
    for x_TH, delta_TH in fused_layers(weights, table_3T, runs, kept=[nowhere] * len(weights.layers)):
        last = x_TH, delta_TH  # one layer's at a time: all of them would be the larger part of the memory
    states_TH = elementwise.add_norm(*last, weights.norm_H, weights.shape.norm_eps)
    wanted = upload(_places(runs, homes), states_TH.device)
    return list(torch.split(states_TH[wanted], [1 + len(row[1]) for row in rows]))


def fused_layers(
    weights: FusedWeights, table_3T: Tensor, runs: Sequence[Run], *, kept: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """After each layer, what has come in and what the layer adds to it, [T, H] both. A token's keys and values go to its place in
    that layer's `kept`. `table_3T` has a column for each token: its id, its position, its place or less than 0 for none."""
    from shoal.model.kernels import elementwise, gate, prompt_attention

    shape, eps = weights.shape, weights.shape.norm_eps
    attention = _Attention(runs, shape, weights.embed_VH)
    x_TH = F.embedding(table_3T[0], weights.embed_VH)
    delta_TH: Tensor | None = None
    for layer, layer_kept in zip(weights.layers, kept, strict=True):
        normed_TH = elementwise.add_norm(x_TH, delta_TH, layer.input_norm_H, eps)
        qkv_TQD = prompt_attention.spread(
            F.linear(normed_TH, layer.qkv_QH, layer.qkv_bias_Q),
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            table_3T=table_3T,
            kept=layer_kept,
        )
        mixed_TQ = attention.attend(qkv_TQD).flatten(1)
        normed_TH = elementwise.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(gate.gated_product(normed_TH, layer.gate_up_FH), layer.down_HF)
        yield x_TH, delta_TH


class _Attention:
    """One for all layers. Floats of 32 bits are left to torch, run by run: the kernel would round them."""

    def __init__(self, runs: Sequence[Run], shape: Shape, like: Tensor) -> None:
        ends = list(accumulate(run.length for run in runs))
        self._heads, self._kv_heads = shape.num_heads, shape.num_kv_heads
        self._spans = [(end - run.length, end) for run, end in zip(runs, ends, strict=True)]
        self._longest = max(run.length for run in runs)
        self._runs_4R: Tensor | None = None
        if runs_kernel(like.device, like.dtype):
            self._runs_4R = upload(np.array(self._lines(runs), dtype=np.int32).T, like.device)
        else:
            assert all(run.follows is None for run in runs)

    def _lines(self, runs: Sequence[Run]) -> list[tuple[int, int, int, int]]:
        earlier = [(0, 0) if run.follows is None else self._spans[run.follows] for run in runs]
        return [
            (begin, end - begin, first, last - first)
            for (begin, end), (first, last) in zip(self._spans, earlier, strict=True)
        ]

    def attend(self, qkv_TQD: Tensor) -> Tensor:
        """[T, N, D]"""
        heads, kv_heads = self._heads, self._kv_heads
        if self._runs_4R is None:
            q_TND, k_TKD, v_TKD = torch.split(qkv_TQD, [heads, kv_heads, kv_heads], dim=1)
            return attend_spans(q_TND, k_TKD, v_TKD, self._spans)
        from shoal.model.kernels.segment_attention import attend_runs

        return attend_runs(qkv_TQD, self._runs_4R, self._longest, num_heads=heads, num_kv_heads=kv_heads)


def _table(tokens: Sequence[Tokens], runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    """A column for each token: its id, its position, and -1 for no place in a cache."""
    lengths = [run.length for run in runs]
    total, begins = sum(lengths), list(accumulate(lengths, initial=0))[:-1]
    firsts = [0 if run.follows is None else lengths[run.follows] for run in runs]
    table_3T = np.full((3, total), -1, dtype=np.int64)
    table_3T[0] = flat(tokens)
    table_3T[1] = np.arange(total) + np.repeat(np.subtract(firsts, begins), lengths)
    return table_3T


def _places(runs: Sequence[Run], homes: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where the states of all rows lie, row by row: a prompt's last, then a run's own."""
    ends = np.cumsum([run.length for run in runs])
    lengths = np.array([run.length for run in runs[-len(homes) :]])
    begins, counts = ends[-len(homes) :] - lengths, lengths + 1
    firsts = np.cumsum(counts) - counts
    places_N: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - firsts - 1, counts)
    places_N[firsts] = ends[homes] - 1
    return places_N
