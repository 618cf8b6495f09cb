# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Values of the proofs' polynomials as one Triton kernel: one program a segment, Horner's rule, lanes are points.

Imported only where there is a CUDA device; the plain torch lines in device.py say what it computes, with a hundred launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.toploc.proof_kernels import reduced


@triton.jit
def _values(coefficients, points, out, num_points, K: tl.constexpr, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < num_points
    x = tl.load(points + segment * num_points + lane, mask=inside, other=0).to(tl.uint32)
    value = tl.zeros((BLOCK,), tl.uint32)
    for k in range(K):
        coefficient = tl.load(coefficients + segment * K + (K - 1 - k)).to(tl.uint32)
        value = reduced(value * x + coefficient)  # below 2^32: both factors are residues
    tl.store(out + segment * num_points + lane, value.to(tl.int32), mask=inside)


def values(coefficients_SK: Tensor, x_SN: Tensor) -> Tensor:
    """[S, N] int32: the polynomial of segment s at each x of line s, which are below PRIME."""
    (num_segments, topk), num_points = coefficients_SK.shape, x_SN.shape[1]
    out_SN = torch.empty(num_segments, num_points, dtype=torch.int32, device=x_SN.device)
    block = min(256, triton.next_power_of_2(num_points))
    _values[(num_segments, triton.cdiv(num_points, block))](
        coefficients_SK.contiguous(), x_SN.contiguous(), out_SN, num_points, K=topk, BLOCK=block, num_warps=4
    )
    return out_SN
