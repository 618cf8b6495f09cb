"""The largest magnitudes of segments on a CPU.

**The K that torch.topk chooses**, faster than it does where segments are wide. Which of several equal values at the last place are chosen is part of the format, and bfloat16 values are equal there nearly
always. On a CPU torch.topk keeps a heap of the K largest so far and goes through a segment from its start: a value enters if it is
larger than the smallest one in the heap, and which of several equal ones the heap drops depends on all that entered before. A value
that does not enter changes nothing. So what cannot enter may be left out, as long as the rest stays in its order:

    line = | the first 32 K values | of those behind them the chunks of 8 in which one is above what K values before it reach |

That bound is the K-th largest of the maxima of 4 K groups: each maximum is a value of its own. It is made anew where the values
behind it become four times as many. Of 163,840 gaussian values 13,000 are left. torch.topk has another way for less than 64 K
values, so shorter lines are filled up with zeros, which never enter.

**All that could be among the K**: every value above the K-th largest magnitude and every value equal to it. No heap is needed for that, and
little more than K values are above such a bound of the whole segment.

S segments, N values of each, K of them chosen, W contenders, L values of a line, C chunks of a line.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 8
FIRST = 32
"""Times K: values at the start of a segment that are looked at all."""
GROUPS = 4
"""Times K."""
HEAP_FROM = 64
"""Times K: the number of values from which on torch.topk uses a heap."""
MOST = 2
NARROW = 16
"""Times K: the number of values below which contenders are sought among all."""
WIDE = 256
"""Times K: the number of values from which on leaving out is cheaper than looking at all."""

Magnitudes = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.int64]
_Number = TypeVar("_Number", np.int64, np.complex128)


@dataclass(frozen=True, slots=True)
class Contenders:
    """Of each segment the values of at least its K-th largest magnitude: K, or more where several are equal to that."""

    indices_SW: Indices
    """Flat; 0 where a segment has fewer than W."""
    num_S: Indices
    """How many of them count."""


class TopSearch:
    """Keeps its memory from one sheet to the next: fresh pages cost as much as the search."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._magnitudes = torch.empty(0, dtype=torch.int16)
        self._kept_flags: npt.NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    def indices(self, values_SN: Tensor) -> Tensor:
        """[S, K] where the largest magnitudes are; values are bfloat16 on a CPU, in one piece."""
        magnitudes_SN = self._without_signs(values_SN)
        width = values_SN.shape[1]
        if width < WIDE * self._topk or width % CHUNK:
            return torch.topk(magnitudes_SN, self._topk, dim=1, sorted=False).indices
        return self._among_candidates(magnitudes_SN)

    def contenders(self, values_SN: Tensor) -> Contenders:
        """All that could be among the K; values as above. Where more than MOST times K could, those that torch.topk chooses."""
        contenders = self._contenders(values_SN)
        if contenders.num_S.max() <= MOST * self._topk:
            return contenders
        chosen_SK = self.indices(values_SN).numpy()
        return Contenders(chosen_SK, np.full(len(chosen_SK), self._topk))

    def _contenders(self, values_SN: Tensor) -> Contenders:
        magnitudes_SN: Magnitudes = self._without_signs(values_SN).numpy().view(np.uint16)
        num_segments, width = magnitudes_SN.shape
        if width < NARROW * self._topk or width % CHUNK:
            return self._of_lines(magnitudes_SN, None)
        usual = GROUPS * self._topk
        groups = magnitudes_SN[:, : width - width % usual].reshape(num_segments, -1, usual)
        bound_S = np.sort(groups.max(axis=1), axis=1)[:, -self._topk]
        flags_SN = self._flags(num_segments, width)
        np.greater_equal(magnitudes_SN, bound_S[:, None], out=flags_SN)
        found = _Found.of(flags_SN.view(np.uint64) != 0)
        chunks = magnitudes_SN.reshape(-1).view(np.complex128)
        lines_SC = found.in_lines(chunks.take(found.flat_F))
        return self._of_lines(lines_SC.view(np.uint16), found.in_lines(found.column_F))

    def _of_lines(self, lines_SL: Magnitudes, chunk_SC: Indices | None) -> Contenders:
        """Those of whole segments, or of lines made of the chunks `chunk_SC`."""
        last_S = np.sort(lines_SL, axis=1)[:, -self._topk]
        found = _Found.of(lines_SL >= last_S[:, None])
        if chunk_SC is None:
            index_F = found.column_F
        else:
            index_F = CHUNK * chunk_SC.reshape(-1).take(found.flat_F // CHUNK) + found.column_F % CHUNK
        return Contenders(found.in_lines(index_F), found.num_S)

    def _flags(self, num_segments: int, width: int) -> npt.NDArray[np.bool_]:
        """Not cleared."""
        if self._kept_flags.size < num_segments * width:
            self._kept_flags = np.empty(num_segments * width, dtype=np.bool_)
        return self._kept_flags[: num_segments * width].reshape(num_segments, width)

    def _without_signs(self, values_SN: Tensor) -> Tensor:
        """Bit patterns order as magnitudes do, and torch.topk searches int16 faster than bfloat16."""
        if self._magnitudes.numel() < values_SN.numel():
            self._magnitudes = torch.empty(values_SN.numel(), dtype=torch.int16)
        magnitudes_SN = self._magnitudes[: values_SN.numel()].view(values_SN.shape)
        return torch.bitwise_and(values_SN.view(torch.int16), 0x7FFF, out=magnitudes_SN)

    def _among_candidates(self, magnitudes_SN: Tensor) -> Tensor:
        values_SN: Magnitudes = magnitudes_SN.numpy().view(np.uint16)
        num_first = FIRST * self._topk // CHUNK
        behind = [chunks.nonzero()[0] + num_first for chunks in self._chunks_that_can_enter(values_SN)]
        longest = num_first + max(map(len, behind))
        shape_SC = (len(values_SN), max(longest, HEAP_FROM * self._topk // CHUNK))
        column_SC = np.zeros(shape_SC, dtype=np.int64)
        column_SC[:, :num_first] = np.arange(num_first)
        # A chunk of 8 is 16 bytes: one complex number to NumPy, which moves it at once.
        from_SC, to_SC = values_SN.view(np.complex128), np.zeros(shape_SC, dtype=np.complex128)
        to_SC[:, :num_first] = from_SC[:, :num_first]
        for s, chunks in enumerate(behind):
            part = slice(num_first, num_first + len(chunks))
            column_SC[s, part] = chunks
            from_SC[s].take(chunks, out=to_SC[s, part], mode="clip")  # "raise" would copy
        lines_SL = torch.from_numpy(to_SC.view(np.int16))
        found_SK: Indices = torch.topk(lines_SL, self._topk, dim=1, sorted=False).indices.numpy()
        chunk_SK = np.take_along_axis(column_SC, found_SK // CHUNK, axis=1)
        return torch.from_numpy(CHUNK * chunk_SK + found_SK % CHUNK)

    def _chunks_that_can_enter(self, values_SN: Magnitudes) -> npt.NDArray[np.bool_]:
        """[S, C] of the chunks behind the first values."""
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
class _Found:
    """Where flags are set: a different number of F in each segment."""

    flat_F: Indices
    column_F: Indices
    num_S: Indices
    line_F: Indices
    """Where each goes if they are put in lines, one after another."""

    @classmethod
    def of(cls, flags_SC: npt.NDArray[np.bool_]) -> "_Found":
        num_segments, width = flags_SC.shape
        (flat_F,) = flags_SC.reshape(-1).nonzero()  # several times faster than in two dimensions
        segment_F = flat_F // width
        num_S = np.bincount(segment_F, minlength=num_segments)
        before_S = np.cumsum(num_S) - num_S
        line_F = np.arange(len(flat_F)) + np.repeat(np.arange(num_segments) * num_S.max() - before_S, num_S)
        return cls(flat_F, flat_F - segment_F * width, num_S, line_F)

    def in_lines(self, values_F: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """[S, the most of any segment], with zeros behind."""
        lines = np.zeros((len(self.num_S), int(self.num_S.max())), dtype=values_F.dtype)
        lines.reshape(-1)[self.line_F] = values_F
        return lines
