"""Child processes that answer one request at a time under limits, and can be killed and restarted.

Use one to handle untrusted input with a library that may hang, crash or take all memory: Parquet, sympy.

In the parent:

    child = ChildProcess("shoal.tasks.grading.math_grader:serve_math", limits=ChildLimits(memory_bytes=10**9, cpu_s=5))
    reply = child.exchange(request, timeout_s=60.0)      # bytes to bytes; starts the child if none is running
    child.close()

`exchange` raises a ChildError if there is no reply, and the next call then starts a new child.

In the child, the named function is called with the limits. It loads what it needs and then serves:

    def serve_math(limits: ChildLimits) -> None:
        answer = load_grader()                           # Callable[[bytes], bytes]
        serve(answer, limits)

The memory limit counts what is allocated after `serve` is called; beyond it the child gets MemoryError, which `answer` should
catch. A child that tests itself under the limit first calls `limit_memory(limits.memory_bytes)` before the test. The child has no environment except OMP_NUM_THREADS=1, OPENBLAS_NUM_THREADS=1, PYTHONHASHSEED=0 and `env`.

A frame is 8 bytes big-endian length, then that many bytes. Its standard output and error go to the parent's ChildDied message.
"""

import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

START_S = 120.0
"""Seconds a child may take to load; a busy machine with a cold disk cache is slow."""
MAX_REPLY_BYTES = 1 << 30
LAST_WORDS_BYTES = 2000

_LENGTH_BYTES = 8
_READY = b"ready\n"
_CHUNK_BYTES = 1 << 20
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class ChildError(RuntimeError):
    """A child process did not answer a request."""


class ChildNotStarted(ChildError):
    """A child could not be started, or ended, hung or sent something else before its first request. Says which command shows why."""


class ChildTimeout(ChildError):
    """A child did not answer within `timeout_s` of wall-clock time (the machine may be busy) and was killed."""


class BadFrame(ChildError):
    """A child announced a reply of more than `max_reply_bytes`."""


