# mypy: disable-error-code="untyped-decorator,misc,no-untyped-def,no-untyped-call,import-not-found,import-untyped,index,unused-ignore"
"""Triton kernels: proofs from top-k points, and values of a proof's polynomial. One program per segment.

Imported only on machines with a CUDA device. The NumPy code in proof.py and field.py computes the same, byte for byte.

In the proof kernel lanes are points. Multiplying a polynomial by (x - x_k) would move coefficients between lanes, so the
master polynomial m, whose zeros are the x_j, is evaluated at 0 .. K-1 instead, and a table converts these values to
coefficients. Then every point divides m by its own (x - x_j), coefficient by coefficient from the highest, and each sum over
the lanes is a coefficient of the proof's polynomial:

    q_j(x) = m(x) / (x - x_j)       c_i = sum_j a_j q_(j,i)       a_j = y_j / product of (x_j - x_k) over all other k

K points. Single products fit in uint32, because 65496 * 65496 + 65496 < 2^32.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.toploc.field import PRIME, interpolate
from shoal.toploc.proof import SEARCH_FLOOR

FINE, ALL_ZERO, NOT_FINITE, NO_MODULUS = range(4)
"""Status of a segment."""
_PRIME, _FLOOR = tl.constexpr(PRIME), tl.constexpr(SEARCH_FLOOR)
_ALL_ZERO, _NOT_FINITE, _NO_MODULUS = (
    tl.constexpr(ALL_ZERO),
    tl.constexpr(NOT_FINITE),
    tl.constexpr(NO_MODULUS),
)


@triton.jit
def reduced(value):
    """Reduces mod PRIME. The constant is uint32, so that the compiler replaces the division by a multiplication."""
    return value % tl.full((), _PRIME, tl.uint32)


@triton.jit
def _product(a, b):
    return reduced(a * b)


@triton.jit
def _difference(a, b):
    """Returns a - b mod PRIME for two residues."""
    return reduced(a + (tl.full((), _PRIME, tl.uint32) - b))


@triton.jit
def _num_equal(indices, x, lane, modulus, K: tl.constexpr):
    """Counts pairs of points that coincide under this modulus, each twice."""
    count = tl.zeros_like(lane)
    for k in range(K):
        other = tl.load(indices + k).to(tl.uint32) % modulus
        count += ((x == other) & (lane != k) & (lane < K)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _inverse(x):
    """Returns x^(PRIME - 2) by repeated squaring; 0 for 0."""
    result = tl.full(x.shape, 1, tl.uint32)
    power = x
    for bit in tl.static_range(16):
        if ((_PRIME - 2) >> bit) & 1:
            result = _product(result, power)
        power = _product(power, power)
    return result


@triton.jit
def _big_endian(value):
    return ((value & 0xFF) << 8) | (value >> 8)


@triton.jit
def _prove(indices, bits, basis, lines, K: tl.constexpr, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    indices += segment * K
    lines += segment * (K + 2)
    lane = tl.arange(0, BLOCK)
    inside = lane < K
    index = tl.load(indices + lane, mask=inside, other=0).to(tl.uint32)
    y = tl.load(bits + segment * K + lane, mask=inside, other=0).to(tl.uint32) & 0xFFFF

    modulus = tl.full((), _PRIME, tl.uint32)
    num_equal = tl.full((), 0, tl.int32)
    if tl.max(index.to(tl.int32), axis=0) >= _PRIME:  # smaller indices are their own residues
        num_equal = _num_equal(indices, index % modulus, lane, modulus, K)
        while (num_equal > 0) & (modulus > _FLOOR + 1):
            modulus = modulus - tl.full((), 1, tl.uint32)
            num_equal = _num_equal(indices, index % modulus, lane, modulus, K)
    x = index % modulus

    slope = tl.full((BLOCK,), 1, tl.uint32)  # derivative of m at x_j
    value = tl.full((BLOCK,), 1, tl.uint32)  # value of m at 0 .. K-1
    node = lane.to(tl.uint32)
    for k in range(K):
        x_k = tl.load(indices + k).to(tl.uint32) % modulus
        slope = tl.where(lane == k, slope, _product(slope, _difference(x, x_k)))
        value = _product(value, _difference(node, x_k))
    weight = tl.where(inside, _product(reduced(y), _inverse(slope)), 0)
    # The table is for degree K-1: subtract the values of x^K at the nodes, which are in its last row.
    value = _difference(value, tl.load(basis + K * K + lane, mask=inside, other=0).to(tl.uint32))
    value = tl.where(inside, value, 0)

    quotient = tl.full((BLOCK,), 1, tl.uint32)
    for step in range(K):
        i = K - 1 - step
        tl.store(lines + 2 + i, _big_endian(reduced(tl.sum(_product(weight, quotient), axis=0))))
        of_basis = tl.load(basis + i * K + lane, mask=inside, other=0).to(tl.uint32)
        coefficient = reduced(tl.sum(_product(of_basis, value), axis=0))
        quotient = reduced(quotient * x + coefficient)

    largest = tl.max((y & 0x7FFF).to(tl.int32), axis=0)
    status = tl.where(num_equal > 0, _NO_MODULUS, 0)
    status = tl.where(largest >= 0x7F80, _NOT_FINITE, tl.where(largest == 0, _ALL_ZERO, status))
    tl.store(lines, status)
    tl.store(lines + 1, _big_endian(modulus))


def proof_lines(indices_SK: Tensor, bits_SK: Tensor) -> Tensor:
    """Returns [S, 2 + K] int16 on the device: the status of each segment and, if it is FINE, its proof in wire order.

    `indices_SK` are flat indices in int64, `bits_SK` bit patterns in int16, one row per segment.
    """
    num_segments, topk = indices_SK.shape
    block = triton.next_power_of_2(topk)
    lines_SX = torch.empty(num_segments, 2 + topk, dtype=torch.int16, device=indices_SK.device)
    _prove[(num_segments,)](
        indices_SK.contiguous(),
        bits_SK.contiguous(),
        _basis(topk, indices_SK.device),
        lines_SX,
        K=topk,
        BLOCK=block,
        num_warps=max(1, min(8, block // 128)),  # sums inside one warp need no synchronisation
    )
    return lines_SX


@cache
def _basis(topk: int, device: torch.device) -> Tensor:
    """Returns [K + 1, K] int32. Row i has the weights that give coefficient i from the values at 0 .. K-1; the last row has
    the values of x^K there."""
    nodes_K = np.arange(topk, dtype=np.uint32)
    of_values_KK = interpolate(np.tile(nodes_K, (topk, 1)), np.eye(topk, dtype=np.uint32)).T
    highest_K = np.array([pow(node, topk, PRIME) for node in range(topk)], dtype=np.uint32)
    # order="C": a transposed array would be copied column by column.
    table = np.concatenate([of_values_KK, highest_K[None]]).astype(np.int32, order="C")
    return torch.from_numpy(table).to(device)


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
    """Evaluates the polynomial of each segment at its own points, which are below PRIME, by Horner's rule; [S, N] int32."""
    (num_segments, topk), num_points = coefficients_SK.shape, x_SN.shape[1]
    out_SN = torch.empty(num_segments, num_points, dtype=torch.int32, device=x_SN.device)
    block = min(256, triton.next_power_of_2(num_points))
    _values[(num_segments, triton.cdiv(num_points, block))](
        coefficients_SK.contiguous(), x_SN.contiguous(), out_SN, num_points, K=topk, BLOCK=block, num_warps=4
    )
    return out_SN
