"""The objectives as pure functions: tensors in, one loss per output token out.

    A   advantage of the answer that a token belongs to
    r   exp(log-prob now - behaviour log-prob), the token's ratio
    s   exp(mean over the answer of the same differences), the answer's ratio

Each returns the loss of every token, and which tokens get no gradient because they are clipped. `token_weights` says how
tokens add up to the batch's loss; KL and entropy are separate terms. docs/losses.md has the formulas, and
examples/one_process.py has the default objective in a few lines.

N counts the output tokens of one micro-batch, S its samples.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.trainer.config import Normalisation, TrainerConfig

MAX_LOG_RATIO = 20.0
"""Bounds the exponent: exp() would overflow, and zero times infinity is NaN in the gradient. Such tokens are clipped anyway."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of every token, before weighting."""

    loss_N: Tensor
    clipped_N: Tensor
    """Tokens that the clip changed."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The inputs of a loss, per output token."""

    behaviour_N: Tensor
    advantages_N: Tensor
    samples_N: Tensor
    """Index of the answer that a token belongs to: 0, 1, ... in order. Every token of an answer is present."""


def policy_loss(logprobs_N: Tensor, answers: AnswerTokens, config: TrainerConfig) -> TokenLoss:
    """Computes the loss that `config` names."""
    recipe = config.recipe
    eps, eps_high, delta = recipe.eps, recipe.eps_high, recipe.delta
    behaviour_N, advantages_N = answers.behaviour_N, answers.advantages_N
    match config.loss:
        case "grpo" | "dr_grpo" | "dapo":
            return grpo_loss(logprobs_N, behaviour_N, advantages_N, eps=eps, eps_high=eps_high, delta=delta)
        case "gspo":
            return gspo_loss(logprobs_N, answers, eps=eps, eps_high=eps_high, delta=delta)
        case "cispo":
            return cispo_loss(logprobs_N, behaviour_N, advantages_N, eps=eps, eps_high=eps_high, delta=delta)


def grpo_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    eps: float,
    eps_high: float,
    delta: float,
) -> TokenLoss:
    """Computes GRPO with two-sided clipping, as in the INTELLECT-2 report.

        loss = -min( min(r, delta) A,  clamp(r, 1 - eps, 1 + eps_high) A )

    The gradient to a token's log-prob is -r A, or zero if the token is clipped:

        A > 0:  r > 1 + eps_high             (already more likely than it should become in one step)
        A < 0:  r < 1 - eps  or  r > delta   (unlikely enough, or so far off that one token would dominate the gradient)

    With eps_high above eps this is DAPO's clip-higher: an unlikely token of a good answer may gain more in one step.
    Dr.GRPO has the same loss with another advantage (not divided by std) and normalisation (constant).
    """
    ratio_N = _exp(logprobs_N - behaviour_N)
    bounded_N = ratio_N.clamp(max=delta)
    clipped_N = ratio_N.clamp(1 - eps, 1 + eps_high)
    loss_N = -torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        good_N = (advantages_N > 0) & (ratio_N > 1 + eps_high)
        bad_N = (advantages_N < 0) & ((ratio_N < 1 - eps) | (ratio_N > delta))
    return TokenLoss(loss_N, good_N | bad_N)


def gspo_loss(
    logprobs_N: Tensor, answers: AnswerTokens, *, eps: float, eps_high: float, delta: float
) -> TokenLoss:
    """Computes GSPO with two-sided clipping: ratio and clip are those of the whole answer.

        loss = -min( min(s, delta) A,  clamp(s, 1 - eps, 1 + eps_high) A ),   the same for every token of the answer

    Averaged over an answer's |o| tokens ("sequence"), the gradient to each token's log-prob is -s A / |o|, or zero for
    the whole answer if it is clipped: A > 0 and s > 1 + eps_high, or A < 0 and (s < 1 - eps or s > delta).

    Without `delta` a worker that reports log-probs d too low makes s = exp(d) for its bad answer, which has no bound: one
    row of a batch becomes the whole gradient. With it the row's gradient is at most delta times an honest row's. A lie in
    a single token moves s less, by d / |o|, so each token's difference is also clamped to +- log(delta) in the ratio that
    weights the gradient: one token then scales its answer by at most delta ** (1 / |o|), and this clamp changes nothing
    while every token's ratio is within [1 / delta, delta]. Whether s > delta is decided on the differences as reported.
    """
    advantages_N = answers.advantages_N
    differences_N = logprobs_N - answers.behaviour_N
    with torch.no_grad():
        excess_N = differences_N - differences_N.clamp(-math.log(delta), math.log(delta))
        too_far_N = _answer_means(differences_N, answers.samples_N) > math.log(delta)
    # Subtracting a constant bounds the value and keeps the gradient of every token.
    ratio_N = _exp(_answer_means(differences_N - excess_N, answers.samples_N))
    bounded_N = torch.where(too_far_N, delta, ratio_N)
    clipped_N = ratio_N.clamp(1 - eps, 1 + eps_high)
    loss_N = -torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        good_N = (advantages_N > 0) & (ratio_N > 1 + eps_high)
        bad_N = (advantages_N < 0) & ((ratio_N < 1 - eps) | too_far_N)
    return TokenLoss(loss_N, good_N | bad_N)


