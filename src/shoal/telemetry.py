"""One log format, one metrics stream.

Log lines go to stderr:  13:02:11 worker  lease done  rows=64 tokens_per_s=812
Metrics go to a JSONL file, one object per event, flushed per line so that a reader can follow it live; and to whatever
sinks a role adds.
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
    """To whatever stderr is now: a progress bar puts itself in its place, to have lines above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def start_logging() -> None:
    """Send every role's lines to stderr. Called once, by the command line."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger("shoal")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


class Sink(Protocol):
    """One more reader of the metrics stream."""

    def write(self, event: str, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Appends one JSON object per event to `path`, and tells every sink."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if _cut_off(path):  # by a kill: what comes next must not be read as the rest of it
            self._file.write("\n")
        self._sinks: list[Sink] = []

    def add_sinks(self, sinks: Iterable[Sink]) -> None:
        """They are closed with the stream."""
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


def _cut_off(path: Path) -> bool:
    """Whether the file's last line has no end."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def plain(words: str) -> str:
    """The words as they may stand in a log or on a terminal: control characters spelled out.

    Strangers' words get there. A newline in one must not start a line of its own, an escape must not steer a terminal.
    """
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def _line(role: str, message: str, values: dict[str, object]) -> str:
    pairs = " ".join(f"{key}={_show(value)}" for key, value in values.items())
    return plain(f"{role:<11} {message}  {pairs}".rstrip())


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
