"""The log format and the metrics stream of every role.

Log lines go to stderr:  13:02:11 I worker      lease done  rows=64 tokens_per_s=812
Metrics go to a JSONL file, one object per event, flushed after each line so that a reader can follow the file, and to the
sinks that a role adds.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO


class Log:
    """A logger for one role. Keyword arguments become key=value at the end of the line."""

    def __init__(self, role: str) -> None:
        self._logger = logging.getLogger(f"shoal.{role}")
        self._role = role

    def info(self, message: str, **values: object) -> None:
        self._logger.info(_line(self._role, message, values))

    def warning(self, message: str, **values: object) -> None:
        self._logger.warning(_line(self._role, message, values))

    def error(self, message: str, **values: object) -> None:
        self._logger.error(_line(self._role, message, values))


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current sys.stderr, which a progress bar replaces while it runs so that log lines appear above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def start_logging() -> None:
    """Sends the log lines of every role to stderr. The command line calls it once."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("shoal")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


class Sink(Protocol):
    """An additional receiver of the metrics stream."""

    def write(self, event: str, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Appends one JSON object per event to `path`, and passes each event to every sink."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        # After a kill the last line may be incomplete; without a newline the next event would become a part of it.
        if _ends_within_a_line(path):
            self._file.write("\n")
        self._sinks: list[Sink] = []

    def add_sinks(self, sinks: Iterable[Sink]) -> None:
        """Adds sinks. They are closed together with the stream."""
        self._sinks.extend(sinks)

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"time_s": round(time.time(), 3), "event": event, **values}) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(event, values)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def _ends_within_a_line(path: Path) -> bool:
    """Returns whether the file's last line lacks its newline."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def printable(text: str, *, keep: str = "") -> str:
    """Returns the text with control characters escaped, except those in `keep`, for a log or a terminal.

    Logs contain text from untrusted nodes: a newline must not forge a log line, an escape sequence must not control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _line(role: str, message: str, values: dict[str, object]) -> str:
    pairs = " ".join(f"{key}={_show(value)}" for key, value in values.items())
    return printable(f"{role:<11} {message}  {pairs}".rstrip())


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
