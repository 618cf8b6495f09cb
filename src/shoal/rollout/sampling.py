"""Drawing tokens as wire/draw.py says: the inverse of the cumulative distribution, at a given uniform."""

import torch
from torch import Tensor


def draw_tokens(logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row, and its log-prob under softmax(logits / temperature), float32.

    The token is the first id whose cumulative probability exceeds the row's uniform (float64).
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature_B[:, None], dim=-1)
    # float64: 49,152 float32 probabilities add up to as far as 1e-4 from 1, and the rounding would depend on the device.
    cumulative_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    # float32 probabilities miss 1 by a little in all; without the factor a uniform near 1 could fall past the end.
    points_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, points_B1, right=True).clamp_(max=logits_BV.shape[1] - 1)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)
