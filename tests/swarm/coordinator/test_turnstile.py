"""Nodes without work, told to wait: a crowd of them asks no more often than there is time for."""

import heapq
import random

import pytest

from shoal.swarm.coordinator.rules.backpressure import ASKS_PER_S, LATE_S, LONGEST_S, Turnstile

LEAST_S = 0.5


def asks_per_s(nodes: int, *, seconds: float = 120.0) -> float:
    """Of a crowd that comes all at once and does as it is told, once things have settled."""
    random.seed(nodes)
    turnstile, asked = Turnstile(), 0
    coming = [index * 1e-4 for index in range(nodes)]
    while (now_s := heapq.heappop(coming)) < seconds:
        asked += now_s > seconds / 2
        heapq.heappush(coming, now_s + turnstile.wait_s(now_s, least_s=LEAST_S))
    return asked / (seconds / 2)


@pytest.mark.parametrize("nodes", [1, 20, 90])
def test_few_wait_as_long_as_the_run_file_says(nodes: int) -> None:
    assert asks_per_s(nodes) == pytest.approx(nodes / LEAST_S, rel=0.05)


@pytest.mark.parametrize("nodes", [400, 1000, 5000])
def test_a_crowd_asks_no_more_than_there_is_time_for(nodes: int) -> None:
    assert asks_per_s(nodes) == pytest.approx(ASKS_PER_S, rel=0.5)


def test_nobody_waits_too_long() -> None:
    assert asks_per_s(20_000) == pytest.approx(20_000 / LONGEST_S, rel=0.2)


def test_a_crowd_that_left_is_forgotten() -> None:
    turnstile = Turnstile()
    waits = [turnstile.wait_s(index * 1e-3, least_s=LEAST_S) for index in range(5000)]
    assert max(waits) > 2
    for now_s in (60.0, 61.5, 63.0):
        last = turnstile.wait_s(now_s, least_s=LEAST_S)
    assert last == LEAST_S


def test_who_was_turned_away_comes_first_until_it_is_late() -> None:
    turnstile = Turnstile()
    assert turnstile.ahead_of("a", 0.0) == 0
    wait_s = turnstile.turn_away("a", 0.0, least_s=LEAST_S)
    turnstile.turn_away("b", 0.1, least_s=LEAST_S)
    assert [turnstile.ahead_of(node, 0.2) for node in "abc"] == [0, 0, 2]
    turnstile.let_in("a")
    assert [turnstile.ahead_of(node, 0.2) for node in "abc"] == [1, 0, 1]
    assert turnstile.ahead_of("c", 0.1 + wait_s + LATE_S + 0.01) == 0


def test_who_does_not_come_back_is_not_hidden_by_one_who_may_take_longer() -> None:
    turnstile = Turnstile(_wait_s=LONGEST_S, _began_s=0.0)
    turnstile.turn_away("told in a crowd", 0.5, least_s=LEAST_S)
    turnstile._wait_s = 0.0
    turnstile.turn_away("gone", 0.6, least_s=LEAST_S)
    assert turnstile.ahead_of("c", 0.7) == 2
    assert turnstile.ahead_of("c", 0.6 + LEAST_S + 2 * LATE_S) == 1