def cispo_loss(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantages_N: Tensor,
    *,
    eps: float,
    eps_high: float,
    delta: float,
) -> TokenLoss:
    """Computes CISPO: REINFORCE with a clipped importance weight that has no gradient of its own.

        loss = -stop_gradient( w ) A log p,   w = clamp(r, 1 - eps, 1 + eps_high) if r <= delta, else 0

    The gradient is -w A: a token outside the clip counts less, and is dropped only above `delta`, far outside. There the
    behaviour log-prob is wrong rather than old, and without `delta` such a token would have the largest weight of all,
    1 + eps_high, for good and bad answers alike: one invented row of 256 had 32 % of the gradient's norm. `clipped_N`
    marks the tokens whose weight the clamp changed. eps = 1 disables the lower bound.
    """
    with torch.no_grad():
        ratio_N = _exp(logprobs_N - behaviour_N)
        weight_N = ratio_N.clamp(1 - eps, 1 + eps_high).masked_fill(ratio_N > delta, 0.0)
    return TokenLoss(-weight_N * advantages_N * logprobs_N, weight_N != ratio_N)


def reference_kl(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Computes the k3 estimate of the KL divergence from the reference policy, per token: never negative, zero if equal.

        k3 = exp(d) - d - 1,   d = reference log-prob - log-prob

    The gradient to the log-prob is 1 - exp(d): it pulls towards the reference from both sides.
    """
    difference_N = (reference_N - logprobs_N).clamp(max=MAX_LOG_RATIO)
    return torch.exp(difference_N) - difference_N - 1


def token_weights(
    kind: Normalisation, samples_N: Tensor, *, num_tokens: int, num_samples: int, constant: int
) -> Tensor:
    """Returns the weight of each token's loss, so that the losses of all micro-batches add up to the batch's loss.

        token      1 / num_tokens                 equal weight for every token of the batch
        sequence   1 / (num_samples * |o|)        equal weight for every answer; the report's formula
        constant   1 / (num_samples * constant)   equal weight for every token of every batch: Dr.GRPO

    `num_tokens` and `num_samples` count the whole batch, so packing and micro-batches do not change the gradient.
    """
    if kind == "token":
        return torch.full_like(samples_N, 1 / num_tokens, dtype=torch.float32)
    if kind == "constant":
        return torch.full_like(samples_N, 1 / (num_samples * constant), dtype=torch.float32)
    lengths_N = torch.bincount(samples_N)[samples_N]
    return 1 / (num_samples * lengths_N.float())


def gap_weights(trainer_N: Tensor, worker_N: Tensor, *, truncate: bool, band: tuple[float, float]) -> Tensor:
    """Returns the weight of tokens for which engine and trainer disagree by w = p_trainer / p_worker before the update.

    truncate   min(w, high)                      the importance weight, bounded so that one token cannot dominate
    mask       1 if low <= w <= high, else 0     tokens that are too far off are not trained on
    """
    low, high = band
    weight_N = _exp(trainer_N - worker_N)
    if truncate:
        return weight_N.clamp(max=high)
    return ((weight_N >= low) & (weight_N <= high)).to(weight_N.dtype)


def _exp(log_ratio_N: Tensor) -> Tensor:
    return torch.exp(log_ratio_N.clamp(max=MAX_LOG_RATIO))


def _answer_means(values_N: Tensor, samples_N: Tensor) -> Tensor:
    """Returns for every token the mean over its answer."""
    lengths_S = torch.bincount(samples_N)
    sums_S = torch.zeros(len(lengths_S), dtype=values_N.dtype, device=values_N.device)
    return (sums_S.index_add(0, samples_N, values_N) / lengths_S)[samples_N]
