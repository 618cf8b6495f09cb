# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels of a decode step: what stands between its matrix products but attention. Imported on CUDA machines only.

    add_norm      residual sum and RMS norm; the last one of a step also keeps the row's state for its proof
    silu_mul      silu(gate) * up
    normed, rotated, gated   for other kernels: a head's values after the q/k norm, and after the rotation; silu(gate) * up

Values are rounded to the model's dtype where the decoder rounds them, so that a state differs from the one that a
prefill computes by the order of sums alone. A row that has ended (ended > 0) is stepped over at next to no cost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    out,
    states,
    counts,
    ended,
    state_stride,
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
        tl.store(states + row * state_stride + fed * H + h, normed.to(tl.bfloat16), mask=inside & runs)


@triton.jit
def rotated(x, swapped, cos, sin, dtype: tl.constexpr):
    return ((x * cos).to(dtype).to(tl.float32) + swapped * sin).to(dtype)


@triton.jit
def normed(x, scale, weight, dtype: tl.constexpr):
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def gated(gate, up, dtype: tl.constexpr):
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
    """norm(x + delta), x being left as the sum. `keep`: (states_SNH, counts_S, ended_S) take the result as a state."""
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
        states.stride(0),
        eps,
        H=hidden,
        BLOCK=triton.next_power_of_2(hidden),
        ADD=delta_BH is not None,
        KEEP=keep is not None,
        num_warps=4,
    )
    return out_BH


def silu_mul(gate_up_BF: Tensor) -> Tensor:
    num_rows, double = gate_up_BF.shape
    out_BF = gate_up_BF.new_empty(num_rows, double // 2)
    grid = (num_rows, triton.cdiv(double // 2, 1024))
    _silu_mul[grid](gate_up_BF, out_BF, F=double // 2, BLOCK=1024, num_warps=4)
    return out_BF
