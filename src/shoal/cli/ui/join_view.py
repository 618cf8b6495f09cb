"""What `shoal join` shows at a terminal: a few lines that change in place, instead of the worker's log.

    demo at http://HOST:8700: version 43 of 100, 12 min here
    [########............] version 0: 412 of 1,020 MB, 24.1 MB/s, about 25 s left      while weights arrive
    generating with version 43: 12 of 64 rows; busy 96.1% of the time; 812 tokens/s
    credit 48,210 (12,100 since you joined, about 60,500 an hour); accepted 24, refused 0, void 1; trusted
    uses 2 cores, 1.30 GB of memory, 540 MB of disk
    p pause, q stop; log: shoal-node/worker.log

What the worker does comes from its status.json, what it earned from the coordinator.
"""

import contextlib
import json
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shoal.cli.ui.values import byte_size
from shoal.cli.ui.view import BAR_WIDTH, duration, explain_verdict, shown_trust
from shoal.files import folder_bytes
from shoal.rollout.worker.worker_folder import LOG_FILE, STATUS_FILE
from shoal.telemetry import printable
from shoal.wire.codes import CODES
from shoal.wire.messages import Info, NodeView

ASK_S = 5.0
"""Seconds between two requests to the coordinator, and between two measurements of the folder."""
RATE_S = 10.0
"""Seconds over which the speed of a download is measured."""


class Transfer:
    """Measures the speed of a download from how many bytes are there at which time."""

    def __init__(self) -> None:
        self._version = -1
        self._seen: list[tuple[float, int]] = []

    def describe(self, version: int, have: int, total: int, now_s: float) -> str:
        """Returns a bar with bytes, speed and remaining time."""
        if version != self._version:
            self._version, self._seen = version, []
        self._seen = [(at_s, count) for at_s, count in self._seen if now_s - at_s <= RATE_S] + [(now_s, have)]
        (first_s, first), full = self._seen[0], BAR_WIDTH * have // max(1, total)
        speed = (have - first) / (now_s - first_s) if now_s > first_s else 0.0
        left = f", {speed / 1e6:.1f} MB/s, about {duration((total - have) / speed)} left" if speed > 0 else ""
        bar = "#" * full + "." * (BAR_WIDTH - full)
        digits = 0 if total >= 1e7 else 2  # a delta of a small model has less than a megabyte
        return f"[{bar}] version {version}: {have / 1e6:,.{digits}f} of {total / 1e6:,.{digits}f} MB{left}"


class JoinView:
    """The lines of one node. `poll` is called a few times a second with the worker's process id."""

    def __init__(
        self,
        folder: Path,
        ask: Callable[[], tuple[Info, NodeView | None] | None],
        console: Console,
        *,
        url: str,
        stop: threading.Event,
    ) -> None:
        """`ask` returns what the coordinator says now, or None if it does not answer."""
        self._folder, self._ask, self._console, self._url, self._stop = folder, ask, console, url, stop
        self._began_s = time.monotonic()
        self._asked_s = float("-inf")
        self._answer: tuple[Info, NodeView | None] | None = None
        self._first_credit: int | None = None
        self._refused = 0
        self._disk_bytes = 0
        self._transfer = Transfer()
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "JoinView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def poll(self, pid: int) -> None:
        """Reads keys, asks the coordinator if it is time, and draws the lines again."""
        now_s = time.monotonic()
        self._obey(read_key())
        if now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            self._answer = self._ask() or self._answer
            self._disk_bytes = folder_bytes(self._folder)
            self._report_refusals()
        self._live.update(Group(*(Text(printable(line)) for line in self.lines(pid, now_s))))

    def lines(self, pid: int, now_s: float) -> list[str]:
        """Returns what is shown now."""
        status = self._read_status()
        lines = [self._headline(now_s)]
        if fetching := status.get("fetching"):
            version, have, total = fetching
            lines.append(self._transfer.describe(version, have, total, now_s))
        lines += [self._activity(status), self._earned(now_s), self._used(pid)]
        keys = "p continue" if self._is_paused() else "p pause after this lease"
        return [*lines, f"{keys}, q stop; log: {self._folder / LOG_FILE}"]

    def _headline(self, now_s: float) -> str:
        here = f"{duration(now_s - self._began_s)} here"
        if self._answer is None:
            return f"{self._url}: no answer yet, {here}"
        info = self._answer[0]
        version = "no version yet" if info.newest_version is None else f"version {info.newest_version}"
        return f"{info.spec.run} at {self._url}: {version} of {info.spec.last_version}, {here}"

    def _activity(self, status: dict[str, Any]) -> str:
        speed = status.get("tokens_per_s") or 0
        phase = status.get("phase") or "starting"
        if self._is_paused() and not str(phase).startswith("paused"):
            phase = f"pausing after this lease; {phase}"
        return f"{phase}; {speed:,.0f} tokens/s" if speed else str(phase)

    def _earned(self, now_s: float) -> str:
        node = None if self._answer is None else self._answer[1]
        if self._answer is not None and self._first_credit is None:
            # A node that is not known yet has no credit.
            self._first_credit = 0 if node is None else node.credit
        if node is None:
            return "credit: none yet; the first accepted lease earns some"
        gained, spent_s = node.credit - (self._first_credit or 0), now_s - self._began_s
        rate = f", about {gained / spent_s * 3600:,.0f} an hour" if gained and spent_s > 60 else ""
        return (
            f"credit {node.credit:,} ({gained:,} since you joined{rate}); accepted {node.accepted}, "
            f"refused {node.rejected}, void {node.void}; {shown_trust(node)}"
        )

    def _used(self, pid: int) -> str:
        cores, memory = used_by(pid)
        return f"uses {cores} cores, {byte_size(memory)} of memory, {byte_size(self._disk_bytes)} of disk"

    def _report_refusals(self) -> None:
        node = None if self._answer is None else self._answer[1]
        if node is None:
            return
        if node.rejected > self._refused and node.last_code and node.last_code.startswith("reject."):
            remedy = CODES[node.last_code].remedy if node.last_code in CODES else "shoal explain"
            words = f"refused: {explain_verdict(node)}; what to do: {remedy}"
            self._console.print(Text(f"{time.strftime('%H:%M:%S')} {printable(words)}"))
        self._refused = node.rejected

    def _obey(self, key: str) -> None:
        if key == "p":
            flag = self._folder / "paused"
            if flag.exists():
                flag.unlink(missing_ok=True)
            else:
                flag.touch()
        elif key == "q":
            self._stop.set()

    def _is_paused(self) -> bool:
        return (self._folder / "paused").exists()

    def _read_status(self) -> dict[str, Any]:
        try:
            found = json.loads((self._folder / STATUS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def used_by(pid: int) -> tuple[int, int]:
    """Returns how many cores a process may use and the bytes of memory it has; (number of cores, 0) where Linux's /proc is missing."""
    try:
        cores = len(os.sched_getaffinity(pid))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (AttributeError, OSError, ValueError, IndexError):
        return os.cpu_count() or 1, 0
    return cores, pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """Makes the terminal deliver each key at once, without echo, while the block runs. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def read_key() -> str:
    """Returns a key that was pressed, or an empty text."""
    if not sys.stdin.isatty() or not select.select([sys.stdin], [], [], 0)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace").lower()
