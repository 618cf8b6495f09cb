"""Relay choice: the formula of the INTELLECT-2 report, and its effect over many draws."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.shardcast import RelayChoice


def simulate(choice: RelayChoice, rates: dict[str, float], num_draws: int, seed: int = 0) -> dict[str, int]:
    """Simulates relays that deliver at `rates` (0: fails) and returns how often each was asked."""
    rng = random.Random(seed)
    asked = dict.fromkeys(choice.urls, 0)
    for _ in range(num_draws):
        url = choice.pick(choice.urls, rng.random())
        asked[url] += 1
        if rates[url]:
            choice.delivered(url, rates[url])
        else:
            choice.failed(url)
    return asked


def test_moving_averages_by_hand() -> None:
    choice = RelayChoice(["a", "b"], heal=0.0)
    choice.delivered("a", 100.0)
    assert (choice.stats["a"].success, choice.stats["a"].bandwidth) == (1.0, 100.0)
    choice.delivered("a", 200.0)
    assert choice.stats["a"].bandwidth == pytest.approx(0.3 * 200 + 0.7 * 100)
    choice.failed("a")
    assert choice.stats["a"].success == pytest.approx(0.7)
    assert choice.stats["a"].bandwidth == pytest.approx(0.7 * 130)


def test_healing_raises_every_success_rate_up_to_one() -> None:
    choice = RelayChoice(["a", "b"])
    choice.failed("a")
    assert choice.stats["a"].success == pytest.approx(0.71)
    for _ in range(40):
        choice.delivered("b", 1.0)
    assert choice.stats["a"].success == 1.0


def test_shares_follow_speed() -> None:
    rates = {"fast": 10.0, "middle": 3.0, "slow": 1.0}
    choice = RelayChoice(rates)
    for url, rate in rates.items():
        choice.delivered(url, rate)
    assert choice.shares(choice.urls) == pytest.approx({"fast": 10 / 14, "middle": 3 / 14, "slow": 1 / 14})
    asked = simulate(choice, rates, 4000)
    assert asked["fast"] / 4000 == pytest.approx(10 / 14, abs=0.03)
    assert asked["slow"] / 4000 == pytest.approx(1 / 14, abs=0.03)


def test_a_dead_relay_is_avoided_and_returns_after_recovery() -> None:
    choice = RelayChoice(["a", "b"])
    simulate(choice, {"a": 5.0, "b": 5.0}, 50)
    dead = simulate(choice, {"a": 0.0, "b": 5.0}, 400, seed=1)
    assert dead["a"] < 40
    revived = simulate(choice, {"a": 5.0, "b": 5.0}, 400, seed=2)
    assert revived["a"] > 120


def test_without_healing_a_relay_hardly_returns() -> None:
    choice = RelayChoice(["a", "b"], heal=0.0)
    simulate(choice, {"a": 5.0, "b": 5.0}, 50)
    for _ in range(30):
        choice.failed("a")
    assert choice.shares(choice.urls)["a"] < 1e-5


def test_an_unknown_relay_counts_as_average() -> None:
    choice = RelayChoice(["a", "new"])
    choice.delivered("a", 1e8)
    assert choice.shares(choice.urls)["new"] == pytest.approx(0.5)
    choice.failed("new")
    assert 0.3 < choice.shares(choice.urls)["new"] < 0.5


def test_update_keeps_the_statistics_of_relays_that_stay() -> None:
    choice = RelayChoice(["http://a/", "http://b"])
    assert choice.urls == ("http://a", "http://b")
    choice.delivered("http://a", 7.0)
    choice.update(["http://c", "http://a"])
    assert choice.urls == ("http://c", "http://a")
    assert choice.stats["http://a"].bandwidth == 7.0


@given(
    tries=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e12)), max_size=60),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None, derandomize=True)
def test_shares_sum_to_one_and_pick_returns_a_member(tries: list[tuple[str, float]], uniform: float) -> None:
    choice = RelayChoice("abc")
    for url, rate in tries:
        choice.delivered(url, rate) if rate > 1 else choice.failed(url)
    assert sum(choice.shares("ab").values()) == pytest.approx(1.0)
    assert choice.pick("ab", uniform) in "ab"
