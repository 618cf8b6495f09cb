# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels of a decode step's attention over cached keys and values. Imported on CUDA machines only.

    attend        q/k norm, rotation, write to the cache and attention over it, each row exactly as far as it is long: first
                  rows of one prompt over it together, then each row over its own new tokens

Values are rounded where the decoder rounds them (kernels.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.model.fused import FusedLayer
from shoal.model.kernels import normed, rotated
from shoal.model.shape import Shape

PIECE_ROWS = 16
"""Rows of one prompt whose queries look at it together."""
PROMPT_SPLIT, PROMPT_BLOCK = 128, 64
"""Positions of a prompt that one program looks at, and those it looks at together. The sums' order rests on these alone."""
PROMPT_PROGRAMS, PROMPT_WARPS, PROMPT_STAGES = 528, 4, 2
"""Programs for all kv heads, four for each of the chip's processors; each takes one item after another."""
ATTEND_BLOCK = 64
"""New tokens looked at together."""
ATTEND_WARPS, ATTEND_STAGES = 4, 3
FLOAT32_DOT = "tf32x3"
"""float32 products as three of the matrix units' short ones: float32's accuracy but for its last bits, at several times
the speed. Without effect on bfloat16."""


class RowTables(NamedTuple):
    """What the kernels know of the rows."""

    table_6S: Tensor
    """Lines: position of the newest token, tokens drawn, the most it may draw, ended, the prompt's place, its length."""
    order_S: Tensor
    """The rows by prompt."""
    items_5W: Tensor
    """Up to PIECE_ROWS rows of one prompt looking at up to PROMPT_SPLIT positions of it. Lines: where in `order_S` the rows
    begin, how many they are, the prompt's place, the first position, how many positions."""
    num_items_1: Tensor
    homes_S: Tensor
    """Slot of each row's new tokens."""


@triton.jit
def _look_at(
    q,
    top,
    total,
    mixed,
    keys,
    values,
    num,
    scale,
    STEP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of q over `num` cached positions, added to what was seen before: highest score, weights, mixed values."""
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    for start in range(0, num, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        seen = n < num
        in_nd = seen[:, None] & in_d[None, :]
        at = n[:, None] * STEP + d[None, :]
        k_nd = tl.load(keys + at, mask=in_nd, other=0.0)
        v_nd = tl.load(values + at, mask=in_nd, other=0.0)
        scores = tl.dot(q, tl.trans(k_nd), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(weights.to(v_nd.dtype), v_nd, mixed, input_precision=PRECISION)
        top = higher
    return top, total, mixed


@triton.jit
def _look_at_prompts(
    qkv,
    rope,
    table,
    order,
    items,
    num_items,
    max_items,
    prompt_keys,
    prompt_values,
    tops,
    totals,
    mixes,
    q_norm,
    prompt_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of a few rows of one prompt over a part of it: the queries of all of them in one product."""
    head = tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV
    step: tl.constexpr = NUM_KV * D
    dtype = qkv.dtype.element_ty
    i = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        first = tl.load(items + item)
        in_q = i < tl.load(items + max_items + item) * group
        place = tl.load(items + 2 * max_items + item)
        begin = tl.load(items + 3 * max_items + item)
        num = tl.load(items + 4 * max_items + item)
        row = tl.load(order + first + i // group, mask=in_q, other=0)
        position = tl.load(table + row, mask=in_q, other=0)
        in_qd = in_q[:, None] & in_d[None, :]
        heads = qkv + row[:, None] * (NUM_HEADS + 2 * NUM_KV) * D + (head * group + i % group)[:, None] * D
        q = tl.load(heads + d[None, :], mask=in_qd, other=0.0).to(tl.float32)
        swapped = tl.load(heads + other[None, :], mask=in_qd, other=0.0).to(tl.float32)
        turn = rope + position[:, None] * 2 * D + d[None, :]
        cos = tl.load(turn, mask=in_qd, other=0.0).to(tl.float32)
        sin = tl.load(turn + D, mask=in_qd, other=0.0).to(tl.float32)
        if QK_NORM:
            q_scale = tl.rsqrt(tl.sum(q * q, axis=1) / D + eps)[:, None]
            weight = tl.load(q_norm + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
            weight_swapped = tl.load(q_norm + other, mask=in_d, other=0.0).to(tl.float32)[None, :]
            q = normed(q, q_scale, weight, dtype)
            swapped = normed(swapped, q_scale, weight_swapped, dtype)
        q = rotated(q, swapped, cos, sin, dtype)
        at = place * prompt_stride + head * D + begin * step
        top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        top, total, mixed = _look_at(
            q, top, total, mixed, prompt_keys + at, prompt_values + at, num, scale,
            step, D, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
        to = (row * NUM_HEADS + head * group + i % group) * SPLITS + begin // SPLIT
        tl.store(tops + to, top, mask=in_q)
        tl.store(totals + to, total, mask=in_q)
        tl.store(mixes + to[:, None] * D + d[None, :], mixed, mask=in_qd)


@triton.jit
def _attend(
    qkv,
    rope,
    table,
    homes,
    num_slots,
    keys,
    values,
    tops,
    totals,
    mixes,
    out,
    q_norm,
    k_norm,
    slot_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QK_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group: tl.constexpr = NUM_HEADS // NUM_KV
    dtype = out.dtype.element_ty
    position = tl.load(table + row)
    prompt_len = tl.load(table + 5 * num_slots + row)
    prompt_len = tl.minimum(prompt_len, position)  # an ended row stands at 0 and looks at nothing
    own = position - prompt_len

    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    g = tl.arange(0, BLOCK_G)
    in_gd = (g < group)[:, None] & in_d[None, :]
    cos = tl.load(rope + position * 2 * D + d, mask=in_d, other=0.0).to(tl.float32)
    sin = tl.load(rope + position * 2 * D + D + d, mask=in_d, other=0.0).to(tl.float32)

    mine = qkv + row * (NUM_HEADS + 2 * NUM_KV) * D
    heads = mine + (head * group + g)[:, None] * D
    q = tl.load(heads + d[None, :], mask=in_gd, other=0.0).to(tl.float32)
    q_swapped = tl.load(heads + other[None, :], mask=in_gd, other=0.0).to(tl.float32)
    k_at = mine + (NUM_HEADS + head) * D
    k = tl.load(k_at + d, mask=in_d, other=0.0).to(tl.float32)
    k_swapped = tl.load(k_at + other, mask=in_d, other=0.0).to(tl.float32)
    v = tl.load(k_at + NUM_KV * D + d, mask=in_d, other=0.0)
    if QK_NORM:
        q_scale = tl.rsqrt(tl.sum(q * q, axis=1) / D + eps)[:, None]
        k_scale = tl.rsqrt(tl.sum(k * k, axis=0) / D + eps)
        q_weight = tl.load(q_norm + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        q_weight_swapped = tl.load(q_norm + other, mask=in_d, other=0.0).to(tl.float32)[None, :]
        k_weight = tl.load(k_norm + d, mask=in_d, other=0.0).to(tl.float32)
        k_weight_swapped = tl.load(k_norm + other, mask=in_d, other=0.0).to(tl.float32)
        q = normed(q, q_scale, q_weight, dtype)
        q_swapped = normed(q_swapped, q_scale, q_weight_swapped, dtype)
        k = normed(k, k_scale, k_weight, dtype)
        k_swapped = normed(k_swapped, k_scale, k_weight_swapped, dtype)
    q = rotated(q, q_swapped, cos[None, :], sin[None, :], dtype)
    k = rotated(k, k_swapped, cos, sin, dtype)

    step: tl.constexpr = NUM_KV * D
    slot = tl.load(homes + row) * slot_stride + head * D
    tl.store(keys + slot + own * step + d, k, mask=in_d)
    tl.store(values + slot + own * step + d, v, mask=in_d)

    # The new token is attended to from registers; what is read from memory was written by earlier steps.
    top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], axis=1) * scale
    total = tl.full([BLOCK_G], 1.0, tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + v.to(tl.float32)[None, :]
    # What was seen of the prompt, `AT_ONCE` parts in one go: loads that wait for one another are what this kernel waits for.
    s = tl.arange(0, AT_ONCE)
    for start in range(0, tl.cdiv(prompt_len, SPLIT), AT_ONCE):
        in_gs = (g < group)[:, None] & (start + s < tl.cdiv(prompt_len, SPLIT))[None, :]
        at = (row * NUM_HEADS + head * group + g)[:, None] * SPLITS + start + s[None, :]
        part_tops = tl.load(tops + at, mask=in_gs, other=float("-inf"))
        part_totals = tl.load(totals + at, mask=in_gs, other=0.0)
        in_gsd = in_gs[:, :, None] & in_d[None, None, :]
        parts = tl.load(mixes + at[:, :, None] * D + d[None, None, :], mask=in_gsd, other=0.0)
        higher = tl.maximum(top, tl.max(part_tops, axis=1))
        shrink, grow = tl.exp(top - higher), tl.exp(part_tops - higher[:, None])
        total = total * shrink + tl.sum(part_totals * grow, axis=1)
        mixed = mixed * shrink[:, None] + tl.sum(parts * grow[:, :, None], axis=1)
        top = higher
    top, total, mixed = _look_at(
        q, top, total, mixed, keys + slot, values + slot, own, scale, step, D, BLOCK_D, BLOCK_N, PRECISION
    )
    mixed = (mixed / total[:, None]).to(dtype)
    to = out + row * NUM_HEADS * D + (head * group + g)[:, None] * D + d[None, :]
    tl.store(to, mixed, mask=in_gd)


def attend(
    qkv_BQ: Tensor,
    layer: FusedLayer,
    *,
    shape: Shape,
    rope_PE: Tensor,
    rows: RowTables,
    own: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention of one new token a row. `own` and `shared` are keys and values of the rows' new tokens, [S, C, K, D], where
    this token's go too, and those of the prompts, [P, C, K, D]."""
    num_rows, heads, kv_heads = qkv_BQ.shape[0], shape.num_heads, shape.num_kv_heads
    group = heads // kv_heads
    splits = triton.cdiv(shared[0].shape[1], PROMPT_SPLIT)
    tops, totals = (qkv_BQ.new_empty(num_rows, heads, splits, dtype=torch.float32) for _ in range(2))
    mixes = qkv_BQ.new_empty(num_rows, heads, splits, shape.head_dim, dtype=torch.float32)
    out_BQ = qkv_BQ.new_empty(num_rows, heads * shape.head_dim)
    q_norm = qkv_BQ if layer.q_norm_D is None else layer.q_norm_D
    sizes = {
        "NUM_HEADS": heads,
        "NUM_KV": kv_heads,
        "D": shape.head_dim,
        "SPLITS": splits,
        "SPLIT": PROMPT_SPLIT,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_dim)),
        "QK_NORM": shape.qk_norm,
        "PRECISION": FLOAT32_DOT,
    }
    scale = shape.head_dim**-0.5
    _look_at_prompts[(max(16, PROMPT_PROGRAMS // kv_heads), kv_heads)](
        qkv_BQ,
        rope_PE,
        rows.table_6S,
        rows.order_S,
        rows.items_5W,
        rows.num_items_1,
        rows.items_5W.shape[1],
        *shared,
        tops,
        totals,
        mixes,
        q_norm,
        shared[0].stride(0),
        scale,
        shape.norm_eps,
        BLOCK_Q=max(16, triton.next_power_of_2(PIECE_ROWS * group)),
        BLOCK_N=PROMPT_BLOCK,
        num_warps=PROMPT_WARPS,
        num_stages=PROMPT_STAGES,
        **sizes,
    )
    _attend[(num_rows, kv_heads)](
        qkv_BQ,
        rope_PE,
        rows.table_6S,
        rows.homes_S,
        rows.table_6S.shape[1],
        *own,
        tops,
        totals,
        mixes,
        out_BQ,
        q_norm,
        qkv_BQ if layer.k_norm_D is None else layer.k_norm_D,
        own[0].stride(0),
        scale,
        shape.norm_eps,
        BLOCK_G=max(16, triton.next_power_of_2(group)),  # fewer queries the matrix units do not take
        BLOCK_N=ATTEND_BLOCK,
        AT_ONCE=4,
        num_warps=ATTEND_WARPS,
        num_stages=ATTEND_STAGES,
        **sizes,
    )
    return out_BQ
