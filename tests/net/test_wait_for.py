"""`wait_for`: retries, log lines, deadline and stop."""

import logging
import threading

import pytest

from shoal.net.waiting import DeadlinePassed, NotYet, Stopped, wait_for
from shoal.telemetry import Log

LOG = Log("test")


def test_it_retries_until_it_succeeds() -> None:
    tries: list[int] = []

    def attempt() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise NotYet("no baker")
        return "bread"

    got = wait_for("bread", attempt, deadline_s=60, log=LOG, stop=threading.Event(), first_delay_s=0.001)
    assert got == "bread"
    assert len(tries) == 4


def test_the_deadline_error_names_what_and_the_last_reason() -> None:
    def attempt() -> str:
        raise NotYet("no baker")

    with pytest.raises(DeadlinePassed, match=r"waited 0 s for bread: no baker"):
        wait_for("bread", attempt, deadline_s=0.01, log=LOG, stop=threading.Event())


def test_one_attempt_is_made_without_any_time() -> None:
    assert wait_for("bread", lambda: "bread", deadline_s=0, log=LOG, stop=threading.Event()) == "bread"


def test_it_logs_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise NotYet("no baker")

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
    assert "waiting for bread: no baker" in caplog.messages[0]


def test_stop_ends_the_wait_at_once() -> None:
    stop = threading.Event()

    def attempt() -> None:
        stop.set()
        raise NotYet("closed for an hour", after_s=3600)

    with pytest.raises(Stopped, match="bread"):
        wait_for("bread", attempt, deadline_s=7200, log=LOG, stop=stop)


def test_a_pause_of_zero_causes_no_busy_loop() -> None:
    tries: list[int] = []

    def attempt() -> None:
        tries.append(1)
        raise NotYet("busy", after_s=0.0)

    with pytest.raises(DeadlinePassed):
        wait_for("bread", attempt, deadline_s=0.2, log=LOG, stop=threading.Event())
    assert len(tries) <= 6


def test_a_long_pause_ends_at_the_deadline() -> None:
    def attempt() -> None:
        raise NotYet("closed for an hour", after_s=3600)

    with pytest.raises(DeadlinePassed):
        wait_for("bread", attempt, deadline_s=0.05, log=LOG, stop=threading.Event())


def test_any_other_exception_passes_through() -> None:
    def attempt() -> None:
        raise ValueError("burnt")

    with pytest.raises(ValueError, match="burnt"):
        wait_for("bread", attempt, deadline_s=60, log=LOG, stop=threading.Event())
