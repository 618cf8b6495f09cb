"""What one segment's proof says, in numbers, and what host.py and device.py share in finding them."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.toploc.proof import ProofError, modulus_floor
from shoal.toploc.search import Indices
from shoal.toploc.segments import Place

NO_MATCH = 2.0**64
"""Mantissa error of a segment in which no exponent matches; the published value."""
MANTISSA_BOUND = 8
MAX_CONTROLS = 128
_CANDIDATES, _CANDIDATES_OF_FEW = 192, 512
"""Nearly all of a full segment's values are small enough, and less than half of a short one's."""

AT_LAST_PLACE, NO_POINT = 1 << 16, 1 << 17
WRONG_EXPONENT, WRONG_SIGN = 1 << 8, 1 << 7
"""How a point is ranked: the best come first, points above the last place before points at it."""

Mask = npt.NDArray[np.bool_]
Column = npt.NDArray[Any]


class SegmentCheck(NamedTuple):
    """One segment; a tuple, because a check of 64 rows makes 2,048 of them while a device waits.

    The published statistics are the exponents that differ among the top-k, and over those that agree the mean and (upper) median of
    |mantissa - mantissa|, in units of 2^-7.
    """

    num_values: int
    """Size of the segment: states times hidden size."""
    num_points: int
    """Points compared: the top-k."""
    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    mantissa_bounded: float
    """The mean again, with no point counting for more than MANTISSA_BOUND: one index that only one side has in its top-k gives
    a random value, which may agree in its exponent and be off by anything in its mantissa."""
    sign_mismatches: int
    """Points whose exponent agrees and whose sign does not."""
    control_hits: int
    """Control points where the proof claims the true exponent, or one found among the top-k. Noise hits (e + 1) / 256
    of them for e exponents among the top-k."""
    num_controls: int
    """Control points that there were, at most 128. A segment of one or two states may have few or none."""
    constant: bool
    """The polynomial is a constant: made without any states."""


def segment_checks(columns: Sequence[Column], topk: int) -> list[SegmentCheck]:
    """`columns` are what SegmentCheck has but num_points, in its order, a value for each segment."""
    sizes, *others, constants = columns
    constants = constants & (topk > 1)
    numbers = (column.tolist() for column in (*others, constants))
    return list(map(SegmentCheck._make, zip(sizes.tolist(), repeat(topk), *numbers, strict=False)))


def control_points(sizes_S: Indices, topk: int, rng: np.random.Generator) -> tuple[Indices, Mask]:
    """[S, C] control points of each segment, and which of them there are: fewer for some sizes."""
    columns_of = {int(size): _control_columns(size, topk, rng) for size in np.unique(sizes_S)}
    columns_SC = np.zeros((len(sizes_S), max(map(len, columns_of.values()))), dtype=np.int64)
    there_SC = np.zeros(columns_SC.shape, dtype=np.bool_)
    for size, columns_C in columns_of.items():
        of_size = sizes_S == size
        columns_SC[of_size, : len(columns_C)] = columns_C
        there_SC[of_size, : len(columns_C)] = True
    return columns_SC, there_SC


def _control_columns(size: int, topk: int, rng: np.random.Generator) -> Indices:
    """Random indices for all segments of a size. They are their own residues: a polynomial says the same at an index and at
    its residue, so those below every modulus are as good as any."""
    limit = min(size, modulus_floor(topk))
    wanted = _CANDIDATES_OF_FEW if size < 64 * topk else _CANDIDATES
    return rng.choice(limit, min(limit, wanted), replace=False)


def check_collisions(count_S: Column, moduli_S: Column, places: Sequence[Place], topk: int) -> None:
    """The prover's indices are distinct under its modulus. Ours may differ from them in a few places, so a few of ours
    may coincide without anybody's fault; more than an eighth cannot."""
    for s in np.flatnonzero(count_S > max(1, topk // 8)).tolist():
        row, segment = places[s]
        raise ProofError(
            f"segment {segment}: modulus {int(moduli_S[s])} merges {int(count_S[s])} of {topk} indices", row
        )
