"""Drawing tokens as wire/draw.py says: the inverse of the cumulative distribution, at a given uniform."""

import torch
from torch import Tensor

BLOCK = 256
"""Probabilities added up together; only one block of each row is looked into."""


def draw_tokens(logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row, and its log-prob under softmax(logits / temperature), float32.

    The token is the first id whose cumulative probability exceeds the row's uniform (float64). Sums are taken of blocks,
    then inside one: adding up a whole vocabulary in float64 takes several times as long.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature_B[:, None], dim=-1)
    probs_BV = logprobs_BV.exp()
    num_rows, vocab = probs_BV.shape
    padded_BV = torch.nn.functional.pad(probs_BV, (0, -vocab % BLOCK))
    blocks_BKN = padded_BV.view(num_rows, -1, BLOCK)
    # float64: 49,152 float32 probabilities add up to as far as 1e-4 from 1, and the rounding would depend on the device.
    reached_BK = blocks_BKN.sum(-1, dtype=torch.float64).cumsum(-1)
    # float32 probabilities miss 1 by a little in all; without the factor a uniform near 1 could fall past the end.
    points_B1 = uniforms_B[:, None] * reached_BK[:, -1:]
    block_B1 = _first_above(reached_BK, points_B1)
    before_B1 = torch.where(block_B1 > 0, reached_BK.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside_BN = blocks_BKN[torch.arange(num_rows, device=logits_BV.device), block_B1.squeeze(1)]
    tokens_B1 = block_B1 * BLOCK + _first_above(before_B1 + inside_BN.double().cumsum(-1), points_B1)
    return tokens_B1.squeeze(1), logprobs_BV.gather(1, tokens_B1).squeeze(1)


def _first_above(reached_BN: Tensor, points_B1: Tensor) -> Tensor:
    """Where the rising sums first exceed the point. If rounding lets none, where they stop rising: no weight of 0 is drawn."""
    found_B1 = torch.searchsorted(reached_BN, points_B1, right=True)
    last_B1 = torch.searchsorted(reached_BN, reached_BN[:, -1:].contiguous())
    return torch.minimum(found_B1, last_B1)
