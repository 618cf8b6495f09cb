"""One thing done in a thread of its own, and what came of it, for whoever asks later."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Sets out at once. A daemon: what hangs on the network must not keep the process from ending."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._work = work
        self._found: list[T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is over, after so long at most."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it brought; raises what it raised. Only once it is over."""
        assert not self._thread.is_alive(), "the errand is still under way"
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except Exception as error:  # noqa: BLE001 - it is raised again where it was asked for
            self._error = error
