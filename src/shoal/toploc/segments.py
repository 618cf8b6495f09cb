"""Cutting rows of states into segments, and batching segments of one size: what build and verify share.

    row 0   | 32 states | 32 states | 32 states | 7 |      blocks: one of 3 segments, one of 1
    row 1   | 32 states | 20 |                             blocks: two of 1

A sheet is some segments of one size in one tensor, small enough to stay in cache: a slice of a long row as it lies in memory,
or several short rows side by side. A batch is the sheets of up to BATCH segments.

S segments, N values of each, K of them committed to, C columns.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.packed_prefill import upload
from shoal.toploc.proof import ProofError
from shoal.toploc.search import Contenders, Indices, TopSearch

Bits = npt.NDArray[np.uint16]
Place = tuple[int, int]
"""Where a segment belongs: row, segment of the row."""

_Number = TypeVar("_Number", np.int64, np.uint16)

BATCH = 256
"""Segments worked on together. Per-call costs are spread thin by then, and the tables still fit in cache."""
SHEET_VALUES = 1 << 20
"""Of one sheet at most, unless one segment has more. A larger one leaves the cache, and if it has to be put together its
fresh memory costs as much in page faults as the search in it."""


DEVICE_VALUES = 1 << 27
"""Of one batch on a device, which holds them three times over: 800 MB."""
DEVICE_SURPLUS = 64
"""Values beyond the top-k that are looked at for ties on a device."""


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments of equal size."""

    places: list[Place]
    sheets: list[Tensor]
    """[S, N] bfloat16 each, flattened state after state, in the order of `places`."""
    sizes_S: Tensor | None = None
    """How many values of each are real, where they were padded to one size; there is one sheet then."""
    padded_sizes: Indices | None = None
    """The same on the host."""

    @property
    def num_values(self) -> int:
        """Of one segment, the smallest if they differ."""
        return self.sheets[0].shape[1] if self.padded_sizes is None else int(self.padded_sizes.min())

    @property
    def host_sizes(self) -> Indices:
        """Values of each segment."""
        return np.full(len(self.places), self.num_values) if self.padded_sizes is None else self.padded_sizes


@dataclass(frozen=True, slots=True)
class _Block:
    """Neighbouring segments of one row and one size."""

    row: int
    first: int
    values_SN: Tensor


def batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """Every segment of every row, in batches of one size."""
    by_size: dict[int, list[_Block]] = {}
    for row, states in enumerate(states_list):
        for block in _blocks(states, row, segment_tokens):
            by_size.setdefault(block.values_SN.shape[1], []).append(block)
    for size, blocks in by_size.items():
        batch = SegmentBatch([], [])
        for places, sheet in _sheets(blocks, max(1, min(BATCH, SHEET_VALUES // size))):
            if len(batch.places) + len(places) > BATCH:
                yield batch
                batch = SegmentBatch([], [])
            batch.places.extend(places)
            batch.sheets.append(sheet)
        yield batch


def padded_batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """The same, padded to one size: a handful of launches on a device, however many rows and sizes there are. Rows and their
    segments come in their order."""
    for row, states in enumerate(states_list):
        check_states(states, row)
    length_R = np.array([len(states) for states in states_list], dtype=np.int64)
    num_R = -(-length_R // segment_tokens)
    if not num_R.sum():
        return
    # No Python a segment: this runs beside the decoding, which wants the interpreter too.
    row_S = np.repeat(np.arange(len(length_R)), num_R)
    segment_S = np.arange(len(row_S)) - np.repeat(np.cumsum(num_R) - num_R, num_R)
    behind_S = segment_S * segment_tokens
    host_2S = np.stack(
        [
            (np.cumsum(length_R) - length_R)[row_S] + behind_S,
            np.minimum(length_R[row_S] - behind_S, segment_tokens),
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
    """[S, K] flat indices of the largest magnitudes, and the bit patterns there.

    Ties fall as torch.topk has them: that is part of the format.
    """
    check_size(batch, topk)
    search = TopSearch(topk)
    indices: list[Indices] = []
    bits: list[Bits] = []
    for sheet in batch.sheets:
        if sheet.device.type == "cpu" and batch.sizes_S is None:
            indices_SK = search.indices(sheet)
        else:
            indices_SK = device_indices(sheet, topk, batch.sizes_S)
        bits.append(_to_bits(torch.gather(sheet, 1, indices_SK)))
        indices.append(indices_SK.cpu().numpy())
    bits_SK = np.concatenate(bits)
    _check_bits(bits_SK, batch.places)
    return np.concatenate(indices), bits_SK


def contender_points(batch: SegmentBatch, topk: int, columns_SC: Indices) -> tuple[Contenders, Bits, Bits]:
    """All that could be among the top-k, [S, W] bit patterns there, and [S, C] those at the given columns."""
    check_size(batch, topk)
    search = TopSearch(topk)
    found: list[Contenders] = []
    bits: list[Bits] = []
    at_columns: list[Bits] = []
    start = 0
    for sheet in batch.sheets:  # all that is wanted of a sheet while it is in cache
        if sheet.device.type == "cpu" and batch.sizes_S is None:
            contenders = search.contenders(sheet)
        else:
            contenders = _device_contenders(sheet, topk, batch.sizes_S)
        indices_SW = torch.from_numpy(contenders.indices_SW).to(sheet.device)
        columns = torch.from_numpy(columns_SC[start : start + len(sheet)]).to(sheet.device)
        bits.append(_to_bits(torch.gather(sheet, 1, indices_SW)))
        at_columns.append(_to_bits(torch.gather(sheet, 1, columns)))
        found.append(contenders)
        start += len(sheet)
    contenders = Contenders(
        side_by_side([part.indices_SW for part in found]), np.concatenate([part.num_S for part in found])
    )
    bits_SW = side_by_side(bits)
    _check_bits(bits_SW, batch.places)
    return contenders, bits_SW, np.concatenate(at_columns)


def side_by_side(parts: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """Lines of several tables in one, with zeros behind the shorter ones."""
    joined = np.zeros((sum(map(len, parts)), max(part.shape[1] for part in parts)), dtype=parts[0].dtype)
    start = 0
    for part in parts:
        joined[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return joined


def _blocks(states: Tensor, row: int, segment_tokens: int) -> Iterator[_Block]:
    check_states(states, row)
    num_full, rest = divmod(len(states), segment_tokens)
    if num_full:
        yield _Block(row, 0, states[: num_full * segment_tokens].detach().reshape(num_full, -1))
    if rest:
        yield _Block(row, num_full, states[-rest:].detach().reshape(1, -1))


def _sheets(blocks: Iterable[_Block], at_once: int) -> Iterator[tuple[list[Place], Tensor]]:
    """The segments of all blocks, up to `at_once` together."""
    places: list[Place] = []
    parts: list[Tensor] = []
    for block in blocks:
        for start in range(0, len(block.values_SN), at_once):
            part = block.values_SN[start : start + at_once]
            if len(places) + len(part) > at_once:
                yield places, _joined(parts)
                places, parts = [], []
            places.extend((block.row, block.first + start + index) for index in range(len(part)))
            parts.append(part.to(torch.bfloat16))
    yield places, _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def device_indices(values_SN: Tensor, topk: int, sizes_S: Tensor | None) -> Tensor:
    """[S, K] where the largest magnitudes are, with whatever ties the device's torch.topk chooses."""
    return torch.topk(magnitudes(values_SN, sizes_S), topk, dim=1, sorted=False).indices


def _device_contenders(values_SN: Tensor, topk: int, sizes_S: Tensor | None) -> Contenders:
    """The same on a device: of values equal to the K-th largest, as many as stand among the next DEVICE_SURPLUS."""
    magnitudes_SN = magnitudes(values_SN, sizes_S)
    top = torch.topk(magnitudes_SN, min(topk + DEVICE_SURPLUS, values_SN.shape[1]), dim=1)
    num_S = (top.values >= top.values[:, topk - 1 : topk]).sum(dim=1)
    return Contenders(top.indices.cpu().numpy(), num_S.cpu().numpy())


def magnitudes(values_SN: Tensor, sizes_S: Tensor | None) -> Tensor:
    absolute_SN = values_SN.abs()
    if sizes_S is not None:  # padding is below every magnitude
        columns_N = torch.arange(absolute_SN.shape[1], device=absolute_SN.device)
        absolute_SN.masked_fill_(columns_N >= sizes_S[:, None], -1.0)
    return absolute_SN


def check_size(batch: SegmentBatch, topk: int) -> None:
    if topk > (size := batch.num_values):
        row, segment = batch.places[int(batch.host_sizes.argmin())]
        raise ProofError(f"segment {segment} has {size} values, fewer than topk={topk}", row)


def _to_bits(values: Tensor) -> Bits:
    bits: Bits = values.view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def check_states(states: Tensor, row: int) -> None:
    if states.dim() != 2 or not states.is_floating_point():
        raise ProofError(
            f"states are {tuple(states.shape)} {states.dtype}, expected [tokens, hidden] floats", row
        )


def _check_bits(bits_SK: Bits, places: list[Place]) -> None:
    """The top values tell of all: to torch.topk infinity is large and NaN larger still."""
    magnitudes_SK = bits_SK & 0x7FFF
    largest_S = magnitudes_SK.max(axis=1)
    for s in np.flatnonzero((largest_S >= 0x7F80) | (largest_S == 0)):
        raise unprovable(places[s], all_zero=largest_S[s] == 0)


def unprovable(place: Place, *, all_zero: bool) -> ProofError:
    row, segment = place
    what = "is all zero" if all_zero else "holds NaN or infinity"
    return ProofError(f"segment {segment} {what} as bfloat16; no proof can be made of it", row)
