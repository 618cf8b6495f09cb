# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels of a decode step's attention over cached keys and values. Imported on CUDA machines only.

    attend        q/k norm, rotation, write to the cache and attention over it, each row only up to its own length

A first launch computes partial results: rows of one prompt attend together to parts of it, and each row attends to its own new
tokens in shares, whose number depends on the row's length alone. A second launch merges the partial results.

Values are rounded where the decoder rounds them (elementwise.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.model.fused import FusedLayer
from shoal.model.kernels.elementwise import normed, rotated
from shoal.model.shape import Shape

ITEM_QUERIES = 32
"""Queries that attend together to a part of a prompt, over all rows of an item. With 64 the sums no longer fit into registers."""
PROMPT_SPLIT, PROMPT_BLOCK = 128, 64
"""Positions of a prompt per program, and positions it loads together. The order of sums depends on these only."""
PROMPT_PROGRAMS, PROMPT_STAGES = 528, 2
"""Programs for all kv heads, four per multiprocessor; each takes one item after another."""
ATTEND_WARPS = 4
OWN_SHARES, OWN_BLOCK = 2, 64
"""Shares of a row's new tokens, and tokens that are loaded together. Shares alternate, so that the order of sums does not depend on
the number of tokens. The step lasts as long as its longest row."""
OWN_STAGES = 3
LONG_ROW, LONG_SHARES = 4096, 8
"""A row with more new tokens than this has so many shares."""
FEW_PROGRAMS = 264
"""Each share of a long row has a program of its own in steps that else had at most this many programs, two per multiprocessor.
Otherwise a program computes several shares, in turn. The results are the same bits."""
MERGE_PARTS, MERGE_WARPS = 8, 2
"""Partial results that are merged at once."""
FLOAT32_DOT = "tf32x3"
"""Computes float32 products as three tf32 products: nearly float32's accuracy at several times the speed. No effect on
bfloat16."""


class RowTables(NamedTuple):
    """Tables about the rows that the kernels read."""

    table_6S: Tensor
    """Rows of the table: position of the newest token, tokens drawn, maximum tokens, ended, the prompt's slot, its length."""
    order_S: Tensor
    """The rows, sorted by prompt."""
    items_5W: Tensor
    """Items of work: up to `rows_per_item` rows of one prompt attend to up to PROMPT_SPLIT positions of it. Rows of the table: index
    of the first row in `order_S`, number of rows, the cache block of these positions, first position, number of positions."""
    num_items_1: Tensor
    blocks_SB: Tensor
    """Cache blocks of each row's new tokens, in order."""


def rows_per_item(shape: Shape) -> int:
    """Returns the rows of one prompt whose queries attend to it together, of one kv head."""
    return max(1, ITEM_QUERIES // (shape.num_heads // shape.num_kv_heads))


def max_registers(shape: Shape) -> int:
    """Returns the registers per thread: four programs, or three with large heads, fit on a multiprocessor, and next to nothing is
    spilled (bench/compile_kernels.py)."""
    return 128 if shape.head_dim <= 64 else 168


@triton.jit
def _attend_blocks(
    q, top, total, mixed, keys, values, blocks, block_stride, begin, end, scale, stride, PAGED: tl.constexpr,
    PAGE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends to BLOCK_N cached positions every `stride`, and updates the highest score, sum of weights and mixed values.

    PAGED: positions are in cache blocks of PAGE, whose numbers are in `blocks`; otherwise they follow one another.
    """
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    for start in tl.range(begin, end, stride, num_stages=STAGES):
        n = start + tl.arange(0, BLOCK_N)
        seen = n < end
        in_nd = seen[:, None] & in_d[None, :]
        if PAGED:
            page = tl.load(blocks + start // PAGE) * block_stride + (start % PAGE) * STEP
            at = page + tl.arange(0, BLOCK_N)[:, None] * STEP + d[None, :]
        else:
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
def _load_rotated(
    heads, turn, norm, inside, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Loads heads, one per row, and applies norm and rotation. `turn`: where the cosines of each begin."""
    dtype = heads.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    x = tl.load(heads + d[None, :], mask=inside, other=0.0).to(tl.float32)
    swapped = tl.load(heads + other[None, :], mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(turn + d[None, :], mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(turn + D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        weight = tl.load(norm + d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        weight_swapped = tl.load(norm + other, mask=in_d, other=0.0).to(tl.float32)[None, :]
        x = normed(x, scale, weight, dtype)
        swapped = normed(swapped, scale, weight_swapped, dtype)
    return rotated(x, swapped, cos, sin, dtype)


@triton.jit
def _shares_of(own, SHARES: tl.constexpr, LONG: tl.constexpr, MOST_SHARES: tl.constexpr):
    """Returns into how many shares the `own` new tokens of a row are divided."""
    if MOST_SHARES == SHARES:
        return SHARES
    return tl.where(own > LONG, MOST_SHARES, SHARES)


@triton.jit
def _attend_share(
    share, num_shares, row, head, position, own, qkv, rope, table, blocks, num_slots, max_blocks, keys, values, tops, totals,
    mixes, q_norm, k_norm, block_stride, scale, eps, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, OWN_N: tl.constexpr,
    OWN_S: tl.constexpr, QK_NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends from one row to one share of its `own` new tokens; the first share also stores the newest key and value."""
    group: tl.constexpr = NUM_HEADS // NUM_KV
    step: tl.constexpr = NUM_KV * D
    line: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
    if (share == 0) | (share * OWN_N < own):
        d = tl.arange(0, BLOCK_D)
        in_d = d < D
        g = tl.arange(0, BLOCK_G)
        in_gd = (g < group)[:, None] & in_d[None, :]
        heads = qkv + row * line + (head * group + g)[:, None] * D
        turn = rope + position * 2 * D + tl.zeros([BLOCK_G, 1], tl.int32)
        q = _load_rotated(heads, turn, q_norm, in_gd, eps, D, BLOCK_D, QK_NORM)
        mine_b = blocks + row * max_blocks
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        if share == 0:
            # The new token's key and value are still in registers; memory holds those of earlier steps.
            mine = tl.zeros([1, 1], tl.int32)
            k_at = qkv + row * line + (NUM_HEADS + head) * D
            in_1d = in_d[None, :]
            k = _load_rotated(
                k_at + mine, rope + position * 2 * D + mine, k_norm, in_1d, eps, D, BLOCK_D, QK_NORM
            )
            v = tl.load(k_at + NUM_KV * D + d[None, :], mask=in_1d, other=0.0)
            # Blocks of a row that has ended may belong to another row already.
            runs = in_1d & (tl.load(table + 3 * num_slots + row) == 0)
            to_1 = tl.load(mine_b + own // PAGE) * block_stride + (own % PAGE) * step + head * D
            tl.store(keys + to_1 + d[None, :], k, mask=runs)
            tl.store(values + to_1 + d[None, :], v, mask=runs)
            top = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
            total = tl.full([BLOCK_G], 1.0, tl.float32)
            mixed = mixed + v.to(tl.float32)
        top, total, mixed = _attend_blocks(
            q, top, total, mixed, keys + head * D, values + head * D, mine_b, block_stride, share * OWN_N, own, scale,
            OWN_N * num_shares, True, PAGE, step, D, BLOCK_D, OWN_N, OWN_S, PRECISION,
        )  # fmt: skip
        to = (row * NUM_HEADS + head * group + g) * PARTS + share
        tl.store(tops + to, top, mask=g < group)
        tl.store(totals + to, total, mask=g < group)
        tl.store(mixes + to[:, None] * D + d[None, :], mixed, mask=in_gd)


@triton.jit
def _attend_parts(
    qkv,
    rope,
    table,
    blocks,
    order,
    items,
    num_items,
    num_own,
    num_slots,
    max_items,
    max_blocks,
    keys,
    values,
    tops,
    totals,
    mixes,
    q_norm,
    k_norm,
    block_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    LONG: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PROMPT_N: tl.constexpr,
    OWN_N: tl.constexpr,
    PROMPT_S: tl.constexpr,
    OWN_S: tl.constexpr,
    QK_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes partial attention. The first `num_own` programs, PROGRAMS for each row, attend from it to shares of its new tokens;
    they come first because the longest rows take longest. The others attend from a few rows of one prompt to a part of it, with the queries
    of all these rows in one product."""
    # Heads vary fastest: those of a row are adjacent in memory, and new tokens come first for all heads.
    program = tl.program_id(0) // NUM_KV
    head = tl.program_id(0) % NUM_KV
    num_others = tl.num_programs(0) // NUM_KV - num_own
    group: tl.constexpr = NUM_HEADS // NUM_KV
    step: tl.constexpr = NUM_KV * D
    line: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
    d = tl.arange(0, BLOCK_D)
    in_d = d < D
    if program >= num_own:
        i = tl.arange(0, BLOCK_Q)
        for item in range(program - num_own, tl.load(num_items), num_others):
            first = tl.load(items + item)
            in_q = i < tl.load(items + max_items + item) * group
            prompt_block = tl.load(items + 2 * max_items + item)
            begin = tl.load(items + 3 * max_items + item)
            num = tl.load(items + 4 * max_items + item)
            rows = tl.load(order + first + i // group, mask=in_q, other=0)
            positions = tl.load(table + rows, mask=in_q, other=0)
            in_qd = in_q[:, None] & in_d[None, :]
            heads = qkv + rows[:, None] * line + (head * group + i % group)[:, None] * D
            q = _load_rotated(
                heads, rope + positions[:, None] * 2 * D, q_norm, in_qd, eps, D, BLOCK_D, QK_NORM
            )
            at = prompt_block * block_stride + head * D
            top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_Q], tl.float32)
            mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
            top, total, mixed = _attend_blocks(
                q, top, total, mixed, keys + at, values + at, blocks, block_stride, 0, num, scale,
                PROMPT_N, False, PAGE, step, D, BLOCK_D, PROMPT_N, PROMPT_S, PRECISION,
            )  # fmt: skip
            to = (rows * NUM_HEADS + head * group + i % group) * PARTS + MOST_SHARES + begin // SPLIT
            tl.store(tops + to, top, mask=in_q)
            tl.store(totals + to, total, mask=in_q)
            tl.store(mixes + to[:, None] * D + d[None, :], mixed, mask=in_qd)
    else:
        row = (program // PROGRAMS).to(tl.int64)
        position = tl.load(table + row)
        # An ended row has position 0 and attends to nothing.
        own = position - tl.minimum(tl.load(table + 5 * num_slots + row), position)
        num_shares = _shares_of(own, SHARES, LONG, MOST_SHARES)
        if MOST_SHARES == SHARES:
            _attend_share(
                program % PROGRAMS, num_shares, row, head, position, own, qkv, rope, table, blocks, num_slots, max_blocks,
                keys, values, tops, totals, mixes, q_norm, k_norm, block_stride, scale, eps,
                NUM_HEADS, NUM_KV, D, PARTS, PAGE, BLOCK_G, BLOCK_D, OWN_N, OWN_S, QK_NORM, PRECISION,
            )  # fmt: skip
        else:
            for share in range(program % PROGRAMS, num_shares, PROGRAMS):
                _attend_share(
                    share, num_shares, row, head, position, own, qkv, rope, table, blocks, num_slots, max_blocks,
                    keys, values, tops, totals, mixes, q_norm, k_norm, block_stride, scale, eps,
                    NUM_HEADS, NUM_KV, D, PARTS, PAGE, BLOCK_G, BLOCK_D, OWN_N, OWN_S, QK_NORM, PRECISION,
                )  # fmt: skip


@triton.jit
def _store_new(
    qkv,
    rope,
    table,
    blocks,
    num_slots,
    max_blocks,
    keys,
    values,
    k_norm,
    block_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Stores the new token's key and value of one row and kv head, with the bits that `_attend_parts` stores."""
    row = (tl.program_id(0) // NUM_KV).to(tl.int64)
    head = tl.program_id(0) % NUM_KV
    step: tl.constexpr = NUM_KV * D
    line: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
    position = tl.load(table + row)
    own = position - tl.minimum(tl.load(table + 5 * num_slots + row), position)
    d = tl.arange(0, BLOCK_D)
    in_1d = (d < D)[None, :]
    mine = tl.zeros([1, 1], tl.int32)
    k_at = qkv + row * line + (NUM_HEADS + head) * D
    k = _load_rotated(k_at + mine, rope + position * 2 * D + mine, k_norm, in_1d, eps, D, BLOCK_D, QK_NORM)
    v = tl.load(k_at + NUM_KV * D + d[None, :], mask=in_1d, other=0.0)
    runs = in_1d & (tl.load(table + 3 * num_slots + row) == 0)
    to_1 = tl.load(blocks + row * max_blocks + own // PAGE) * block_stride + (own % PAGE) * step + head * D
    tl.store(keys + to_1 + d[None, :], k, mask=runs)
    tl.store(values + to_1 + d[None, :], v, mask=runs)


@triton.jit
def _merge(
    table,
    num_slots,
    tops,
    totals,
    mixes,
    out,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    LONG: tl.constexpr,
    MOST_SHARES: tl.constexpr,
    SPLIT: tl.constexpr,
    OWN_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the partial results: the shares of new tokens first, then the prompt's parts in order."""
    row = (tl.program_id(0) // NUM_KV).to(tl.int64)
    head = tl.program_id(0) % NUM_KV
    group: tl.constexpr = NUM_HEADS // NUM_KV
    position = tl.load(table + row)
    prompt_len = tl.minimum(tl.load(table + 5 * num_slots + row), position)
    own = position - prompt_len
    num_shares = _shares_of(own, SHARES, LONG, MOST_SHARES)
    num_parts = num_shares + tl.cdiv(prompt_len, SPLIT)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_H)
    in_h = h < group
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    # Several at once: the kernel's time is spent waiting for loads.
    for start in range(0, num_parts, AT_ONCE):
        p = start + tl.arange(0, AT_ONCE)
        there = (p < num_parts) & ((p == 0) | (p >= num_shares) | (p * OWN_N < own))
        in_hp = in_h[:, None] & there[None, :]
        place = p if MOST_SHARES == SHARES else tl.where(p < num_shares, p, p - num_shares + MOST_SHARES)
        at = (row * NUM_HEADS + head * group + h)[:, None] * PARTS + place[None, :]
        part_tops = tl.load(tops + at, mask=in_hp, other=float("-inf"))
        part_totals = tl.load(totals + at, mask=in_hp, other=0.0)
        in_hpd = in_hp[:, :, None] & (d < D)[None, None, :]
        parts = tl.load(mixes + at[:, :, None] * D + d[None, None, :], mask=in_hpd, other=0.0)
        higher = tl.maximum(top, tl.max(part_tops, axis=1))
        higher = tl.where(in_h, higher, 0.0)  # unused rows have no scores: -inf - -inf would be NaN
        shrink, grow = tl.exp(top - higher), tl.exp(part_tops - higher[:, None])
        total = total * shrink + tl.sum(part_totals * grow, axis=1)
        mixed = mixed * shrink[:, None] + tl.sum(parts * grow[:, :, None], axis=1)
        top = higher
    to = out + (row * NUM_HEADS + head * group + h)[:, None] * D + d[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, mixed, mask=in_h[:, None] & (d < D)[None, :])


def attend(
    qkv_BQ: Tensor,
    layer: FusedLayer,
    *,
    shape: Shape,
    rope_PE: Tensor,
    rows: RowTables,
    cache: tuple[Tensor, Tensor],
    prompt_positions: int,
    store_first: bool = False,
) -> Tensor:
    """Returns the attention of one new token per row.

    `cache`: keys and values of all blocks, [M, C, K, D], with C a multiple of OWN_BLOCK and not less than PROMPT_SPLIT; those of
    this token are stored there too. `prompt_positions`: length of the longest prompt. `store_first`: rows share blocks and attend to
    one another's new tokens, so all are stored before any row attends.
    """
    num_rows, heads, kv_heads = qkv_BQ.shape[0], shape.num_heads, shape.num_kv_heads
    group = heads // kv_heads
    most_shares = LONG_SHARES if rows.blocks_SB.shape[1] * cache[0].shape[1] > LONG_ROW else OWN_SHARES
    programs_per_row = most_shares if num_rows * OWN_SHARES * kv_heads <= FEW_PROGRAMS else OWN_SHARES
    parts = most_shares + triton.cdiv(prompt_positions, PROMPT_SPLIT)
    tops, totals = (qkv_BQ.new_empty(num_rows, heads, parts, dtype=torch.float32) for _ in range(2))
    mixes = qkv_BQ.new_empty(num_rows, heads, parts, shape.head_dim, dtype=torch.float32)
    out_BQ = qkv_BQ.new_empty(num_rows, heads * shape.head_dim)
    sizes = {
        "NUM_HEADS": heads,
        "NUM_KV": kv_heads,
        "D": shape.head_dim,
        "PARTS": parts,
        "SHARES": OWN_SHARES,
        "LONG": LONG_ROW,
        "MOST_SHARES": most_shares,
        "SPLIT": PROMPT_SPLIT,
        "OWN_N": OWN_BLOCK,
    }
    if store_first:
        _store_new[(num_rows * kv_heads,)](
            qkv_BQ,
            rope_PE,
            rows.table_6S,
            rows.blocks_SB,
            rows.table_6S.shape[1],
            rows.blocks_SB.shape[1],
            *cache,
            qkv_BQ if layer.k_norm_D is None else layer.k_norm_D,
            cache[0].stride(0),
            shape.norm_eps,
            NUM_HEADS=heads,
            NUM_KV=kv_heads,
            D=shape.head_dim,
            PAGE=cache[0].shape[1],
            BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
            QK_NORM=shape.qk_norm,
            num_warps=ATTEND_WARPS,  # as in _attend_parts, whose norm then sums in the same order
        )
    programs = max(16, PROMPT_PROGRAMS // kv_heads)
    num_own = num_rows * programs_per_row
    _attend_parts[((num_own + programs) * kv_heads,)](
        qkv_BQ,
        rope_PE,
        rows.table_6S,
        rows.blocks_SB,
        rows.order_S,
        rows.items_5W,
        rows.num_items_1,
        num_own,
        rows.table_6S.shape[1],
        rows.items_5W.shape[1],
        rows.blocks_SB.shape[1],
        *cache,
        tops,
        totals,
        mixes,
        qkv_BQ if layer.q_norm_D is None else layer.q_norm_D,
        qkv_BQ if layer.k_norm_D is None else layer.k_norm_D,
        cache[0].stride(0),
        shape.head_dim**-0.5,
        shape.norm_eps,
        PROGRAMS=programs_per_row,
        PAGE=cache[0].shape[1],
        BLOCK_Q=max(16, triton.next_power_of_2(rows_per_item(shape) * group)),
        BLOCK_G=max(16, triton.next_power_of_2(group)),  # tl.dot needs at least 16 rows
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        PROMPT_N=PROMPT_BLOCK,
        PROMPT_S=PROMPT_STAGES,
        OWN_S=OWN_STAGES,
        QK_NORM=shape.qk_norm,
        PRECISION=FLOAT32_DOT,
        num_warps=ATTEND_WARPS,
        maxnreg=max_registers(shape),
        **sizes,
    )
    _merge[(num_rows * kv_heads,)](
        rows.table_6S,
        rows.table_6S.shape[1],
        tops,
        totals,
        mixes,
        out_BQ,
        BLOCK_H=triton.next_power_of_2(group),
        BLOCK_D=triton.next_power_of_2(shape.head_dim),
        AT_ONCE=MERGE_PARTS,
        num_warps=MERGE_WARPS,
        **sizes,
    )
    return out_BQ
