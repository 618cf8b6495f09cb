"""Polynomials over the integers mod 65497, for many segments at once, in NumPy.

Sums of products are matrix products in float64, which is exact for whole numbers up to 2^53: a sum of 128 products of
residues is below 2^39 and is reduced once. Single products fit in uint32, because 65496 * 65496 + 65496 < 2^32.

Evaluation uses blocks of L coefficients and the powers x^1 .. x^L:

    p(x) = p_0(x) + x^L (p_1(x) + x^L (p_2(x) + ...))

Interpolation is Lagrange's formula with m(x) = (x - x_1) ... (x - x_K) and a_j = y_j / m'(x_j):

    p(x) = sum_j a_j m(x) / (x - x_j),  so  c_i = sum_t m_(i+1+t) s_t  with  s_t = sum_j a_j x_j^t

    K  points (and coefficients) of a segment      N  points to evaluate at      S  segments      B  blocks
"""

from functools import cache

import numpy as np
import numpy.typing as npt

Residues = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float64]

PRIME = 65497
"""The prime of the published format. Every finite bfloat16 bit pattern is below it: only negative NaNs reach 0xFFD9."""
BLOCK = 16
"""Coefficients per block (L)."""
AT_ONCE = 64
"""Segments whose powers are computed together; they fit in cache."""

_P = np.uint32(PRIME)


