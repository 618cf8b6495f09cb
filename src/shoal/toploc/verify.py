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

from shoal.toploc.field import PRIME, Residues, evaluate
from shoal.toploc.proof import ProofError, check_format, collisions, num_segments, unpack
from shoal.toploc.segments import Bits, SegmentBatch, batches, bits_of_columns, top_points

NO_MATCH = 2.0**64
"""Mantissa error of a segment in which no exponent matches; the published value."""
MANTISSA_BOUND = 8
MAX_CONTROLS = 128
_CANDIDATES = 4 * MAX_CONTROLS

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
    tables = [unpack(proof, topk) for proof in proofs]
    rng = np.random.default_rng(control_seed)
    found: dict[tuple[int, int], SegmentCheck] = {}
    for batch in batches(states_list, segment_tokens=segment_tokens):
        lines_SK = np.stack([tables[row][segment] for row, segment in batch.places])
        found.update(zip(batch.places, _check_batch(batch, lines_SK, topk, rng), strict=True))
    return [
        [found[row, segment] for segment in range(num_segments(len(states), segment_tokens))]
        for row, states in enumerate(states_list)
    ]


def _check_batch(
    batch: SegmentBatch, lines_SK: Bits, topk: int, rng: np.random.Generator
) -> list[SegmentCheck]:
    top_SK, true_SK = top_points(batch, topk)
    moduli_S = lines_SK[:, 0].astype(np.int64)
    _check_moduli(top_SK, moduli_S, batch.places, topk)
    control_SC, control_true_SC, usable_SC = _controls(batch, true_SK, rng)

    points_SN = np.concatenate([top_SK, control_SC], axis=1) % moduli_S[:, None]
    claimed_SN = _evaluate(lines_SK[:, 1:], points_SN)
    claimed_SK, control_claimed_SC = claimed_SN[:, :topk], claimed_SN[:, topk:]
    mismatches_S, mean_S, median_S, bounded_S, signs_S = _compare(claimed_SK, true_SK)
    hits_S = _control_hits(control_claimed_SC, control_true_SC, usable_SC, true_SK)
    constant_S: Mask = np.logical_not(np.any(lines_SK[:, 2:], axis=1))
    return [
        SegmentCheck(
            num_values=batch.num_values,
            num_points=topk,
            exponent_mismatches=int(mismatches_S[s]),
            mantissa_mean=float(mean_S[s]),
            mantissa_median=float(median_S[s]),
            mantissa_bounded=float(bounded_S[s]),
            sign_mismatches=int(signs_S[s]),
            control_hits=int(hits_S[s]),
            num_controls=int(usable_SC[s].sum()),
            constant=bool(constant_S[s]) and topk > 1,
        )
        for s in range(len(batch.places))
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


def _controls(
    batch: SegmentBatch, true_SK: Bits, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], Bits, Mask]:
    """Indices, values and usability of control points: random ones of at most half the smallest top-k magnitude.

    Half, because the prover's hardware may have ordered near-equal values otherwise; nothing moves by a factor of two.
    """
    size = batch.num_values
    candidates = rng.choice(size, min(size, _CANDIDATES), replace=False)
    bits_SC = bits_of_columns(batch, candidates)
    # One exponent step is a factor of two, and without the sign bit patterns order as magnitudes do.
    bar_S = np.maximum((true_SK & 0x7FFF).min(axis=1).astype(np.int32) - 0x80, 0)
    usable_SC: Mask = np.less_equal(bits_SC & 0x7FFF, bar_S[:, None])
    order_SC = np.argsort(~usable_SC, axis=1, kind="stable")[:, :MAX_CONTROLS]
    return (
        candidates[order_SC],
        np.take_along_axis(bits_SC, order_SC, axis=1),
        np.take_along_axis(usable_SC, order_SC, axis=1),
    )


def _evaluate(coefficients_SK: Bits, points_SN: npt.NDArray[np.int64]) -> Bits:
    columns_KS: Residues = np.ascontiguousarray(coefficients_SK.T.astype(np.uint32))
    points_NS: Residues = np.ascontiguousarray(points_SN.T.astype(np.uint32))
    return evaluate(columns_KS, points_NS).T.astype(np.uint16)


def _compare(
    claimed_SK: Bits, true_SK: Bits
) -> tuple[npt.NDArray[np.int64], Floats, Floats, Floats, npt.NDArray[np.int64]]:
    """Exponents that differ; mean, upper median and bounded mean of the mantissa error; signs that differ."""
    agree_SK = _exponents(claimed_SK) == _exponents(true_SK)
    num_S = agree_SK.sum(axis=1)
    error_SK = np.abs((claimed_SK & 0x7F).astype(np.int64) - (true_SK & 0x7F).astype(np.int64))
    agreeing_SK = np.where(agree_SK, error_SK, 0)
    divisor_S = np.maximum(num_S, 1)
    mean_S = np.where(num_S > 0, agreeing_SK.sum(axis=1) / divisor_S, NO_MATCH)
    bounded_S = np.where(
        num_S > 0, np.minimum(agreeing_SK, MANTISSA_BOUND).sum(axis=1) / divisor_S, MANTISSA_BOUND
    )
    # Disagreeing points sort behind all others, so element n // 2 is the upper median of the n that agree.
    sorted_SK = np.sort(np.where(agree_SK, error_SK, 1 << 20), axis=1)
    middle_S = np.take_along_axis(sorted_SK, np.minimum(num_S // 2, sorted_SK.shape[1] - 1)[:, None], axis=1)[
        :, 0
    ]
    median_S = np.where(num_S > 0, middle_S.astype(np.float64), NO_MATCH)
    signs_S = (agree_SK & ((claimed_SK ^ true_SK) >> 15).astype(np.bool_)).sum(axis=1)
    return agree_SK.shape[1] - num_S, mean_S, median_S, bounded_S, signs_S


def _control_hits(claimed_SC: Bits, true_SC: Bits, usable_SC: Mask, top_SK: Bits) -> npt.NDArray[np.int64]:
    among_top_SE = np.zeros((len(top_SK), 256), dtype=np.bool_)
    np.put_along_axis(among_top_SE, _exponents(top_SK), True, axis=1)
    exponents_SC = _exponents(claimed_SC)
    plausible_SC = np.take_along_axis(among_top_SE, exponents_SC, axis=1)
    hits_S: npt.NDArray[np.int64] = (usable_SC & (plausible_SC | (exponents_SC == _exponents(true_SC)))).sum(
        axis=1
    )
    return hits_S


def _exponents(bits: Bits) -> npt.NDArray[np.int64]:
    return ((bits & 0x7F80) >> 7).astype(np.int64)
