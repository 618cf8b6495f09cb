"""Segments: splitting rows of states into them, their largest values, and the record of a segment's check.

    row 0   | 32 states | 32 states | 32 states | 7 |      runs: one of 3 segments, one of 1
    row 1   | 32 states | 20 |                             runs: two of 1

Segments of one size are stacked in tensors that fit in cache: a slice of a long row without copying, or several short rows.
A batch holds the tensors of up to BATCH segments.

S segments, N values per segment, K of them in the proof, W candidates for the top-k, C control points.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.packed_prefill import upload
from shoal.toploc.proof import ProofError, modulus_floor
from shoal.toploc.search import Candidates, Indices, TopSearch

Bits = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Column = npt.NDArray[Any]
Place = tuple[int, int]
"""Row, and index of the segment in the row."""

_Number = TypeVar("_Number", np.int64, np.uint16)

BATCH = 256
"""Segments that are processed together. The cost per call is small by then, and the tables still fit in cache."""
TENSOR_VALUES = 1 << 20
"""Most values in one tensor of segments, unless one segment has more. A larger tensor leaves the cache, and if it must be
copied together, page faults cost as much time as the search in it."""
DEVICE_VALUES = 1 << 27
"""Most values in one batch on a device, which holds them three times: 800 MB."""
DEVICE_SURPLUS = 64
"""Values after the top-k that are examined for ties on a device."""
NO_MATCH = 2.0**64
"""Mantissa error of a segment in which no exponent matches; the published value."""
MANTISSA_BOUND = 8
MAX_CONTROLS = 128
_NUM_DRAWN, _NUM_DRAWN_SHORT = 192, 512
"""Random indices drawn to find MAX_CONTROLS small values. Nearly all values of a full segment are small enough, and less
than half of a short segment's."""


