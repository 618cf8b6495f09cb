"""What proofs say about states, segment by segment, in numbers. Deciding what the numbers mean is the caller's.

top-k points    the polynomial at the verifier's own top-k indices against the verifier's own values
control points  the polynomial at random indices with small values, which no honest prover commits to: there an
                honest polynomial is noise, and one that was made up to fit everywhere gives itself away
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere
from shoal.toploc.proof import MODULUS_FLOOR, ProofError, check_format, collisions, num_segments, unpack
from shoal.toploc.segments import Bits, SegmentBatch, batches, top_points

NO_MATCH = 2.0**64
"""Mantissa error of a segment in which no exponent matches; the published value."""
MANTISSA_BOUND = 8
MAX_CONTROLS = 128
_CANDIDATES = 192
"""Of which enough are small: most values of a segment are below half of its largest percent."""
_CANDIDATES_OF_FEW = 512
"""The same where the top-k are more than a percent and a half."""

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


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
    firsts = np.cumsum([0, *(num_segments(len(states), segment_tokens) for states in states_list)])
    lines_SK = np.concatenate([unpack(proof, topk) for proof in proofs]) if proofs else None
    rng = np.random.default_rng(control_seed)
    found: dict[tuple[int, int], SegmentCheck] = {}
    for batch in batches(states_list, segment_tokens=segment_tokens):
        assert lines_SK is not None, "no rows, no batches"
        chosen_SK = lines_SK[[firsts[row] + segment for row, segment in batch.places]]
        found.update(zip(batch.places, _check_batch(batch, chosen_SK, topk, rng), strict=True))
    return [
        [found[row, segment] for segment in range(num_segments(len(states), segment_tokens))]
        for row, states in enumerate(states_list)
    ]


def _check_batch(
    batch: SegmentBatch, lines_SK: Bits, topk: int, rng: np.random.Generator
) -> list[SegmentCheck]:
    columns_C = _control_columns(batch.num_values, topk, rng)
    top_SK, true_SK, control_true_SC = top_points(batch, topk, columns_C)
    moduli_S = lines_SK[:, 0].astype(np.int64)
    _check_moduli(top_SK, moduli_S, batch.places, topk)
    usable_SC = _usable(control_true_SC, true_SK)

    coefficients_SK = lines_SK[:, 1:]
    claimed_SK = evaluate(coefficients_SK, top_SK % moduli_S[:, None])
    control_claimed_SC = evaluate_everywhere(coefficients_SK, columns_C)
    columns = (
        *_compare(claimed_SK, true_SK),
        _control_hits(control_claimed_SC, control_true_SC, usable_SC, true_SK),
        usable_SC.sum(axis=1),
        ~coefficients_SK[:, 1:].any(axis=1) & (topk > 1),
    )
    return [
        SegmentCheck(
            num_values=batch.num_values,
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
        for mismatches, mean, median, bounded, signs, hits, num_controls, constant in zip(
            *(column.tolist() for column in columns), strict=True
        )
    ]


def _check_moduli(
    indices_SK: npt.NDArray[np.int64],
    moduli_S: npt.NDArray[np.int64],
    places: list[tuple[int, int]],
    topk: int,
) -> None:
    # The prover's indices are distinct under its modulus. Ours may differ from them in a few places, so a few of ours
    # may coincide without anybody's fault; more than an eighth cannot.
    if moduli_S.min() == PRIME and indices_SK.max() < PRIME:
        return
    count_S = collisions(indices_SK, moduli_S)
    for s in np.flatnonzero(count_S > max(1, topk // 8)):
        row, segment = places[s]
        raise ProofError(
            f"segment {segment}: modulus {moduli_S[s]} merges {count_S[s]} of {topk} indices", row
        )


def _control_columns(size: int, topk: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Random indices, the same for a whole batch. All are their own residues: a polynomial says the same at an index and at
    its residue, so those below every modulus are as good as any."""
    few = size < 64 * topk
    limit = min(size, MODULUS_FLOOR)
    return rng.choice(limit, min(limit, _CANDIDATES_OF_FEW if few else _CANDIDATES), replace=False)


def _usable(control_true_SC: Bits, true_SK: Bits) -> Mask:
    """Up to MAX_CONTROLS of a segment's candidates: the first of at most half the smallest top-k magnitude.

    Half, because the prover's hardware may have ordered near-equal values otherwise; nothing moves by a factor of two.
    """
    # One exponent step is a factor of two, and without the sign bit patterns order as magnitudes do.
    smallest_S = (true_SK & 0x7FFF).min(axis=1)
    bar_S = np.maximum(smallest_S, 0x80) - np.uint16(0x80)
    small_SC: Mask = np.less_equal(control_true_SC & 0x7FFF, bar_S[:, None])
    return small_SC & (np.cumsum(small_SC, axis=1, dtype=np.uint16) <= MAX_CONTROLS)


def _compare(
    claimed_SK: Bits, true_SK: Bits
) -> tuple[npt.NDArray[np.int64], Floats, Floats, Floats, npt.NDArray[np.int64]]:
    """Exponents that differ; mean, upper median and bounded mean of the mantissa error; signs that differ."""
    differ_SK = claimed_SK ^ true_SK
    agree_SK = (differ_SK & 0x7F80) == 0
    num_S = agree_SK.sum(axis=1)
    claimed_mantissa_SK, mantissa_SK = claimed_SK & 0x7F, true_SK & 0x7F
    error_SK = np.maximum(claimed_mantissa_SK, mantissa_SK) - np.minimum(claimed_mantissa_SK, mantissa_SK)
    agreeing_SK = error_SK * agree_SK
    divisor_S = np.maximum(num_S, 1)
    mean_S = np.where(num_S > 0, agreeing_SK.sum(axis=1) / divisor_S, NO_MATCH)
    bounded_S = np.where(
        num_S > 0, np.minimum(agreeing_SK, MANTISSA_BOUND).sum(axis=1) / divisor_S, MANTISSA_BOUND
    )
    # Disagreeing points sort behind all others, so element n // 2 is the upper median of the n that agree.
    sorted_SK = np.sort(np.where(agree_SK, error_SK, np.uint16(0xFFFF)), axis=1)
    middle_S = np.minimum(num_S // 2, sorted_SK.shape[1] - 1)
    median_S = np.where(num_S > 0, sorted_SK[np.arange(len(sorted_SK)), middle_S].astype(np.float64), NO_MATCH)
    signs_S = (agree_SK & (differ_SK >= 0x8000)).sum(axis=1)
    return agree_SK.shape[1] - num_S, mean_S, median_S, bounded_S, signs_S


def _control_hits(claimed_SC: Bits, true_SC: Bits, usable_SC: Mask, top_SK: Bits) -> npt.NDArray[np.int64]:
    among_top_SE = np.zeros((len(top_SK), 256), dtype=np.bool_)
    lines_S1 = np.arange(len(top_SK))[:, None]
    among_top_SE[lines_S1, _exponents(top_SK)] = True
    plausible_SC = among_top_SE[lines_S1, _exponents(claimed_SC)]
    right_SC = ((claimed_SC ^ true_SC) & 0x7F80) == 0
    hits_S: npt.NDArray[np.int64] = (usable_SC & (plausible_SC | right_SC)).sum(axis=1)
    return hits_S


def _exponents(bits: Bits) -> npt.NDArray[np.int64]:
    return ((bits & 0x7F80) >> 7).astype(np.int64)
