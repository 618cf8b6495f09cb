"""The objective, against its formula written out by hand."""

import math

import pytest
import torch

from shoal.trainer.loss import grpo_loss

EPS, DELTA = 0.2, 4.0


def value_and_gradient(ratio: float, advantage: float) -> tuple[float, float, int]:
    logprob = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-1.5], dtype=torch.float64)
    result = grpo_loss(
        logprob,
        behaviour,
        torch.tensor([advantage], dtype=torch.float64),
        num_tokens=1,
        eps=EPS,
        delta=DELTA,
    )
    result.loss.backward()
    assert logprob.grad is not None
    return float(result.loss.detach()), float(logprob.grad), result.num_clipped


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient"),
    [
        (0.1, -0.1, -0.1),
        (0.5, -0.5, -0.5),
        (1.0, -1.0, -1.0),
        (1.3, -1.2, 0),
        (3, -1.2, 0),
        (5, -1.2, 0),
        (100, -1.2, 0),
    ],
)
def test_good_token_counts_until_it_is_one_fifth_likelier(ratio: float, loss: float, gradient: float) -> None:
    found = value_and_gradient(ratio, 1.0)
    assert found[0] == pytest.approx(loss, abs=1e-12)
    assert found[1] == pytest.approx(gradient, abs=1e-12)
    assert found[2] == (gradient == 0)


@pytest.mark.parametrize(
    ("ratio", "loss", "gradient"),
    [
        (0.1, 0.8, 0),
        (0.5, 0.8, 0),
        (1.0, 1.0, 1.0),
        (1.3, 1.3, 1.3),
        (3, 3.0, 3.0),
        (5, 4.0, 0),
        (100, 4.0, 0),
    ],
)
def test_bad_token_counts_between_both_sides_of_the_clip(ratio: float, loss: float, gradient: float) -> None:
    found = value_and_gradient(ratio, -1.0)
    assert found[0] == pytest.approx(loss, abs=1e-12)
    assert found[1] == pytest.approx(gradient, abs=1e-12)
    assert found[2] == (gradient == 0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratio_beyond_all_numbers_gives_no_nan(advantage: float) -> None:
    logprob = torch.tensor([0.0], requires_grad=True)
    result = grpo_loss(
        logprob, torch.tensor([-1e5]), torch.tensor([advantage]), num_tokens=1, eps=EPS, delta=DELTA
    )
    result.loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == 0
    assert result.loss.item() == pytest.approx(-1.2 if advantage > 0 else 4.0)


def test_shares_of_micro_batches_add_up() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, behaviour, advantages = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    whole = grpo_loss(logprobs, behaviour, advantages, num_tokens=12, eps=EPS, delta=DELTA)
    parts = [
        grpo_loss(logprobs[cut], behaviour[cut], advantages[cut], num_tokens=12, eps=EPS, delta=DELTA)
        for cut in (slice(0, 5), slice(5, 12))
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), abs=1e-12)
    assert sum(part.num_clipped for part in parts) == whole.num_clipped
