"""Where tokens lie in the distributions they were drawn from, as one Triton kernel: one program a row, every logit read once.

Imported only where there is a CUDA device. The plain torch lines in swarm/validator/recompute.py say what it computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit  # type: ignore[untyped-decorator]
def _interval_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    tokens_ptr,
    out_ptr,
    num_rows,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab
    token = tl.load(tokens_ptr + row)
    largest = tl.full((), -1e30, tl.float32)  # a number, as zero times infinity is none
    # Sums by lane, put together at the end: to put a block's together takes longer than to read it.
    total = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.float32)  # of that, tokens with smaller ids
    first_moment = tl.zeros((BLOCK,), tl.float32)  # of z - largest: differences, as z itself would cancel
    second_moment = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(start + columns, mask=columns < vocab, other=-1e30).to(tl.float32) * inverse_temperature
        new_largest = tl.max(z, 0)
        if new_largest > largest:  # rarely, after the first few
            shift = largest - new_largest
            shrink = tl.exp(shift)
            # shift squared would be infinite in the first round
            second_moment = (second_moment + shift * (2 * first_moment + shift * total)) * shrink
            first_moment = (first_moment + shift * total) * shrink
            below *= shrink
            total *= shrink
            largest = new_largest
        d = z - largest
        e = tl.exp(d)
        total += e
        below += tl.where(columns < token, e, 0.0)
        first_moment += e * d
        second_moment += e * d * d  # in this order: d squared may be infinite past the vocabulary's end
    total = tl.sum(total, 0)
    below = tl.sum(below, 0)
    first_moment = tl.sum(first_moment, 0)
    second_moment = tl.sum(second_moment, 0)
    logprob = tl.load(start + token).to(tl.float32) * inverse_temperature - largest - tl.log(total)
    mean = first_moment / total
    tl.store(out_ptr + row, logprob)
    tl.store(out_ptr + num_rows + row, below / total)
    tl.store(out_ptr + 2 * num_rows + row, below / total + tl.exp(logprob))
    tl.store(out_ptr + 3 * num_rows + row, tl.log(total) - mean)
    tl.store(out_ptr + 4 * num_rows + row, tl.maximum(second_moment / total - mean * mean, 0.0))


def token_intervals(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Tensor:
    """[5, N] float32: each token's log-prob, the ends of its interval, entropy and variance of -log p."""
    logits_NV = logits_NV.contiguous()
    num_rows, vocab = logits_NV.shape
    out_5N = torch.empty(5, num_rows, device=logits_NV.device, dtype=torch.float32)
    _interval_row[(num_rows,)](
        logits_NV, tokens_N, out_5N, num_rows, vocab, 1 / temperature, BLOCK=BLOCK, num_warps=WARPS
    )
    return out_5N
