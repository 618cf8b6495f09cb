# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels of attention inside prompts and other runs of tokens laid end to end. Imported on CUDA machines only.

    norm_and_rotate   q/k norm and rotation; stores keys and values in the cache
    attend_runs       causal attention inside each run and over the prompt that it follows

        0 0 0 1 1 2 2 2 2      runs 1 and 2 follow run 0, the prompt that they share: they attend to it and to themselves

attend_runs has no gradient. A program takes RUN_BLOCK queries of one head of one run. torch's own kernel, which cannot share
prompts, takes twice as long on a Hopper GPU. Sums are in float32, and weights are rounded to the model's dtype before they
are multiplied with the values, as in torch's.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.model.fused import FusedLayer
from shoal.model.kernels.elementwise import normed, rotated
from shoal.model.shape import Shape

RUN_BLOCK = 64
"""Queries of a program, and keys that it loads together. With 128 of either, fewer programs fit on a multiprocessor."""
RUN_WARPS, RUN_STAGES = 4, 2


@triton.jit
def _norm_and_rotate(
    qkv,
    rope,
    table,
    out,
    keys,
    values,
    q_norm,
    k_norm,
    num_tokens,
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
    line = tl.load(table + 2 * num_tokens + token)
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
    rotated_heads = tl.where(is_v, stored, rotated(x, swapped, cos, sin, dtype))
    tl.store(
        out + token * (NUM_HEADS + 2 * NUM_KV) * D + h[:, None] * D + d[None, :], rotated_heads, mask=inside
    )
    kept = inside & (line >= 0)
    k_at = line * NUM_KV * D + (h - NUM_HEADS)[:, None] * D + d[None, :]
    is_k = ((h >= NUM_HEADS) & (h < NUM_HEADS + NUM_KV))[:, None]
    tl.store(keys + k_at, rotated_heads, mask=kept & is_k)
    tl.store(values + k_at - NUM_KV * D, rotated_heads, mask=kept & is_v)


def norm_and_rotate(
    qkv_TQ: Tensor,
    layer: FusedLayer,
    *,
    shape: Shape,
    rope_PE: Tensor,
    table_3T: Tensor,
    kept: tuple[Tensor, Tensor],
) -> Tensor:
    """Applies q/k norm and rotation to prompts laid end to end; returns queries, keys and values, [T, N + 2 K, D].

    `table_3T`: for each token its id, its position, and the line of the `kept` keys and values, [..., K, D], in which its own are
    stored too, or a number below 0 to store nothing.
    """
    num_tokens = len(qkv_TQ)
    out_TQD = torch.empty_like(qkv_TQ).view(num_tokens, -1, shape.head_dim)
    _norm_and_rotate[(num_tokens,)](
        qkv_TQ,
        rope_PE,
        table_3T,
        out_TQD,
        *kept,
        qkv_TQ if layer.q_norm_D is None else layer.q_norm_D,
        qkv_TQ if layer.k_norm_D is None else layer.k_norm_D,
        num_tokens,
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


@triton.jit
def _tile(
    head,
    start,
    end,
    stride,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Loads a head's values of the BLOCK tokens from `start` on, [BLOCK, D]. MASKED: values past the `end` are 0."""
    places = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    where = head + start.to(tl.int64) * stride + places[:, None] * stride + d[None, :]
    if MASKED:
        values = tl.load(where, mask=(start + places < end)[:, None] & (d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        values = tl.load(where)
    else:
        values = tl.load(where, mask=(d < D)[None, :], other=0.0)
    return values


@triton.jit
def _attend_block(
    seen,
    q,
    start,
    last,
    heads,
    stride,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attends to BLOCK tokens from `start` on; MASKED: not to tokens past the `last` that each query may attend to.

    `heads`: keys and values. `seen`: for each query the weighted values, sum of weights and largest score so far; and the scale.
    """
    mixed, total, largest, scale = seen
    keys, values = heads
    end = tl.max(last, 0) + 1
    k = _tile(keys, start, end, stride, MASKED, D, BLOCK, BLOCK_D)
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where((start + tl.arange(0, BLOCK))[None, :] <= last[:, None], scores, -1e30)
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    v = _tile(values, start, end, stride, MASKED, D, BLOCK, BLOCK_D)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None])
    return mixed, total, new_largest, scale


@triton.jit
def _attend(
    qkv,
    out,
    runs,
    num_runs,
    scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Programs of one run are adjacent, so that its keys stay in the cache; those with the most keys come first.
    head, run = tl.program_id(0), tl.program_id(2)
    own = tl.num_programs(1) - 1 - tl.program_id(1)
    length = tl.load(runs + num_runs + run)
    if own * BLOCK < length:
        stride: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
        first = tl.load(runs + run)
        # Counted from the run's first token, so that 32 bits are enough.
        earlier = tl.load(runs + 2 * num_runs + run) - first
        num_earlier = tl.load(runs + 3 * num_runs + run)
        heads_at = qkv + first.to(tl.int64) * stride
        key = heads_at + (NUM_HEADS + head // (NUM_HEADS // NUM_KV)) * D
        heads = (key, key + NUM_KV * D)
        start = own * BLOCK
        queries = start + tl.arange(0, BLOCK)
        q = _tile(heads_at + head * D, start, length, stride, True, D, BLOCK, BLOCK_D)
        seen = (
            tl.zeros((BLOCK, BLOCK_D), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.full((BLOCK,), -1e30, tl.float32),
            scale,
        )
        # Masked blocks are outside the loop: two of them inside it made the kernel a fifth slower.
        seen = _attend_block(
            seen, q, start, tl.minimum(queries, length - 1), heads, stride, True, D, BLOCK, BLOCK_D
        )
        whole = num_earlier // BLOCK
        # One loop over the whole blocks of both runs: two loops use more registers.
        for block in range(0, whole + own):
            begin = block * BLOCK + tl.where(block < whole, earlier, -whole * BLOCK)
            seen = _attend_block(seen, q, begin, queries, heads, stride, False, D, BLOCK, BLOCK_D)
        if num_earlier > whole * BLOCK:
            last = tl.zeros((BLOCK,), tl.int32) + (earlier + num_earlier - 1)
            seen = _attend_block(
                seen, q, earlier + whole * BLOCK, last, heads, stride, True, D, BLOCK, BLOCK_D
            )
        d = tl.arange(0, BLOCK_D)
        places = out + (first.to(tl.int64) * NUM_HEADS + head) * D
        places += queries[:, None] * (NUM_HEADS * D) + d[None, :]
        inside = (queries < length)[:, None] & (d < D)[None, :]
        tl.store(places, (seen[0] / seen[1][:, None]).to(out.dtype.element_ty), mask=inside)


def attend_runs(
    qkv_TQD: Tensor, runs_4R: Tensor, longest: int, *, num_heads: int, num_kv_heads: int
) -> Tensor:
    """Returns attention inside runs, [T, N, D], of adjacent queries, keys and values, [T, N + 2 K, D], in 16 bits.

    `runs_4R`, int32: start and length of each run, then start and length of the run that it follows, length 0 if none.
    """
    num_tokens, _, head_dim = qkv_TQD.shape
    num_runs = runs_4R.shape[1]
    out_TND = qkv_TQD.new_empty(num_tokens, num_heads, head_dim)
    _attend[(num_heads, triton.cdiv(longest, RUN_BLOCK), num_runs)](
        qkv_TQD.contiguous(),
        out_TND,
        runs_4R,
        num_runs,
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_HEADS=num_heads,
        NUM_KV=num_kv_heads,
        D=head_dim,
        BLOCK=RUN_BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=RUN_WARPS,
        num_stages=RUN_STAGES,
    )
    return out_TND
