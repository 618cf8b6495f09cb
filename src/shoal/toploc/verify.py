"""Compares proofs with states and returns statistics per segment. The caller decides what they mean.

top-k points    the polynomial at the verifier's own top-k indices, compared with the verifier's own values
control points  the polynomial at random indices with small values, which no honest prover commits to. There an honest
                polynomial is noise; one that was made to fit everywhere hits far too often

States in host memory are checked here in NumPy, states on a device by device.py with tensor operations.

Several values are often equal to the K-th largest, and which of them a prover committed to depends on its hardware. So the
polynomial is compared at all of them, and the ones with the smallest error count.

S segments, K top-k, W candidates for the top-k, C control points.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shoal.toploc import device
from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere
from shoal.toploc.proof import check_format, collisions, num_segments, unpack
from shoal.toploc.search import Indices
from shoal.toploc.segments import (
    AT_LAST_PLACE,
    BATCH,
    MANTISSA_BOUND,
    MAX_CONTROLS,
    NO_MATCH,
    NO_POINT,
    WRONG_EXPONENT,
    WRONG_SIGN,
    Bits,
    Mask,
    Place,
    SegmentBatch,
    SegmentCheck,
    batches,
    candidate_points,
    check_collisions,
    check_states,
    control_points,
    padded_batches,
    segment_checks,
    stack_padded,
)

Floats = npt.NDArray[np.float64]


def verify_proofs(
    proofs: Sequence[bytes],
    states_list: Sequence[Tensor],
    *,
    topk: int = 128,
    segment_tokens: int = 32,
    control_seed: int,
) -> list[list[SegmentCheck]]:
    """Returns for each row the check of each segment. Raises ProofError for the first row whose bytes cannot be its proof.

    `control_seed` selects the control points; a prover must not know it.
    """
    return start_verifying(
        proofs, states_list, topk=topk, segment_tokens=segment_tokens, control_seed=control_seed
    ).checks()


def start_verifying(
    proofs: Sequence[bytes],
    states_list: Sequence[Tensor],
    *,
    topk: int = 128,
    segment_tokens: int = 32,
    control_seed: int,
) -> "Verification":
    """Starts `verify_proofs`. On a device the work is queued and `checks()` waits for it; on a CPU `checks()` does it."""
    for row, states in enumerate(states_list):
        check_states(states, row)
    hidden_sizes = {states.shape[-1] for states in states_list}
    if len(hidden_sizes) > 1:
        raise ValueError(f"rows have different hidden sizes {sorted(hidden_sizes)}; verify them separately")
    check_format(
        proofs,
        [len(states) for states in states_list],
        hidden_size=hidden_sizes.pop() if hidden_sizes else 0,
        topk=topk,
        segment_tokens=segment_tokens,
    )
    counts = [num_segments(len(states), segment_tokens) for states in states_list]
    firsts = np.cumsum([0, *counts])
    lines_SK = np.concatenate(
        [np.empty((0, 1 + topk), np.uint16), *(unpack(proof, topk) for proof in proofs)]
    )
    on_device = bool(states_list) and states_list[0].device.type != "cpu"
    cut = padded_batches if on_device else batches
    chosen = (
        (batch, lines_SK[[firsts[row] + segment for row, segment in batch.places]])
        for batch in cut(states_list, segment_tokens=segment_tokens)
    )
    rng = np.random.default_rng(control_seed)
    find = device.start(chosen, topk, rng) if on_device else partial(_check_on_host, chosen, topk, rng)
    return Verification(counts, find)


class Verification:
    """A verification that was started."""

    def __init__(self, counts: Sequence[int], find: Callable[[], dict[Place, SegmentCheck]]) -> None:
        self._counts, self._find = counts, find

    def checks(self) -> list[list[SegmentCheck]]:
        """Returns or raises what `verify_proofs` does."""
        found = self._find()
        return [[found[row, segment] for segment in range(count)] for row, count in enumerate(self._counts)]


def _check_on_host(
    chosen: Iterable[tuple[SegmentBatch, Bits]], topk: int, rng: np.random.Generator
) -> dict[Place, SegmentCheck]:
    """Checks segments with their proofs (modulus and coefficients)."""
    found: dict[Place, SegmentCheck] = {}
    for points in _group(_gather_points(batch, lines_SK, topk, rng) for batch, lines_SK in chosen):
        found.update(zip(points.places, _check(points, topk), strict=True))
    return found


@dataclass(frozen=True, slots=True)
class _SegmentPoints:
    """What a check needs of the states of some segments."""

    places: list[Place]
    sizes_S: Indices
    lines_SK: Bits
    """The proofs: modulus and coefficients."""
    indices_SW: Indices
    num_S: Indices
    true_SW: Bits
    hits_S: Indices
    controls_S: Indices


def _gather_points(
    batch: SegmentBatch, lines_SK: Bits, topk: int, rng: np.random.Generator
) -> _SegmentPoints:
    sizes_S = batch.host_sizes
    columns_SC, valid_SC = control_points(sizes_S, topk, rng)
    claimed_SC = np.zeros(columns_SC.shape, dtype=np.uint16)
    for size in np.unique(sizes_S):
        of_size = sizes_S == size
        columns_C = columns_SC[of_size][0][valid_SC[of_size][0]]
        claimed_SC[of_size, : len(columns_C)] = evaluate_everywhere(lines_SK[of_size, 1:], columns_C)
    candidates, true_SW, control_SC = candidate_points(batch, topk, columns_SC)
    is_point_SW = np.arange(true_SW.shape[1]) < candidates.num_S[:, None]
    usable_SC = _usable(control_SC, valid_SC, _last_place(true_SW, is_point_SW))
    return _SegmentPoints(
        places=batch.places,
        sizes_S=sizes_S,
        lines_SK=lines_SK,
        indices_SW=candidates.indices_SW,
        num_S=candidates.num_S,
        true_SW=true_SW,
        hits_S=_control_hits(
            claimed_SC, control_SC, usable_SC, np.where(is_point_SW, true_SW, true_SW[:, :1])
        ),
        controls_S=usable_SC.sum(axis=1),
    )


def _group(points: Iterable[_SegmentPoints]) -> Iterator[_SegmentPoints]:
    """Joins points of all sizes to BATCH segments or more: the steps after this do not need equal sizes."""
    waiting: list[_SegmentPoints] = []
    for one in points:
        waiting.append(one)
        if sum(len(group.places) for group in waiting) >= BATCH:
            yield _joined(waiting)
            waiting = []
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[_SegmentPoints]) -> _SegmentPoints:
    if len(parts) == 1:
        return parts[0]
    return _SegmentPoints(
        places=[place for part in parts for place in part.places],
        sizes_S=np.concatenate([part.sizes_S for part in parts]),
        lines_SK=np.concatenate([part.lines_SK for part in parts]),
        indices_SW=stack_padded([part.indices_SW for part in parts]),
        num_S=np.concatenate([part.num_S for part in parts]),
        true_SW=stack_padded([part.true_SW for part in parts]),
        hits_S=np.concatenate([part.hits_S for part in parts]),
        controls_S=np.concatenate([part.controls_S for part in parts]),
    )


def _check(points: _SegmentPoints, topk: int) -> list[SegmentCheck]:
    moduli_S = points.lines_SK[:, 0].astype(np.int64)
    _check_moduli(points.indices_SW[:, :topk], moduli_S, points.places, topk)
    coefficients_SK = points.lines_SK[:, 1:]
    claimed_SW = evaluate(coefficients_SK, points.indices_SW % moduli_S[:, None])
    columns = (
        points.sizes_S,
        *_compare(_best(claimed_SW, points.true_SW, points.num_S, topk)),
        points.hits_S,
        points.controls_S,
        np.count_nonzero(coefficients_SK[:, 1:], axis=1) == 0,
    )
    return segment_checks(columns, topk)


def _check_moduli(indices_SK: Indices, moduli_S: Indices, places: list[Place], topk: int) -> None:
    if moduli_S.min() == PRIME and indices_SK.max() < PRIME:
        return
    check_collisions(collisions(indices_SK, moduli_S), moduli_S, places, topk)


def _last_place(true_SW: Bits, is_point_SW: Mask) -> Bits:
    """Returns the K-th largest magnitude of each segment, as a bit pattern."""
    last_S: Bits = np.where(is_point_SW, true_SW & 0x7FFF, np.uint16(0x7FFF)).min(axis=1)
    return last_S


def _usable(control_SC: Bits, valid_SC: Mask, last_S: Bits) -> Mask:
    """Selects up to MAX_CONTROLS control points per segment, of at most half the smallest top-k magnitude.

    Half, because the prover's hardware may order near-equal values differently, but never by a factor of two.
    """
    # One exponent step is a factor of two, and bit patterns without the sign are ordered like magnitudes.
    bar_S = np.maximum(last_S, 0x80) - np.uint16(0x80)
    small_SC: Mask = valid_SC & ((control_SC & 0x7FFF) <= bar_S[:, None])
    return small_SC & (np.cumsum(small_SC, axis=1, dtype=np.uint16) <= MAX_CONTROLS)


def _best(claimed_SW: Bits, true_SW: Bits, num_S: Indices, topk: int) -> npt.NDArray[np.uint32]:
    """Returns the [S, K] best points, each ranked by one number made of exponent, sign and mantissa error."""
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
    """Returns exponent mismatches; mean, upper median and bounded mean of the mantissa error; sign mismatches."""
    agree_SK = (rank_SK & WRONG_EXPONENT) == 0
    num_S = agree_SK.sum(axis=1)
    error_SK = (rank_SK & 0x7F).astype(np.uint16)
    agreeing_SK = error_SK * agree_SK
    divisor_S = np.maximum(num_S, 1)
    mean_S = np.where(num_S > 0, agreeing_SK.sum(axis=1) / divisor_S, NO_MATCH)
    bounded_S = np.where(
        num_S > 0, np.minimum(agreeing_SK, MANTISSA_BOUND).sum(axis=1) / divisor_S, MANTISSA_BOUND
    )
    # Points that disagree are sorted last, so element n // 2 is the upper median of the n that agree.
    sorted_SK = np.sort(np.where(agree_SK, error_SK, np.uint16(0xFFFF)), axis=1)
    middle_S = np.minimum(num_S // 2, sorted_SK.shape[1] - 1)
    median_S = np.where(
        num_S > 0, sorted_SK[np.arange(len(sorted_SK)), middle_S].astype(np.float64), NO_MATCH
    )
    signs_S = (agree_SK & ((rank_SK & WRONG_SIGN) != 0)).sum(axis=1)
    return agree_SK.shape[1] - num_S, mean_S, median_S, bounded_S, signs_S


def _control_hits(claimed_SC: Bits, true_SC: Bits, usable_SC: Mask, top_SW: Bits) -> Indices:
    """Counts usable control points that claim the true exponent, or one found among the top-k."""
    among_top_SE = np.zeros((len(top_SW), 256), dtype=np.bool_)
    lines_S1 = np.arange(len(top_SW))[:, None]
    among_top_SE[lines_S1, _exponents(top_SW)] = True
    plausible_SC = among_top_SE[lines_S1, _exponents(claimed_SC)]
    right_SC = ((claimed_SC ^ true_SC) & 0x7F80) == 0
    hits_S: Indices = (usable_SC & (plausible_SC | right_SC)).sum(axis=1)
    return hits_S


def _exponents(bits: Bits) -> Indices:
    return ((bits & 0x7F80) >> 7).astype(np.int64)
