"""Copies the weights, then writes or publishes the copy, in a thread beside the next step."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.background import BackgroundTask
from shoal.net.waiting import DeadlinePassed

T = TypeVar("T")


class BackgroundSave(Generic[T]):
    """Saves one version at a time. Call its methods from one thread at a time.

    `what` is saved, such as "checkpoint"; `saved` says what that means, such as "to be written to FOLDER".
    """

    def __init__(self, what: str, saved: str) -> None:
        self._what, self._saved = what, saved
        self._version = -1
        self._task: BackgroundTask[None] | None = None
        self._copied = threading.Event()

    def start(self, version: int, copy: Callable[[], T], save: Callable[[T], None]) -> None:
        """Starts to copy and to save a version. The one before must be finished."""
        assert self._task is None, f"finish {self._what} {self._version} before {self._what} {version}"
        self._version, self._copied = version, threading.Event()
        copied = self._copied

        def work() -> None:
            try:
                values = copy()
            finally:
                copied.set()
            save(values)

        self._task = BackgroundTask(f"{self._what}-{version}", work)

    @property
    def running(self) -> bool:
        """Whether a version is being saved. Raises the error if that failed."""
        if self._task is not None and self._task.done:
            self.finish(0)
        return self._task is not None

    def wait_for_copy(self, deadline_s: float) -> None:
        """Waits until the weights may change: the copy of them is complete."""
        if self._task is not None and not self._copied.wait(deadline_s):
            raise DeadlinePassed(
                f"waited {deadline_s:.0f} s for {self._what} {self._version} to be copied to host memory"
            )

    def finish(self, deadline_s: float) -> None:
        """Waits until the version is saved; raises the error if that failed."""
        if self._task is None:
            return
        if not self._task.wait(deadline_s):
            raise DeadlinePassed(
                f"waited {deadline_s:.0f} s for {self._what} {self._version} {self._saved}; is its disk slow or full?"
            )
        task, self._task = self._task, None
        task.result()

    def close(self, deadline_s: float) -> bool:
        """Waits for a version that is being saved; returns whether none is left. An error is not raised."""
        return self._task is None or self._task.wait(deadline_s)
