"""Progress of a long command on standard error: a bar at a terminal, a line every ten seconds in a log, nothing if it is quick."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shoal.background import BackgroundTask

SHOW_AFTER_S = 2.0
"""Commands that take less show nothing."""
LINE_EVERY_S, BAR_EVERY_S = 10.0, 0.2


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows the progress of `what` while the block runs; yields the function that counts steps of `total`.

    A fetch of weights logs its own progress, so it needs none.
    """
    counter = _Counter(what, total)
    done = threading.Event()
    display = BackgroundTask("progress", lambda: counter.show_until(done))
    try:
        yield counter.advance
    finally:
        done.set()
        display.wait()


class _Counter:
    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.count = what, total, 0

    def advance(self, by: int = 1) -> None:
        self.count += by

    def show_until(self, done: threading.Event) -> None:
        if done.wait(SHOW_AFTER_S):
            return
        if sys.stderr.isatty():
            self._show_bar(done)
        else:
            self._print_lines(done)

    def _show_bar(self, done: threading.Event) -> None:
        # Imported here because quick commands do not need it.
        from rich import progress as bars
        from rich.console import Console

        counts: list[bars.ProgressColumn] = [bars.TimeElapsedColumn()]
        if self.total is not None:
            counts = [bars.MofNCompleteColumn(), bars.TimeRemainingColumn()]
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), *counts)
        with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(self.what, total=self.total)
            while not done.wait(BAR_EVERY_S):
                bar.update(task, completed=self.count)

    def _print_lines(self, done: threading.Event) -> None:
        began_s = time.monotonic() - SHOW_AFTER_S
        while True:
            far = f"{self.count:,} of {self.total:,}, " if self.total is not None else ""
            print(f"{self.what}: {far}{time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
            if done.wait(LINE_EVERY_S):
                return
