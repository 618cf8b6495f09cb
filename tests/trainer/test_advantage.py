"""Advantages of a group."""

import statistics

import pytest

from shoal.trainer.data.advantage import group_advantages


def test_mean() -> None:
    assert group_advantages([0.0, 0.0, 0.5, 1.0], "mean") == pytest.approx([-0.375, -0.375, 0.125, 0.625])


def test_std_has_one_degree_of_freedom_less() -> None:
    rewards = [0.0, 0.25, 1.0, 0.5]
    std = statistics.stdev(rewards)
    expected = [(reward - 0.4375) / (std + 1e-6) for reward in rewards]
    assert group_advantages(rewards, "std") == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_carry_nothing() -> None:
    assert group_advantages([0.1] * 7, "std") == pytest.approx([0.0] * 7, abs=1e-9)


def test_lonely_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="samples_per_prompt"):
        group_advantages([1.0], "std")
