"""A decoder's weights laid out for decoding: matrices that read the same input are concatenated.

    qkv      q_proj, k_proj, v_proj
    gate_up  gate_proj, up_proj

The decoder's own parameters become views of these, so there is one copy of the weights: loading other weights into the decoder
fills the fused matrices in place, and the decoder's names and values do not change.

`pack` copies the fused matrices once more for a CPU, in the block layout that oneDNN's kernels read. Without it, a product of a
few rows spends a third of its time on packing the matrix, in every step. The plain matrices stay, for loading and for prompts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.decoder import Decoder, Layer
from shoal.model.rope import rope_table
from shoal.model.shape import Shape

PACKED_ROWS = 32
"""Rows of input that the packing is optimised for. The same layout was fastest from 1 to 300 rows."""


class FusedLayer(NamedTuple):
    """One layer's tensors, in the order in which a decode step uses them."""

    input_norm_H: Tensor
    qkv_QH: Tensor
    qkv_bias_Q: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_HQ: Tensor
    post_norm_H: Tensor
    gate_up_FH: Tensor
    down_HF: Tensor


_MATRICES = ("qkv_QH", "o_HQ", "gate_up_FH", "down_HF")
"""Fields of FusedLayer that a CPU packs."""


class FusedWeights(NamedTuple):
    """A decoder's tensors, in the order in which a decode step uses them."""

    shape: Shape
    embed_VH: Tensor
    layers: tuple[FusedLayer, ...]
    norm_H: Tensor
    head_VH: Tensor
    rope_PE: Tensor
    """Cosines and signed sines of every position, rounded to the weights' dtype as the decoder does."""


@torch.no_grad()
def fuse(decoder: Decoder) -> FusedWeights:
    """Fuses the decoder's weights. Its parameters become views, so `decoder.to()` must not be called afterwards."""
    embed_VH = decoder.model.embed_tokens.weight.data
    head = decoder.lm_head
    return FusedWeights(
        shape=decoder.shape,
        embed_VH=embed_VH,
        layers=tuple(_fuse_layer(layer) for layer in decoder.model.layers if isinstance(layer, Layer)),
        norm_H=decoder.model.norm.weight.data,
        head_VH=embed_VH if head is None else head.weight.data,
        rope_PE=rope_table(decoder.shape).to(device=embed_VH.device, dtype=embed_VH.dtype),
    )


def _fuse_layer(layer: Layer) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = attention.q_proj.bias is not None
    return FusedLayer(
        input_norm_H=layer.input_layernorm.weight.data,
        qkv_QH=_join([linear.weight for linear in qkv]),
        qkv_bias_Q=_join([linear.bias for linear in qkv]) if has_bias else None,
        q_norm_D=None if attention.q_norm is None else attention.q_norm.weight.data,
        k_norm_D=None if attention.k_norm is None else attention.k_norm.weight.data,
        o_HQ=attention.o_proj.weight.data,
        post_norm_H=layer.post_attention_layernorm.weight.data,
        gate_up_FH=_join([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down_HF=mlp.down_proj.weight.data,
    )


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenates the parameters and makes each a view of its part."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined


def pack(weights: FusedWeights) -> FusedWeights:
    """Returns the weights with packed matrices, or unchanged where this CPU or torch lacks the kernels.

    Only `linear` may use the packed matrices.
    """
    if not _can_pack(weights.embed_VH.dtype):
        return weights
    layers = tuple(
        layer._replace(**{name: _packed(getattr(layer, name)) for name in _MATRICES})
        for layer in weights.layers
    )
    return weights._replace(layers=layers, head_VH=_packed(weights.head_VH))


def repack_jobs(packed: FusedWeights, weights: FusedWeights) -> list[Callable[[], None]]:
    """Returns one job per matrix that copies changed `weights` into `packed`, largest first. They may run in any order."""
    if not packed.head_VH.is_mkldnn:
        return []

    def repack(copy: Tensor, matrix: Tensor) -> None:
        copy.copy_(_packed(matrix))

    pairs = [(packed.head_VH, weights.head_VH)]
    for copies, layer in zip(packed.layers, weights.layers, strict=True):
        pairs += [(getattr(copies, name), getattr(layer, name)) for name in _MATRICES]
    return [partial(repack, *pair) for pair in sorted(pairs, key=lambda pair: -pair[1].numel())]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes F.linear with a matrix that may be packed. A row's result does not depend on the number of rows, bit for bit.

    One row is computed as two: libraries sum its products in another order.
    """
    rows = x.expand(2, -1) if len(x) == 1 else x
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        product = F.linear(rows, weight, bias)
    return product[:1] if len(x) == 1 else product


def _can_pack(dtype: torch.dtype) -> bool:
    """Returns whether torch has the operations. They are private to its compiler and may disappear from a later release."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or bool(operations._is_mkldnn_bf16_supported())


def _packed(matrix: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, PACKED_ROWS)
    return packed
