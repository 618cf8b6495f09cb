"""The objective of the report: GRPO with two-sided clipping. Pure; examples/one_process.py has the same lines.

N counts the output tokens of one micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp() of more would overflow, and zero times infinity is NaN in the gradient. Clipped tokens all the same."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    loss: Tensor
    """This micro-batch's share of the batch's loss: the shares of all micro-batches add up to it."""
    num_clipped: int
    """Tokens the clip took the gradient from."""


def grpo_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    num_tokens: int,
    eps: float,
    delta: float,
) -> TokenLoss:
    """Per output token, with r = exp(logprob - behaviour logprob):

        loss = -min( min(r, delta) * A,  clamp(r, 1 - eps, 1 + eps) * A ),  summed, divided by num_tokens

    `num_tokens` counts the output tokens of the whole batch, so neither packing nor micro-batches change a thing.
    The gradient to a token's logprob is -r * A / num_tokens, or zero where the clip holds:

        A > 0:  r > 1 + eps                  (already likelier than it should become in one step)
        A < 0:  r < 1 - eps  or  r > delta   (unlikely enough, or so far off that one token would move everything)
    """
    ratio_N = torch.exp((logprobs_N - behaviour_N).clamp(max=MAX_LOG_RATIO))
    bounded_N = ratio_N.clamp(max=delta)
    clipped_N = ratio_N.clamp(1 - eps, 1 + eps)
    loss_N = -torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        good_N = (advantages_N > 0) & (ratio_N > 1 + eps)
        bad_N = (advantages_N < 0) & ((ratio_N < 1 - eps) | (ratio_N > delta))
    return TokenLoss(loss_N.sum() / num_tokens, int((good_N | bad_N).sum()))
