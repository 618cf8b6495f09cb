"""Finds the largest magnitudes of segments on a CPU.

**TopSearch.indices returns the K values that torch.topk chooses**, faster where segments are wide. Which of several equal
values are chosen at the K-th place is part of the format, and bfloat16 values are nearly always equal there. On a CPU
torch.topk keeps a heap of the K largest so far and scans a segment from its start: a value enters if it is larger than the
smallest in the heap. Which of several equal values the heap drops depends on all that entered before; a value that does not
enter has no effect. So values that cannot enter may be removed, if the rest keeps its order:

    kept = | the first 32 K values | after them, the chunks of 8 that hold a value above a bound |

The bound is the K-th largest of the maxima of 4 K groups: at least K earlier values reach it. It is computed again each time
the number of values has grown fourfold. Of 163,840 gaussian values 13,000 are kept. torch.topk uses another algorithm for
fewer than 64 K values, so shorter rows are padded with zeros, which never enter.

**TopSearch.candidates returns all values that could be among the K**: those above the K-th largest magnitude and all that are
equal to it. This needs no heap, and few more than K values are above such a bound for the whole segment.

S segments, N values per segment, K of them chosen, W candidates, L values of a kept row, C chunks of a kept row.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 8
"""Values that are kept or removed together."""
FIRST = 32
"""Times K: values at the start of a segment that are always kept."""
GROUPS = 4
"""Times K: groups whose maxima give the bound."""
HEAP_FROM = 64
"""Times K: number of values from which torch.topk uses a heap."""
MAX_CANDIDATES = 2
"""Times K: with more candidates, the choice of torch.topk is used."""
NARROW = 16
"""Times K: in segments with fewer values, candidates are searched among all of them."""
WIDE = 256
"""Times K: number of values from which removing some is cheaper than scanning all."""

Magnitudes = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.int64, np.complex128)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The values of each segment that reach its K-th largest magnitude: K, or more if several are equal to it."""

    indices_SW: Indices
    """Flat indices; 0 at the end if a segment has fewer than W."""
    num_S: Indices
    """Number of candidates of each segment."""


