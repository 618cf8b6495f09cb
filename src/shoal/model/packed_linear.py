"""Fused weights packed for a CPU's matrix products: each matrix once more, in the blocks that oneDNN's kernels read.

A product of a few rows with a matrix as it stands spends a third of its time on packing it, step after step. A packed
one costs the matrix's memory a second time: the decoder's own stay as they are, for loading and for prompts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.fused import FusedLayer, FusedWeights

ROWS = 32
"""Rows the packing is meant for. The same layout was best from 1 to 300 rows."""


def pack(weights: FusedWeights) -> FusedWeights:
    """The same weights with packed matrices where this CPU and torch have the kernels; else as they are.

    Only `linear` may use the packed matrices.
    """
    return _with_matrices(weights, _packed) if _can_pack(weights.embed_VH.dtype) else weights


def repacking(packed: FusedWeights, weights: FusedWeights) -> list[Callable[[], None]]:
    """What makes `packed` follow a change of `weights`, in place: a job for each matrix, the largest first, in any order."""
    if not packed.head_VH.is_mkldnn:
        return []
    pairs = zip(_matrices(packed), _matrices(weights), strict=True)
    return [partial(_repack, *pair) for pair in sorted(pairs, key=lambda pair: -pair[1].numel())]


def _repack(mine: Tensor, theirs: Tensor) -> None:
    mine.copy_(_packed(theirs))  # one matrix at a time is held twice


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear for matrices packed or not."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    """These operations are torch's own, made for its compiler, and not promised to stay: without them all is as before."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or bool(operations._is_mkldnn_bf16_supported())


def _packed(matrix: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, ROWS)
    return packed


def _with_matrices(weights: FusedWeights, change: Callable[[Tensor], Tensor]) -> FusedWeights:
    layers = tuple(
        layer._replace(
            qkv_QH=change(layer.qkv_QH),
            o_HQ=change(layer.o_HQ),
            gate_up_FH=change(layer.gate_up_FH),
            down_HF=change(layer.down_HF),
        )
        for layer in weights.layers
    )
    return weights._replace(layers=layers, head_VH=change(weights.head_VH))


def _matrices(weights: FusedWeights) -> list[Tensor]:
    def of(layer: FusedLayer) -> list[Tensor]:
        return [layer.qkv_QH, layer.o_HQ, layer.gate_up_FH, layer.down_HF]

    return [matrix for layer in weights.layers for matrix in of(layer)] + [weights.head_VH]