class SegmentCheck(NamedTuple):
    """The statistics of one segment. A tuple is created fast: a check of 64 rows creates 2,048 of them while a device waits.

    The published statistics are the exponents that differ among the top-k and, over those that agree, the mean and (upper)
    median of |mantissa - mantissa|, in units of 2^-7.
    """

    num_values: int
    """Size of the segment: states times hidden size."""
    num_points: int
    """Points compared: the top-k."""
    exponent_mismatches: int
    mantissa_mean: float
    mantissa_median: float
    mantissa_bounded: float
    """The mean with every error limited to MANTISSA_BOUND. An index that only one side has in its top-k gives a random
    value, whose exponent may agree by chance while its mantissa is far off."""
    sign_mismatches: int
    """Points whose exponent agrees but whose sign differs."""
    control_hits: int
    """Control points where the proof claims the true exponent, or one found among the top-k. Noise hits (e + 1) / 256
    of them for e exponents among the top-k."""
    num_controls: int
    """Control points available, at most 128. A segment of one or two states may have few or none."""
    constant: bool
    """Whether the polynomial is a constant, which can be made without any states."""

    @property
    def wrong_points(self) -> int:
        """Exponent and sign mismatches. The published rule ignores signs, but honest noise never flips one."""
        return self.exponent_mismatches + self.sign_mismatches


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments of equal size, or padded to equal size."""

    places: list[Place]
    tensors: list[Tensor]
    """[S, N] bfloat16 each, flattened state after state, in the order of `places`."""
    sizes_S: Tensor | None = None
    """Number of real values per segment, if they were padded. A padded batch has one tensor."""
    padded_sizes: Indices | None = None
    """`sizes_S` on the host."""

    @property
    def num_values(self) -> int:
        """Values of one segment; of the smallest if they differ."""
        return self.tensors[0].shape[1] if self.padded_sizes is None else int(self.padded_sizes.min())

    @property
    def host_sizes(self) -> Indices:
        """Values of each segment."""
        return np.full(len(self.places), self.num_values) if self.padded_sizes is None else self.padded_sizes


_Run = tuple[list[Place], Tensor]
"""Consecutive segments of one size: their places, and their values as [S, N]."""


def batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """Yields every segment of every row, in batches of one size."""
    by_size: dict[int, list[_Run]] = {}
    for row, states in enumerate(states_list):
        for run in _runs(states, row, segment_tokens):
            by_size.setdefault(run[1].shape[1], []).append(run)
    for size, runs in by_size.items():
        batch = SegmentBatch([], [])
        for places, tensor in _stack(runs, max(1, min(BATCH, TENSOR_VALUES // size))):
            if len(batch.places) + len(places) > BATCH:
                yield batch
                batch = SegmentBatch([], [])
            batch.places.extend(places)
            batch.tensors.append(tensor)
        yield batch


def padded_batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """Yields every segment in order, padded to one size, so that a device needs few launches for any number of rows."""
    for row, states in enumerate(states_list):
        check_states(states, row)
    length_R = np.array([len(states) for states in states_list], dtype=np.int64)
    num_R = -(-length_R // segment_tokens)
    if not num_R.sum():
        return
    # No Python loop over segments: this runs while a worker decodes, and both need the interpreter's lock.
    row_S = np.repeat(np.arange(len(length_R)), num_R)
    segment_S = np.arange(len(row_S)) - np.repeat(np.cumsum(num_R) - num_R, num_R)
    offset_S = segment_S * segment_tokens
    host_2S = np.stack(
        [
            (np.cumsum(length_R) - length_R)[row_S] + offset_S,
            np.minimum(length_R[row_S] - offset_S, segment_tokens),
        ]
    )
    places = list(zip(row_S.tolist(), segment_S.tolist(), strict=True))
    states_TH = torch.cat(list(states_list)).detach().to(torch.bfloat16)
    hidden_size = states_TH.shape[1]
    first_SL = upload(host_2S, states_TH.device)
    size = max(1, DEVICE_VALUES // (segment_tokens * hidden_size))
    for begin in range(0, len(places), size):
        some = slice(begin, begin + size)
        first_S, length_S = first_SL[:, some]
        at_SN = first_S[:, None] + torch.arange(segment_tokens, device=states_TH.device)
        values_SN = states_TH[at_SN.clamp_(max=len(states_TH) - 1)].flatten(1)
        yield SegmentBatch(places[some], [values_SN], length_S * hidden_size, host_2S[1, some] * hidden_size)


def top_points(batch: SegmentBatch, topk: int) -> tuple[Indices, Bits]:
    """Returns [S, K] flat indices of the largest magnitudes, and the bit patterns there.

    Ties are resolved as torch.topk resolves them: that is part of the format.
    """
    check_size(batch, topk)
    search = TopSearch(topk)
    indices: list[Indices] = []
    bits: list[Bits] = []
    for tensor in batch.tensors:
        if tensor.device.type == "cpu" and batch.sizes_S is None:
            indices_SK = search.indices(tensor)
        else:
            indices_SK = device_indices(tensor, topk, batch.sizes_S)
        bits.append(_to_bits(torch.gather(tensor, 1, indices_SK)))
        indices.append(indices_SK.cpu().numpy())
    bits_SK = np.concatenate(bits)
    _check_bits(bits_SK, batch.places)
    return np.concatenate(indices), bits_SK


def candidate_points(batch: SegmentBatch, topk: int, columns_C: Indices) -> tuple[Candidates, Bits, Bits]:
    """Returns all values that could be in the top-k, their [S, W] bit patterns, and the [S, C] ones at the given columns.

    For segments of one size in host memory.
    """
    check_size(batch, topk)
    search = TopSearch(topk)
    found: list[Candidates] = []
    bits: list[Bits] = []
    at_columns: list[Bits] = []
    columns = torch.from_numpy(columns_C)
    for tensor in batch.tensors:  # gather everything from a tensor while it is in cache
        candidates = search.candidates(tensor)
        bits.append(_to_bits(torch.gather(tensor, 1, torch.from_numpy(candidates.indices_SW))))
        at_columns.append(_to_bits(tensor.index_select(1, columns)))
        found.append(candidates)
    candidates = Candidates(
        stack_padded([part.indices_SW for part in found]), np.concatenate([part.num_S for part in found])
    )
    bits_SW = stack_padded(bits)
    _check_bits(bits_SW, batch.places)
    return candidates, bits_SW, np.concatenate(at_columns)


def stack_padded(parts: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """Stacks tables of different widths; shorter rows are filled with zeros at the end."""
    joined = np.zeros((sum(map(len, parts)), max(part.shape[1] for part in parts)), dtype=parts[0].dtype)
    start = 0
    for part in parts:
        joined[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return joined


def _runs(states: Tensor, row: int, segment_tokens: int) -> Iterator[_Run]:
    """Yields the full segments of a row, and the shorter one at its end."""
    check_states(states, row)
    num_full, rest = divmod(len(states), segment_tokens)
    if num_full:
        full = states[: num_full * segment_tokens].detach().reshape(num_full, -1)
        yield [(row, segment) for segment in range(num_full)], full
    if rest:
        yield [(row, num_full)], states[-rest:].detach().reshape(1, -1)


def _stack(runs: Iterable[_Run], at_once: int) -> Iterator[_Run]:
    """Yields the segments of all runs in tensors of up to `at_once` segments."""
    places: list[Place] = []
    parts: list[Tensor] = []
    for run_places, values_SN in runs:
        for start in range(0, len(values_SN), at_once):
            some = slice(start, start + at_once)
            if len(places) + len(run_places[some]) > at_once:
                yield places, _joined(parts)
                places, parts = [], []
            places += run_places[some]
            parts.append(values_SN[some].to(torch.bfloat16))
    yield places, _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def device_indices(values_SN: Tensor, topk: int, sizes_S: Tensor | None) -> Tensor:
    """Returns [S, K] indices of the largest magnitudes; ties are resolved by the device's torch.topk."""
    return torch.topk(magnitudes(values_SN, sizes_S), topk, dim=1, sorted=False).indices


