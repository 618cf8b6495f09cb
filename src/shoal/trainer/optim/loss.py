"""The objectives. Pure: tensors in, one loss per output token out; examples/one_process.py has the default's lines.

    A   advantage of the answer a token stands in
    r   exp(log-prob now - behaviour log-prob), the token's ratio
    s   exp(mean over the answer of the same differences), the answer's ratio

Each gives the loss of every token, and which tokens its clip took the gradient from. How tokens add up to the batch's
loss is `token_weights`; KL and entropy are terms of their own. docs/losses.md has them all on one page.

N counts the output tokens of one micro-batch, S its samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.trainer.config import Normalisation, TrainerConfig

MAX_LOG_RATIO = 20.0
"""exp() of more would overflow, and zero times infinity is NaN in the gradient. Clipped tokens all the same."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    loss_N: Tensor
    clipped_N: Tensor
    """Tokens the clip took the gradient from."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of some answers, as a loss sees them: all [N]."""

    behaviour_N: Tensor
    advantages_N: Tensor
    samples_N: Tensor
    """Which answer a token stands in: 0, 1, ... in order, every token of an answer present."""


def policy_loss(logprobs_N: Tensor, answers: Answers, config: TrainerConfig) -> TokenLoss:
    """The loss that `config` names, with its clip."""
    eps, eps_high = config.recipe.eps, config.recipe.eps_high
    behaviour_N, advantages_N = answers.behaviour_N, answers.advantages_N
    match config.loss:
        case "grpo" | "dr_grpo" | "dapo":
            return grpo_loss(
                logprobs_N, behaviour_N, advantages_N, eps=eps, eps_high=eps_high, delta=config.delta
            )
        case "gspo":
            return gspo_loss(logprobs_N, answers, eps=eps, eps_high=eps_high)
        case "cispo":
            return cispo_loss(logprobs_N, behaviour_N, advantages_N, eps=eps, eps_high=eps_high)


def grpo_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    eps: float,
    eps_high: float,
    delta: float,
) -> TokenLoss:
    """GRPO with two-sided clipping, the report's.

        loss = -min( min(r, delta) A,  clamp(r, 1 - eps, 1 + eps_high) A )

    Its gradient to a token's log-prob is -r A, or zero where the clip holds:

        A > 0:  r > 1 + eps_high             (already likelier than it should become in one step)
        A < 0:  r < 1 - eps  or  r > delta   (unlikely enough, or so far off that one token would move everything)

    With eps_high above eps it is DAPO's clip-higher: an unlikely token of a good answer may gain more at once. Dr.GRPO
    has the same loss; what differs is the advantage (no division by std) and the normalisation (constant).
    """
    ratio_N = _exp(logprobs_N - behaviour_N)
    bounded_N = ratio_N.clamp(max=delta)
    clipped_N = ratio_N.clamp(1 - eps, 1 + eps_high)
    loss_N = -torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        good_N = (advantages_N > 0) & (ratio_N > 1 + eps_high)
        bad_N = (advantages_N < 0) & ((ratio_N < 1 - eps) | (ratio_N > delta))
    return TokenLoss(loss_N, good_N | bad_N)


def gspo_loss(logprobs_N: Tensor, answers: Answers, *, eps: float, eps_high: float) -> TokenLoss:
    """GSPO: the ratio, and the clip, of the whole answer.

        loss = -min( s A,  clamp(s, 1 - eps, 1 + eps_high) A ),   the same for every token of the answer

    Averaged over an answer's |o| tokens ("sequence"), the gradient to each token's log-prob is -s A / |o|, or zero for
    the whole answer where the clip holds: A > 0 and s > 1 + eps_high, A < 0 and s < 1 - eps.
    """
    advantages_N = answers.advantages_N
    ratio_N = _exp(_answer_means(logprobs_N - answers.behaviour_N, answers.samples_N))
    clipped_N = ratio_N.clamp(1 - eps, 1 + eps_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        good_N = (advantages_N > 0) & (ratio_N > 1 + eps_high)
        bad_N = (advantages_N < 0) & (ratio_N < 1 - eps)
    return TokenLoss(loss_N, good_N | bad_N)


def cispo_loss(
    logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, *, eps: float, eps_high: float
) -> TokenLoss:
    """CISPO: REINFORCE with a clipped importance weight that itself has no gradient.

        loss = -stop_gradient( clamp(r, 1 - eps, 1 + eps_high) ) A log p

    Its gradient is -clamp(r, ...) A: a token outside the clip counts for less, never for nothing. `clipped_N` are the
    tokens whose weight the clamp changed. eps = 1 leaves the lower side open.
    """
    with torch.no_grad():
        ratio_N = _exp(logprobs_N - behaviour_N)
        weight_N = ratio_N.clamp(1 - eps, 1 + eps_high)
    return TokenLoss(-weight_N * advantages_N * logprobs_N, weight_N != ratio_N)


def reference_kl(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """The k3 estimate of the KL divergence from the reference policy, per token: never negative, zero where equal.

        k3 = exp(d) - d - 1,   d = reference log-prob - log-prob

    Its gradient to the log-prob is 1 - exp(d): it pulls towards the reference from either side.
    """
    difference_N = (reference_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return torch.exp(difference_N) - difference_N - 1


def token_weights(
    kind: Normalisation, samples_N: Tensor, *, num_tokens: int, num_samples: int, constant: int
) -> Tensor:
    """What each token's loss counts, so that the shares of all micro-batches add up to the batch's loss.

        token      1 / num_tokens                 every token of the batch the same
        sequence   1 / (num_samples * |o|)        every answer the same; the report's formula
        constant   1 / (num_samples * constant)   every token the same in every batch: long answers weigh more; Dr.GRPO

    `num_tokens` and `num_samples` are of the whole batch, so neither packing nor micro-batches change a thing.
    """
    if kind == "token":
        return torch.full_like(samples_N, 1 / num_tokens, dtype=torch.float32)
    if kind == "constant":
        return torch.full_like(samples_N, 1 / (num_samples * constant), dtype=torch.float32)
    lengths_N = torch.bincount(samples_N)[samples_N]
    return 1 / (num_samples * lengths_N.float())


def gap_weights(trainer_N: Tensor, worker_N: Tensor, *, truncate: bool, band: tuple[float, float]) -> Tensor:
    """What a token still counts when engine and trainer disagree by w = p_trainer / p_worker before the update.

    truncate   min(w, high)                     the importance weight, bounded so that one token cannot rule
    mask       1 where low <= w <= high, else 0  what is too far off is not learnt from
    """
    low, high = band
    weight_N = _exp(trainer_N - worker_N)
    if truncate:
        return weight_N.clamp(max=high)
    return ((weight_N >= low) & (weight_N <= high)).to(weight_N.dtype)


def _exp(log_ratio_N: Tensor) -> Tensor:
    return torch.exp(log_ratio_N.clamp(max=MAX_LOG_RATIO))


def _answer_means(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """For every token the mean over its answer."""
    lengths_S = torch.bincount(samples_N)
    sums_S = torch.zeros(len(lengths_S), dtype=values_N.dtype, device=values_N.device)
    return (sums_S.index_add(0, samples_N, values_N) / lengths_S)[samples_N]
