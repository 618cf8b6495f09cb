"""A decoder's weights laid out for decoding: what reads the same input stands in one matrix.

    qkv      q_proj, k_proj, v_proj, one below the other
    gate_up  gate_proj, up_proj, likewise

The decoder's own parameters become views of these, so there is one copy of the weights: loading into the decoder,
as a swap does, fills the fused matrices in place, and neither names nor values of the decoder change.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.model.decoder import Decoder, Layer, rope_table
from shoal.model.shape import Shape


class FusedLayer(NamedTuple):
    """One layer's tensors, in the order in which a step uses them."""

    input_norm_H: Tensor
    qkv_QH: Tensor
    qkv_bias_Q: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_HQ: Tensor
    post_norm_H: Tensor
    gate_up_FH: Tensor
    down_HF: Tensor


class FusedWeights(NamedTuple):
    shape: Shape
    embed_VH: Tensor
    layers: tuple[FusedLayer, ...]
    norm_H: Tensor
    head_VH: Tensor
    rope_PE: Tensor
    """Cosines and signed sines of every position, in the weights' dtype: as the decoder rounds them."""


@torch.no_grad()
def fuse(decoder: Decoder) -> FusedWeights:
    """The decoder's weights, fused. From here on its parameters are views: no `.to()` may move them."""
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
    """The parameters one below the other; each becomes a view of its part."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined
