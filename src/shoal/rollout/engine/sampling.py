"""Draws tokens as docs/wire/draw.md says: the inverse of the cumulative distribution, at a given uniform.

B rows, V vocabulary, K blocks of N entries.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256
"""Vocabulary entries summed together; the draw then looks into one block of each row."""


def draw_tokens(logits_BV: Tensor, temperatures_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a token for each row and its log-prob under softmax(logits / temperature), float32.

    The token is the first id whose cumulative probability exceeds the row's uniform (float64). The softmax is float32
    whatever dtype the temperatures have: validators recompute it in float32. Sums are taken over blocks and then
    inside one block, because a float64 sum over the whole vocabulary takes longer than everything else.
    """
    num_rows, vocab = logits_BV.shape
    probs_BV = (logits_BV / temperatures_B.float()[:, None]).softmax(-1)
    if vocab % BLOCK:
        probs_BV = F.pad(probs_BV, (0, -vocab % BLOCK))
    blocks_BKN = probs_BV.view(num_rows, -1, BLOCK)
    # float64: 49,152 float32 probabilities can add up to 1 +- 1e-4, and the rounding would depend on the device.
    # The sum of one block, taken pairwise, is as exact as its probabilities.
    reached_BK = blocks_BKN.sum(-1).cumsum(-1, dtype=torch.float64)
    total_B1 = reached_BK[:, -1:]
    points_B1 = uniforms_B[:, None] * total_B1
    block_B1 = _first_above(reached_BK, points_B1)
    before_B1 = torch.where(block_B1 > 0, reached_BK.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    inside_BN = blocks_BKN[torch.arange(num_rows, device=logits_BV.device), block_B1.squeeze(1)]
    tokens_B1 = block_B1 * BLOCK + _first_above(before_B1 + inside_BN.double().cumsum(-1), points_B1)
    logprobs_B1 = blocks_BKN.view(num_rows, -1).gather(1, tokens_B1).double().log() - total_B1.log()
    return tokens_B1.squeeze(1), logprobs_B1.squeeze(1).float()


def _first_above(reached_BN: Tensor, points_B1: Tensor) -> Tensor:
    """Returns where the rising sums first exceed the point.

    If rounding leaves none above it, returns where the sums stop rising, so that no entry of probability 0 is drawn.
    """
    found_B1 = torch.searchsorted(reached_BN, points_B1, right=True)
    last_B1 = torch.searchsorted(reached_BN, reached_BN[:, -1:].contiguous())
    return torch.minimum(found_B1, last_B1)
