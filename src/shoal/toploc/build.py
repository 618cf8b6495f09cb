"""Proofs from states."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shoal.toploc.proof import ProofError, num_segments, proofs_of_points
from shoal.toploc.segments import BATCH, Bits, batches, padded_batches, top_points

_Points = tuple[list[tuple[int, int]], npt.NDArray[np.int64], Bits]
"""Where segments belong, and the indices and bit patterns of their points."""


def build_proofs(states_list: Sequence[Tensor], *, topk: int = 128, segment_tokens: int = 32) -> list[bytes]:
    """One bytes per row: the proofs of its segments, end to end; empty for a row without states.

    `states_list` holds [tokens, hidden] floats per row, in any float dtype; they are proven as bfloat16. All segments of
    all rows are worked on together, so hand over many rows at once. ProofError if a row cannot be proven.
    """
    proofs = [[b""] * num_segments(len(states), segment_tokens) for states in states_list]
    for places, indices_SK, bits_SK in _together(states_list, topk, segment_tokens):
        try:
            made = proofs_of_points(indices_SK, bits_SK)
        except ValueError as error:
            raise ProofError(str(error), places[0][0]) from None
        for (row, segment), proof in zip(places, made, strict=True):
            proofs[row][segment] = proof
    return [b"".join(row) for row in proofs]


def _together(states_list: Sequence[Tensor], topk: int, segment_tokens: int) -> Iterator[_Points]:
    """Points of segments of all sizes, BATCH segments at a time: interpolation, the dear part, asks for no equal sizes."""
    on_device = bool(states_list) and states_list[0].device.type != "cpu"
    cut = padded_batches if on_device else batches
    places: list[tuple[int, int]] = []
    parts: list[tuple[npt.NDArray[np.int64], Bits]] = []
    for batch in cut(states_list, segment_tokens=segment_tokens):
        places += batch.places
        parts.append(top_points(batch, topk))
    if places:
        indices_SK, bits_SK = (np.concatenate(part) for part in zip(*parts, strict=True))
        for start in range(0, len(places), BATCH):
            chunk = slice(start, start + BATCH)
            yield places[chunk], indices_SK[chunk], bits_SK[chunk]
