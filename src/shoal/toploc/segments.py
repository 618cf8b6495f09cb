"""Cutting rows of states into segments, and batching segments of one size: what build and verify share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.toploc.proof import ProofError

Bits = npt.NDArray[np.uint16]

BATCH = 256
"""Segments worked on together. Per-call costs are spread thin by then, and the tables still fit in cache."""


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Segments of equal size. `places` says for each where it belongs: (row, segment of the row)."""

    places: list[tuple[int, int]]
    values_SN: Tensor
    """bfloat16, flattened: state after state."""
    sizes_S: Tensor | None = None
    """How many values of each are real, where they were padded to one size."""


def batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """Every segment of every row, in batches of one size."""
    by_size: dict[int, list[tuple[int, int, Tensor]]] = {}
    for row, states in enumerate(states_list):
        for segment, piece in enumerate(_pieces(states, row, segment_tokens)):
            by_size.setdefault(piece.numel(), []).append((row, segment, piece))
    for same_size in by_size.values():
        for start in range(0, len(same_size), BATCH):
            chunk = same_size[start : start + BATCH]
            places = [(row, segment) for row, segment, _ in chunk]
            values_SN = torch.stack([piece.to(torch.bfloat16) for _, _, piece in chunk])
            yield SegmentBatch(places, values_SN)


def padded_batches(states_list: Sequence[Tensor], *, segment_tokens: int) -> Iterator[SegmentBatch]:
    """The same, padded to one size: a handful of launches on a device, however many rows and sizes there are."""
    places: list[tuple[int, int]] = []
    firsts: list[int] = []
    lengths: list[int] = []
    start = 0
    for row, states in enumerate(states_list):
        _check_states(states, row)
        for segment, first in enumerate(range(0, len(states), segment_tokens)):
            places.append((row, segment))
            firsts.append(start + first)
            lengths.append(min(segment_tokens, len(states) - first))
        start += len(states)
    if not places:
        return
    states_TH = torch.cat([states.detach() for states in states_list]).to(torch.bfloat16)
    first_SL = torch.tensor([firsts, lengths]).to(states_TH.device)
    for begin in range(0, len(places), 4 * BATCH):
        first_S, length_S = first_SL[:, begin : begin + 4 * BATCH]
        at_SN = first_S[:, None] + torch.arange(segment_tokens, device=states_TH.device)
        values_SN = states_TH[at_SN.clamp_(max=len(states_TH) - 1)].flatten(1)
        yield SegmentBatch(places[begin : begin + 4 * BATCH], values_SN, length_S * states_TH.shape[1])


def top_points(batch: SegmentBatch, topk: int) -> tuple[npt.NDArray[np.int64], Bits]:
    """[S, K] flat indices of the largest magnitudes, and the bit patterns there.

    Ties fall as torch.topk has them: that is part of the format.
    """
    size = batch.values_SN.shape[1] if batch.sizes_S is None else int(batch.sizes_S.min())
    if topk > size:
        row, segment = batch.places[0]
        raise ProofError(f"segment {segment} has {size} values, fewer than topk={topk}", row)
    magnitudes_SN = batch.values_SN.abs()
    if batch.sizes_S is not None:  # padding is below every magnitude
        columns_N = torch.arange(magnitudes_SN.shape[1], device=magnitudes_SN.device)
        magnitudes_SN.masked_fill_(columns_N >= batch.sizes_S[:, None], -1.0)
    indices_SK = torch.topk(magnitudes_SN, topk, dim=1, sorted=False).indices
    bits_SK = _to_bits(torch.gather(batch.values_SN, 1, indices_SK))
    _check_bits(bits_SK, batch.places)
    return indices_SK.cpu().numpy(), bits_SK


def bits_of_columns(values_SN: Tensor, columns_C: npt.NDArray[np.int64]) -> Bits:
    """Bit patterns of the same places in every segment."""
    return _to_bits(values_SN.index_select(1, torch.from_numpy(columns_C).to(values_SN.device)))


def _to_bits(values: Tensor) -> Bits:
    bits: Bits = values.view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def _pieces(states: Tensor, row: int, segment_tokens: int) -> Sequence[Tensor]:
    _check_states(states, row)
    if segment_tokens < 1:
        raise ValueError(f"segment_tokens={segment_tokens} must be at least 1")
    if len(states) == 0:
        return ()
    return [piece.reshape(-1) for piece in torch.split(states.detach(), segment_tokens)]


def _check_states(states: Tensor, row: int) -> None:
    if states.dim() != 2 or not states.is_floating_point():
        raise ProofError(
            f"states are {tuple(states.shape)} {states.dtype}, expected [tokens, hidden] floats", row
        )


def _check_bits(bits_SK: Bits, places: list[tuple[int, int]]) -> None:
    """The top values tell of all: to torch.topk infinity is large and NaN larger still."""
    magnitudes_SK = bits_SK & 0x7FFF
    largest_S = magnitudes_SK.max(axis=1)
    for s in np.flatnonzero((largest_S >= 0x7F80) | (largest_S == 0)):
        row, segment = places[s]
        what = "is all zero" if largest_S[s] == 0 else "holds NaN or infinity"
        raise ProofError(f"segment {segment} {what} as bfloat16; no proof can be made of it", row)
