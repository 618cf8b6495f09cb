"""The two passes over a chunk of logits as Triton kernels: one program a row, every logit read once.

Imported only where there is a CUDA device. The plain torch lines in logprobs.py say what they compute.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    targets_ptr,
    logprobs_ptr,
    lse_ptr,
    entropy_ptr,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab
    largest = -1e30  # a number, as zero times infinity is none
    total = 0.0
    weighted = (
        0.0  # sum of e^(z - largest) (z - largest): differences, as z itself would cancel in the entropy
    )
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_largest = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - new_largest)
        e = tl.exp(z - new_largest)
        weighted = (weighted + total * (largest - new_largest)) * shrink
        weighted += tl.sum(tl.where(inside, e * (z - new_largest), 0.0), 0)
        total = total * shrink + tl.sum(e, 0)
        largest = new_largest
    lse = largest + tl.log(total)
    target = tl.load(targets_ptr + row)
    tl.store(logprobs_ptr + row, tl.load(start + target).to(tl.float32) * inverse_temperature - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(entropy_ptr + row, tl.log(total) - weighted / total)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    targets_ptr,
    lse_ptr,
    entropy_ptr,
    of_logprob_ptr,
    of_entropy_ptr,
    vocab,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * vocab
    target = tl.load(targets_ptr + row)
    lse, entropy = tl.load(lse_ptr + row), tl.load(entropy_ptr + row)
    of_logprob, of_entropy = tl.load(of_logprob_ptr + row), tl.load(of_entropy_ptr + row)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        logp = z - lse
        p = tl.exp(logp)
        hit = tl.where(columns == target, 1.0, 0.0)
        d = (of_logprob * (hit - p) - of_entropy * p * (logp + entropy)) * inverse_temperature
        tl.store(start + columns, d.to(logits_ptr.dtype.element_ty), mask=inside)


def reduce_rows(logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, log-sum-exp and entropy of each row of logits / temperature; float32."""
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    logprobs_N, lse_N, entropy_N = torch.empty(3, rows, device=logits_NV.device, dtype=torch.float32)
    _reduce_row[(rows,)](
        logits_NV, targets_N, logprobs_N, lse_N, entropy_N, vocab, 1 / temperature, BLOCK=BLOCK, num_warps=8
    )
    return logprobs_N, lse_N, entropy_N


def gradient_rows(
    logits_NV: Tensor,
    targets_N: Tensor,
    reduced: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """The gradient to the logits, written over them. `reduced`: log-sum-exp and entropy; `gradients`: to log-prob and entropy."""
    assert logits_NV.is_contiguous(), "written in place"
    rows, vocab = logits_NV.shape
    _gradient_row[(rows,)](
        logits_NV, targets_N, *reduced, *gradients, vocab, 1 / temperature, BLOCK=BLOCK, num_warps=8
    )
    return logits_NV
