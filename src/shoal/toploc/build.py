"""Builds proofs from states.

    on a CPU            segments of one size ─▶ top-k ─▶ modulus and polynomial in NumPy ─▶ bytes
    on a CUDA device    all segments, padded ─▶ top-k ─▶ modulus and polynomial in one kernel ─▶ bytes ─▶ host

For states on a device the host makes a few launches and one copy for any number of proofs: a worker decodes at the same
time, and both need the interpreter's lock.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.toploc.device import HostCopy, has_kernels
from shoal.toploc.proof import (
    ProofError,
    check_parameters,
    no_modulus,
    num_segments,
    proof_bytes,
    proofs_of_points,
)
from shoal.toploc.segments import (
    BATCH,
    Bits,
    Place,
    batches,
    check_size,
    device_indices,
    padded_batches,
    top_points,
    unprovable,
)

_Points = tuple[list[Place], npt.NDArray[np.int64], Bits]
"""Places of some segments, and the indices and bit patterns of their points."""


def build_proofs(states_list: Sequence[Tensor], *, topk: int = 128, segment_tokens: int = 32) -> list[bytes]:
    """Returns the proofs of each row: those of its segments, concatenated; empty for a row without states.

    `states_list` has [tokens, hidden] floats per row, in any float dtype; they are rounded to bfloat16. Segments of all rows
    are processed together, so pass many rows at once. Raises ProofError if a row cannot be proven.
    """
    check_parameters(topk, segment_tokens)
    if states_list and has_kernels(states_list[0].device):
        return _build_on_device(states_list, topk, segment_tokens)
    proofs = [[b""] * num_segments(len(states), segment_tokens) for states in states_list]
    for places, indices_SK, bits_SK in _grouped_points(states_list, topk, segment_tokens):
        try:
            made = proofs_of_points(indices_SK, bits_SK)
        except ValueError as error:
            raise ProofError(str(error), places[0][0]) from None
        for (row, segment), proof in zip(places, made, strict=True):
            proofs[row][segment] = proof
    return [b"".join(row) for row in proofs]


def _build_on_device(states_list: Sequence[Tensor], topk: int, segment_tokens: int) -> list[bytes]:
    from shoal.toploc.proof_kernels import ALL_ZERO, NO_MODULUS, proof_lines

    places: list[Place] = []
    tables: list[Tensor] = []
    for batch in padded_batches(states_list, segment_tokens=segment_tokens):
        check_size(batch, topk)
        (values_SN,) = batch.tensors
        indices_SK = device_indices(values_SN, topk, batch.sizes_S)
        tables.append(proof_lines(indices_SK, torch.gather(values_SN.view(torch.int16), 1, indices_SK)))
        places += batch.places
    if not tables:
        return [b""] * len(states_list)
    lines_SX: npt.NDArray[np.int16] = HostCopy(torch.cat(tables)).wait().numpy()
    for s in np.flatnonzero(lines_SX[:, 0]):
        if lines_SX[s, 0] == NO_MODULUS:
            raise ProofError(no_modulus(topk), places[s][0])
        raise unprovable(places[s], all_zero=bool(lines_SX[s, 0] == ALL_ZERO))
    together = lines_SX[:, 1:].tobytes()
    counts = [num_segments(len(states), segment_tokens) for states in states_list]
    ends = (np.cumsum([0, *counts]) * proof_bytes(topk)).tolist()
    return [together[start:end] for start, end in pairwise(ends)]


def _grouped_points(states_list: Sequence[Tensor], topk: int, segment_tokens: int) -> Iterator[_Points]:
    """Yields the points of segments of all sizes, BATCH at a time: interpolation, the slowest part, needs no equal sizes."""
    on_device = bool(states_list) and states_list[0].device.type != "cpu"
    cut = padded_batches if on_device else batches
    places: list[Place] = []
    parts: list[tuple[npt.NDArray[np.int64], Bits]] = []
    for batch in cut(states_list, segment_tokens=segment_tokens):
        places += batch.places
        parts.append(top_points(batch, topk))
    if places:
        indices_SK, bits_SK = (np.concatenate(part) for part in zip(*parts, strict=True))
        for start in range(0, len(places), BATCH):
            chunk = slice(start, start + BATCH)
            yield places[chunk], indices_SK[chunk], bits_SK[chunk]
