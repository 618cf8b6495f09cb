"""What proofs say about states, segment by segment, in numbers. Deciding what the numbers mean is the caller's.

top-k points    the polynomial at the verifier's own top-k indices against the verifier's own values
control points  the polynomial at random indices with small values, which no honest prover commits to: there an
                honest polynomial is noise, and one that was made up to fit everywhere gives itself away

Several values are often equal to the K-th largest, and which of them a prover committed to is its hardware's affair. So the polynomial
is compared at all of them, and of those at the last place the ones that it knows best count.

S segments, K top-k, W values that could be among them, C control points.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.toploc.device import Fetched, Limits, check_on_device
from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere
from shoal.toploc.proof import MODULUS_FLOOR, ProofError, check_format, collisions, num_segments, unpack
from shoal.toploc.search import Indices
from shoal.toploc.segments import (
    BATCH,
    Bits,
    Place,
    SegmentBatch,
    batches,
    check_size,
    contender_points,
    padded_batches,
    side_by_side,
    unprovable,
)

NO_MATCH = 2.0**64
"""Mantissa error of a segment in which no exponent matches; the published value."""
MANTISSA_BOUND = 8
MAX_CONTROLS = 128
_CANDIDATES, _CANDIDATES_OF_FEW = 192, 512
"""Nearly all of a full segment's values are small enough, and less than half of a short one's."""

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

# How a point is ranked: the best come first, points above the last place before points at it.
_AT_LAST_PLACE, _NO_POINT = np.uint32(1 << 16), np.uint32(1 << 17)
_WRONG_EXPONENT, _WRONG_SIGN = np.uint32(1 << 8), np.uint32(1 << 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCheck:
    """One segment. The published statistics are the exponents that differ among the top-k, and over those that agree
    the mean and (upper) median of |mantissa - mantissa|, in units of 2^-7."""

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


def verify_proofs(
    proofs: Sequence[bytes],
    states_list: Sequence[Tensor],
    *,
    topk: int = 128,
    segment_tokens: int = 32,
    control_seed: int,
) -> list[list[SegmentCheck]]:
    """For each row the check of each segment. ProofError names the first row whose bytes cannot be a proof of its states.

    `control_seed` picks the control points; a prover must not know it.
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
    """The same in two steps: on a device everything is queued, and `checks()` waits for it. On a CPU `checks()` does all."""
    hidden_sizes = {states.shape[-1] for states in states_list}
    if len(hidden_sizes) > 1:
        raise ValueError(f"rows have different hidden sizes {sorted(hidden_sizes)}; verify them apart")
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
    start = _start_on_device if on_device else _start
    return Verification(counts, start(chosen, topk, np.random.default_rng(control_seed)))


class Verification:
    """One that was begun."""

    def __init__(self, counts: Sequence[int], find: Callable[[], dict[Place, SegmentCheck]]) -> None:
        self._counts, self._find = counts, find

    def checks(self) -> list[list[SegmentCheck]]:
        """As verify_proofs gives and raises them."""
        found = self._find()
        return [[found[row, segment] for segment in range(count)] for row, count in enumerate(self._counts)]


Chosen = Iterable[tuple[SegmentBatch, Bits]]
"""Segments and their lines."""


def _start(chosen: Chosen, topk: int, rng: np.random.Generator) -> Callable[[], dict[Place, SegmentCheck]]:
    return partial(_find, chosen, topk, rng)


def _find(chosen: Chosen, topk: int, rng: np.random.Generator) -> dict[Place, SegmentCheck]:
    found: dict[Place, SegmentCheck] = {}
    for look in _together(_look(batch, lines_SK, topk, rng) for batch, lines_SK in chosen):
        found.update(zip(look.places, _check(look, topk), strict=True))
    return found


def _start_on_device(
    chosen: Chosen, topk: int, rng: np.random.Generator
) -> Callable[[], dict[Place, SegmentCheck]]:
    places: list[Place] = []
    tables: list[Tensor] = []
    for batch, lines_SK in chosen:
        check_size(batch, topk)
        controls = _controls(batch.host_sizes, topk, rng)
        limits = Limits(MAX_CONTROLS, MANTISSA_BOUND, NO_MATCH)
        tables.append(check_on_device(batch, lines_SK, controls, topk=topk, limits=limits))
        places += batch.places
    fetched = Fetched(torch.cat(tables, dim=1)) if tables else None
    return partial(_find_on_device, places, fetched, topk)


