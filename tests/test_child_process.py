"""A child that answers requests, and each way in which it can fail to."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.child_process import (
    BadFrame,
    ChildDied,
    ChildLimits,
    ChildNotStarted,
    ChildProcess,
    ChildTimeout,
)

LIMITS = ChildLimits(memory_bytes=200_000_000, cpu_s=1)
TESTS = {"PYTHONPATH": str(Path(__file__).parent)}


def child_of(function: str, *, start_s: float = 60.0, max_reply_bytes: int = 1 << 30) -> ChildProcess:
    return ChildProcess(
        f"child_functions:{function}",
        limits=LIMITS,
        env=TESTS,
        start_s=start_s,
        max_reply_bytes=max_reply_bytes,
    )


@pytest.fixture(scope="module")
def child() -> Iterator[ChildProcess]:
    child = child_of("serve_answers")
    yield child
    child.close()


def ask(child: ChildProcess, request: bytes, timeout_s: float = 60.0) -> bytes:
    return child.exchange(request, timeout_s=timeout_s)


def test_frames_of_any_length_come_back(child: ChildProcess) -> None:
    for request in (b"", b"abc", bytes(range(256)) * 20_000):
        assert ask(child, request) == request[::-1]


def test_one_child_serves_many_requests(child: ChildProcess) -> None:
    assert ask(child, b"pid") == ask(child, b"pid") == str(child.pid).encode()


def test_what_the_child_prints_neither_blocks_it_nor_enters_a_frame(child: ChildProcess) -> None:
    assert ask(child, b"print") == b"printed"


def test_an_idle_child_that_was_killed_is_replaced(child: ChildProcess) -> None:
    child.start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    assert ask(child, b"abc") == b"cba"


def test_a_child_that_does_not_answer_in_time_is_killed(child: ChildProcess) -> None:
    with pytest.raises(ChildTimeout, match="within 1 s of wall-clock time"):
        ask(child, b"sleep", timeout_s=1.0)
    assert child.pid is None
    assert ask(child, b"abc") == b"cba"


def test_a_deadline_in_the_past_is_a_timeout(child: ChildProcess) -> None:
    with pytest.raises(ChildTimeout):
        ask(child, b"abc", timeout_s=-1.0)


def test_a_request_that_takes_too_much_processor_time_ends_the_child_once(child: ChildProcess) -> None:
    with pytest.raises(ChildDied, match="serve_answers ended with signal SIGXCPU") as died:
        ask(child, b"spin")
    assert died.value.status == -signal.SIGXCPU
    assert ask(child, b"abc") == b"cba"


def test_a_request_that_needs_too_much_memory_gets_a_memory_error(child: ChildProcess) -> None:
    assert ask(child, b"allocate") == b"MemoryError"


def test_a_child_writes_no_files(child: ChildProcess) -> None:
    assert ask(child, b"write") == b"OSError"


def test_a_request_that_ends_the_child_reports_its_last_output(child: ChildProcess) -> None:
    with pytest.raises(ChildDied, match="status 1: ValueError: cannot parse this") as died:
        ask(child, b"raise")
    assert died.value.status == 1


def test_a_killed_child_says_the_signal(child: ChildProcess) -> None:
    with pytest.raises(ChildDied, match="signal SIGKILL") as died:
        ask(child, b"kill")
    assert died.value.status == -signal.SIGKILL


def test_a_reply_that_is_too_long_is_refused() -> None:
    child = child_of("serve_answers", max_reply_bytes=10)
    with pytest.raises(BadFrame, match="a reply of 11 bytes, at most 10"):
        ask(child, b"x" * 11)
    assert ask(child, b"abc") == b"cba"
    child.close()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("fail_to_load", "ended with status 1: ImportError: no module named sympathy, before its first"),
        ("say_something_else", "sent b'hello,' instead of"),
        ("hang", "was not ready within 2 s"),
        ("not_there", "has no attribute 'not_there'"),
    ],
)
def test_a_child_that_cannot_start_says_why(function: str, problem: str) -> None:
    child = child_of(function, start_s=2.0 if function == "hang" else 60.0)
    with pytest.raises(ChildNotStarted, match=problem) as error:
        child.start()
    assert f"-m shoal.child_process child_functions:{function} 200000000 1" in str(error.value)
    assert child.pid is None


def test_an_interpreter_that_fails_is_reported() -> None:
    child = ChildProcess("child_functions:serve_answers", limits=LIMITS, python="/bin/false")
    with pytest.raises(ChildNotStarted, match="status 1, before its first request"):
        child.start()


def test_a_child_that_the_system_does_not_start_is_reported() -> None:
    child = ChildProcess("child_functions:serve_answers", limits=LIMITS, python="/no/such/python")
    with pytest.raises(ChildNotStarted, match=r"serve_answers cannot be started: .*No such file"):
        child.exchange(b"x", timeout_s=10.0)


def test_threads_share_a_child_one_request_at_a_time(child: ChildProcess) -> None:
    replies: list[bytes] = []
    threads = [threading.Thread(target=lambda: replies.append(ask(child, b"abc"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert replies == [b"cba"] * 4
