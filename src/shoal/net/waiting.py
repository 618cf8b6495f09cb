"""Waits with a deadline, a stop event and a reason: every retry of Shoal goes through `wait_for`.

Our own code instead of a library (tenacity, stamina), because each wait must end when `stop` is set, name what it waits
for in the log, and follow the server's Retry-After.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shoal.telemetry import Log

T = TypeVar("T")

MIN_PAUSE_S = 0.05
MAX_DELAY_S = 2.0
POLL_S = 0.1


class DeadlinePassed(Exception):
    """A wait reached its deadline. The message says what was waited for, how long, and the last reason."""


class Stopped(Exception):
    """The process was asked to stop during a wait."""


class NotYet(Exception):
    """Raised by an attempt inside `wait_for`: it failed for this reason; retry, but not before `after_s`."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class LinkedEvent(threading.Event):
    """An event that also counts as set while `parent` is set.

    For a part of a process that may be stopped alone: other parts depend on the process's own event.
    """

    def __init__(self, parent: threading.Event) -> None:
        super().__init__()
        self.parent = parent

    def is_set(self) -> bool:
        return super().is_set() or self.parent.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        end_s = time.monotonic() + timeout if timeout is not None else float("inf")
        while not self.parent.is_set():
            left_s = end_s - time.monotonic()
            if super().wait(max(0.0, min(POLL_S, left_s))):
                return True
            if left_s <= POLL_S:
                return self.parent.is_set()
        return True


def wait_for(
    what: str,
    attempt: Callable[[], T],
    *,
    deadline_s: float,
    log: Log,
    stop: threading.Event,
    first_delay_s: float = 0.1,
    say_every_s: float = 5.0,
) -> T:
    """Calls `attempt` until it stops raising NotYet, and returns its result.

    The delay between attempts grows by half up to 2 s, with 20 % jitter. `after_s` of NotYet replaces it, but at least
    50 ms pass: a server that answers 0 must not cause a busy loop. Logs the last reason every `say_every_s`; raises
    DeadlinePassed after `deadline_s`, and Stopped when `stop` is set.
    """
    started_s = logged_s = time.monotonic()
    delay_s = first_delay_s
    while True:
        try:
            return attempt()
        except NotYet as not_yet:
            reason, after_s = str(not_yet), not_yet.after_s
        waited_s = time.monotonic() - started_s
        if waited_s >= deadline_s:
            raise DeadlinePassed(f"waited {waited_s:.0f} s for {what}: {reason}")
        if time.monotonic() - logged_s >= say_every_s:
            logged_s = time.monotonic()
            log.info(f"waiting for {what}: {reason}", waited_s=round(waited_s), deadline_s=round(deadline_s))
        pause_s = max(after_s, MIN_PAUSE_S) if after_s is not None else delay_s * random.uniform(0.8, 1.2)
        if stop.wait(min(pause_s, deadline_s - waited_s + 0.01)):
            raise Stopped(f"stopped while waiting for {what}")
        delay_s = min(delay_s * 1.5, MAX_DELAY_S)
