# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""silu(gate) * up where gate and up are made: one Triton kernel, and neither is ever written. Imported on CUDA machines only.

For the many rows of a prefill. Written and read again, gate and up are four fifths of what goes through memory in a layer's MLP;
that costs a third of the product's own time (docs/LOG.md). Sums are rounded where the decoder rounds them.

T rows, H hidden size, F two intermediate sizes: the gate's rows, then up's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from shoal.model.kernels.elementwise import gated, silu_mul

BLOCK_T, BLOCK_F, BLOCK_H = 128, 64, 64
"""BLOCK_F of both, gate and up, so that a program's tile is a square. Three programs fit on a processor at once: while one
is at its end, the others multiply."""
WARPS, STAGES = 4, 2
ALIGNED_BYTES = 16


@triton.jit
def _gated_product(
    x,
    gate_up,
    out,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # Programs side by side share their rows, and the weights are in the cache anyway.
    across: tl.constexpr = (HALF + BLOCK_F - 1) // BLOCK_F
    row = tl.program_id(0) // across * BLOCK_T
    column = tl.program_id(0) % across * BLOCK_F
    gate = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    up = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for h in range(0, H, BLOCK_H):
        part = x.load([row, h])
        gate = tl.dot(part, gate_up.load([column, h]).T, gate)
        up = tl.dot(part, gate_up.load([HALF + column, h]).T, up)
    dtype = out.dtype
    out.store([row, column], gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype))


def gated_product(x_TH: Tensor, gate_up_FH: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), [T, F / 2]."""
    if copies_tiles(x_TH) and fits(x_TH, gate_up_FH):
        return launch(x_TH, gate_up_FH)
    return silu_mul(F.linear(x_TH, gate_up_FH))


def copies_tiles(x: Tensor) -> bool:
    """Whether the device brings tiles from memory by itself, which the kernel relies on: since Hopper."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def fits(x_TH: Tensor, gate_up_FH: Tensor) -> bool:
    """Whether numbers have 16 bits, as of more the kernel would lose some, and lines begin where a tile may."""
    sizes = (x_TH.shape[1], gate_up_FH.shape[0] // 2)
    return x_TH.element_size() == 2 and all(2 * size % ALIGNED_BYTES == 0 for size in sizes)


def launch(x_TH: Tensor, gate_up_FH: Tensor) -> Tensor:
    (num_rows, hidden), half = x_TH.shape, gate_up_FH.shape[0] // 2
    out_TF = x_TH.new_empty(num_rows, half)
    _gated_product[(triton.cdiv(num_rows, BLOCK_T) * triton.cdiv(half, BLOCK_F),)](
        TensorDescriptor.from_tensor(x_TH, [BLOCK_T, BLOCK_H]),
        TensorDescriptor.from_tensor(gate_up_FH, [BLOCK_F, BLOCK_H]),
        TensorDescriptor.from_tensor(out_TF, [BLOCK_T, BLOCK_F]),
        H=hidden,
        HALF=half,
        BLOCK_T=BLOCK_T,
        BLOCK_F=BLOCK_F,
        BLOCK_H=BLOCK_H,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out_TF
