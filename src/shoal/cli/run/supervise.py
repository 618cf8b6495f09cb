"""Supervises one process per role: starts it, logs its output, restarts it when it dies, and stops it at the end.

A child's standard input is a pipe whose other end the supervisor holds. When the supervisor ends, however it ends, the pipe
closes and the child stops: no process is left behind, even after kill -9.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.files import write_bytes_atomically
from shoal.net.waiting import Stopped

GRACE_S = 5.0
"""Seconds between asking a child to stop and killing it. Together with local.ANSWER_S well below ten, so that Ctrl-C is quick."""
LOCK_WAIT_S = 15.0
"""Seconds to wait for processes of an earlier run, which end by themselves within GRACE_S."""
MAX_RESTARTS = 5
MAX_DEADLINES = 2
"""Restarts of a role that gave up waiting. It has waited for minutes each time, so it is not restarted for ever."""
NO_LOG = "the log is empty"
TRACE_LINES = 80
"""Lines at the end of a log in which a traceback is looked for."""
STABLE_AFTER_S = 30.0
"""Seconds after which a running child counts as healthy and its count of restarts is reset."""

# docs/cli.md lists the exit codes.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DEADLINE, EXIT_EJECTED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
FINAL_CODES = {EXIT_OK, EXIT_USAGE, EXIT_EJECTED}
"""A role that ends with one of these is not restarted."""


class RoleError(Exception):
    """A role ended. `trace` is the traceback at the end of its log, if there is one; `describe_error` prints it above the message."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class RunFailed(RoleError):
    """The run cannot continue. The message says why, and which log to read."""


class RoleStopped(RoleError, ValueError):
    """A role ended with an error that its owner must correct."""


@dataclass
class Child:
    name: str
    command: Sequence[str]
    log_path: Path
    process: subprocess.Popen[bytes]
    started_s: float
    restarts: int = 0
    deadlines: int = 0
    """How often it ended because it had waited too long for another role."""
    reason: str = ""
    """The last line of its log when it died last. The run ends if a role dies twice in a row with the same last line."""
    ended: int | None = None
    """Exit code, once it has ended and will not be restarted."""


@dataclass
class Supervisor:
    """The child processes of a run, and a list of what happened to them."""

    folder: Path
    lock: int | None = None
    """Descriptor from `lock_folder`. Children inherit it, so the folder stays locked until the last of them has ended."""
    program: Sequence[str] = (sys.executable, "-m", "shoal")
    children: dict[str, Child] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    """Restarts and kills, as sentences for the user."""

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Starts `shoal ARGUMENTS` as a child called `name`."""
        command = [*self.program, *arguments, "--stop-with-stdin"]
        log_path = self.folder / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.children[name] = Child(name, command, log_path, self._spawn(command, log_path), time.monotonic())
        self._write_pids()

    def check(self) -> None:
        """Restarts children that died. Raises RunFailed if one keeps dying, ValueError if one reports an error of its owner."""
        for child in self.children.values():
            code = child.process.poll()
            if code is None or child.ended is not None:
                continue
            if code in FINAL_CODES:
                child.ended = code
                if code == EXIT_USAGE:
                    raise RoleStopped(
                        f"{child.name} stopped: {last_line(child.log_path)} (log: {child.log_path})",
                        last_trace(child.log_path),
                    )
                continue
            if code == EXIT_DEADLINE:
                self._count_deadline(child)
            elif time.monotonic() - child.started_s > STABLE_AFTER_S:
                child.restarts = 0
            reason = last_line(child.log_path)
            repeats = code == EXIT_FAILED and child.restarts > 0 and reason == child.reason
            if repeats or child.restarts >= MAX_RESTARTS:
                raise RunFailed(
                    f"{child.name} died {child.restarts + 1} times in a row, the last time with {_describe_exit(code)}: "
                    f"{reason} (log: {child.log_path})",
                    last_trace(child.log_path),
                )
            child.restarts += 1
            child.reason = reason
            why = f": {reason}" if code > 0 and reason != NO_LOG else ""
            self.events.append(
                f"{child.name} ended with {_describe_exit(code)}{why}; restarted ({child.restarts} of {MAX_RESTARTS}), "
                f"log: {child.log_path}"
            )
            _close_stdin(child.process)
            child.process = self._spawn(child.command, child.log_path)
            child.started_s = time.monotonic()
            self._write_pids()

    def _count_deadline(self, child: Child) -> None:
        child.deadlines += 1
        if child.deadlines > MAX_DEADLINES:
            raise RunFailed(
                f"{child.name} gave up waiting {child.deadlines} times: {last_line(child.log_path)} (log: {child.log_path})"
            )

    def wait_for(self, name: str, timeout_s: float) -> None:
        """Waits until a child has ended, for `timeout_s` at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.children[name].process.wait(timeout_s)

    def stop(self) -> None:
        """Asks every child to stop, waits for GRACE_S in all, then kills the ones that still run."""
        running = [child for child in self.children.values() if child.process.poll() is None]
        for child in running:
            _close_stdin(child.process)
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        give_up_s = time.monotonic() + GRACE_S
        for child in running:
            try:
                child.process.wait(max(0.0, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
                self.events.append(f"{child.name} did not stop within {GRACE_S:.0f} s and was killed")
        for child in self.children.values():
            _close_stdin(child.process)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def _spawn(self, command: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
        # A new session: otherwise Ctrl-C in the terminal would reach the children too, and they would not end in order.
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=() if self.lock is None else (self.lock,),
            )

    def _write_pids(self) -> None:
        pids = {child.name: child.process.pid for child in self.children.values()}
        write_bytes_atomically(self.folder / "pids.json", json.dumps(pids).encode(), durable=False)


@contextlib.contextmanager
def lock_folder(folder: Path, stop: threading.Event) -> Iterator[int]:
    """Locks a run's folder for the block and yields the descriptor that holds the lock.

    Waits for the last processes of a killed run to end. Raises ValueError if the folder is still locked then. The lock is on
    the folder itself and its descriptor can be inherited, which `shoal.files.hold_lock` does not offer.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        give_up_s = time.monotonic() + LOCK_WAIT_S
        said = False
        while not _try_lock(descriptor):
            if time.monotonic() > give_up_s:
                raise ValueError(
                    f"{folder} is in use by another `shoal`; stop that one, or choose another --dir"
                )
            if not said:
                print(f"shoal: waiting for another `shoal` in {folder} to end", file=sys.stderr)
                said = True
            if stop.wait(0.1):
                raise Stopped(f"stopped while waiting for {folder}")
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def last_line(log_path: Path) -> str:
    """Returns the last line of a log that is not empty."""
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("shoal: ") if lines else NO_LOG


def last_trace(log_path: Path) -> str:
    """Returns the traceback that is nearest to the end of a log, within its last lines; empty if there is none."""
    lines = log_path.read_text(errors="replace").splitlines()[-TRACE_LINES:]
    starts = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return ""
    rest = range(starts[-1] + 1, len(lines))
    # The exception's own line, which is the last one, is not indented.
    last = next((at for at in rest if not lines[at].startswith(" ")), len(lines))
    return "\n".join(lines[starts[-1] : last + 1])


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
