"""Polynomials over the integers mod 65497, for many segments at once. NumPy only.

Interpolation has one column per segment: a step of Newton's scheme is then a few passes over contiguous memory, and
its fixed cost is shared by all segments. Everything fits in uint32, because 65496 * 65496 + 65496 < 2^32.

Evaluation is products of matrices in float64, which holds whole numbers up to 2^53: a sum of 128 products stays below 2^39. To reduce
after every product, as Horner's scheme has to, costs five times as much.

    K  points (and coefficients) of a segment      N  points to evaluate at      S  segments
    B  blocks of L coefficients
"""

from functools import cache

import numpy as np
import numpy.typing as npt

Residues = npt.NDArray[np.uint32]

PRIME = 65497
"""Largest prime such that every finite bfloat16 bit pattern is below it: only negative NaNs reach 0xFFD9."""

BLOCK = 16
"""Coefficients of a block."""
AT_ONCE = 64
"""Segments evaluated together: their powers stay in cache."""

_P = np.uint32(PRIME)


def interpolate(x_KS: Residues, y_KS: Residues) -> Residues:
    """Coefficients c_0 .. c_(K-1) of the polynomial through the points. The x of a segment must differ mod PRIME."""
    return _to_monomials(x_KS, _divided_differences(x_KS, y_KS))


def evaluate(coefficients_SK: npt.NDArray[np.uint16], x_SN: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """The polynomial of segment s at each x of line s, which are below PRIME."""
    parts = [
        _evaluate_some(coefficients_SK[start : start + AT_ONCE], x_SN[start : start + AT_ONCE])
        for start in range(0, len(x_SN), AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.empty(x_SN.shape, dtype=np.uint16)


def evaluate_everywhere(
    coefficients_SK: npt.NDArray[np.uint16], x_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    """[S, N]: every polynomial at the same points, which are below PRIME."""
    num_powers = 1 << (coefficients_SK.shape[1] - 1).bit_length()
    powers_KN = _powers(x_N[None].astype(np.uint32), num_powers)[0]
    coefficients = coefficients_SK.astype(np.float64)
    value_SN = coefficients[:, 1:] @ powers_KN[: coefficients_SK.shape[1] - 1].astype(np.float64)
    value_SN += coefficients[:, :1]
    return _reduce_floats(value_SN).astype(np.uint16)


def _evaluate_some(
    coefficients_SK: npt.NDArray[np.uint16], x_SN: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    """p(x) = p_0(x) + x^L (p_1(x) + x^L (...)): the blocks p_b by one product, then Horner's scheme over them."""
    num_segments, num_coefficients = coefficients_SK.shape
    powers_SLN = _powers(x_SN.astype(np.uint32), BLOCK)
    num_blocks = -(-num_coefficients // BLOCK)
    padded_SK = np.zeros((num_segments, num_blocks * BLOCK))
    padded_SK[:, :num_coefficients] = coefficients_SK
    blocks_SBL = padded_SK.reshape(num_segments, num_blocks, BLOCK)
    value_SBN = np.matmul(blocks_SBL[:, :, 1:], powers_SLN[:, :-1].astype(np.float64))
    value_SBN += blocks_SBL[:, :, :1]
    block_SBN = _reduce_floats(value_SBN)
    result_SN = block_SBN[:, -1]
    scratch_SN = np.empty_like(result_SN)
    for block in range(num_blocks - 2, -1, -1):
        result_SN = result_SN * powers_SLN[:, -1]
        result_SN += block_SBN[:, block]
        _reduce(result_SN, scratch_SN)
    return result_SN.astype(np.uint16)


def _powers(x_SN: Residues, num_powers: int) -> Residues:
    """[S, L, N]: x^1 .. x^L, L a power of two."""
    num_segments, num_points = x_SN.shape
    powers_SLN = np.empty((num_segments, num_powers, num_points), dtype=np.uint32)
    scratch = np.empty((num_segments, max(1, num_powers // 2), num_points), dtype=np.uint32)
    powers_SLN[:, 0] = x_SN
    have = 1
    while have < num_powers:
        new = powers_SLN[:, have : 2 * have]
        np.multiply(powers_SLN[:, :have], powers_SLN[:, have - 1 : have], out=new)
        _reduce(new, scratch[:, :have])
        have *= 2
    return powers_SLN


def _reduce_floats(values: npt.NDArray[np.float64]) -> Residues:
    """Whole numbers from 0 to 2^40 mod PRIME; overwrites them."""
    quotient = values * (1.0 / PRIME)
    np.floor(quotient, out=quotient)
    quotient *= PRIME
    values -= quotient
    # The quotient is rounded, so it may be one too large; less than 0 wraps to huge, and the smaller of the two is right.
    reduced = values.astype(np.int32).view(np.uint32)
    np.minimum(reduced, reduced + _P, out=reduced)
    np.minimum(reduced, reduced - _P, out=reduced)  # or one too small
    return reduced


def _divided_differences(x_KS: Residues, y_KS: Residues) -> Residues:
    inverse_of = _inverses()
    x_index_KS = x_KS.astype(np.intp)
    table_KS = y_KS % _P
    num_points = len(x_KS)
    for level in range(1, num_points):
        width = num_points - level
        # a - b mod P without branches: the smaller of (a - b + P) and (a - b), the latter wrapping to huge if negative.
        step = table_KS[level:] + (_P - table_KS[level - 1 : -1])
        np.minimum(step, step - _P, out=step)
        denominators = x_index_KS[level:] - x_index_KS[:width]
        np.multiply(step, inverse_of[denominators], out=step)
        _reduce(step, table_KS[level:])
        table_KS[level:] = step
    return table_KS


def _to_monomials(x_KS: Residues, newton_KS: Residues) -> Residues:
    """Expand n_0 + (x - x_0) (n_1 + (x - x_1) (n_2 + ...)) from the inside out."""
    minus_x_KS = _P - x_KS
    result_KS = np.zeros_like(newton_KS)
    result_KS[0] = newton_KS[-1]
    for index in range(len(newton_KS) - 2, -1, -1):
        width = len(newton_KS) - index
        product = result_KS[:width] * minus_x_KS[index]
        product[1:] += result_KS[: width - 1]
        product[0] += newton_KS[index]
        _reduce(product, result_KS[:width])
        result_KS[:width] = product
    return result_KS


def _reduce(values: Residues, scratch: Residues) -> None:
    """values mod PRIME, in place. Division by a constant is vectorised in NumPy, the remainder is not: 4x faster."""
    np.floor_divide(values, _P, out=scratch)
    np.multiply(scratch, _P, out=scratch)
    np.subtract(values, scratch, out=values)


@cache
def _inverses() -> Residues:
    """1/d mod PRIME at index d, for d from -(PRIME - 1) to PRIME - 1: a negative d counts from the end, as in Python."""
    inverse = [0, 1]
    for d in range(2, PRIME):  # P = q d + r, so 1/d = -q/r
        inverse.append(PRIME - PRIME // d * inverse[PRIME % d] % PRIME)
    # Index -d is 2P - d from the front, and -d = P - d mod P: the table is the list twice.
    return np.array(inverse * 2, dtype=np.uint32)
