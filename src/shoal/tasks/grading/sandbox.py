"""Runs strangers' programs where they can do no harm, and says whether they passed their tests.

Levels, the strongest that the system allows:
    namespace   own mounts, processes, network, user; nothing of the machine in sight but Python's library
    user        (root, where namespaces are not allowed) a user of its own
    limits      neither: the same user under limits, and a filter that refuses sockets, signals and tracing

Whichever it is, processor time, memory, files, processes, disk and output are bounded, and nothing outlives the sandbox.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shoal.tasks.grading.sandbox_child import CANNOT, TIME_IS_UP
from shoal.tasks.grading.sandbox_modes import PASSED
from shoal.tasks.task import CannotGrade
from shoal.telemetry import Log

Level = Literal["namespace", "user", "limits"]
LEVELS: tuple[Level, ...] = ("namespace", "user", "limits")
Mode = Literal["script", "serve", "test"]

GRACE_S = 10.0
"""For a sandbox to end itself before it is killed."""
_CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may take."""

    cpu_s: int = 10
    wall_s: float = 60.0
    """Six times the processor's: a program that waits ends by it, one on a busy machine should not."""
    memory_bytes: int = 512 << 20
    disk_bytes: int = 16 << 20
    file_bytes: int = 4 << 20
    files: int = 32
    processes: int = 16
    output_bytes: int = 1 << 20
    """Of a script; one that prints more has failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a script ended: its exit status (0 is well) and what it printed."""

    status: int
    output: bytes


def passes(program: str, tests: Sequence[str], *, limits: Limits, level: Level | None = None) -> bool:
    """Whether the program's functions pass all of the tests, Python sources that raise if they do not."""
    level = level or best_level()
    ask, asked = os.pipe()
    answer, answered = os.pipe()
    with contextlib.ExitStack() as cells:
        try:
            cells.enter_context(Cell("serve", program, limits, level, pipe=(ask, answered)))
            tests_text = json.dumps(list(tests))
            tester = cells.enter_context(Cell("test", tests_text, limits, level, pipe=(answer, asked)))
        finally:
            for fd in (ask, asked, answer, answered):
                os.close(fd)  # ours, so that each side sees the other's end
        ended = tester.wait()
    return ended.status == 0 and ended.output == PASSED


def run_script(program: str, stdin: bytes, *, limits: Limits, level: Level | None = None) -> Ended:
    """Run a program as a script."""
    with Cell("script", program, limits, level or best_level(), stdin=stdin) as cell:
        return cell.wait()


@functools.cache
def best_level() -> Level:
    """The strongest level this system allows; tried out, once a process."""
    for level in LEVELS:
        try:
            ended = run_script("print(6 * 7)", b"", limits=Limits(), level=level)
        except CannotGrade:
            continue
        if ended == Ended(0, b"42\n"):
            if level != "namespace":
                Log("sandbox").warning(
                    "this system allows no namespaces; programs run behind weaker walls", level=level
                )
            return level
    raise CannotGrade(
        "no sandbox can be built here; run `shoal validator` on Linux, as root or with user namespaces"
    )


class Cell:
    """One sandbox. Use as a context manager: at its end nothing of it is left."""

    def __init__(
        self,
        mode: Mode,
        source: str,
        limits: Limits,
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
            # -I -S: no environment, no user's files, no packages. A program has the standard library.
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), json.dumps(job)],
                stdin=stdin_file,
                # What a program prints while it is called is nobody's business, and must not fill a pipe.
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
        if self._warden.stdout is not None:
            self._warden.stdout.close()
        self._folder.cleanup()

    def wait(self) -> Ended:
        """Until it ends by itself or by its limits. CannotGrade if it could not be built."""
        output = self._read_all()
        if len(output) > self._limits.output_bytes:
            return Ended(TIME_IS_UP, output[: self._limits.output_bytes])
        try:
            status = self._warden.wait(max(0.1, self._give_up_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise CannotGrade("a sandbox did not end itself in time; is the machine busy?") from None
        if status == CANNOT or status < 0:
            raise CannotGrade(f"a sandbox could not be built (status {status})")
        return Ended(status, output)

    def _read_all(self) -> bytes:
        """All that it prints, up to the first byte too much."""
        assert self._warden.stdout is not None
        fd, pieces, count = self._warden.stdout.fileno(), [], 0
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
        """The warden ends what it guards; if it does not, all of its group is killed."""
        if self._warden.poll() is None:
            self._warden.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._warden.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._warden.pid, signal.SIGKILL)
        self._warden.wait()
