# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Causal attention inside runs of tokens laid end to end, as one Triton kernel: a program takes BLOCK queries of one head of one run.

    0 0 0 1 1 2 2 2 2      runs 1 and 2 follow run 0, the prompt that they share: they look at it, then at themselves

Imported on CUDA machines only, for states that need no gradient. torch's own kernel, which knows no shared prompts either, takes twice
as long on a Hopper GPU (docs/LOG.md). Sums are of float32, and weights are rounded to the model's dtype before they meet the
values, as in torch's.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Queries of a program, and keys it looks at together. With 128 of either fewer programs fit on a processor at once."""
WARPS, STAGES = 4, 3


@triton.jit
def _tile(
    start,
    end,
    head,
    stride,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A head's values of the tokens from `start` on, [BLOCK, D]. MASKED: what lies past the `end` is 0."""
    places = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    where = head + start * stride + places[:, None] * stride + d[None, :]
    if MASKED:
        values = tl.load(where, mask=(start + places < end)[:, None] & (d < D)[None, :], other=0.0)
    elif D == BLOCK_D:
        values = tl.load(where)
    else:
        values = tl.load(where, mask=(d < D)[None, :], other=0.0)
    return values


@triton.jit
def _look(
    looked,
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
    """At the tokens from `start` on, MASKED: not at those past the `last` that a query may see. `heads`: keys and values.
    `looked`: weighted values, sum of weights and largest score so far, of each query, and what scores are scaled by."""
    mixed, total, largest, scale = looked
    keys, values = heads
    end = tl.max(last, 0) + 1
    k = _tile(start, end, keys, stride, MASKED, D, BLOCK, BLOCK_D)
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        scores = tl.where((start + tl.arange(0, BLOCK))[None, :] <= last[:, None], scores, -1e30)
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, 1)
    v = _tile(start, end, values, stride, MASKED, D, BLOCK, BLOCK_D)
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
    head = tl.program_id(0) % NUM_HEADS
    run = tl.program_id(0) // NUM_HEADS
    # Queries at the end of a run have the most to look at: they come first.
    own = tl.num_programs(1) - 1 - tl.program_id(1)
    length = tl.load(runs + num_runs + run)
    if own * BLOCK < length:
        stride: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
        first = tl.load(runs + run).to(tl.int64)
        earlier = tl.load(runs + 2 * num_runs + run).to(tl.int64)
        num_earlier = tl.load(runs + 3 * num_runs + run)
        key = qkv + (NUM_HEADS + head // (NUM_HEADS // NUM_KV)) * D
        heads = (key, key + NUM_KV * D)
        start = first + own * BLOCK
        queries = start + tl.arange(0, BLOCK)
        q = _tile(start, first + length, qkv + head * D, stride, True, D, BLOCK, BLOCK_D)
        looked = (
            tl.zeros((BLOCK, BLOCK_D), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.full((BLOCK,), -1e30, tl.float32),
            scale,
        )
        # One loop over whole blocks of both runs: with two of them the compiler keeps more in registers.
        whole = num_earlier // BLOCK
        for block in range(0, whole + own):
            begin = tl.where(block < whole, earlier + block * BLOCK, first + (block - whole) * BLOCK)
            looked = _look(looked, q, begin, queries, heads, stride, False, D, BLOCK, BLOCK_D)
        for part in range(
            tl.where(num_earlier > whole * BLOCK, 0, 1), 2
        ):  # what is left of the earlier run, and the own block
            begin = tl.where(part == 0, earlier + whole * BLOCK, start)
            last = tl.where(part == 0, earlier + num_earlier - 1, tl.minimum(queries, first + length - 1))
            looked = _look(looked, q, begin, last, heads, stride, True, D, BLOCK, BLOCK_D)
        d = tl.arange(0, BLOCK_D)
        places = out + queries[:, None] * NUM_HEADS * D + head * D + d[None, :]
        inside = (queries < first + length)[:, None] & (d < D)[None, :]
        tl.store(places, (looked[0] / looked[1][:, None]).to(out.dtype.element_ty), mask=inside)


def attend_runs(
    qkv_TQD: Tensor, runs_4R: Tensor, longest: int, *, num_heads: int, num_kv_heads: int
) -> Tensor:
    """[T, N, D] of queries, keys and values that stand side by side, [T, N + 2 K, D], in 16 bits.

    `runs_4R`, int32: where each run begins and how long it is, and the same of the one it follows, of length 0 if there is none.
    """
    num_tokens, _, head_dim = qkv_TQD.shape
    num_runs = runs_4R.shape[1]
    out_TND = qkv_TQD.new_empty(num_tokens, num_heads, head_dim)
    _attend[(num_heads * num_runs, triton.cdiv(longest, BLOCK))](
        qkv_TQD.contiguous(),
        out_TND,
        runs_4R,
        num_runs,
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_HEADS=num_heads,
        NUM_KV=num_kv_heads,
        D=head_dim,
        BLOCK=BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out_TND
