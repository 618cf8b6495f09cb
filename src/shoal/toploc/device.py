"""Checks states on a device with tensor operations, so that only the results are copied to the host.

The numbers are those of verify.py on a CPU (a test compares them). Residues are int64; products of blocks are float64, which
is exact for whole numbers below 2^53.

S segments, K top-k, W candidates for the top-k, C control points, N values per segment, L coefficients per block.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.model.packed_prefill import upload
from shoal.toploc.field import BLOCK, PRIME
from shoal.toploc.search import Indices
from shoal.toploc.segments import (
    AT_LAST_PLACE,
    DEVICE_SURPLUS,
    MANTISSA_BOUND,
    MAX_CONTROLS,
    NO_MATCH,
    NO_POINT,
    WRONG_EXPONENT,
    WRONG_SIGN,
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
    largest_S, collisions_S, moduli_S = table[9:]
    for s in np.flatnonzero(~np.isfinite(largest_S) | (largest_S == 0)):
        raise unprovable(places[s], all_zero=largest_S[s] == 0)
    check_collisions(collisions_S, moduli_S, places, topk)
    size_S, wrong_S, signs_S, hits_S, controls_S = (
        table[place].astype(np.int64) for place in (0, 1, 5, 6, 7)
    )
    columns = (size_S, wrong_S, *table[2:5], signs_S, hits_S, controls_S, table[8] > 0)
    return dict(zip(places, segment_checks(columns, topk), strict=True))


def _check(
    batch: SegmentBatch,
    lines_SK: Bits,
    controls: tuple[Indices, Mask],
    *,
    topk: int,
) -> Tensor:
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
    rank_SK = _best(evaluate(coefficients_SK, x_SW), true_SW, is_point_SW, last_S1)[:, :topk]
    control_SC = torch.gather(bits_SN, 1, columns).int() & 0xFFFF
    usable_SC = valid & ((control_SC & 0x7FFF) <= last_S1.clamp(min=0x80) - 0x80)
    usable_SC &= usable_SC.cumsum(1) <= MAX_CONTROLS
    hits_S = _hits(evaluate(coefficients_SK, columns), control_SC, usable_SC, true_SW, is_point_SW)
    x_SK = x_SW[:, :topk].sort(dim=1).values
    sizes_S = torch.full_like(hits_S, values_SN.shape[1]) if batch.sizes_S is None else batch.sizes_S
    return torch.stack(
        [
            sizes_S.double(),
            *_compare(rank_SK),
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


def _best(claimed_SW: Tensor, true_SW: Tensor, is_point_SW: Tensor, last_S1: Tensor) -> Tensor:
    """Ranks each point by one number made of exponent, sign and mantissa error; the best come first."""
    differ_SW = claimed_SW ^ true_SW
    rank_SW = ((claimed_SW & 0x7F) - (true_SW & 0x7F)).abs()
    rank_SW += WRONG_SIGN * (differ_SW >= 0x8000)
    rank_SW += WRONG_EXPONENT * ((differ_SW & 0x7F80) != 0)
    rank_SW += AT_LAST_PLACE * ((true_SW & 0x7FFF) == last_S1)
    return rank_SW.masked_fill(~is_point_SW, NO_POINT).sort(dim=1).values


def _compare(rank_SK: Tensor) -> Iterator[Tensor]:
    """Yields exponent mismatches; mean, upper median and bounded mean of the mantissa error; sign mismatches."""
    agree_SK = (rank_SK & WRONG_EXPONENT) == 0
    num_S = agree_SK.sum(1)
    error_SK = rank_SK & 0x7F
    agreeing_SK = error_SK * agree_SK
    divisor_S, some_S = num_S.clamp(min=1).double(), num_S > 0
    sorted_SK = error_SK.masked_fill(~agree_SK, 0xFFFF).sort(dim=1).values
    middle_S1 = (num_S // 2).clamp(max=rank_SK.shape[1] - 1)[:, None]
    no_match_S = torch.full_like(divisor_S, NO_MATCH)
    yield (rank_SK.shape[1] - num_S).double()
    yield torch.where(some_S, agreeing_SK.sum(1) / divisor_S, no_match_S)
    yield torch.where(some_S, sorted_SK.gather(1, middle_S1)[:, 0].double(), no_match_S)
    bounded_S = agreeing_SK.clamp(max=MANTISSA_BOUND).sum(1) / divisor_S
    yield torch.where(some_S, bounded_S, torch.full_like(divisor_S, float(MANTISSA_BOUND)))
    yield (agree_SK & ((rank_SK & WRONG_SIGN) != 0)).sum(1).double()


def _hits(
    claimed_SC: Tensor, control_SC: Tensor, usable_SC: Tensor, true_SW: Tensor, is_point_SW: Tensor
) -> Tensor:
    """Counts usable control points that claim the true exponent, or one found among the top-k."""
    top_SW = torch.where(is_point_SW, true_SW, true_SW[:, :1])
    among_top_SE = torch.zeros(len(true_SW), 256, dtype=torch.bool, device=true_SW.device)
    among_top_SE.scatter_(1, _exponents(top_SW), True)
    plausible_SC = among_top_SE.gather(1, _exponents(claimed_SC))
    right_SC = ((claimed_SC ^ control_SC) & 0x7F80) == 0
    return (usable_SC & (plausible_SC | right_SC)).sum(1)


def _exponents(bits: Tensor) -> Tensor:
    return ((bits & 0x7F80) >> 7).long()
