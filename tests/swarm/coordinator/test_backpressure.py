"""Backpressure: nodes without work together ask no more often than the coordinator has time for."""

import heapq
import random

import pytest

from shoal.swarm.coordinator.rules.backpressure import (
    ASKS_PER_S,
    LATE_S,
    LONGEST_S,
    SPREAD,
    Backpressure,
    RefusalRate,
)

LEAST_S = 0.5


def refuse(backpressure: Backpressure, now_s: float, node: str | None = None, spread: float = 1.0) -> float:
    """Does what a refused request does: returns the wait, counts the refusal, keeps the node's place."""
    proven = node is not None
    wait_s = backpressure.wait_s(proven=proven, least_s=LEAST_S, spread=spread)
    if node is not None:
        backpressure.keep_place(node, now_s, wait_s, least_s=LEAST_S)
    else:
        backpressure.others.count(now_s, least_s=LEAST_S)
    return wait_s


def asks_per_s(nodes: int, *, proven: bool, seconds: float = 120.0) -> float:
    """Returns how often many nodes ask that all come at once and then wait as they are told, once the rate has settled."""
    rng = random.Random(nodes)
    backpressure, asked = Backpressure(), 0
    coming = [(index * 1e-4, index) for index in range(nodes)]
    while (first := heapq.heappop(coming))[0] < seconds:
        now_s, index = first
        asked += now_s > seconds / 2
        name = f"node {index}" if proven else None
        heapq.heappush(
            coming, (now_s + refuse(backpressure, now_s, name, spread=rng.uniform(*SPREAD)), index)
        )
    return asked / (seconds / 2)


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("nodes", [1, 20, 90])
def test_few_nodes_wait_as_long_as_the_run_file_says(nodes: int, proven: bool) -> None:
    assert asks_per_s(nodes, proven=proven) == pytest.approx(nodes / LEAST_S, rel=0.05)


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("nodes", [400, 1000, 5000])
def test_many_nodes_ask_no_more_than_there_is_time_for(nodes: int, proven: bool) -> None:
    assert asks_per_s(nodes, proven=proven) == pytest.approx(ASKS_PER_S, rel=0.5)


@pytest.mark.parametrize("proven", [False, True])
def test_no_wait_is_longer_than_the_limit(proven: bool) -> None:
    assert asks_per_s(20_000, proven=proven) == pytest.approx(20_000 / LONGEST_S, rel=0.2)


def test_keys_that_ask_without_pause_do_not_make_others_wait() -> None:
    """Eight keys may ask 50 times a second each. New ones make other new nodes wait; proven ones count once each."""
    backpressure = Backpressure()
    for index in range(20_000):
        refuse(backpressure, index / 400)
    assert backpressure.wait_s(proven=False, least_s=LEAST_S, spread=1.0) == LONGEST_S
    for index in range(20_000):
        refuse(backpressure, 50 + index / 400, f"key {index % 8}")
    assert refuse(backpressure, 100.0, "who does the work") == LEAST_S


def test_a_node_that_comes_back_early_keeps_its_place() -> None:
    backpressure = Backpressure()
    for index in range(100):
        refuse(backpressure, index / 50, "a")
    assert backpressure.ahead_of("b", 2.0) == 1
    assert backpressure.ahead_of("b", 2.0 + LEAST_S + LATE_S) == 0


def test_the_wait_falls_when_the_nodes_have_left() -> None:
    backpressure = Backpressure()
    waits = [refuse(backpressure, index * 1e-3) for index in range(5000)]
    assert max(waits) > 2
    for now_s in (60.0, 61.5, 63.0, 64.5):
        last = refuse(backpressure, now_s)
    assert last == LEAST_S


def test_asking_for_the_wait_changes_nothing() -> None:
    """A write group may be redone, and then its requests ask again."""
    asked_twice, asked_once = Backpressure(), Backpressure()
    for index in range(3000):
        asked_twice.wait_s(proven=False, least_s=LEAST_S, spread=1.0)
        assert refuse(asked_twice, index * 1e-3) == refuse(asked_once, index * 1e-3)
    assert asked_twice == asked_once


def test_refused_nodes_come_first_until_they_are_late() -> None:
    backpressure = Backpressure()
    assert backpressure.ahead_of("a", 0.0) == 0
    wait_s = refuse(backpressure, 0.0, "a")
    refuse(backpressure, 0.1, "b")
    assert [backpressure.ahead_of(node, 0.2) for node in "abc"] == [0, 0, 2]
    backpressure.release_place("a")
    assert [backpressure.ahead_of(node, 0.2) for node in "abc"] == [1, 0, 1]
    assert backpressure.ahead_of("c", 0.1 + wait_s + LATE_S + 0.01) == 0


def test_a_node_that_may_take_longer_does_not_keep_the_place_of_others() -> None:
    backpressure = Backpressure(proven=RefusalRate(wait_s=LONGEST_S))
    refuse(backpressure, 0.5, "told to wait long")
    backpressure.proven.wait_s = 0.0
    refuse(backpressure, 0.6, "gone")
    assert backpressure.ahead_of("c", 0.7) == 2
    assert backpressure.ahead_of("c", 0.6 + LEAST_S + 2 * LATE_S) == 1


def test_nodes_with_little_work_behind_them_do_not_come_first() -> None:
    backpressure = Backpressure()
    backpressure.keep_place("new", 0.0, 1.0, accepted=3, least_s=LEAST_S)
    backpressure.keep_place("old", 0.0, 1.0, accepted=30, least_s=LEAST_S)
    assert [backpressure.ahead_of("c", 0.1, record) for record in (0, 4, 31)] == [2, 1, 0]