def interpolate(x_SK: Residues, y_SK: Residues) -> Residues:
    """Returns [S, K] coefficients c_0 .. c_(K-1) of the polynomials through the points. The x of a segment must be distinct."""
    num_points = x_SK.shape[1]
    master_SK = _master(x_SK)
    slope_SK = master_SK * np.arange(1, num_points + 1, dtype=np.uint32)
    _reduce(slope_SK, np.empty_like(slope_SK))
    sums_SK = np.empty(x_SK.shape)
    powers = _Powers(x_SK.shape)
    for start in range(0, len(x_SK), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        powers.set(x_SK[some])
        weight_SK = _inverses()[powers.evaluate(slope_SK[some])]
        weight_SK *= y_SK[some]
        _reduce(weight_SK, np.empty_like(weight_SK))
        sums_SK[some] = powers.sums(weight_SK)[:, :num_points]
    # The sum over t is a product of polynomials, one of them reversed. The rounding error of the FFT is below 0.001.
    size = 2 * num_points
    reversed_SK = np.fft.rfft(master_SK[:, ::-1].astype(np.float64), size)
    product = np.fft.irfft(reversed_SK * np.fft.rfft(sums_SK, size), size)[:, :num_points]
    return _reduce_floats(np.rint(product))[:, ::-1]


def evaluate(coefficients_SK: npt.NDArray[np.uint16], x_SN: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Evaluates the polynomial of each segment at its own points, which are below PRIME."""
    values_SN = np.empty(x_SN.shape, dtype=np.uint16)
    powers = _Powers(x_SN.shape)
    for start in range(0, len(x_SN), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        powers.set(x_SN[some])
        values_SN[some] = powers.evaluate(coefficients_SK[some])
    return values_SN


def evaluate_everywhere(
    coefficients_SK: npt.NDArray[np.uint16], x_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    """Returns [S, N] values of every polynomial at the same points, which are below PRIME."""
    powers_KN = np.empty((coefficients_SK.shape[1], len(x_N)), dtype=np.uint32)
    powers_KN[0] = x_N
    _fill_powers(powers_KN, np.empty_like(powers_KN))
    factors_KN = np.ones(powers_KN.shape)  # x^0 first
    factors_KN[1:] = powers_KN[:-1]
    return _reduce_floats(coefficients_SK.astype(np.float64) @ factors_KN).astype(np.uint16)


class _Powers:
    """The powers x^1 .. x^L of up to AT_ONCE segments. Buffers are reused: page faults would cost more than the arithmetic."""

    def __init__(self, shape_SN: tuple[int, ...]) -> None:
        num_segments, num_points = min(shape_SN[0], AT_ONCE), shape_SN[1]
        self._powers_SLN = np.empty((num_segments, BLOCK, num_points), dtype=np.uint32)
        self._scratch_SLN = np.empty((num_segments, BLOCK // 2, num_points), dtype=np.uint32)
        self._floats_SLN = np.empty(self._powers_SLN.shape)
        self._num = 0

    def set(self, x_SN: npt.NDArray[np.integer]) -> None:
        """Computes the powers of new points."""
        self._num = len(x_SN)
        powers_SLN, scratch_SLN = self._powers_SLN[: self._num], self._scratch_SLN[: self._num]
        powers_SLN[:, 0] = x_SN
        _fill_powers(powers_SLN, scratch_SLN)
        # Shifted by one, with x^0 first: the factors of a block's coefficients.
        self._floats_SLN[: self._num, 0] = 1
        self._floats_SLN[: self._num, 1:] = powers_SLN[:, :-1]

    def evaluate(self, coefficients_SK: npt.NDArray[np.integer]) -> Residues:
        """Returns [S, N] values of one polynomial per segment."""
        num_coefficients = coefficients_SK.shape[1]
        num_blocks = -(-num_coefficients // BLOCK)
        padded_SK = np.zeros((self._num, num_blocks * BLOCK))
        padded_SK[:, :num_coefficients] = coefficients_SK
        blocks_SBL = padded_SK.reshape(self._num, num_blocks, BLOCK)
        block_SBN = _reduce_floats(np.matmul(blocks_SBL, self._floats_SLN[: self._num]))
        value_SN, scratch_SN = block_SBN[:, -1].copy(), self._scratch_SLN[: self._num, 0]
        for block in range(num_blocks - 2, -1, -1):
            value_SN *= self._powers_SLN[: self._num, -1]
            value_SN += block_SBN[:, block]
            _reduce(value_SN, scratch_SN)
        return value_SN

    def sums(self, weight_SN: Residues) -> Residues:
        """Returns the sums of weight x^t over the points for t = 0, 1, ..., [S, N rounded up to blocks]."""
        num_blocks = -(-weight_SN.shape[1] // BLOCK)
        weights_SBN = np.empty((self._num, num_blocks, weight_SN.shape[1]))
        weight_SN, scratch_SN = weight_SN.copy(), self._scratch_SLN[: self._num, 0]
        for block in range(num_blocks):
            weights_SBN[:, block] = weight_SN
            weight_SN *= self._powers_SLN[: self._num, -1]
            _reduce(weight_SN, scratch_SN)
        sums_SBL = np.matmul(weights_SBN, self._floats_SLN[: self._num].transpose(0, 2, 1))
        return _reduce_floats(sums_SBL).reshape(self._num, -1)


def _master(x_SK: Residues) -> Residues:
    """Returns [S, K] coefficients m_1 .. m_K of the polynomial whose zeros are the x; m_0 is not needed."""
    minus_x_KS = _P - np.ascontiguousarray(x_SK.T)
    num_points, num_segments = minus_x_KS.shape
    # One column per segment, so that each step reads contiguous memory.
    result_KS = np.zeros((num_points + 1, num_segments), dtype=np.uint32)
    product_KS, scratch_KS = np.zeros_like(result_KS), np.empty_like(result_KS)
    result_KS[0] = 1
    for degree, minus_x_S in enumerate(minus_x_KS, start=1):
        result, product = result_KS[: degree + 1], product_KS[: degree + 1]
        np.multiply(result, minus_x_S, out=product)
        product[1:] += result[:-1]
        _reduce(product, scratch_KS[: degree + 1])
        # Neither buffer has been written beyond its own degree, so the next coefficient is still 0.
        result_KS, product_KS = product_KS, result_KS
    return np.ascontiguousarray(result_KS[1:].T)


def _fill_powers(powers: Residues, scratch: Residues) -> None:
    """Fills the last axis but one with x^1, x^2, ... of the x at its first place. Each step doubles how many there are."""
    have, length = 1, powers.shape[-2]
    while have < length:
        new = powers[..., have : 2 * have, :]
        count = new.shape[-2]
        np.multiply(powers[..., :count, :], powers[..., have - 1 : have, :], out=new)
        _reduce(new, scratch[..., :count, :])
        have *= 2


def _reduce(values: Residues, scratch: Residues) -> None:
    """Reduces values mod PRIME, in place. NumPy vectorises division by a constant but not the remainder: 4x faster."""
    np.floor_divide(values, _P, out=scratch)
    np.multiply(scratch, _P, out=scratch)
    np.subtract(values, scratch, out=values)


def _reduce_floats(values: Floats) -> Residues:
    """Reduces whole numbers from 0 to 2^40 mod PRIME; overwrites its input."""
    quotient = values * (1.0 / PRIME)
    np.floor(quotient, out=quotient)
    quotient *= PRIME
    values -= quotient
    # The quotient may be off by one by rounding: negative values wrap to large ones, and the smaller of both is right.
    reduced = values.astype(np.int32).view(np.uint32)
    np.minimum(reduced, reduced + _P, out=reduced)
    np.minimum(reduced, reduced - _P, out=reduced)
    return reduced


@cache
def _inverses() -> Residues:
    """Returns a table with 1/d mod PRIME at index d, and 0 at 0."""
    inverse = [0, 1]
    for d in range(2, PRIME):  # P = q d + r, so 1/d = -q/r
        inverse.append(PRIME - PRIME // d * inverse[PRIME % d] % PRIME)
    return np.array(inverse, dtype=np.uint32)
