# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels of a layer except attention. Imported on CUDA machines only.

    add_norm         residual sum and RMS norm; the last one of a decode step also stores the row's state for its proof
    silu_mul         silu(gate) * up
    gated_product    silu(x @ gate.T) * (x @ up.T) in one kernel, for the many rows of a prefill
    gate_product, gate_gradients   silu(gate) * up of two tensors and its gradients, for training
    rotate_heads     rotary positions, forward and backward, for training
    normed, rotated, gated   used by other kernels: a head after its q/k norm, a head after rotation, silu(gate) * up

Values are rounded to the model's dtype where the decoder rounds them, so that states differ from the decoder's only by the order
of sums. Rows that have ended (ended > 0) are skipped.

T rows, H hidden size, F twice the intermediate size: the rows of gate, then the rows of up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

GATE_BLOCK_T, GATE_BLOCK_F, GATE_BLOCK_H = 128, 64, 64
"""Tile sizes of gated_product. GATE_BLOCK_F counts for gate and for up, so that a program's tile is a square. Three programs fit
on a multiprocessor at once: while one writes its results, the others multiply."""
GATE_WARPS, GATE_STAGES = 4, 2
FLAT_BLOCK = 1024
"""Values that one program of a plain elementwise kernel computes."""
ALIGNED_BYTES = 16
"""Rows must begin at a multiple of this for the device's tile copies."""


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    out,
    states,
    counts,
    ended,
    num_states,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    dtype = out.dtype.element_ty
    wide = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        summed = (wide + tl.load(delta + row * H + h, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(x + row * H + h, summed, mask=inside)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    normed = (normed * tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + row * H + h, normed, mask=inside)
    if KEEP:
        runs = tl.load(ended + row) == 0
        fed = tl.load(counts + row) - 1
        line = row * num_states + fed % num_states
        tl.store(states + line * H + h, normed.to(tl.bfloat16), mask=inside & runs)


@triton.jit
def rotated(x, swapped, cos, sin, dtype: tl.constexpr):
    """Rotates a head's values."""
    return ((x * cos).to(dtype).to(tl.float32) + swapped * sin).to(dtype)


@triton.jit
def normed(x, scale, weight, dtype: tl.constexpr):
    """Applies the q/k norm to a head's values."""
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
    """Computes silu(gate) * up."""
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (opened * up).to(dtype)


@triton.jit
def _silu_mul(gate_up, out, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * F + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + f, gated(gate, up, dtype), mask=inside)


def add_norm(
    x_BH: Tensor,
    delta_BH: Tensor | None,
    weight_H: Tensor,
    eps: float,
    *,
    keep: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Returns norm(x + delta) and stores the sum in x. `keep`: (states_SAH, counts_S, ended_S):
    the result is stored as the state of the row's newest token, number counts_S - 1, in line modulo A."""
    out_BH = torch.empty_like(x_BH)
    states, counts, ended = keep if keep is not None else (x_BH, x_BH, x_BH)
    hidden = x_BH.shape[1]
    _add_norm[(x_BH.shape[0],)](
        x_BH,
        x_BH if delta_BH is None else delta_BH,
        weight_H,
        out_BH,
        states,
        counts,
        ended,
        states.shape[1],
        eps,
        H=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ADD=delta_BH is not None,
        KEEP=keep is not None,
        num_warps=4,
    )
    return out_BH


def silu_mul(gate_up_BF: Tensor) -> Tensor:
    """Returns silu(gate) * up, [B, F / 2]."""
    num_rows, double = gate_up_BF.shape
    out_BF = gate_up_BF.new_empty(num_rows, double // 2)
    grid = (num_rows, triton.cdiv(double // 2, 1024))
    _silu_mul[grid](gate_up_BF, out_BF, F=double // 2, BLOCK=1024, num_warps=4)
    return out_BF


@triton.jit
def _gate_product(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wide_gate = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    wide_up = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, gated(wide_gate, wide_up, out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradients(gate, up, gradient, of_gate, of_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = of_gate.dtype.element_ty
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    tl.store(of_up + at, (d * (g * share).to(dtype).to(tl.float32)).to(dtype), mask=inside)
    inner = (d * u).to(dtype).to(tl.float32)
    tl.store(of_gate + at, (inner * share * (1.0 + g * (1.0 - share))).to(dtype), mask=inside)


@triton.jit
def _rotate_heads(
    x,
    cos,
    signed_sin,
    out,
    rope_stride,
    sign,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    c = tl.load(cos + row * rope_stride + d, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(signed_sin + row * rope_stride + d, mask=d < D, other=0.0).to(tl.float32) * sign
    for first in range(0, HEADS, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < HEADS) & (d[None, :] < D)
        head = (row * HEADS + n[:, None]) * D
        value = tl.load(x + head + d[None, :], mask=inside, other=0.0).to(tl.float32)
        swapped = tl.load(x + head + ((d + D // 2) % D)[None, :], mask=inside, other=0.0).to(tl.float32)
        turned = rotated(value, swapped, c[None, :], s[None, :], out.dtype.element_ty)
        tl.store(out + head + d[None, :], turned, mask=inside)


def gate_product(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _gate_product[(triton.cdiv(gate.numel(), FLAT_BLOCK),)](gate, up, out, gate.numel(), BLOCK=FLAT_BLOCK)
    return out


def gate_gradients(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients to gate and up, rounded where torch rounds them."""
    gate, up, gradient = gate.contiguous(), up.contiguous(), gradient.contiguous()
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), FLAT_BLOCK),)
    _gate_gradients[grid](gate, up, gradient, of_gate, of_up, gate.numel(), BLOCK=FLAT_BLOCK)
    return of_gate, of_up


def rotate_heads(x_BTND: Tensor, cos_BT1D: Tensor, signed_sin_BT1D: Tensor, *, sign: float) -> Tensor:
    """Returns heads rotated by their positions; with `sign` -1.0 back again, as a gradient is."""
    x_BTND = x_BTND.contiguous()
    rows, length, num_heads, head_dim = x_BTND.shape
    out_BTND = torch.empty_like(x_BTND)
    strides = (cos_BT1D.stride(1), signed_sin_BT1D.stride(1))
    assert strides[0] == strides[1], "cosines and sines are halves of one table"
    assert rows == 1 or cos_BT1D.stride(0) == length * strides[0], "rows of the table follow each other"
    _rotate_heads[(rows * length,)](
        x_BTND,
        cos_BT1D,
        signed_sin_BT1D,
        out_BTND,
        strides[0],
        sign,
        HEADS=num_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_N=min(32, triton.next_power_of_2(num_heads)),
    )
    return out_BTND


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
    # Adjacent programs read the same rows of x, which then come from the cache, where the weights are anyway.
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
    """Returns silu(x @ gate.T) * (x @ up.T), [T, F / 2].

    In one kernel where the device allows: writing gate and up and reading them again is four fifths of the memory traffic of a
    layer's MLP and takes a third of the product's own time (measured).
    """
    if has_tile_copies(x_TH) and fits_gated_product(x_TH, gate_up_FH):
        return launch_gated_product(x_TH, gate_up_FH)
    return silu_mul(F.linear(x_TH, gate_up_FH))


def has_tile_copies(x: Tensor) -> bool:
    """Returns whether the device can copy tiles asynchronously, as the kernel needs: Hopper and later.

    AMD's numbers of devices mean something else: MI300 is (9, 4).
    """
    return x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)


def fits_gated_product(x_TH: Tensor, gate_up_FH: Tensor) -> bool:
    """Returns whether values have 16 bits, since the kernel would round wider ones, and rows are aligned for tile copies."""
    sizes = (x_TH.shape[1], gate_up_FH.shape[0] // 2)
    return x_TH.element_size() == 2 and all(2 * size % ALIGNED_BYTES == 0 for size in sizes)


def launch_gated_product(x_TH: Tensor, gate_up_FH: Tensor) -> Tensor:
    """Runs the kernel of gated_product."""
    (num_rows, hidden), half = x_TH.shape, gate_up_FH.shape[0] // 2
    out_TF = x_TH.new_empty(num_rows, half)
    _gated_product[(triton.cdiv(num_rows, GATE_BLOCK_T) * triton.cdiv(half, GATE_BLOCK_F),)](
        TensorDescriptor.from_tensor(x_TH, [GATE_BLOCK_T, GATE_BLOCK_H]),
        TensorDescriptor.from_tensor(gate_up_FH, [GATE_BLOCK_F, GATE_BLOCK_H]),
        TensorDescriptor.from_tensor(out_TF, [GATE_BLOCK_T, GATE_BLOCK_F]),
        H=hidden,
        HALF=half,
        BLOCK_T=GATE_BLOCK_T,
        BLOCK_F=GATE_BLOCK_F,
        BLOCK_H=GATE_BLOCK_H,
        num_warps=GATE_WARPS,
        num_stages=GATE_STAGES,
    )
    return out_TF
