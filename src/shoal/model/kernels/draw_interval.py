# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Where tokens lie in the distributions they were drawn from, as one Triton kernel: one program a row, every logit read once.

Imported only where there is a CUDA device. The plain torch lines in swarm/validator/recompute.py say what it computes.

Everything is counted from a reference, the drawn token's own logit, in powers of two: it is near the largest, and known before the first
block is read. Lanes sum for themselves and are put together at the end, so nothing but the memory is waited for.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 8
NEAR = 24.0
"""How far, in powers of two, the largest logit may lie above the reference: else sums of squares would lose digits, and the row is
read again with the largest as its reference. Honest draws are hardly ever that unlikely."""


@triton.jit
def _block(sums, start, first, vocab, scale, reference, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Add a block to the sums, by lane: of 2^d, of d 2^d, of d d 2^d, and the largest d. Also gives its 2^d."""
    total, first_moment, second_moment, largest = sums
    columns = first + tl.arange(0, BLOCK)
    if MASKED:
        z = tl.load(start + columns, mask=columns < vocab, other=0.0).to(tl.float32)
        d = tl.where(columns < vocab, z * scale - reference, -1e30)
    else:
        d = tl.load(start + columns).to(tl.float32) * scale - reference
    e = tl.exp2(d)
    ed = e * d  # and then by d again: d squared may be infinite past the vocabulary's end
    return (total + e, first_moment + ed, second_moment + ed * d, tl.maximum(largest, d)), e


@triton.jit
def _row(start, token, vocab, scale, reference, BLOCK: tl.constexpr):
    """Of a row: the three sums, that of 2^d of tokens with smaller ids, and the largest d."""
    home = token // BLOCK * BLOCK
    whole = vocab // BLOCK * BLOCK
    zeros = tl.zeros((BLOCK,), tl.float32)
    sums = (zeros, zeros, zeros, zeros - 1e30)
    for first in range(0, home, BLOCK):
        sums, _ = _block(sums, start, first, vocab, scale, reference, False, BLOCK)
    below = sums[0]
    sums, e = _block(sums, start, home, vocab, scale, reference, True, BLOCK)
    below += tl.where(home + tl.arange(0, BLOCK) < token, e, 0.0)
    for first in range(home + BLOCK, whole, BLOCK):
        sums, _ = _block(sums, start, first, vocab, scale, reference, False, BLOCK)
    if home < whole and whole < vocab:
        sums, _ = _block(sums, start, whole, vocab, scale, reference, True, BLOCK)
    total, first_moment, second_moment, largest = sums
    return (
        tl.sum(total, 0),
        tl.sum(first_moment, 0),
        tl.sum(second_moment, 0),
        tl.sum(below, 0),
        tl.max(largest, 0),
    )


@triton.jit
def _interval_row(logits, tokens, out, num_rows, vocab, scale, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab
    token = tl.load(tokens + row).to(tl.int32)
    own = tl.load(start + token).to(tl.float32) * scale
    reference = own
    total, first_moment, second_moment, below, largest = _row(start, token, vocab, scale, reference, BLOCK)
    if largest > NEAR:
        reference += largest
        total, first_moment, second_moment, below, largest = _row(
            start, token, vocab, scale, reference, BLOCK
        )
    low, mean, log2_total = below / total, first_moment / total, tl.log2(total)
    ln2: tl.constexpr = 0.6931471805599453
    logprob = (own - reference - log2_total) * ln2
    tl.store(out + row, logprob)
    tl.store(out + num_rows + row, low)
    tl.store(out + 2 * num_rows + row, low + tl.exp(logprob))
    tl.store(out + 3 * num_rows + row, (log2_total - mean) * ln2)
    variance = tl.maximum(second_moment / total - mean * mean, 0.0)
    tl.store(out + 4 * num_rows + row, variance * (ln2 * ln2))


def token_intervals(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """[5, N] float32: each token's log-prob, the ends of its interval, entropy and variance of -log p."""
    logits_NV = logits_NV.contiguous()
    num_rows, vocab = logits_NV.shape
    out_5N = torch.empty(5, num_rows, device=logits_NV.device, dtype=torch.float32)
    scale = math.log2(math.e) / temperature
    _interval_row[(num_rows,)](
        logits_NV, tokens_N, out_5N, num_rows, vocab, scale, NEAR=NEAR, BLOCK=BLOCK, num_warps=WARPS
    )
    return out_5N
