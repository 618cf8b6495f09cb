"""One process per role, watched: started, logged, restarted when it dies, stopped when we stop.

A child's standard input is a pipe that we hold. When we end, however we end, the pipe closes and the child takes
that as the word to stop: nothing is left behind, even after kill -9.
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

from shoal.net.waiting import Stopped

GRACE_S = 5.0
"""Between asking a child to stop and making it. With local.ANSWER_S it must stay well below ten seconds."""
FORMER_S = 15.0
"""How long to wait for what an earlier run left behind: such processes end by themselves within GRACE_S."""
MAX_RESTARTS = 5
MAX_DEADLINES = 2
"""A role whose deadline passed has waited long already. It is given another chance or two, never one more for ever."""
STABLE_AFTER_S = 30.0
"""A child that ran this long has earned a fresh count of restarts."""

# Exit codes of a role that mean: do not start me again. docs/cli.md has the list.
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DEADLINE, EXIT_EJECTED, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
FINAL_CODES = {EXIT_OK, EXIT_USAGE, EXIT_EJECTED}


class RunFailed(Exception):
    """The run cannot go on. The message says because of what, and where to look."""


@dataclass
class Child:
    name: str
    command: Sequence[str]
    log_path: Path
    process: subprocess.Popen[bytes]
    started_s: float
    restarts: int = 0
    deadlines: int = 0
    """How often it ended because what it waited for did not come."""
    ended: int | None = None
    """Exit code, once it has ended for good."""


@dataclass
class Supervisor:
    """Children by name, and what happened to them in words."""

    folder: Path
    held: int | None = None
    """What `alone_in` gave. Children inherit it: the folder is free again when the last of them is gone."""
    program: Sequence[str] = (sys.executable, "-m", "shoal.cli")
    children: dict[str, Child] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `shoal ARGUMENTS` as a child called `name`."""
        command = [*self.program, *arguments, "--stop-with-stdin"]
        log_path = self.folder / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.children[name] = Child(name, command, log_path, self._spawn(command, log_path), time.monotonic())
        self._write_pids()

    def check(self) -> None:
        """Restart children that died. RunFailed if one keeps dying, ValueError if one says that its owner must act."""
        for child in self.children.values():
            code = child.process.poll()
            if code is None or child.ended is not None:
                continue
            if code in FINAL_CODES:
                child.ended = code
                if code == EXIT_USAGE:
                    raise ValueError(
                        f"{child.name} refused to go on: {last_words(child.log_path)} (log: {child.log_path})"
                    )
                continue
            if code == EXIT_DEADLINE:
                self._count_deadline(child)
            elif time.monotonic() - child.started_s > STABLE_AFTER_S:
                child.restarts = 0
            if child.restarts >= MAX_RESTARTS:
                raise RunFailed(
                    f"{child.name} died {child.restarts + 1} times in a row, at last with {_how(code)}: "
                    f"{last_words(child.log_path)} (log: {child.log_path})"
                )
            child.restarts += 1
            self.events.append(
                f"{child.name} ended with {_how(code)}; started again ({child.restarts} of {MAX_RESTARTS})"
            )
            _close_stdin(child.process)
            child.process = self._spawn(child.command, child.log_path)
            child.started_s = time.monotonic()
            self._write_pids()

    def _count_deadline(self, child: Child) -> None:
        child.deadlines += 1
        if child.deadlines > MAX_DEADLINES:
            raise RunFailed(
                f"{child.name} waited in vain {child.deadlines} times: {last_words(child.log_path)} (log: {child.log_path})"
            )

    def stop(self) -> None:
        """Ask every child to stop, wait GRACE_S in all, then make it."""
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
        # A session of its own: Ctrl-C in the terminal reaches us alone, and we stop the children in order.
        with log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=() if self.held is None else (self.held,),
            )

    def _write_pids(self) -> None:
        pids = {child.name: child.process.pid for child in self.children.values()}
        partial = self.folder / "pids.json.partial"
        partial.write_text(json.dumps(pids))
        os.replace(partial, self.folder / "pids.json")


@contextlib.contextmanager
def alone_in(folder: Path, stop: threading.Event) -> Iterator[int]:
    """Hold a run's folder; the descriptor to hold it by. Waits for what a killed run left behind, then refuses."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        give_up_s = time.monotonic() + FORMER_S
        said = False
        while not _locks(descriptor):
            if time.monotonic() > give_up_s:
                raise ValueError(
                    f"{folder} is in use: another `shoal` is at work there; stop that one, or choose another --dir"
                )
            if not said:
                print(f"shoal: waiting for another `shoal` in {folder} to end", file=sys.stderr)
                said = True
            if stop.wait(0.1):
                raise Stopped(f"stopped while waiting for {folder}")
        yield descriptor
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def last_words(log_path: Path) -> str:
    """The last line of a log that says something."""
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("shoal: ") if lines else "it said nothing"


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