class ChildDied(ChildError):
    """A request ended the child, on every attempt. `status` is its exit status, -SIGNAL if a signal ended it.

    -SIGXCPU: more than `cpu_s` of processor time; -SIGKILL: the kernel's out-of-memory killer.
    """

    def __init__(self, name: str, status: int, last_words: str) -> None:
        super().__init__(f"{name} ended with {_status_text(status)}{f': {last_words}' if last_words else ''}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Limits of one request."""

    memory_bytes: int
    """Most memory that requests may take beyond what the child holds when it starts to serve."""
    cpu_s: int
    """Seconds of processor time; the kernel ends the child with SIGXCPU."""


class ChildProcess:
    """One child that serves many requests. Safe to use from several threads; requests are sent one at a time."""

    def __init__(
        self,
        function: str,
        *,
        limits: ChildLimits,
        env: Mapping[str, str] | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        start_s: float = START_S,
        python: str = sys.executable,
    ) -> None:
        """Starts nothing yet. `function` is "package.module:function", called in the child with `limits`."""
        self._name = f"child process {function.rpartition(':')[2]}"
        # -s -P: no packages of the user or the current folder, which could load other code.
        self._command = [
            *(python, "-s", "-P", "-m", "shoal.child_process"),
            *(function, str(limits.memory_bytes), str(limits.cpu_s)),
        ]
        self._env = {**_ENVIRONMENT, **(env or {})}
        self._max_reply_bytes, self._start_s = max_reply_bytes, start_s
        self._child: subprocess.Popen[bytes] | None = None
        self._last_words = b""
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        child = self._child
        return None if child is None or child.poll() is not None else child.pid

    def start(self) -> None:
        """Starts the child if none is running, and waits until it is ready. Raises ChildNotStarted."""
        with self._lock:
            self._running_child()

    def exchange(self, request: bytes, *, timeout_s: float, attempts: int = 2) -> bytes:
        """Sends a request and returns the reply; starts the child if none is running. Raises ChildError.

        A request that ends the child is sent again up to `attempts` times, since something else may have killed it. One that
        used up its processor time is not.
        """
        with self._lock:
            while True:
                attempts -= 1
                try:
                    return self._exchange_once(request, time.monotonic() + timeout_s)
                except ChildError as error:
                    self.close()
                    if isinstance(error, ChildTimeout):
                        raise ChildTimeout(
                            f"{self._name} did not answer within {timeout_s:.0f} s of wall-clock time; is the machine busy?"
                        ) from None
                    killed = isinstance(error, ChildDied) and error.status != -signal.SIGXCPU
                    if not killed or attempts <= 0:
                        raise

    def close(self) -> None:
        """Kills the child. A later `exchange` starts a new one."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process, modules may be gone
            self.close()

    def _exchange_once(self, request: bytes, deadline_s: float) -> bytes:
        child = self._running_child()
        self._write(child, len(request).to_bytes(_LENGTH_BYTES, "big") + request, deadline_s)
        length = int.from_bytes(self._read(child, _LENGTH_BYTES, deadline_s), "big")
        if length > self._max_reply_bytes:
            raise BadFrame(
                f"{self._name} announces a reply of {length} bytes, at most {self._max_reply_bytes} allowed"
            )
        return self._read(child, length, deadline_s)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._last_words = b""
            try:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._env,
                    bufsize=0,
                    start_new_session=True,
                )
            # No memory, process or descriptor is left, or there is no such interpreter.
            except OSError as error:
                raise ChildNotStarted(
                    f"{self._name} cannot be started: {error}; try: {' '.join(self._command)}"
                ) from None
            for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
            self._wait_until_ready(self._child)
        return self._child

    def _wait_until_ready(self, child: subprocess.Popen[bytes]) -> None:
        try:
            sent = self._read(child, len(_READY), time.monotonic() + self._start_s)
            problem = "" if sent == _READY else f"{self._name} sent {sent!r} instead of {_READY!r}"
        except ChildDied as died:
            problem = str(died)
        except ChildTimeout:
            problem = f"{self._name} was not ready within {self._start_s:.0f} s"
        if problem:
            self.close()
            raise ChildNotStarted(f"{problem}, before its first request; try: {' '.join(self._command)}")

    def _write(self, child: subprocess.Popen[bytes], data: bytes, deadline_s: float) -> None:
        assert child.stdin is not None
        view = memoryview(data)
        while view:
            self._wait_for(child, child.stdin.fileno(), select.POLLOUT, deadline_s)
            try:
                view = view[os.write(child.stdin.fileno(), view[:_CHUNK_BYTES]) :]
            except BrokenPipeError:
                raise self._died(child) from None

    def _read(self, child: subprocess.Popen[bytes], count: int, deadline_s: float) -> bytes:
        assert child.stdout is not None
        pieces: list[bytes] = []
        while count:
            self._wait_for(child, child.stdout.fileno(), select.POLLIN, deadline_s)
            piece = os.read(child.stdout.fileno(), min(count, _CHUNK_BYTES))
            if not piece:
                raise self._died(child)
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def _wait_for(
        self, child: subprocess.Popen[bytes], descriptor: int, event: int, deadline_s: float
    ) -> None:
        """Waits until the descriptor is ready. Reads standard error meanwhile: a full pipe would block the child."""
        assert child.stderr is not None
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(child.stderr.fileno(), select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = {found for found, _ in poll.poll(left_s * 1000)}
            if child.stderr.fileno() in ready and not self._read_last_words(child):
                poll.unregister(child.stderr.fileno())
            if descriptor in ready:
                return
        raise ChildTimeout

    def _read_last_words(self, child: subprocess.Popen[bytes]) -> bool:
        """Reads what standard error holds now; returns whether more may come."""
        assert child.stderr is not None
        with suppress(BlockingIOError):
            while piece := os.read(child.stderr.fileno(), _CHUNK_BYTES):
                self._last_words = (self._last_words + piece)[-LAST_WORDS_BYTES:]
            return False
        return True

    def _died(self, child: subprocess.Popen[bytes]) -> ChildDied:
        try:
            status = child.wait(5.0)
        except subprocess.TimeoutExpired:  # the child closed its pipe and continued
            child.kill()
            status = child.wait()
        self._read_last_words(child)
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        return ChildDied(self._name, status, lines[-1][:500] if lines else "")


def serve(answer: Callable[[bytes], bytes], limits: ChildLimits) -> None:
    """Runs in the child: sets the limits, then answers requests until the parent closes the pipe or ends.

    Everything that is needed should be loaded before: afterwards no file may be written and only 16 may be open.
    """
    # What a library prints must not end up between the frames.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    limit_memory(limits.memory_bytes)
    replies.write(_READY)
    replies.flush()
    while length := requests.read(_LENGTH_BYTES):
        limit_cpu(limits.cpu_s)
        reply = answer(requests.read(int.from_bytes(length, "big")))
        replies.write(len(reply).to_bytes(_LENGTH_BYTES, "big") + reply)
        replies.flush()


def limit_memory(memory_bytes: int) -> None:
    """Limits this process to `memory_bytes` more than it has mapped now, and to no new files.

    Libraries reserve address space that they never use, more on machines with many cores: a fixed limit would be too low.
    """
    for kind, value in (
        (resource.RLIMIT_AS, _address_space_bytes() + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _address_space_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 0


def limit_cpu(cpu_s: int) -> None:
    """Moves the limit on processor time, which counts over the child's whole life, to `cpu_s` from now.

    `serve` calls it before each request. Call it again in `answer` if the request's size decides how long it may take.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + cpu_s, hard))


def _status_text(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


def main(function: str, memory_bytes: int, cpu_s: int) -> None:
    """Runs `python -m shoal.child_process MODULE:FUNCTION MEMORY_BYTES CPU_S`, as started by ChildProcess."""
    module, _, name = function.partition(":")
    # By its real name: this file runs as __main__, whose ChildLimits is another class.
    limits = importlib.import_module("shoal.child_process").ChildLimits(
        memory_bytes=memory_bytes, cpu_s=cpu_s
    )
    getattr(importlib.import_module(module), name)(limits)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