def magnitudes(values_SN: Tensor, sizes_S: Tensor | None) -> Tensor:
    """Returns absolute values, with -1 at padding so that it never enters the top-k."""
    absolute_SN = values_SN.abs()
    if sizes_S is not None:
        columns_N = torch.arange(absolute_SN.shape[1], device=absolute_SN.device)
        absolute_SN.masked_fill_(columns_N >= sizes_S[:, None], -1.0)
    return absolute_SN


def check_size(batch: SegmentBatch, topk: int) -> None:
    """Raises ProofError if a segment has fewer than `topk` values."""
    if topk > (size := batch.num_values):
        row, segment = batch.places[int(batch.host_sizes.argmin())]
        raise ProofError(f"segment {segment} has {size} values, fewer than topk={topk}", row)


def _to_bits(values: Tensor) -> Bits:
    bits: Bits = values.view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def check_states(states: Tensor, row: int) -> None:
    """Raises ProofError if `states` are not [tokens, hidden] floats."""
    if states.dim() != 2 or not states.is_floating_point():
        raise ProofError(
            f"states are {tuple(states.shape)} {states.dtype}, expected [tokens, hidden] floats", row
        )


def _check_bits(bits_SK: Bits, places: list[Place]) -> None:
    """Raises ProofError for NaN, infinity and all-zero segments. torch.topk puts NaN and infinity first, so the top values suffice."""
    magnitudes_SK = bits_SK & 0x7FFF
    largest_S = magnitudes_SK.max(axis=1)
    for s in np.flatnonzero((largest_S >= 0x7F80) | (largest_S == 0)):
        raise unprovable(places[s], all_zero=largest_S[s] == 0)


def unprovable(place: Place, *, all_zero: bool) -> ProofError:
    """Returns the error for a segment whose values cannot be proven."""
    row, segment = place
    what = "is all zero" if all_zero else "holds NaN or infinity"
    return ProofError(f"segment {segment} {what} as bfloat16; no proof can be made of it", row)


def segment_checks(columns: Sequence[Column], topk: int) -> list[SegmentCheck]:
    """Returns one SegmentCheck per segment. `columns` are its fields except num_points, in order, one number per segment."""
    *numbers, constant = columns
    kinds = (int, int, float, float, float, int, int, int)
    sizes, *others = (column.astype(kind).tolist() for column, kind in zip(numbers, kinds, strict=True))
    others.append(((constant > 0) & (topk > 1)).tolist())
    return list(map(SegmentCheck._make, zip(sizes, repeat(topk), *others, strict=False)))


def control_points(sizes_S: Indices, topk: int, rng: np.random.Generator) -> tuple[Indices, Mask]:
    """Returns [S, C] random control points per segment, and a mask, because some sizes have fewer."""
    columns_of = {int(size): control_columns(size, topk, rng) for size in np.unique(sizes_S)}
    columns_SC = np.zeros((len(sizes_S), max(map(len, columns_of.values()))), dtype=np.int64)
    valid_SC = np.zeros(columns_SC.shape, dtype=np.bool_)
    for size, columns_C in columns_of.items():
        of_size = sizes_S == size
        columns_SC[of_size, : len(columns_C)] = columns_C
        valid_SC[of_size, : len(columns_C)] = True
    return columns_SC, valid_SC


def control_columns(size: int, topk: int, rng: np.random.Generator) -> Indices:
    """Draws random indices for all segments of a size, below every modulus, so that each is its own residue.

    A polynomial has the same value at an index and at its residue, so no others are needed.
    """
    limit = min(size, modulus_floor(topk))
    wanted = _NUM_DRAWN_SHORT if size < 64 * topk else _NUM_DRAWN
    return rng.choice(limit, min(limit, wanted), replace=False)


def check_collisions(count_S: Column, moduli_S: Column, places: Sequence[Place], topk: int) -> None:
    """Raises ProofError if a modulus merges more than an eighth of the verifier's indices.

    The prover's own indices are distinct under its modulus. The verifier's differ from them in a few places, so an honest
    proof may merge a few of those.
    """
    for s in np.flatnonzero(count_S > max(1, topk // 8)).tolist():
        row, segment = places[s]
        raise ProofError(
            f"segment {segment}: modulus {int(moduli_S[s])} merges {int(count_S[s])} of {topk} indices", row
        )
