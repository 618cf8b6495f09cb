"""Checks of segments whose states are in the host's memory, in NumPy.

Several values are often equal to the K-th largest, and which of them a prover committed to is its hardware's affair. So the polynomial
is compared at all of them, and of those at the last place the ones that it knows best count.

S segments, K top-k, W values that could be among them, C control points.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere
from shoal.toploc.proof import collisions
from shoal.toploc.search import Indices
from shoal.toploc.segment_check import (
    AT_LAST_PLACE,
    MANTISSA_BOUND,
    MAX_CONTROLS,
    NO_MATCH,
    NO_POINT,
    WRONG_EXPONENT,
    WRONG_SIGN,
    Mask,
    SegmentCheck,
    check_collisions,
    control_points,
    segment_checks,
)
from shoal.toploc.segments import BATCH, Bits, Place, SegmentBatch, contender_points, side_by_side

Floats = npt.NDArray[np.float64]


def find(
    chosen: Iterable[tuple[SegmentBatch, Bits]], topk: int, rng: np.random.Generator
) -> dict[Place, SegmentCheck]:
    """Of segments and their lines."""
    found: dict[Place, SegmentCheck] = {}
    for look in _together(_look(batch, lines_SK, topk, rng) for batch, lines_SK in chosen):
        found.update(zip(look.places, _check(look, topk), strict=True))
    return found


@dataclass(frozen=True, slots=True)
class _Look:
    """Segments with all that is needed of their states."""

    places: list[Place]
    sizes_S: Indices
    lines_SK: Bits
    """Their proofs: modulus and coefficients."""
    indices_SW: Indices
    num_S: Indices
    true_SW: Bits
    hits_S: Indices
    controls_S: Indices


def _look(batch: SegmentBatch, lines_SK: Bits, topk: int, rng: np.random.Generator) -> _Look:
    sizes_S = batch.host_sizes
    columns_SC, there_SC = control_points(sizes_S, topk, rng)
    claimed_SC = np.zeros(columns_SC.shape, dtype=np.uint16)
    for size in np.unique(sizes_S):
        of_size = sizes_S == size
        columns_C = columns_SC[of_size][0][there_SC[of_size][0]]
        claimed_SC[of_size, : len(columns_C)] = evaluate_everywhere(lines_SK[of_size, 1:], columns_C)
    contenders, true_SW, control_SC = contender_points(batch, topk, columns_SC)
    is_point_SW = np.arange(true_SW.shape[1]) < contenders.num_S[:, None]
    usable_SC = _usable(control_SC, there_SC, _last_place(true_SW, is_point_SW))
    return _Look(
        places=batch.places,
        sizes_S=sizes_S,
        lines_SK=lines_SK,
        indices_SW=contenders.indices_SW,
        num_S=contenders.num_S,
        true_SW=true_SW,
        hits_S=_control_hits(
            claimed_SC, control_SC, usable_SC, np.where(is_point_SW, true_SW, true_SW[:, :1])
        ),
        controls_S=usable_SC.sum(axis=1),
    )


def _together(looks: Iterable[_Look]) -> Iterator[_Look]:
    """BATCH segments or more at a time, of all sizes: what follows asks for no equal ones."""
    waiting: list[_Look] = []
    for look in looks:
        waiting.append(look)
        if sum(len(one.places) for one in waiting) >= BATCH:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(looks: list[_Look]) -> _Look:
    if len(looks) == 1:
        return looks[0]
    return _Look(
        places=[place for look in looks for place in look.places],
        sizes_S=np.concatenate([look.sizes_S for look in looks]),
        lines_SK=np.concatenate([look.lines_SK for look in looks]),
        indices_SW=side_by_side([look.indices_SW for look in looks]),
        num_S=np.concatenate([look.num_S for look in looks]),
        true_SW=side_by_side([look.true_SW for look in looks]),
        hits_S=np.concatenate([look.hits_S for look in looks]),
        controls_S=np.concatenate([look.controls_S for look in looks]),
    )


def _check(look: _Look, topk: int) -> list[SegmentCheck]:
    moduli_S = look.lines_SK[:, 0].astype(np.int64)
    _check_moduli(look.indices_SW[:, :topk], moduli_S, look.places, topk)
    coefficients_SK = look.lines_SK[:, 1:]
    claimed_SW = evaluate(coefficients_SK, look.indices_SW % moduli_S[:, None])
    columns = (
        look.sizes_S,
        *_compare(_best(claimed_SW, look.true_SW, look.num_S, topk)),
        look.hits_S,
        look.controls_S,
        np.count_nonzero(coefficients_SK[:, 1:], axis=1) == 0,
    )
    return segment_checks(columns, topk)


def _check_moduli(indices_SK: Indices, moduli_S: Indices, places: list[Place], topk: int) -> None:
    if moduli_S.min() == PRIME and indices_SK.max() < PRIME:
        return
    check_collisions(collisions(indices_SK, moduli_S), moduli_S, places, topk)


def _last_place(true_SW: Bits, is_point_SW: Mask) -> Bits:
    """The K-th largest magnitude of each segment, as a bit pattern."""
    last_S: Bits = np.where(is_point_SW, true_SW & 0x7FFF, np.uint16(0x7FFF)).min(axis=1)
    return last_S


def _usable(control_SC: Bits, there_SC: Mask, last_S: Bits) -> Mask:
    """Up to MAX_CONTROLS of a segment's candidates: the first of at most half the smallest top-k magnitude.

    Half, because the prover's hardware may have ordered near-equal values otherwise; nothing moves by a factor of two.
    """
    # One exponent step is a factor of two, and without the sign bit patterns order as magnitudes do.
    bar_S = np.maximum(last_S, 0x80) - np.uint16(0x80)
    small_SC: Mask = there_SC & ((control_SC & 0x7FFF) <= bar_S[:, None])
    return small_SC & (np.cumsum(small_SC, axis=1, dtype=np.uint16) <= MAX_CONTROLS)


def _best(claimed_SW: Bits, true_SW: Bits, num_S: Indices, topk: int) -> npt.NDArray[np.uint32]:
    """[S, K] what is wrong with each point, as one number: exponent, sign, mantissa error; the best ones at the last place."""
    is_point_SW = np.arange(true_SW.shape[1]) < num_S[:, None]
    at_last_SW = (true_SW & 0x7FFF) == _last_place(true_SW, is_point_SW)[:, None]
    differ_SW = claimed_SW ^ true_SW
    claimed_mantissa_SW, mantissa_SW = claimed_SW & 0x7F, true_SW & 0x7F
    rank_SW = np.maximum(claimed_mantissa_SW, mantissa_SW) - np.minimum(claimed_mantissa_SW, mantissa_SW)
    rank_SW = rank_SW.astype(np.uint32)
    rank_SW += np.uint32(WRONG_SIGN) * (differ_SW >= 0x8000)
    rank_SW += np.uint32(WRONG_EXPONENT) * ((differ_SW & 0x7F80) != 0)
    rank_SW += np.uint32(AT_LAST_PLACE) * at_last_SW
    rank_SW[~is_point_SW] = NO_POINT
    best_SK: npt.NDArray[np.uint32] = np.sort(rank_SW, axis=1)[:, :topk]
    return best_SK


def _compare(
    rank_SK: npt.NDArray[np.uint32],
) -> tuple[Indices, Floats, Floats, Floats, Indices]:
    """Exponents that differ; mean, upper median and bounded mean of the mantissa error; signs that differ."""
    agree_SK = (rank_SK & WRONG_EXPONENT) == 0
    num_S = agree_SK.sum(axis=1)
    error_SK = (rank_SK & 0x7F).astype(np.uint16)
    agreeing_SK = error_SK * agree_SK
    divisor_S = np.maximum(num_S, 1)
    mean_S = np.where(num_S > 0, agreeing_SK.sum(axis=1) / divisor_S, NO_MATCH)
    bounded_S = np.where(
        num_S > 0, np.minimum(agreeing_SK, MANTISSA_BOUND).sum(axis=1) / divisor_S, MANTISSA_BOUND
    )
    # Disagreeing points sort behind all others, so element n // 2 is the upper median of the n that agree.
    sorted_SK = np.sort(np.where(agree_SK, error_SK, np.uint16(0xFFFF)), axis=1)
    middle_S = np.minimum(num_S // 2, sorted_SK.shape[1] - 1)
    median_S = np.where(
        num_S > 0, sorted_SK[np.arange(len(sorted_SK)), middle_S].astype(np.float64), NO_MATCH
    )
    signs_S = (agree_SK & ((rank_SK & WRONG_SIGN) != 0)).sum(axis=1)
    return agree_SK.shape[1] - num_S, mean_S, median_S, bounded_S, signs_S


def _control_hits(claimed_SC: Bits, true_SC: Bits, usable_SC: Mask, top_SW: Bits) -> Indices:
    among_top_SE = np.zeros((len(top_SW), 256), dtype=np.bool_)
    lines_S1 = np.arange(len(top_SW))[:, None]
    among_top_SE[lines_S1, _exponents(top_SW)] = True
    plausible_SC = among_top_SE[lines_S1, _exponents(claimed_SC)]
    right_SC = ((claimed_SC ^ true_SC) & 0x7F80) == 0
    hits_S: Indices = (usable_SC & (plausible_SC | right_SC)).sum(axis=1)
    return hits_S


def _exponents(bits: Bits) -> Indices:
    return ((bits & 0x7F80) >> 7).astype(np.int64)
