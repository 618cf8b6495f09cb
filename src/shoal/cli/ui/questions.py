"""Questions to the user at a terminal. Ctrl-C ends them: Python's input() would keep waiting for an answer."""

import select
import sys
import threading
from typing import TextIO

from shoal.net.waiting import Stopped

STOP_POLL_S = 0.1
"""Seconds between two looks at the stop signal while a question is open."""


def ask_line(question: str, stop: threading.Event, *, out: TextIO | None = None) -> str:
    """Prints the question and returns the line that is typed; "" if the input ends. Raises Stopped.

    `out` is where the question goes: standard output by default.

    Standard input must be a terminal. Of a pipe Python reads several lines at once and keeps them, and this would then wait for
    input that has been read already.
    """
    print(question, end="", flush=True, file=out)
    while not select.select([sys.stdin], [], [], STOP_POLL_S)[0]:
        if stop.is_set():
            raise Stopped("stopped while a question was open")
    return sys.stdin.readline()


def agrees(question: str, stop: threading.Event, *, otherwise: str, default: bool = False) -> bool:
    """Returns whether the user agrees; `default` is the meaning of an empty line.

    Raises ValueError with the text `otherwise` where nobody can be asked: standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ValueError(otherwise)
    line = ask_line(question, stop)
    answer = line.strip().lower()
    if line and not answer:
        return default
    return answer in ("y", "yes")
