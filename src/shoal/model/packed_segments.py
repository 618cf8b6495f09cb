"""Attention inside the samples of packed rows, without a T x T mask.

    segments   0 0 0 1 1 -1 | 0 0 0 0 0 0         two rows of six, laid end to end
    starts     0     3    5   6            12     where a run of equal ids begins, and the end

The flash kernels take these starts and compute only the blocks inside each run. They exist for CUDA and 16-bit floats;
everything else uses the dense mask of decoder.py, which gives the same states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LONG = 8192
"""From this mean length on, one call of the vendor's attention per run beats the one kernel for all runs (docs/LOG.md)."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The runs of equal ids of packed rows laid end to end."""

    starts_S: Tensor
    """int32, the end included; padded with the end to a power of two, so that few shapes exist."""
    longest: int
    """Length of the longest run, rounded up to a power of two."""
    spans: tuple[tuple[int, int], ...]
    """Start and end of each run where there are few long ones, else empty."""


def runs_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def find_segments(segments_BT: Tensor) -> Segments:
    """Runs of equal ids; a row's end ends a run. Samples must lie in one piece, as pack.py lays them."""
    change_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    change_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = change_BT.flatten().nonzero().flatten().tolist()
    total = segments_BT.numel()
    ends = [*starts[1:], total]
    longest = max(end - start for start, end in zip(starts, ends, strict=True))
    size = _power_of_two(len(starts) + 1)
    starts_S = torch.tensor(starts + [total] * (size - len(starts)), dtype=torch.int32)
    spans = tuple(zip(starts, ends, strict=True)) if total >= LONG * len(starts) else ()
    return Segments(starts_S.to(segments_BT.device), _power_of_two(longest), spans)


def attend_segments(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, segments: Segments) -> Tensor:
    """Causal grouped-query attention inside each run, [B, T, N, D]."""
    q_TND, k_TKD, v_TKD = q_BTND.flatten(0, 1), k_BTKD.flatten(0, 1), v_BTKD.flatten(0, 1)
    if segments.spans:
        out_TND = attend_spans(q_TND, k_TKD, v_TKD, segments.spans)
    else:
        out_TND = torch.ops.aten._flash_attention_forward(
            q_TND,
            k_TKD,
            v_TKD,
            segments.starts_S,
            segments.starts_S,
            segments.longest,
            segments.longest,
            0.0,
            True,
            False,
        )[0]
    return out_TND.view(q_BTND.shape)


def attend_spans(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """The same for runs that begin and end there, one after another, in any dtype, [T, N, D]."""
    parts = [_attend_one(q_TND[a:b], k_TKD[a:b], v_TKD[a:b]) for a, b in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_one(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    out_1NTD = F.scaled_dot_product_attention(
        q_TND.transpose(0, 1)[None],
        k_TKD.transpose(0, 1)[None],
        v_TKD.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=q_TND.shape[1] != k_TKD.shape[1],
    )
    return out_1NTD[0].transpose(0, 1)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
