# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernel of prompts: q/k norm and rotation of whole ones laid end to end, keys and values into the cache. Imported on
CUDA machines only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.model.fused import FusedLayer
from shoal.model.kernels.elementwise import normed, rotated
from shoal.model.shape import Shape


@triton.jit
def _spread(
    qkv,
    rope,
    table,
    out,
    keys,
    values,
    q_norm,
    k_norm,
    num_tokens,
    prompt_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(table + num_tokens + token)
    place = tl.load(table + 2 * num_tokens + token)
    dtype = out.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    h = tl.arange(0, BLOCK_H)
    inside = (h < NUM_HEADS + 2 * NUM_KV)[:, None] & in_d[None, :]
    cos = tl.load(rope + position * 2 * D + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(rope + position * 2 * D + D + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    heads = qkv + token * (NUM_HEADS + 2 * NUM_KV) * D + h[:, None] * D
    stored = tl.load(heads + d[None, :], mask=inside, other=0.0)
    x = stored.to(tl.float32)
    swapped = tl.load(heads + other[None, :], mask=inside, other=0.0).to(tl.float32)
    is_q = (h < NUM_HEADS)[:, None]
    is_v = (h >= NUM_HEADS + NUM_KV)[:, None]
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        q_weight = tl.load(q_norm + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(k_norm + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        q_weight_swapped = tl.load(q_norm + other, mask=in_d, other=0.0).to(tl.float32)[None, :]
        k_weight_swapped = tl.load(k_norm + other, mask=in_d, other=0.0).to(tl.float32)[None, :]
        x = normed(x, scale, tl.where(is_q, q_weight, k_weight), dtype)
        swapped = normed(swapped, scale, tl.where(is_q, q_weight_swapped, k_weight_swapped), dtype)
    turned = tl.where(is_v, stored, rotated(x, swapped, cos, sin, dtype))
    tl.store(out + token * (NUM_HEADS + 2 * NUM_KV) * D + h[:, None] * D + d[None, :], turned, mask=inside)
    kept = inside & (place >= 0)
    k_at = place * prompt_stride + position * NUM_KV * D + (h - NUM_HEADS)[:, None] * D + d[None, :]
    tl.store(keys + k_at, turned, mask=kept & (is_q == 0) & (is_v == 0))
    tl.store(values + k_at - NUM_KV * D, turned, mask=kept & is_v)


def spread(
    qkv_TQ: Tensor,
    layer: FusedLayer,
    *,
    shape: Shape,
    rope_PE: Tensor,
    table_3T: Tensor,
    kept: tuple[Tensor, Tensor],
) -> Tensor:
    """Queries, keys and values of prompts laid end to end, normed and rotated, [T, N + 2 K, D].

    `table_3T`: ids, positions, and the place among the `kept` keys and values, [P, C, K, D], where a token's go too; none
    if below 0.
    """
    num_tokens = len(qkv_TQ)
    out_TQD = torch.empty_like(qkv_TQ).view(num_tokens, -1, shape.head_dim)
    _spread[(num_tokens,)](
        qkv_TQ,
        rope_PE,
        table_3T,
        out_TQD,
        *kept,
        qkv_TQ if layer.q_norm_D is None else layer.q_norm_D,
        qkv_TQ if layer.k_norm_D is None else layer.k_norm_D,
        num_tokens,
        kept[0].stride(0),
        shape.norm_eps,
        NUM_HEADS=shape.num_heads,
        NUM_KV=shape.num_kv_heads,
        D=shape.head_dim,
        BLOCK_H=triton.next_power_of_2(shape.num_heads + 2 * shape.num_kv_heads),
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        QK_NORM=shape.qk_norm,
        num_warps=4,
    )
    return out_TQD
