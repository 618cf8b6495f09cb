"""The objectives against their formulas: value, gradient, and which tokens are clipped."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.trainer.config import TrainerConfig
from shoal.trainer.optim.loss import (
    AnswerTokens,
    TokenLoss,
    cispo_loss,
    gap_weights,
    grpo_loss,
    gspo_loss,
    policy_loss,
    reference_kl,
    token_weights,
)

EPS, DELTA = 0.2, 4.0
RATIOS = (0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 3.9, 4.1, 5.1, 100.0)
ADVANTAGES = (-2.0, -0.5, 0.0, 0.3, 1.7)


LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(
    loss: Callable[[Tensor, Tensor, Tensor], TokenLoss], ratio: float, advantage: float
) -> tuple[float, float, bool]:
    logprob = column([math.log(ratio) - 1.5]).requires_grad_()
    result = loss(logprob, column([-1.5]), column([advantage]))
    result.loss_N.sum().backward()
    assert logprob.grad is not None
    return float(result.loss_N.detach()), float(logprob.grad), bool(result.clipped_N)


def two_sided(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenLoss:
    return grpo_loss(logprobs, behaviour, advantages, eps=EPS, eps_high=EPS, delta=DELTA)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient"),
    [(0.1, -0.1, -0.1), (0.5, -0.5, -0.5), (1.0, -1.0, -1.0), (1.3, -1.2, 0), (3, -1.2, 0), (5, -1.2, 0), (100, -1.2, 0)],
)  # fmt: skip
def test_good_tokens_are_clipped_above_the_upper_side(ratio: float, loss: float, gradient: float) -> None:
    assert value_and_gradient(two_sided, ratio, 1.0) == pytest.approx((loss, gradient, gradient == 0))


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient"),
    [(0.1, 0.8, 0), (0.5, 0.8, 0), (1.0, 1.0, 1.0), (1.3, 1.3, 1.3), (3, 3.0, 3.0), (5, 4.0, 0), (100, 4.0, 0)],
)  # fmt: skip
def test_bad_tokens_are_clipped_on_both_sides(ratio: float, loss: float, gradient: float) -> None:
    assert value_and_gradient(two_sided, ratio, -1.0) == pytest.approx((loss, gradient, gradient == 0))


def expected_gradient(ratio: float, advantage: float, *, low: float, high: float, delta: float) -> float:
    """Returns the gradient of the clipped objective to the log-prob, as in docs/losses.md."""
    if advantage > 0:
        return -ratio * advantage if ratio <= high else 0.0
    return -ratio * advantage if low <= ratio <= delta else 0.0


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_gradient_of_the_clipped_objectives(name: str, ratio: float, advantage: float) -> None:
    config = TrainerConfig(loss=name)  # type: ignore[arg-type]
    high = 1.28 if name == "dapo" else 1.2

    def loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenLoss:
        return policy_loss(logprobs, AnswerTokens(behaviour, advantages, torch.tensor([0])), config)

    _, gradient, clipped = value_and_gradient(loss, ratio, advantage)
    expected = expected_gradient(ratio, advantage, low=0.8, high=high, delta=4.0)
    assert gradient == pytest.approx(expected, abs=1e-12)
    assert clipped == (advantage != 0 and expected == 0)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_cispo_weighs_a_token_and_drops_it_only_above_delta(ratio: float, advantage: float) -> None:
    def loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor) -> TokenLoss:
        return cispo_loss(logprobs, behaviour, advantages, eps=1.0, eps_high=4.0, delta=20.0)

    value, gradient, clipped = value_and_gradient(loss, ratio, advantage)
    weight = min(ratio, 5.0) if ratio <= 20 else 0.0
    assert gradient == pytest.approx(-weight * advantage, abs=1e-12)
    assert value == pytest.approx(-weight * advantage * (math.log(ratio) - 1.5), abs=1e-12)
    assert clipped == (ratio > 5)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize(
    "log_ratios",
    [
        (0.0, 0.0, 0.0),
        (0.6, -0.6, 1e-4),
        (0.0012, 0.0006, 0.0),
        (0.5, 0.4, 0.3),
        (-0.5, 0.1, -0.3),
        (1.3, 1.35, 1.3),
        (1.5, 1.3, 1.5),
    ],
)
def test_gspo_takes_and_clips_the_answers_ratio(log_ratios: tuple[float, ...], advantage: float) -> None:
    """Tests three tokens of one answer between tokens of two others, which must not matter."""
    logprobs = column([-1.0, *(value - 2.0 for value in log_ratios), -1.5]).requires_grad_()
    answers = AnswerTokens(
        behaviour_N=column([-1.3, -2.0, -2.0, -2.0, -1.1]),
        advantages_N=column([9.0, advantage, advantage, advantage, -9.0]),
        samples_N=torch.tensor([0, 1, 1, 1, 2]),
    )
    result = gspo_loss(logprobs, answers, eps=3e-4, eps_high=4e-4, delta=4.0)
    weights = token_weights("sequence", answers.samples_N, num_tokens=5, num_samples=1, constant=0)
    (result.loss_N * weights)[1:4].sum().backward()
    ratio = math.exp(sum(log_ratios) / 3)
    expected = expected_gradient(ratio, advantage, low=1 - 3e-4, high=1 + 4e-4, delta=4.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, *[expected / 3] * 3, 0], abs=1e-7)
    assert result.clipped_N[1:4].tolist() == [advantage != 0 and expected == 0] * 3


def share_of_row(name: str, lie_T: list[float], *, advantage: float) -> float:
    """Returns the norm of row 0's gradient divided by that of the batch of 256, if row 0 lies by `lie_T`.

    Every token has a direction of its own in a space of 512 dimensions, as tokens of different answers nearly have.
    """
    num_rows, num_tokens, generator = 256, len(lie_T), torch.Generator().manual_seed(0)
    directions = torch.randn(num_rows * num_tokens, 512, generator=generator, dtype=torch.float64)
    samples_N = torch.arange(num_rows).repeat_interleave(num_tokens)
    advantages_R = column([advantage, *(1.0 if at % 2 else -1.0 for at in range(1, num_rows))])
    honest_N = torch.randn(len(samples_N), generator=generator, dtype=torch.float64) * 0.02 - 2.0
    behaviour_N = honest_N.clone()
    behaviour_N[:num_tokens] -= column(lie_T)
    config = TrainerConfig(loss=name)  # type: ignore[arg-type]
    logprobs = honest_N.clone().requires_grad_()
    loss_N = policy_loss(
        logprobs, AnswerTokens(behaviour_N, advantages_R[samples_N], samples_N), config
    ).loss_N
    (
        loss_N * token_weights("sequence", samples_N, num_tokens=0, num_samples=num_rows, constant=0)
    ).sum().backward()
    assert logprobs.grad is not None
    row = logprobs.grad[:num_tokens] @ directions[:num_tokens]
    return float(row.norm() / (logprobs.grad @ directions).norm())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_invented_row_has_no_large_share_of_the_gradient(name: str, advantage: float) -> None:
    """Tests one answer of 256 whose behaviour log-probs are 19.9 too low in every token."""
    assert share_of_row(name, [19.9] * 16, advantage=advantage) < 0.05


@pytest.mark.parametrize("name", LOSSES)
def test_one_invented_token_gives_a_row_no_larger_share_than_an_honest_row(name: str) -> None:
    honest = share_of_row(name, [0.0] * 16, advantage=-1.0)
    assert share_of_row(name, [19.9] + [0.0] * 15, advantage=-1.0) < 1.2 * honest


@pytest.mark.parametrize("lie", [0.5, 1.3, 1.38, 2.9])
@pytest.mark.parametrize("name", LOSSES)
def test_no_lie_multiplies_a_row_by_more_than_its_bound(name: str, lie: float) -> None:
    """The bound is delta, and 1 + eps_high for cispo."""
    honest = share_of_row(name, [0.0] * 16, advantage=-1.0)
    assert share_of_row(name, [lie] * 16, advantage=-1.0) < (5 if name == "cispo" else 4) * honest


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_overflowing_ratio_gives_no_nan(name: str, advantage: float) -> None:
    logprob = torch.tensor([0.0], requires_grad=True)
    answers = AnswerTokens(torch.tensor([-1e5]), torch.tensor([advantage]), torch.tensor([0]))
    result = policy_loss(logprob, answers, TrainerConfig(loss=name))  # type: ignore[arg-type]
    result.loss_N.sum().backward()
    assert logprob.grad is not None
    assert math.isfinite(float(logprob.grad))
    assert math.isfinite(float(result.loss_N.detach()))


@pytest.mark.parametrize("difference", [-30.0, -2.0, -0.1, 0.0, 0.1, 2.0])
def test_kl_has_a_gradient(difference: float) -> None:
    """`difference` is log p - log p_reference; k3 = e^-x + x - 1, and its slope is 1 - e^-x."""
    logprob = column([-1.0]).requires_grad_()
    kl = reference_kl(logprob, column([-1.0 - difference]))
    kl.sum().backward()
    if difference == -30.0:  # beyond the bound the term is constant: finite, with no gradient
        assert math.isfinite(float(kl.detach()))
        return
    assert float(kl.detach()) == pytest.approx(math.exp(-difference) + difference - 1, abs=1e-12)
    assert logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(1 - math.exp(-difference), abs=1e-12)


def test_normalisations() -> None:
    samples_N = torch.tensor([0, 0, 0, 1])
    count = {"num_tokens": 8, "num_samples": 2, "constant": 16}
    assert token_weights("token", samples_N, **count).tolist() == [1 / 8] * 4
    assert token_weights("sequence", samples_N, **count).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])
    assert token_weights("constant", samples_N, **count).tolist() == [1 / 32] * 4


def test_gap_weights() -> None:
    trainer = column([math.log(w) - 1 for w in (0.1, 0.6, 1.0, 1.9, 50.0)])
    worker = column([-1.0] * 5)
    truncated = gap_weights(trainer, worker, truncate=True, band=(0.5, 2.0))
    assert truncated.tolist() == pytest.approx([0.1, 0.6, 1.0, 1.9, 2.0])
    masked = gap_weights(trainer, worker, truncate=False, band=(0.5, 2.0))
    assert masked.tolist() == [0, 1, 1, 1, 0]
