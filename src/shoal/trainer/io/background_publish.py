"""The version on its way out, while the next step trains: one at a time, in order, and no failure is lost.

    main      step 7 ── settle ── capture ── send(7) ── take batch ── step 8 ── settle ── capture ── send(8)
    outbox                                   └ write, encode, sign, wait for the checkpoint, serve, announce ┘

What it does is reading and writing, numpy, zstd and BLAKE3, which leave the interpreter's lock to others.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from shoal.net.waiting import DeadlinePassed

LEAVE_S = 5.0
"""For a publication to end when the process is leaving; the next process makes it again."""


class Outbox:
    """All methods from one thread."""

    def __init__(self) -> None:
        self._future: Future[None] | None = None
        self._version = -1
        self._thread: threading.Thread | None = None

    def send(self, version: int, publish: Callable[[], None]) -> None:
        """Start to publish a version; the one before must be settled."""
        assert self._future is None, f"settle version {self._version} before version {version}"
        future: Future[None] = Future()
        self._future, self._version = future, version
        self._thread = threading.Thread(
            target=_fulfil, args=(future, publish), name=f"publish-{version}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong, if it is known by now. For whoever waits for something that a publication brings."""
        if self._future is not None and self._future.done():
            self._future.result()

    def settle(self, deadline_s: float) -> None:
        """Wait until what `send` began is out; raise what went wrong."""
        if self._future is None:
            return
        try:
            self._future.result(deadline_s)
        except TimeoutError:
            if self._future.done():  # its own
                raise
            raise DeadlinePassed(
                f"waited {deadline_s:.0f} s for version {self._version} to be published; is its disk slow or full?"
            ) from None
        self._future = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(LEAVE_S)


def _fulfil(future: Future[None], publish: Callable[[], None]) -> None:
    try:
        publish()
    except BaseException as failure:  # noqa: BLE001 - `check` and `settle` raise it in the thread that can act on it
        future.set_exception(failure)
    else:
        future.set_result(None)