class TopSearch:
    """Searches segments. It reuses its buffers between calls: page faults would cost as much time as the search."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._magnitudes = torch.empty(0, dtype=torch.int16)
        self._kept_flags: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def indices(self, values_SN: Tensor) -> Tensor:
        """Returns [S, K] indices of the largest magnitudes. The values are contiguous bfloat16 on a CPU."""
        magnitudes_SN = self._without_signs(values_SN)
        width = values_SN.shape[1]
        if width < WIDE * self._topk or width % CHUNK:
            return torch.topk(magnitudes_SN, self._topk, dim=1, sorted=False).indices
        return self._search_kept(magnitudes_SN)

    def candidates(self, values_SN: Tensor) -> Candidates:
        """Returns all values that could be among the K. If there are more than MAX_CANDIDATES times K, returns torch.topk's choice."""
        candidates = self._candidates(values_SN)
        if candidates.num_S.max() <= MAX_CANDIDATES * self._topk:
            return candidates
        chosen_SK = self.indices(values_SN).numpy()
        return Candidates(chosen_SK, np.full(len(chosen_SK), self._topk))

    def _candidates(self, values_SN: Tensor) -> Candidates:
        magnitudes_SN: Magnitudes = self._without_signs(values_SN).numpy().view(np.uint16)
        num_segments, width = magnitudes_SN.shape
        if width < NARROW * self._topk or width % CHUNK:
            return self._candidates_of_rows(magnitudes_SN, None)
        usual = GROUPS * self._topk
        groups = magnitudes_SN[:, : width - width % usual].reshape(num_segments, -1, usual)
        bound_S = np.sort(groups.max(axis=1), axis=1)[:, -self._topk]
        flags_SN = self._flags(num_segments, width)
        np.greater_equal(magnitudes_SN, bound_S[:, None], out=flags_SN)
        found = _FlagPositions.of(flags_SN.view(np.uint64) != 0)
        chunks = magnitudes_SN.reshape(-1).view(np.complex128)
        rows_SC = found.as_rows(chunks.take(found.flat_F))
        return self._candidates_of_rows(rows_SC.view(np.uint16), found.as_rows(found.column_F))

    def _candidates_of_rows(self, rows_SL: Magnitudes, chunk_SC: Indices | None) -> Candidates:
        """Returns the candidates of whole segments, or of rows made of the chunks `chunk_SC`."""
        last_S = np.sort(rows_SL, axis=1)[:, -self._topk]
        found = _FlagPositions.of(rows_SL >= last_S[:, None])
        if chunk_SC is None:
            index_F = found.column_F
        else:
            index_F = CHUNK * chunk_SC.reshape(-1).take(found.flat_F // CHUNK) + found.column_F % CHUNK
        return Candidates(found.as_rows(index_F), found.num_S)

    def _flags(self, num_segments: int, width: int) -> npt.NDArray[np.bool_]:
        """Returns a buffer of flags with undefined content."""
        if self._kept_flags.size < num_segments * width:
            self._kept_flags = np.empty(num_segments * width, dtype=np.bool_)
        return self._kept_flags[: num_segments * width].reshape(num_segments, width)

    def _without_signs(self, values_SN: Tensor) -> Tensor:
        """Returns bit patterns without sign: they are ordered like magnitudes, and torch.topk is faster on int16."""
        if self._magnitudes.numel() < values_SN.numel():
            self._magnitudes = torch.empty(values_SN.numel(), dtype=torch.int16)
        magnitudes_SN = self._magnitudes[: values_SN.numel()].view(values_SN.shape)
        return torch.bitwise_and(values_SN.view(torch.int16), 0x7FFF, out=magnitudes_SN)

    def _search_kept(self, magnitudes_SN: Tensor) -> Tensor:
        values_SN: Magnitudes = magnitudes_SN.numpy().view(np.uint16)
        num_first = FIRST * self._topk // CHUNK
        rest = [chunks.nonzero()[0] + num_first for chunks in self._chunks_that_can_enter(values_SN)]
        longest = num_first + max(map(len, rest))
        shape_SC = (len(values_SN), max(longest, HEAP_FROM * self._topk // CHUNK))
        column_SC = np.zeros(shape_SC, dtype=np.int64)
        column_SC[:, :num_first] = np.arange(num_first)
        # A chunk of 8 values is 16 bytes: viewed as one complex number, NumPy copies it in one move.
        from_SC, to_SC = values_SN.view(np.complex128), np.zeros(shape_SC, dtype=np.complex128)
        to_SC[:, :num_first] = from_SC[:, :num_first]
        for s, chunks in enumerate(rest):
            part = slice(num_first, num_first + len(chunks))
            column_SC[s, part] = chunks
            from_SC[s].take(chunks, out=to_SC[s, part], mode="clip")  # "raise" would copy
        rows_SL = torch.from_numpy(to_SC.view(np.int16))
        found_SK: Indices = torch.topk(rows_SL, self._topk, dim=1, sorted=False).indices.numpy()
        chunk_SK = np.take_along_axis(column_SC, found_SK // CHUNK, axis=1)
        return torch.from_numpy(CHUNK * chunk_SK + found_SK % CHUNK)

    def _chunks_that_can_enter(self, values_SN: Magnitudes) -> npt.NDArray[np.bool_]:
        """Returns [S, C] flags of the chunks after the first values that can enter the heap."""
        num_segments, width = values_SN.shape
        num_first, num_groups = FIRST * self._topk, GROUPS * self._topk
        can_enter_SN = self._flags(num_segments, width - num_first)
        maxima_SG = np.zeros((num_segments, num_groups), dtype=np.uint16)
        start, end = 0, num_first
        while end < width:
            new = values_SN[:, start:end].reshape(num_segments, -1, num_groups).max(axis=1)
            np.maximum(maxima_SG, new, out=maxima_SG)
            bound_S = np.sort(maxima_SG, axis=1)[:, -self._topk]
            start, end = end, 4 * end
            part = can_enter_SN[:, start - num_first : end - num_first]
            np.greater(values_SN[:, start:end], bound_S[:, None], out=part)
        chunks: npt.NDArray[np.bool_] = can_enter_SN.view(np.uint64) != 0
        return chunks


@dataclass(frozen=True, slots=True)
class _FlagPositions:
    """Positions of set flags; each segment has a different number F of them."""

    flat_F: Indices
    column_F: Indices
    num_S: Indices
    target_F: Indices
    """Flat position of each in a table with one row per segment."""

    @classmethod
    def of(cls, flags_SC: npt.NDArray[np.bool_]) -> "_FlagPositions":
        num_segments, width = flags_SC.shape
        (flat_F,) = flags_SC.reshape(-1).nonzero()  # several times faster than in two dimensions
        segment_F = flat_F // width
        num_S = np.bincount(segment_F, minlength=num_segments)
        before_S = np.cumsum(num_S) - num_S
        target_F = np.arange(len(flat_F)) + np.repeat(np.arange(num_segments) * num_S.max() - before_S, num_S)
        return cls(flat_F, flat_F - segment_F * width, num_S, target_F)

    def as_rows(self, values_F: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Returns a table with one row per segment, filled with zeros at the end of shorter rows."""
        rows = np.zeros((len(self.num_S), int(self.num_S.max())), dtype=values_F.dtype)
        rows.reshape(-1)[self.target_F] = values_F
        return rows
