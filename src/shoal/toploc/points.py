"""The statistics of a segment's points, for states in host memory (verify.py) and on a device (device.py).

Bit patterns are int32 tensors. S segments, K top-k, W candidates for the top-k, C control points, E exponents.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.toploc.segments import MANTISSA_BOUND, MAX_CONTROLS, NO_MATCH

AT_LAST_PLACE, NO_POINT = 1 << 16, 1 << 17
WRONG_EXPONENT, WRONG_SIGN = 1 << 8, 1 << 7
"""Flags that rank points: the best come first, and points above the K-th largest magnitude before points equal to it."""


def best_points(claimed_SW: Tensor, true_SW: Tensor, is_point_SW: Tensor, last_S1: Tensor) -> Tensor:
    """Returns [S, W] ranks, the best first: one number made of exponent, sign and mantissa error. `last_S1` is the K-th largest
    magnitude.
    """
    differ_SW = claimed_SW ^ true_SW
    rank_SW = ((claimed_SW & 0x7F) - (true_SW & 0x7F)).abs()
    # A flag times a whole number would be int64, which is slower.
    rank_SW += (differ_SW >= 0x8000).int() * WRONG_SIGN
    rank_SW += ((differ_SW & 0x7F80) != 0).int() * WRONG_EXPONENT
    rank_SW += ((true_SW & 0x7FFF) == last_S1).int() * AT_LAST_PLACE
    return rank_SW.masked_fill(~is_point_SW, NO_POINT).sort(dim=1).values


def compare_points(rank_SK: Tensor) -> Iterator[Tensor]:
    """Yields exponent mismatches; mean, upper median and bounded mean of the mantissa error; sign mismatches."""
    agree_SK = (rank_SK & WRONG_EXPONENT) == 0
    num_S = agree_SK.sum(1)
    error_SK = rank_SK & 0x7F
    agreeing_SK = error_SK * agree_SK
    divisor_S, some_S = num_S.clamp(min=1).double(), num_S > 0
    # Points that disagree are sorted last, so element n // 2 is the upper median of the n that agree.
    sorted_SK = error_SK.masked_fill(~agree_SK, 0xFFFF).sort(dim=1).values
    middle_S1 = (num_S // 2).clamp(max=rank_SK.shape[1] - 1)[:, None]
    no_match_S = torch.full_like(divisor_S, NO_MATCH)
    yield (rank_SK.shape[1] - num_S).double()
    yield torch.where(some_S, agreeing_SK.sum(1) / divisor_S, no_match_S)
    yield torch.where(some_S, sorted_SK.gather(1, middle_S1)[:, 0].double(), no_match_S)
    bounded_S = agreeing_SK.clamp(max=MANTISSA_BOUND).sum(1) / divisor_S
    yield torch.where(some_S, bounded_S, torch.full_like(divisor_S, float(MANTISSA_BOUND)))
    yield (agree_SK & ((rank_SK & WRONG_SIGN) != 0)).sum(1).double()


def usable_controls(control_SC: Tensor, last_S1: Tensor, valid_SC: Tensor | None = None) -> Tensor:
    """Selects up to MAX_CONTROLS control points per segment, of at most half the smallest top-k magnitude `last_S1`.

    Values up to half are safe: the prover's hardware may order near-equal values differently, but never by a factor of two.
    """
    # One exponent step is a factor of two, and bit patterns without the sign are ordered like magnitudes.
    usable_SC = (control_SC & 0x7FFF) <= last_S1.clamp(min=0x80) - 0x80
    if valid_SC is not None:
        usable_SC &= valid_SC
    return usable_SC & (usable_SC.cumsum(1) <= MAX_CONTROLS)


def control_hits(
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
