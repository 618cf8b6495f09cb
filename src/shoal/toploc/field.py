"""Polynomials over the integers mod 65497, for many segments at once. NumPy only.

Arrays end in S, one column per segment: a step of Newton's scheme is then a few passes over contiguous memory, and
its fixed cost is shared by all segments. Everything fits in uint32, because 65496 * 65496 + 65496 < 2^32.

    K  points (and coefficients) of a segment      N  points to evaluate at      S  segments
"""

from functools import cache

import numpy as np
import numpy.typing as npt

Residues = npt.NDArray[np.uint32]

PRIME = 65497
"""Largest prime such that every finite bfloat16 bit pattern is below it: only negative NaNs reach 0xFFD9."""

_P = np.uint32(PRIME)


def interpolate(x_KS: Residues, y_KS: Residues) -> Residues:
    """Coefficients c_0 .. c_(K-1) of the polynomial through the points. The x of a segment must differ mod PRIME."""
    return _to_monomials(x_KS, _divided_differences(x_KS, y_KS))


def evaluate(coefficients_KS: Residues, x_NS: Residues) -> Residues:
    """The polynomial of segment s at each x of column s (Horner)."""
    value_NS = np.zeros_like(x_NS)
    scratch_NS = np.empty_like(x_NS)
    for coefficient_S in coefficients_KS[::-1]:
        np.multiply(value_NS, x_NS, out=value_NS)
        np.add(value_NS, coefficient_S, out=value_NS)
        _reduce(value_NS, scratch_NS)
    return value_NS


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
