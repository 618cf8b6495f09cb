"""A function that runs in its own thread, with its result or its exception for the thread that asks later."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Starts `work` at once in a daemon thread, so that work that hangs on the network cannot keep the process alive."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the work has ended, with a result or an exception."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the work has ended, for at most `timeout_s`; returns whether it has."""
        self._thread.join(timeout_s)
        return self.done

    def result(self) -> T:
        """Returns what the work returned, or raises what it raised. Call it only when `done`."""
        assert self.done, f"background task {self._thread.name} is still running"
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the thread that asks for it
            self._error = error
