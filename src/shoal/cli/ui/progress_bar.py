"""How far a command is: nothing if it is soon over, then a bar for a person at a terminal, a line now and then for a log."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

SAY_AFTER_S, SAY_EVERY_S, LOOK_EVERY_S = 2.0, 10.0, 0.2


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Says on standard error how far `what` is, once it has taken two seconds; gives what moves it on by so many.

    Not around a fetch of weights, which has a bar of its own: two would write over each other.
    """
    counted = _Counted(what, total)
    done = threading.Event()
    looking = threading.Thread(target=counted.look, args=(done,), name="progress", daemon=True)
    looking.start()
    try:
        yield counted.advance
    finally:
        done.set()
        looking.join()


class _Counted:
    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.count = what, total, 0

    def advance(self, by: int = 1) -> None:
        self.count += by

    def look(self, done: threading.Event) -> None:
        if done.wait(SAY_AFTER_S):
            return
        if sys.stderr.isatty():
            self._draw(done)
        else:
            self._say(done)

    def _draw(self, done: threading.Event) -> None:
        # Only those who are looked at pay for this import.
        from rich import progress as bars
        from rich.console import Console

        counts: list[bars.ProgressColumn] = [bars.TimeElapsedColumn()]
        if self.total is not None:
            counts = [bars.MofNCompleteColumn(), bars.TimeRemainingColumn()]
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *counts)
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self.what, total=self.total)
            while not done.wait(LOOK_EVERY_S):
                bar.update(task, completed=self.count)

    def _say(self, done: threading.Event) -> None:
        began_s = time.monotonic() - SAY_AFTER_S
        while True:
            far = f"{self.count:,} of {self.total:,}, " if self.total is not None else ""
            print(f"{self.what}: {far}{time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
            if done.wait(SAY_EVERY_S):
                return
