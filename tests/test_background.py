"""Work in a thread of its own, and its result."""

import threading

import pytest

from shoal.background import BackgroundTask


def test_the_result_is_there_when_the_work_is_done() -> None:
    go = threading.Event()
    task = BackgroundTask("wait-then-answer", lambda: go.wait(10) and 7)
    assert not task.wait(0.01)
    go.set()
    assert task.wait(10)
    assert task.result() == 7


def test_an_exception_reaches_the_thread_that_asks() -> None:
    def fail() -> None:
        raise ValueError("no such lease")

    task = BackgroundTask("fail", fail)
    assert task.wait(10)
    with pytest.raises(ValueError, match="no such lease"):
        task.result()
