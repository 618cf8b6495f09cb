"""How far a download is: a bar for a person at a terminal, a line every few seconds for a log; nothing if it is soon over."""

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.telemetry import Log

SAY_AFTER_S, SAY_EVERY_S = 2.0, 5.0

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_one_bar = threading.Lock()  # two would write over each other


class Progress:
    """Of one version. `had`: bytes that were here before."""

    def __init__(self, version: int, *, num_bytes: int, had: int, log: Log) -> None:
        self._version, self._num_bytes, self._had, self._log = version, num_bytes, had, log
        self._began_s = time.monotonic()
        self._said_s = self._began_s - SAY_EVERY_S + SAY_AFTER_S
        self._bar: Bar | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            _one_bar.release()

    def show(self, here: int, state: Callable[[], str]) -> None:
        """`here`: bytes that are here now; `state` is asked for the rest of a line in the log."""
        now_s = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=here)
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            if sys.stderr.isatty() and _one_bar.acquire(blocking=False):
                self._bar = self._start_bar(here)
            else:
                self._log.info(f"fetching version {self._version}: {self._line(here)}; {state()}")

    def _start_bar(self, here: int) -> "Bar":
        # Only those who are looked at pay for this import.
        from rich import progress
        from rich.console import Console

        bar = progress.Progress(
            progress.TextColumn("fetching version {task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(str(self._version), total=self._num_bytes, completed=here)
        bar.start()
        return bar

    def _line(self, here: int) -> str:
        """[######    ] 57 % of 269 MB, 38 MB/s"""
        share = here / max(1, self._num_bytes)
        speed = (here - self._had) / max(1e-6, time.monotonic() - self._began_s)
        bar = "#" * int(10 * share)
        return f"[{bar:<10}] {100 * share:.0f} % of {self._num_bytes / 1e6:.0f} MB, {speed / 1e6:.3g} MB/s"
