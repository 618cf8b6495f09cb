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
WARPS, STAGES = 4, 2


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
    """A head's values of the tokens from `start` on, [BLOCK, D]. MASKED: what lies past the `end` is 0."""
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
    # A run's programs stand side by side, so that its keys are still in the cache; those with the most to look at come first.
    head, run = tl.program_id(0), tl.program_id(2)
    own = tl.num_programs(1) - 1 - tl.program_id(1)
    length = tl.load(runs + num_runs + run)
    if own * BLOCK < length:
        stride: tl.constexpr = (NUM_HEADS + 2 * NUM_KV) * D
        first = tl.load(runs + run)
        # Tokens are counted from the run's first one on: 32 bits will do.
        earlier = tl.load(runs + 2 * num_runs + run) - first
        num_earlier = tl.load(runs + 3 * num_runs + run)
        heads_at = qkv + first.to(tl.int64) * stride
        key = heads_at + (NUM_HEADS + head // (NUM_HEADS // NUM_KV)) * D
        heads = (key, key + NUM_KV * D)
        start = own * BLOCK
        queries = start + tl.arange(0, BLOCK)
        q = _tile(heads_at + head * D, start, length, stride, True, D, BLOCK, BLOCK_D)
        looked = (
            tl.zeros((BLOCK, BLOCK_D), tl.float32),
            tl.zeros((BLOCK,), tl.float32),
            tl.full((BLOCK,), -1e30, tl.float32),
            scale,
        )
        # What is masked stands before and behind the loop, not in one: two masked looks in a loop took a fifth longer in all.
        looked = _look(
            looked, q, start, tl.minimum(queries, length - 1), heads, stride, True, D, BLOCK, BLOCK_D
        )
        whole = num_earlier // BLOCK
        # One loop over whole blocks of both runs: with two of them the compiler keeps more in registers.
        for block in range(0, whole + own):
            begin = block * BLOCK + tl.where(block < whole, earlier, -whole * BLOCK)
            looked = _look(looked, q, begin, queries, heads, stride, False, D, BLOCK, BLOCK_D)
        if num_earlier > whole * BLOCK:
            last = tl.zeros((BLOCK,), tl.int32) + (earlier + num_earlier - 1)
            looked = _look(looked, q, earlier + whole * BLOCK, last, heads, stride, True, D, BLOCK, BLOCK_D)
        d = tl.arange(0, BLOCK_D)
        places = out + (first.to(tl.int64) * NUM_HEADS + head) * D
        places += queries[:, None] * (NUM_HEADS * D) + d[None, :]
        inside = (queries < length)[:, None] & (d < D)[None, :]
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
    _attend[(num_heads, triton.cdiv(longest, BLOCK), num_runs)](
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
