"""Every wait has a deadline and names what it waits for."""

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shoal.telemetry import Log

T = TypeVar("T")


class DeadlinePassed(Exception):
    """A wait ended without what it waited for. The message says what, how long, and the last reason."""


class Stopped(Exception):
    """Somebody asked this process to stop while it waited."""


class NotYet(Exception):
    """Raised by a try inside `wait_for`: not there yet, for this reason; try again, not before `after_s`."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


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
    """Call `attempt` until it stops raising NotYet.

    Delays grow by half up to 2 s, jittered by a fifth; an `after_s` in NotYet is taken instead, but never less than
    50 ms: a server that says 0 must not make us spin. While it waits it says so every `say_every_s`, with the last
    reason, and after `deadline_s` it raises DeadlinePassed.
    """
    started_s = said_s = time.monotonic()
    delay_s = first_delay_s
    while True:
        try:
            return attempt()
        except NotYet as not_yet:
            reason, after_s = str(not_yet), not_yet.after_s
        waited_s = time.monotonic() - started_s
        if waited_s >= deadline_s:
            raise DeadlinePassed(f"waited {waited_s:.0f} s for {what}: {reason}")
        if time.monotonic() - said_s >= say_every_s:
            said_s = time.monotonic()
            log.info(f"waiting for {what}: {reason}", waited_s=round(waited_s), deadline_s=round(deadline_s))
        pause_s = max(after_s, 0.05) if after_s is not None else delay_s * random.uniform(0.8, 1.2)
        if stop.wait(min(pause_s, deadline_s - waited_s + 0.01)):
            raise Stopped(f"stopped while waiting for {what}")
        delay_s = min(delay_s * 1.5, 2.0)
