"""Early warnings: each rule on a run with the problem, and no warning on a healthy run."""

from collections.abc import Sequence
from typing import Any

import pytest

from shoal.trainer.reporting.early_warnings import QUIET_STEPS, WarningTracker, early_warnings
from shoal.wire.messages import StepReport


def reports(num_steps: int, **series: Any) -> list[StepReport]:
    """Returns the reports of a healthy run; `series` replaces figures, by a value or a function of the step."""
    healthy: dict[str, Any] = {
        "loss": 0.0,
        "reward_mean": lambda step: min(0.8, 0.3 + 0.005 * step),
        "groups": 16,
        "dropped_groups": 8,
        "rollouts": 256,
        "tokens": 4096,
        "lag_mean": 1.0,
        "lag_max": 2,
        "lags": (64, 128, 64),
        "grad_norm": lambda step: 0.3 + 0.05 * (step % 3),
        "clip_fraction": lambda step: 0.01 + 0.002 * (step % 4),
        "logprob_gap": 0.002,
        "logprob_gap_max": 0.03,
        "gap_fresh_tokens": 900,
        "learning_rate": 1e-4,
        "wait_s": 0.5,
        "train_s": 1.0,
        "tokens_per_s": 4096.0,
        "entropy": lambda step: max(0.5, 2.0 - 0.02 * step),
    }
    return [
        StepReport(
            version=step + 1,
            **{name: value(step) if callable(value) else value for name, value in (healthy | series).items()},
        )
        for step in range(num_steps)
    ]


def sentence(run: Sequence[StepReport], kind: str) -> str:
    ((found, text),) = early_warnings(run).items()
    assert found == kind, "only this kind is expected"
    return text


@pytest.mark.parametrize("num_steps", [0, 1, 7, 40, 200])
def test_a_healthy_run_gives_no_warning(num_steps: int) -> None:
    run = reports(num_steps)
    for end in range(0, num_steps + 1, 13):
        assert early_warnings(run[:end]) == {}


@pytest.mark.parametrize(
    ("reward", "advice"), [(0.01, "too hard"), (0.97, "is solved"), (0.5, "filter them by pass rate")]
)
def test_no_signal(reward: float, advice: str) -> None:
    said = sentence(reports(6, dropped_groups=150, reward_mean=reward), "no-signal")
    assert advice in said
    assert "90 % of the groups of the last 5 steps" in said


def test_entropy_that_rises_after_a_fall() -> None:
    def entropy(step: int) -> float:
        return 2.0 - 0.02 * step if step < 60 else 0.8 + 0.02 * (step - 60)

    assert early_warnings(reports(62, entropy=entropy)) == {}
    said = sentence(reports(90, entropy=entropy), "entropy-rising")
    assert "fell from 1.91 to 0.89" in said
    assert "raise kl" in said


def test_steadily_rising_clip_fraction() -> None:
    said = sentence(reports(60, clip_fraction=lambda step: 0.01 * 1.03**step), "clip-creeping")
    assert "lower learning_rate, optimizer_steps or max_lag" in said


def test_steadily_rising_gradient_norm() -> None:
    said = sentence(reports(60, grad_norm=lambda step: 0.2 * 1.03**step), "gradient-creeping")
    assert "raise kl" in said and "clip_norm" in said


def test_a_rise_after_warm_up_is_not_a_trend() -> None:
    assert early_warnings(reports(40, grad_norm=lambda step: 0.1 if step < 10 else 0.5)) == {}


def test_engine_gap_counts_on_fresh_rollouts_only() -> None:
    assert "0.020" in sentence(reports(3, logprob_gap=0.02), "engine-gap")
    assert early_warnings(reports(3, logprob_gap=0.02, gap_fresh_tokens=0)) == {}


def test_starving_names_what_it_waits_for() -> None:
    said = sentence(reports(5, wait_s=9.0, waited_on="workers: none live (0 of 3 enrolled)"), "starving")
    assert said == (
        "a step waits 9 s for rollouts and trains 1 s (medians of the last 5): more workers would make the run faster; "
        "the last wait was for workers: none live (0 of 3 enrolled)"
    )
    on = "rollouts: 0 of 16 groups ready, 0 leases open on 2 live workers; 6 submissions at the validator"
    assert "more validators would" in sentence(reports(5, wait_s=9.0, waited_on=on), "starving")


def test_one_long_wait_is_not_starving() -> None:
    assert early_warnings(reports(5, wait_s=lambda step: 600.0 if step == 0 else 0.5)) == {}


def test_each_warning_is_given_once_until_it_has_not_held_for_long() -> None:
    tracker = WarningTracker()
    gaps = [0.002, 0.02, 0.02, 0.002, 0.02, *[0.002] * QUIET_STEPS, 0.02]
    run = [report for step, gap in enumerate(gaps) for report in reports(step + 1, logprob_gap=gap)[-1:]]
    assert [len(tracker.add(report)) for report in run] == [0, 1, 0, 0, 0, *[0] * QUIET_STEPS, 1]
    assert tracker.add(run[-1]) == {}, "a step that is reported again after a crash"


def test_a_wait_for_the_trainers_own_publication_is_not_starving() -> None:
    on = "the trainer: it is training version 13"
    assert "starving" not in early_warnings(reports(5, wait_s=9.0, waited_on=on))
