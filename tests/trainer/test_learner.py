"""One step: how the weights change, and the figures of the step."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_learner import CONFIG, make_batch, make_learner, output_logprobs

from shoal.net.waiting import Stopped
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.pack import pack
from shoal.trainer.optim.learner import update_rate, warmup_rate


def test_learning_rate_rises_and_then_stays() -> None:
    rates = [warmup_rate(1.0, step=step, warmup_steps=3) for step in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert warmup_rate(1.0, step=0, warmup_steps=0) == 1.0


def test_cosine_schedule_falls_to_zero_after_the_warm_up() -> None:
    config = TrainerConfig(learning_rate=2.0, warmup_steps=3, lr_schedule="cosine", decay_steps=13)
    rates = [update_rate(config, step) for step in (0, 1, 2, 3, 8, 13, 99)]
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.0, 0.0, 0.0])
    constant = TrainerConfig(learning_rate=2.0, warmup_steps=3)
    assert [update_rate(constant, step) for step in (0, 3, 99)] == [0.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"lr_schedule": "cosine"}, "needs decay_steps"),
        ({"decay_steps": 9}, '"constant" does not use it'),
        ({"lr_schedule": "cosine", "decay_steps": 5}, "must be above warmup_steps=5"),
    ],
)
def test_schedule_without_a_horizon_is_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainerConfig(**keys)


def test_good_answers_become_more_likely(model: Path) -> None:
    learner = make_learner(model)
    batch = make_batch(0)
    (micro,) = pack(batch.samples, row_tokens=500, rows_per_micro_batch=1)
    before_N = output_logprobs(learner.decoder, micro).detach()
    figures = learner.step(batch, threading.Event())
    after_N = output_logprobs(learner.decoder, micro).detach()
    assert float(((after_N - before_N) * micro.advantages_N).mean()) > 0
    assert learner.version == 1
    assert figures.learning_rate == pytest.approx(1e-3 / 3)
    assert figures.grad_norm > 0


def test_gap_is_measured_on_fresh_tokens(model: Path) -> None:
    batch = make_batch(0)
    learner = make_learner(model)
    (micro,) = pack(batch.samples, row_tokens=500, rows_per_micro_batch=1)
    gaps_N = (output_logprobs(learner.decoder, micro) - micro.behaviour_N).abs().detach()
    assert 0 < int((micro.lags_N == 0).sum()) < len(gaps_N)
    figures = learner.step(batch, threading.Event())
    assert figures.logprob_gap == pytest.approx(float(gaps_N[micro.lags_N == 0].mean()), rel=1e-4)


def test_gap_is_measured_on_all_tokens_if_none_is_fresh(model: Path) -> None:
    batch = make_batch(0)
    batch = replace(batch, samples=tuple(replace(sample, lag=1) for sample in batch.samples))
    learner = make_learner(model)
    (micro,) = pack(batch.samples, row_tokens=500, rows_per_micro_batch=1)
    gaps_N = (output_logprobs(learner.decoder, micro) - micro.behaviour_N).abs().detach()
    assert learner.step(batch, threading.Event()).logprob_gap == pytest.approx(float(gaps_N.mean()), rel=1e-4)


def test_a_stop_before_the_first_update_leaves_the_weights(model: Path) -> None:
    learner = make_learner(model)
    before = [parameter.detach().clone() for parameter in learner.decoder.parameters()]
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped, match="step from version 0"):
        learner.step(make_batch(0), stop)
    assert learner.version == 0
    assert all(torch.equal(old, new) for old, new in zip(before, learner.decoder.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_stops_the_run(model: Path) -> None:
    learner = make_learner(model)
    batch = make_batch(0)
    broken = replace(batch.samples[0], advantage=float("nan"))
    with pytest.raises(
        ArithmeticError, match="step from version 0: gradient norm is nan; lower learning_rate"
    ):
        learner.step(replace(batch, samples=(broken, *batch.samples[1:])), threading.Event())
    assert learner.version == 0


def test_master_weights_are_float32(model: Path) -> None:
    learner = make_learner(model, CONFIG)
    learner.step(make_batch(0), threading.Event())
    assert {parameter.dtype for parameter in learner.decoder.parameters()} == {torch.float32}


def test_each_answer_is_trained_at_its_own_temperature(model: Path) -> None:
    """The gradient of a mixed batch is that of its two halves, each at its one temperature."""
    batch = make_batch(0, temperatures=(0.6, 1.4))
    gradients = []
    for samples in (batch.samples, batch.samples[:6], batch.samples[6:]):
        learner = make_learner(model)
        (micro,) = pack(samples, row_tokens=500, rows_per_micro_batch=1)
        assert len(micro.by_temperature) == (2 if samples is batch.samples else 1)
        (output_logprobs(learner.policy, micro) * micro.advantages_N).sum().backward()
        parts = [one.grad.flatten() for one in learner.decoder.parameters() if one.grad is not None]
        gradients.append(torch.cat(parts))
    both, cold, warm = gradients
    assert min(float(cold.norm()), float(warm.norm())) > 1e-3
    torch.testing.assert_close(both, cold + warm, atol=1e-5, rtol=1e-4)
