"""Waiting: tries again, says so, gives up in time, and stops when told."""

import logging
import threading

import pytest

from shoal.net.waiting import DeadlinePassed, NotYet, Stopped, wait_for
from shoal.telemetry import Log

LOG = Log("test")


def test_it_tries_until_it_succeeds() -> None:
    tries: list[int] = []

    def attempt() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise NotYet("the shop is closed")
        return "bread"

    got = wait_for("bread", attempt, deadline_s=60, log=LOG, stop=threading.Event(), first_delay_s=0.001)
    assert got == "bread"
    assert len(tries) == 4


def test_the_deadline_names_what_was_waited_for_and_why_it_is_not_there() -> None:
    def attempt() -> str:
        raise NotYet("the shop is closed")

    with pytest.raises(DeadlinePassed, match=r"waited 0 s for bread: the shop is closed"):
        wait_for("bread", attempt, deadline_s=0.01, log=LOG, stop=threading.Event())


def test_one_try_is_made_even_with_no_time_at_all() -> None:
    assert wait_for("bread", lambda: "bread", deadline_s=0, log=LOG, stop=threading.Event()) == "bread"


def test_it_says_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise NotYet("the shop is closed")

    with caplog.at_level(logging.INFO, logger="shoal.test"):
        wait_for(
            "bread",
            attempt,
            deadline_s=60,
            log=LOG,
            stop=threading.Event(),
            first_delay_s=0.001,
            say_every_s=0.0,
        )
    assert "waiting for bread: the shop is closed" in caplog.messages[0]


def test_stop_ends_the_wait_at_once() -> None:
    stop = threading.Event()

    def attempt() -> None:
        stop.set()
        raise NotYet("closed for an hour", after_s=3600)

    with pytest.raises(Stopped, match="bread"):
        wait_for("bread", attempt, deadline_s=7200, log=LOG, stop=stop)


def test_a_pause_of_zero_does_not_make_it_spin() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise NotYet("busy", after_s=0.0)

    with pytest.raises(DeadlinePassed):
        wait_for("bread", attempt, deadline_s=0.2, log=LOG, stop=threading.Event())
    assert len(tries) <= 6


def test_a_long_pause_does_not_outlast_the_deadline() -> None:
    def attempt() -> None:
        raise NotYet("closed for an hour", after_s=3600)

    with pytest.raises(DeadlinePassed):
        wait_for("bread", attempt, deadline_s=0.05, log=LOG, stop=threading.Event())


def test_any_other_exception_passes_through() -> None:
    def attempt() -> None:
        raise ValueError("burnt")

    with pytest.raises(ValueError, match="burnt"):
        wait_for("bread", attempt, deadline_s=60, log=LOG, stop=threading.Event())
