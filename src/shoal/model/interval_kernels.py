"""Where tokens lie in the distributions they were drawn from, as one Triton kernel: one program a row, every logit read once.

Imported only where there is a CUDA device. The plain torch lines in swarm/validator/recompute.py say what it computes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


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
    largest = -1e30  # a number, as zero times infinity is none
    total = 0.0
    below = 0.0  # of that, tokens with smaller ids
    first_moment = 0.0  # of z - largest: differences, as z itself would cancel
    second_moment = 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_largest = tl.maximum(largest, tl.max(z, 0))
        shift = largest - new_largest
        shrink = tl.exp(shift)
        d = tl.where(inside, z - new_largest, 0.0)
        e = tl.where(inside, tl.exp(d), 0.0)
        # shift squared would be infinite in the first round
        second_moment = (second_moment + shift * (2 * first_moment + shift * total)) * shrink
        first_moment = (first_moment + shift * total) * shrink
        second_moment += tl.sum(e * d * d, 0)
        first_moment += tl.sum(e * d, 0)
        below = below * shrink + tl.sum(tl.where(columns < token, e, 0.0), 0)
        total = total * shrink + tl.sum(e, 0)
        largest = new_largest
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
        logits_NV, tokens_N, out_5N, num_rows, vocab, 1 / temperature, BLOCK=BLOCK, num_warps=8
    )
    return out_5N
