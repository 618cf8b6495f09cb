"""Checks states on a device with tensor operations, so that only the results are copied to the host.

The numbers are those of verify.py on a CPU (a test compares them). Residues are int64; products of blocks are float64, which
is exact for whole numbers below 2^53.

S segments, K top-k, W candidates for the top-k, C control points, N values per segment, L coefficients per block.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.packed_prefill import upload
from shoal.toploc.field import BLOCK, PRIME
from shoal.toploc.points import best_points, compare_points, control_hits, usable_controls
from shoal.toploc.search import Indices
from shoal.toploc.segments import (
    DEVICE_SURPLUS,
    Bits,
    Mask,
    Place,
    SegmentBatch,
    SegmentCheck,
    check_collisions,
    check_size,
    control_points,
    magnitudes,
    segment_checks,
    unprovable,
)


class HostCopy:
    """An asynchronous copy of a tensor to the host, in the order of the device's queue."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """Waits for the copy and returns the tensor on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


def has_kernels(device: torch.device) -> bool:
    """Returns whether the Triton kernels can run on a device."""
    return device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


Finder = Callable[[], dict[Place, SegmentCheck]]
"""Waits for the queued work and returns the checks."""


def start(chosen: Iterable[tuple[SegmentBatch, Bits]], topk: int, rng: np.random.Generator) -> Finder:
    """Queues the checks of segments with their proofs (modulus and coefficients)."""
    places: list[Place] = []
    tables: list[Tensor] = []
    for batch, lines_SK in chosen:
        check_size(batch, topk)
        tables.append(_check(batch, lines_SK, control_points(batch.host_sizes, topk, rng), topk=topk))
        places += batch.places
    copied = HostCopy(torch.cat(tables, dim=1)) if tables else None
    return partial(_find, places, copied, topk)


def _find(places: list[Place], copied: HostCopy | None, topk: int) -> dict[Place, SegmentCheck]:
    if copied is None:
        return {}
    table: npt.NDArray[np.float64] = copied.wait().numpy()
    *columns, largest_S, collisions_S, moduli_S = table
    for s in np.flatnonzero(~np.isfinite(largest_S) | (largest_S == 0)):
        raise unprovable(places[s], all_zero=largest_S[s] == 0)
    check_collisions(collisions_S, moduli_S, places, topk)
    return dict(zip(places, segment_checks(columns, topk), strict=True))


def _check(batch: SegmentBatch, lines_SK: Bits, controls: tuple[Indices, Mask], *, topk: int) -> Tensor:
    """Returns [12, S] float64 on the device: SegmentCheck's fields except num_points, in order; then the largest magnitude,
    the number of colliding indices, and the modulus."""
    values_SN, device = batch.tensors[0], batch.tensors[0].device
    bits_SN = values_SN.view(torch.int16)
    lines = upload(lines_SK.astype(np.int32), device).long()
    columns, valid = (upload(array, device) for array in controls)
    moduli_S1, coefficients_SK = lines[:, :1], lines[:, 1:]
    top = torch.topk(
        magnitudes(values_SN, batch.sizes_S), min(topk + DEVICE_SURPLUS, values_SN.shape[1]), dim=1
    )
    is_point_SW = top.values >= top.values[:, topk - 1 : topk]
    true_SW = torch.gather(bits_SN, 1, top.indices).int() & 0xFFFF
    last_S1 = true_SW[:, topk - 1 : topk] & 0x7FFF
    x_SW = top.indices % moduli_S1
    rank_SK = best_points(evaluate(coefficients_SK, x_SW), true_SW, is_point_SW, last_S1)[:, :topk]
    control_SC = torch.gather(bits_SN, 1, columns).int() & 0xFFFF
    usable_SC = usable_controls(control_SC, last_S1, valid)
    hits_S = control_hits(evaluate(coefficients_SK, columns), control_SC, usable_SC, true_SW, is_point_SW)
    x_SK = x_SW[:, :topk].sort(dim=1).values
    sizes_S = torch.full_like(hits_S, values_SN.shape[1]) if batch.sizes_S is None else batch.sizes_S
    return torch.stack(
        [
            sizes_S.double(),
            *compare_points(rank_SK),
            hits_S.double(),
            usable_SC.sum(1).double(),
            (coefficients_SK[:, 1:] == 0).all(1).double(),
            top.values[:, 0].double(),
            (x_SK[:, 1:] == x_SK[:, :-1]).sum(1).double(),
            moduli_S1[:, 0].double(),
        ]
    )


def evaluate(coefficients_SK: Tensor, x_SN: Tensor) -> Tensor:
    """Evaluates the polynomial of each segment at its own points, which are below PRIME; returns int32.

    Uses a kernel on a CUDA device and blocks of coefficients elsewhere, as field.py does.
    """
    if has_kernels(x_SN.device):
        from shoal.toploc.proof_kernels import values

        return values(coefficients_SK, x_SN)
    num_segments, num_coefficients = coefficients_SK.shape
    powers_SLN = x_SN[:, None]
    while powers_SLN.shape[1] < BLOCK:
        powers_SLN = torch.cat([powers_SLN, powers_SLN * powers_SLN[:, -1:] % PRIME], dim=1)
    floats_SLN = torch.cat([torch.ones_like(powers_SLN[:, :1]), powers_SLN[:, :-1]], dim=1).double()
    num_blocks = -(-num_coefficients // BLOCK)
    padded_SK = coefficients_SK.new_zeros(num_segments, num_blocks * BLOCK)
    padded_SK[:, :num_coefficients] = coefficients_SK
    blocks_SBL = padded_SK.view(num_segments, num_blocks, BLOCK).double()
    block_SBN = torch.bmm(blocks_SBL, floats_SLN).long() % PRIME
    value_SN = block_SBN[:, -1]
    for block in range(num_blocks - 2, -1, -1):
        value_SN = (value_SN * powers_SLN[:, -1] + block_SBN[:, block]) % PRIME
    return value_SN.int()