def _find_on_device(places: list[Place], fetched: Fetched | None, topk: int) -> dict[Place, SegmentCheck]:
    if fetched is None:
        return {}
    table: Floats = fetched.wait().numpy()
    _check_device_table(table, places, topk)
    wrong, signs, hits, controls = (table[place].astype(np.int64) for place in (1, 5, 6, 7))
    columns = (table[0].astype(np.int64), wrong, *table[2:5], signs, hits, controls, table[8] > 0)
    return {
        place: SegmentCheck(
            num_values=size,
            num_points=topk,
            exponent_mismatches=mismatches,
            mantissa_mean=mean,
            mantissa_median=median,
            mantissa_bounded=bounded,
            sign_mismatches=signs,
            control_hits=hits,
            num_controls=num_controls,
            constant=constant and topk > 1,
        )
        for place, size, mismatches, mean, median, bounded, signs, hits, num_controls, constant in zip(
            places, *(column.tolist() for column in columns), strict=True
        )
    }


def _check_device_table(table: Floats, places: list[Place], topk: int) -> None:
    """What contender_points and _check_moduli refuse."""
    largest_S, collisions_S, moduli_S = table[9:]
    for s in np.flatnonzero(~np.isfinite(largest_S) | (largest_S == 0)):
        raise unprovable(places[s], all_zero=largest_S[s] == 0)
    for s in np.flatnonzero(collisions_S > max(1, topk // 8)):
        raise _merging(places[s], int(moduli_S[s]), int(collisions_S[s]), topk)


def _controls(sizes_S: Indices, topk: int, rng: np.random.Generator) -> tuple[Indices, Mask]:
    """[S, C] control points of each segment, and which of them there are: fewer for some sizes."""
    columns_of = {int(size): _control_columns(size, topk, rng) for size in np.unique(sizes_S)}
    columns_SC = np.zeros((len(sizes_S), max(map(len, columns_of.values()))), dtype=np.int64)
    there_SC = np.zeros(columns_SC.shape, dtype=np.bool_)
    for size, columns_C in columns_of.items():
        of_size = sizes_S == size
        columns_SC[of_size, : len(columns_C)] = columns_C
        there_SC[of_size, : len(columns_C)] = True
    return columns_SC, there_SC


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
    columns_SC, there_SC = _controls(sizes_S, topk, rng)
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
        ~coefficients_SK[:, 1:].any(axis=1) & (topk > 1),
    )
    return [
        SegmentCheck(
            num_values=size,
            num_points=topk,
            exponent_mismatches=mismatches,
            mantissa_mean=mean,
            mantissa_median=median,
            mantissa_bounded=bounded,
            sign_mismatches=signs,
            control_hits=hits,
            num_controls=num_controls,
            constant=constant,
        )
        for size, mismatches, mean, median, bounded, signs, hits, num_controls, constant in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _check_moduli(indices_SK: Indices, moduli_S: Indices, places: list[Place], topk: int) -> None:
    # The prover's indices are distinct under its modulus. Ours may differ from them in a few places, so a few of ours
    # may coincide without anybody's fault; more than an eighth cannot.
    if moduli_S.min() == PRIME and indices_SK.max() < PRIME:
        return
    count_S = collisions(indices_SK, moduli_S)
    for s in np.flatnonzero(count_S > max(1, topk // 8)):
        raise _merging(places[s], moduli_S[s], count_S[s], topk)


def _merging(place: Place, modulus: int, count: int, topk: int) -> ProofError:
    row, segment = place
    return ProofError(f"segment {segment}: modulus {modulus} merges {count} of {topk} indices", row)


def _control_columns(size: int, topk: int, rng: np.random.Generator) -> Indices:
    """Random indices for all segments of a size. They are their own residues: a polynomial says the same at an index and at
    its residue, so those below every modulus are as good as any."""
    limit = min(size, MODULUS_FLOOR)
    wanted = _CANDIDATES_OF_FEW if size < 64 * topk else _CANDIDATES
    return rng.choice(limit, min(limit, wanted), replace=False)


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
    rank_SW += _WRONG_SIGN * (differ_SW >= 0x8000)
    rank_SW += _WRONG_EXPONENT * ((differ_SW & 0x7F80) != 0)
    rank_SW += _AT_LAST_PLACE * at_last_SW
    rank_SW[~is_point_SW] = _NO_POINT
    best_SK: npt.NDArray[np.uint32] = np.sort(rank_SW, axis=1)[:, :topk]
    return best_SK


def _compare(
    rank_SK: npt.NDArray[np.uint32],
) -> tuple[Indices, Floats, Floats, Floats, Indices]:
    """Exponents that differ; mean, upper median and bounded mean of the mantissa error; signs that differ."""
    agree_SK = (rank_SK & _WRONG_EXPONENT) == 0
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
    signs_S = (agree_SK & ((rank_SK & _WRONG_SIGN) != 0)).sum(axis=1)
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
