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
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.toploc import device
from shoal.toploc.field import PRIME, evaluate, evaluate_everywhere
from shoal.toploc.points import best_points, compare_points, control_hits, usable_controls
from shoal.toploc.proof import check_format, collisions, num_segments, unpack
from shoal.toploc.search import Indices
from shoal.toploc.segments import (
    BATCH,
    Bits,
    Place,
    SegmentBatch,
    SegmentCheck,
    batches,
    candidate_points,
    check_collisions,
    check_states,
    control_columns,
    padded_batches,
    segment_checks,
    stack_padded,
)


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


class _SegmentPoints(NamedTuple):
    """What a check needs of the states of some segments."""

    places: list[Place]
    sizes_S: Indices
    lines_SK: Bits
    """The proofs: modulus and coefficients."""
    indices_SW: Indices
    num_S: Indices
    true_SW: Bits
    last_S: Bits
    """The K-th largest magnitude."""
    hits_S: Indices
    controls_S: Indices


def _gather_points(
    batch: SegmentBatch, lines_SK: Bits, topk: int, rng: np.random.Generator
) -> _SegmentPoints:
    columns_C = control_columns(batch.num_values, topk, rng)
    claimed_SC = evaluate_everywhere(lines_SK[:, 1:], columns_C)
    candidates, true_SW, control_SC = candidate_points(batch, topk, columns_C)
    is_point_SW = np.arange(true_SW.shape[1]) < candidates.num_S[:, None]
    last_S = np.where(is_point_SW, true_SW & 0x7FFF, np.uint16(0x7FFF)).min(axis=1)
    control = _words(control_SC)
    usable_SC = usable_controls(control, _words(last_S)[:, None])
    hits_S = control_hits(
        _words(claimed_SC), control, usable_SC, _words(true_SW), torch.from_numpy(is_point_SW)
    )
    return _SegmentPoints(
        places=batch.places,
        sizes_S=batch.host_sizes,
        lines_SK=lines_SK,
        indices_SW=candidates.indices_SW,
        num_S=candidates.num_S,
        true_SW=true_SW,
        last_S=last_S,
        hits_S=hits_S.numpy(),
        controls_S=usable_SC.sum(1).numpy(),
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
    places, *columns = zip(*parts, strict=True)
    arrays = (stack_padded(one) if one[0].ndim == 2 else np.concatenate(one) for one in columns)
    return _SegmentPoints(list(chain(*places)), *arrays)


def _check(points: _SegmentPoints, topk: int) -> list[SegmentCheck]:
    moduli_S = points.lines_SK[:, 0].astype(np.int64)
    indices_SK = points.indices_SW[:, :topk]
    if moduli_S.min() < PRIME or indices_SK.max() >= PRIME:  # smaller indices are their own residues
        check_collisions(collisions(indices_SK, moduli_S), moduli_S, points.places, topk)
    coefficients_SK = points.lines_SK[:, 1:]
    claimed_SW = evaluate(coefficients_SK, points.indices_SW % moduli_S[:, None])
    is_point_SW = torch.from_numpy(np.arange(claimed_SW.shape[1]) < points.num_S[:, None])
    last_S1 = _words(points.last_S)[:, None]
    rank_SK = best_points(_words(claimed_SW), _words(points.true_SW), is_point_SW, last_S1)[:, :topk]
    columns = (
        points.sizes_S,
        *(column.numpy() for column in compare_points(rank_SK)),
        points.hits_S,
        points.controls_S,
        np.count_nonzero(coefficients_SK[:, 1:], axis=1) == 0,
    )
    return segment_checks(columns, topk)


def _words(bits: Bits) -> Tensor:
    """Returns bit patterns as points.py needs them: torch computes little with 16 bits without sign."""
    return torch.from_numpy(bits.astype(np.int32))
