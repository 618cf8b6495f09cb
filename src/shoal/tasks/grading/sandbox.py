"""Runs untrusted programs in a sandbox and returns whether they pass their tests.

Levels; the strongest that the system allows is used:
    namespace   own mounts, processes, network and user; only Python's library of the machine is visible
    user        (root, where namespaces are not allowed) a user of its own
    limits      the same user under limits, and a filter that refuses sockets, signals and tracing

At every level, processor time, memory, files, processes, disk and output are limited, and no process outlives the sandbox.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shoal.tasks.grading.entry_points import names_from_program
from shoal.tasks.grading.sandbox_child import NOT_BUILT, TIMED_OUT
from shoal.tasks.grading.sandbox_modes import PASSED
from shoal.tasks.task import CannotGrade
from shoal.telemetry import Log

Level = Literal["namespace", "user", "limits"]
LEVELS: tuple[Level, ...] = ("namespace", "user", "limits")
Mode = Literal["script", "serve", "test"]

GRACE_S = 10.0
"""Seconds a sandbox has to end itself before it is killed."""
_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits on what one program may use."""

    cpu_s: int = 10
    wall_s: float = 60.0
    """Six times `cpu_s`: ends programs that wait, but not programs on a busy machine."""
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    file_bytes: int = 4 << 20
    files: int = 32
    processes: int = 16
    output_bytes: int = 1 << 20
    """A script that prints more has failed."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """Exit status and output of a script. Status 0 means success."""

    status: int
    output: bytes


def passes(
    program: str,
    tests: Sequence[str],
    *,
    limits: SandboxLimits,
    entry_points: Mapping[str, str] | None = None,
    level: Level | None = None,
) -> bool:
    """Returns whether the program's functions pass all tests. A test is Python source that raises if it fails.

    The tests get the names that they use and do not define, except builtins and modules. `entry_points` adds others, as name in
    the tests to name in the program: only the data set, never the program, may say that `sum` is the program's function.
    """
    level = level or best_level()
    ask, asked = os.pipe()
    answer, answered = os.pipe()
    with contextlib.ExitStack() as sandboxes:
        try:
            sandboxes.enter_context(Sandbox("serve", program, limits, level, pipe=(ask, answered)))
            names, modules = names_from_program(tests)
            wanted = {name: name for name in names} | dict(entry_points or {})
            tests_text = json.dumps({"tests": list(tests), "entry_points": wanted, "modules": modules})
            tester = sandboxes.enter_context(Sandbox("test", tests_text, limits, level, pipe=(answer, asked)))
        finally:
            for fd in (ask, asked, answer, answered):
                os.close(
                    fd
                )  # this process's copies: otherwise neither side would see the other close its end
        ended = tester.wait()
    return ended.status == 0 and ended.output == PASSED


def run_script(
    program: str, stdin: bytes, *, limits: SandboxLimits, level: Level | None = None
) -> ScriptResult:
    """Runs a program as a script."""
    with Sandbox("script", program, limits, level or best_level(), stdin=stdin) as sandbox:
        return sandbox.wait()


@functools.cache
def best_level() -> Level:
    """Returns the strongest level that this system allows, by trying them; once per process."""
    for level in LEVELS:
        try:
            ended = run_script("print(6 * 7)", b"", limits=SandboxLimits(), level=level)
        except CannotGrade:
            continue
        if ended == ScriptResult(0, b"42\n"):
            if level != "namespace":
                Log("sandbox").warning(
                    "this system allows no namespaces; programs run with weaker isolation", level=level
                )
            return level
    raise CannotGrade(
        "no sandbox can be built on this system; run `shoal validator` on Linux, as root or with user namespaces"
    )


class Sandbox:
    """One program in a sandbox. Use as a context manager, which ends all its processes and removes its files."""

    def __init__(
        self,
        mode: Mode,
        source: str,
        limits: SandboxLimits,
        level: Level,
        *,
        stdin: bytes = b"",
        pipe: tuple[int, int] | None = None,
    ) -> None:
        self._limits = limits
        self._give_up_s = time.monotonic() + limits.wall_s + GRACE_S
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)
        with tempfile.TemporaryFile() as source_file, tempfile.TemporaryFile() as stdin_file:
            source_file.write(source.encode(errors="replace"))
            source_file.seek(0)
            stdin_file.write(stdin)
            stdin_file.seek(0)
            job = asdict(limits) | {
                "mode": mode,
                "level": level,
                "folder": self._folder.name,
                "source_fd": source_file.fileno(),
                "pipe": pipe or (),
            }
            # -I -S: no environment, no user's files, no packages; only the standard library.
            self._monitor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), json.dumps(job)],
                stdin=stdin_file,
                # Not read, so it must not fill a pipe and block the program.
                stdout=subprocess.DEVNULL if mode == "serve" else subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                pass_fds=(source_file.fileno(), *(pipe or ())),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()
        if self._monitor.stdout is not None:
            self._monitor.stdout.close()
        self._folder.cleanup()

    def wait(self) -> ScriptResult:
        """Waits until the program ends, by itself or by its limits. Raises CannotGrade if the sandbox could not be built."""
        output = self._read_all()
        if len(output) > self._limits.output_bytes:
            return ScriptResult(TIMED_OUT, output[: self._limits.output_bytes])
        try:
            status = self._monitor.wait(max(0.1, self._give_up_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CannotGrade("the sandbox did not end itself in time; is the machine busy?") from None
        if status == NOT_BUILT or status < 0:
            raise CannotGrade(f"the sandbox could not be built (status {status})")
        return ScriptResult(status, output)

    def _read_all(self) -> bytes:
        """Reads the output until it ends or exceeds the limit."""
        assert self._monitor.stdout is not None
        fd, pieces, count = self._monitor.stdout.fileno(), [], 0
        while count <= self._limits.output_bytes:
            left_s = self._give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                break
            piece = os.read(fd, 1 << 16)
            if not piece:
                break
            pieces.append(piece)
            count += len(piece)
        return b"".join(pieces)

    def _end(self) -> None:
        """Asks the monitor process to end the program; kills the whole process group if it does not."""
        if self._monitor.poll() is None:
            self._monitor.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._monitor.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._monitor.pid, signal.SIGKILL)
        self._monitor.wait()
