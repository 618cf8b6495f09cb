"""Computes the states of rows laid end to end on a CUDA device. Validators use it for whole rows, engines for prompts.

There is no padding, and a prompt that several rows share is computed once. Values are rounded where the decoder rounds them, so
its states differ only by the order of sums. T tokens of all rows, R runs of adjacent tokens.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder, attend_spans, supports_flash_attention
from shoal.model.fused import FusedWeights, fuse
from shoal.model.shape import Shape

_FUSED: WeakKeyDictionary[Decoder, FusedWeights] = WeakKeyDictionary()
"""Fused weights by decoder. Fused once; loading other weights into the decoder changes them in place."""

Tokens = Sequence[int]


class TokenRun(NamedTuple):
    """Adjacent tokens of one row: a prompt, or what follows it."""

    length: int
    follows: int | None = None
    """Index of the run before it in its row, a prompt; None if this run begins the row."""


def packed_states(decoder: Decoder, rows: Sequence[tuple[Tokens, Tokens]]) -> list[Tensor]:
    """Returns for each row the states after the final norm of the prompt's last token and of all N tokens after it, [1 + N, H].

    A row is a prompt and the tokens that follow it. Needs 16-bit floats on a CUDA device.
    """
    from shoal.model.kernels import elementwise

    if decoder not in _FUSED:
        _FUSED[decoder] = fuse(decoder)
    weights = _FUSED[decoder]
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(tuple(row[0]) for row in rows))}
    prompt_runs = [prompts[tuple(prompt)] for prompt, _ in rows]
    runs = [
        *map(TokenRun, map(len, prompts)),
        *(TokenRun(len(row[1]), prompt_run) for row, prompt_run in zip(rows, prompt_runs, strict=True)),
    ]
    table_3T = upload(_table([*prompts, *(row[1] for row in rows)], runs), weights.embed_VH.device)
    nowhere = (weights.embed_VH, weights.embed_VH)  # no slot is 0 or above, so keys and values are not stored
    for x_TH, delta_TH in fused_layers(weights, table_3T, runs, kept=[nowhere] * len(weights.layers)):
        last = x_TH, delta_TH  # only the last layer's: keeping all would take most of the memory
    states_TH = elementwise.add_norm(*last, weights.norm_H, weights.shape.norm_eps)
    wanted = upload(_places(runs, prompt_runs), states_TH.device)
    return list(torch.split(states_TH[wanted], [1 + len(row[1]) for row in rows]))


def fused_layers(
    weights: FusedWeights,
    table_3T: Tensor,
    runs: Sequence[TokenRun],
    *,
    kept: Sequence[tuple[Tensor, Tensor]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields after each layer its residual input and what the layer adds to it, both [T, H].

    `table_3T` has for each token its id, its position and its cache slot. Keys and values are stored in that slot of the layer's
    `kept`, or not stored if the slot is below 0.
    """
    from shoal.model.kernels import elementwise, prompt_attention

    shape, eps = weights.shape, weights.shape.norm_eps
    attention = _Attention(runs, shape, weights.embed_VH)
    x_TH = F.embedding(table_3T[0], weights.embed_VH)
    delta_TH: Tensor | None = None
    for layer, layer_kept in zip(weights.layers, kept, strict=True):
        normed_TH = elementwise.add_norm(x_TH, delta_TH, layer.input_norm_H, eps)
        qkv_TQD = prompt_attention.norm_and_rotate(
            F.linear(normed_TH, layer.qkv_QH, layer.qkv_bias_Q),
            layer,
            shape=shape,
            rope_PE=weights.rope_PE,
            table_3T=table_3T,
            kept=layer_kept,
        )
        mixed_TQ = attention.attend(qkv_TQD).flatten(1)
        normed_TH = elementwise.add_norm(x_TH, F.linear(mixed_TQ, layer.o_HQ), layer.post_norm_H, eps)
        delta_TH = F.linear(elementwise.gated_product(normed_TH, layer.gate_up_FH), layer.down_HF)
        yield x_TH, delta_TH


class _Attention:
    """Attention inside runs, for all layers. 32-bit floats go to torch, run by run, since the kernel would round them."""

    def __init__(self, runs: Sequence[TokenRun], shape: Shape, like: Tensor) -> None:
        ends = list(accumulate(run.length for run in runs))
        self._heads, self._kv_heads = shape.num_heads, shape.num_kv_heads
        self._spans = [(end - run.length, end) for run, end in zip(runs, ends, strict=True)]
        self._longest = max(run.length for run in runs)
        self._runs_4R: Tensor | None = None
        if supports_flash_attention(like.device, like.dtype):
            self._runs_4R = upload(np.array(self._lines(runs), dtype=np.int32).T, like.device)
        else:
            assert all(run.follows is None for run in runs)

    def _lines(self, runs: Sequence[TokenRun]) -> list[tuple[int, int, int, int]]:
        earlier = [(0, 0) if run.follows is None else self._spans[run.follows] for run in runs]
        return [
            (begin, end - begin, first, last - first)
            for (begin, end), (first, last) in zip(self._spans, earlier, strict=True)
        ]

    def attend(self, qkv_TQD: Tensor) -> Tensor:
        """Returns attention inside each run and its prompt, [T, N, D]."""
        heads, kv_heads = self._heads, self._kv_heads
        if self._runs_4R is None:
            q_TND, k_TKD, v_TKD = torch.split(qkv_TQD, [heads, kv_heads, kv_heads], dim=1)
            return attend_spans(q_TND, k_TKD, v_TKD, self._spans)
        from shoal.model.kernels.prompt_attention import attend_runs

        return attend_runs(qkv_TQD, self._runs_4R, self._longest, num_heads=heads, num_kv_heads=kv_heads)


def _table(tokens: Sequence[Tokens], runs: Sequence[TokenRun]) -> npt.NDArray[np.int64]:
    """Returns for each token its id, its position, and -1 for no cache slot."""
    lengths = [run.length for run in runs]
    total, begins = sum(lengths), list(accumulate(lengths, initial=0))[:-1]
    firsts = [0 if run.follows is None else lengths[run.follows] for run in runs]
    table_3T = np.full((3, total), -1, dtype=np.int64)
    table_3T[0] = flat(tokens)
    table_3T[1] = np.arange(total) + np.repeat(np.subtract(firsts, begins), lengths)
    return table_3T


def _places(runs: Sequence[TokenRun], prompt_runs: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns the indices of the wanted states, row by row: the prompt's last token, then the run's own."""
    ends = np.cumsum([run.length for run in runs])
    lengths = np.array([run.length for run in runs[-len(prompt_runs) :]])
    begins, counts = ends[-len(prompt_runs) :] - lengths, lengths + 1
    firsts = np.cumsum(counts) - counts
    places_N: npt.NDArray[np.int64] = np.arange(counts.sum()) + np.repeat(begins - firsts - 1, counts)
    places_N[firsts] = ends[prompt_runs] - 1
    return places_N


def flat(rows: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Concatenates rows of numbers. NumPy takes twice as long to convert Python's numbers."""
    return np.frombuffer(b"".join(struct.pack(f"{len(row)}i", *row) for row in rows), dtype=np.int32)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies an array to a device without waiting: from pageable memory the copy would wait for all queued work."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
