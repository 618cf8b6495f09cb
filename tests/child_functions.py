"""Functions that tests/test_child_process.py runs in a child process."""

import os
import signal
import sys
import time
from collections.abc import Callable

from shoal.child_process import ChildLimits, serve


def _print() -> bytes:
    sys.stdout.write("x" * 1_000_000)
    sys.stderr.write("y" * 1_000_000)
    return b"printed"


def _spin() -> bytes:
    while True:
        pass


def _allocate() -> bytes:
    try:
        return str(len(bytearray(1 << 30))).encode()
    except MemoryError:
        return b"MemoryError"


def _write() -> bytes:
    try:
        with open("/tmp/shoal-child-test", "wb") as file:
            file.write(b"x")
    except OSError as error:
        return type(error).__name__.encode()
    return b"written"


def _raise() -> bytes:
    raise ValueError("cannot parse this")


def _kill() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def _sleep() -> bytes:
    time.sleep(60)
    return b""


_ANSWERS: dict[bytes, Callable[[], bytes]] = {
    b"pid": lambda: str(os.getpid()).encode(),
    b"print": _print,
    b"sleep": _sleep,
    b"spin": _spin,
    b"allocate": _allocate,
    b"write": _write,
    b"raise": _raise,
    b"kill": _kill,
}


def serve_answers(limits: ChildLimits) -> None:
    serve(lambda request: _ANSWERS[request]() if request in _ANSWERS else request[::-1], limits)


def fail_to_load(limits: ChildLimits) -> None:
    raise ImportError("no module named sympathy")


def say_something_else(limits: ChildLimits) -> None:
    os.write(1, b"hello, world")
    time.sleep(60)


def hang(limits: ChildLimits) -> None:
    time.sleep(60)
