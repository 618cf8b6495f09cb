"""Runs untrusted programs in a sandbox and returns whether they pass their tests.

Levels; the strongest that the system allows is used:
    bubblewrap  (bwrap is installed) its mounts, network and user; each program has processes and a /tmp of its own
    namespace   the same, built by sandbox_child.py itself; only Python's library of the machine is visible
    gvisor      (runsc is installed, as root) the same in a container whose system calls gVisor answers, not the machine's kernel.
                Slower, and it does not know how long a program waited for a processor. SHOAL_SANDBOX=gvisor prefers it to all
    user        (root, where namespaces are not allowed) a user of its own
    limits      the same user under limits; it can read that user's files. Refused unless SHOAL_ALLOW_LIMITS_SANDBOX=1

At every level, processor time, memory, files, processes, disk and output are limited, only listed system calls are allowed, and no
process outlives the sandbox.

Each thread that grades has a fork server of its own (sandbox_child.py), which starts a program in a few milliseconds.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from shoal.tasks.grading import gvisor, sandbox_child
from shoal.tasks.grading.entry_points import names_from_program
from shoal.tasks.grading.sandbox_child import MAX_JOB_BYTES, MAX_STRETCH, NOT_BUILT, READY, TIMED_OUT
from shoal.tasks.grading.sandbox_files import remove_tree
from shoal.tasks.grading.sandbox_modes import PASSED
from shoal.tasks.task import CannotGrade
from shoal.telemetry import Log

Level = Literal["bubblewrap", "namespace", "gvisor", "user", "limits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespace", "gvisor", "user", "limits")
Mode = Literal["script", "serve", "test"]

ALLOW_LIMITS = "SHOAL_ALLOW_LIMITS_SANDBOX"
"""Environment variable that allows programs at level limits, with the value 1."""
CHOSEN_LEVEL = "SHOAL_SANDBOX"
"""Environment variable that names the only level to use."""
START_S = 60.0
"""Seconds a fork server may take to start."""
GRACE_S = 10.0
"""Seconds a sandbox has to end itself before its server is killed."""
TESTER_S = 1.0
"""Seconds the tests may run longer than the program, so that a program which is too slow ends first."""
_STARVED = "a program got too little of the processor to be graded; is the machine too busy?"
_CHILD = Path(sandbox_child.__file__)
_CODE = ("sandbox_child.py", "sandbox_modes.py", "sandbox_files.py", "system_calls.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits on what one program may use."""

    cpu_s: int = 10
    wall_s: float = 20.0
    """Twice `cpu_s`. Time in which the program waits for a processor is added, up to twice `wall_s`."""
    memory_bytes: int = 512 << 20
    """Most memory of one process; a program with several processes may take `processes` times as much."""
    disk_bytes: int = 16 << 20
    file_bytes: int = 4 << 20
    files: int = 32
    processes: int = 8
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """A script that prints more has failed."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """Exit status and output of a script. Status 0 means success."""

    status: int
    output: bytes
    starved: bool = False
    """Whether its time was up because the machine is too busy, so that nothing can be said about the program."""


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
    names, modules = names_from_program(tuple(tests))
    wanted = {name: name for name in names} | dict(entry_points or {})
    tests_text = json.dumps({"tests": list(tests), "entry_points": wanted, "modules": modules})
    server = _server(level or best_level())
    ask, asked = os.pipe()
    answer, answered = os.pipe()
    with contextlib.ExitStack() as sandboxes:
        try:
            served = sandboxes.enter_context(server.start("serve", program, limits, pipe=(ask, answered)))
            longer = replace(limits, wall_s=MAX_STRETCH * limits.wall_s + TESTER_S)
            tester = sandboxes.enter_context(server.start("test", tests_text, longer, pipe=(answer, asked)))
        finally:
            # This process's copies: otherwise neither side would see the other close its end.
            for fd in (ask, asked, answer, answered):
                os.close(fd)
        tested, ended = tester.wait(), served.end()
    if tested.starved or ended.starved:
        raise CannotGrade(_STARVED)
    return tested == ScriptResult(0, PASSED) and ended.status != TIMED_OUT


def run_script(
    program: str, stdin: bytes, *, limits: SandboxLimits, level: Level | None = None
) -> ScriptResult:
    """Runs a program as a script."""
    server = _server(level or best_level())
    with server.start("script", program, limits, stdin=stdin) as sandbox:
        ended = sandbox.wait()
    if ended.starved:
        raise CannotGrade(_STARVED)
    return ended


# -- levels -----------------------------------------------------------------------------------------------


_LEVEL_LOCK = threading.Lock()
"""Held while the levels are tried, so that the threads of a pool do not try them all at once."""


def best_level() -> Level:
    """Returns the strongest level that this system allows, by trying them; once per process. Raises CannotGrade."""
    with _LEVEL_LOCK:
        return find_level()


@functools.cache
def find_level() -> Level:
    """Tries the levels, strongest first; only the chosen one if there is one."""
    chosen = os.environ.get(CHOSEN_LEVEL)
    if chosen and chosen not in LEVELS:
        raise CannotGrade(f"{CHOSEN_LEVEL}={chosen!r} is not a level; choose one of {', '.join(LEVELS)}")
    for level in LEVELS:
        if chosen not in (None, "", level) or not works(level):
            continue
        if level == "limits" and os.environ.get(ALLOW_LIMITS) != "1":
            raise CannotGrade(
                "this system allows neither namespaces nor a user of its own for programs, which could read all files of this "
                f"user; install bubblewrap, allow user namespaces, run as root, or set {ALLOW_LIMITS}=1 to run them all the same"
            )
        if level not in ("bubblewrap", "namespace", "gvisor"):
            Log("sandbox").warning("programs run in a weak sandbox; install bubblewrap", level=level)
        return level
    if chosen:
        raise CannotGrade(
            f"no sandbox of level {chosen} can be built on this system; unset {CHOSEN_LEVEL} or install what it needs"
        )
    raise CannotGrade(
        "no sandbox can be built on this system; run `shoal validator` on Linux, as root or with user namespaces"
    )


def works(level: Level) -> bool:
    """Returns whether a sandbox of this level can be built here, by running a program in one."""
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return False
    if level == "gvisor" and gvisor.find_runsc() is None:
        return False
    try:
        ended = run_script("print(6 * 7)", b"", limits=SandboxLimits(), level=level)
        return ended == ScriptResult(0, b"42\n")
    except CannotGrade:
        return False


def _server_command(level: Level, folder: str) -> list[str]:
    # -I -S: no environment, no user's files, no packages; only the standard library.
    options = json.dumps({"level": level, "folder": folder})
    python = os.path.realpath(sys.executable)
    inside = ["-I", "-S", f"{gvisor.CODE_FOLDER}/{_CHILD.name}", options]
    if level == "bubblewrap":
        return [*_bwrap_command(python), python, *inside]
    if level == "gvisor":
        code = [_CHILD.with_name(name) for name in _CODE]
        return gvisor.container_command(folder, python, code, inside)
    return [python, "-I", "-S", str(_CHILD), options]


def _bwrap_command(python: str) -> list[str]:
    """Returns the beginning of a command line that runs a command which sees only Python's library."""
    # Capabilities inside its namespaces, which each program drops: they give each program namespaces of its own.
    namespaces = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    command = ["bwrap", *namespaces, "--cap-add", "ALL"]
    if os.getuid() != 0:
        command.append("--unshare-user")
    for path in (*sandbox_child.needed_folders(), python):
        for folder in reversed(Path(path).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(folder)]  # by default only root may enter them
        link = os.path.islink(path)
        command += ["--symlink", os.readlink(path), path] if link else ["--ro-bind", path, path]
    for path in sandbox_child.package_folders():
        command += ["--tmpfs", path, "--remount-ro", path]
    for name in _CODE:
        command += ["--ro-bind", str(_CHILD.with_name(name)), f"{gvisor.CODE_FOLDER}/{name}"]
    command += ["--proc", "/proc", "--perms", "1777", "--dir", "/tmp", "--remount-ro", "/"]
    return [*command, "--new-session", "--"]


# -- servers and sandboxes --------------------------------------------------------------------------------

_THREAD = threading.local()


def _server(level: Level) -> "SandboxServer":
    """Returns the fork server of this thread. It ends when the thread does: its socket is closed."""
    servers: dict[Level, SandboxServer] = _THREAD.__dict__.setdefault("servers", {})
    if level not in servers:
        servers[level] = SandboxServer(level)
    return servers[level]


class SandboxServer:
    """A fork server of one level. Use it from one thread only. It is started at the first program and again after a failure."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._socket: socket.socket | None = None

    def start(
        self,
        mode: Mode,
        source: str,
        limits: SandboxLimits,
        *,
        stdin: bytes = b"",
        pipe: tuple[int, ...] = (),
    ) -> "Sandbox":
        """Starts a program. Raises CannotGrade if the server cannot be started."""
        for last in (False, True):
            if self._socket is None:
                self._socket = self._start_server()
            try:
                return Sandbox(self._socket, self._level, mode, source, limits, stdin, pipe)
            except OSError as error:
                self.close()
                if last:
                    raise CannotGrade(f"the sandbox's server has ended: {error}") from None
        raise AssertionError

    @property
    def pid(self) -> int | None:
        """Process id of the running server, or None."""
        return None if self._socket is None else self._process.pid

    def close(self) -> None:
        """Ends the server. Programs that are running end by their own limits."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the process, modules may be gone
            self.close()

    def _start_server(self) -> socket.socket:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                _server_command(self._level, self._folder.name),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        ours.settimeout(START_S)
        try:
            ready = ours.recv(len(READY)) == READY
        except OSError:
            ready = False
        if not ready:
            ours.close()
            self._process.kill()
            status = self._process.wait()
            self._folder.cleanup()
            raise CannotGrade(f"a sandbox of level {self._level} cannot be built here (status {status})")
        ours.settimeout(None)
        return ours


class Sandbox:
    """One program in a sandbox. Use as a context manager, which ends all its processes and removes its files."""

    def __init__(
        self,
        server: socket.socket,
        level: Level,
        mode: Mode,
        source: str,
        limits: SandboxLimits,
        stdin: bytes,
        pipe: tuple[int, ...],
    ) -> None:
        self._limits = limits
        self._give_up_s = time.monotonic() + MAX_STRETCH * limits.wall_s + GRACE_S
        self._result: ScriptResult | None = None
        job = _limits_of(limits) | {"mode": mode}
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            if level in ("user", "limits"):
                folder = tempfile.mkdtemp(prefix="shoal-")
                ours.callback(remove_tree, folder)
                job["folder"] = folder
            message = json.dumps(job).encode()
            assert len(message) <= MAX_JOB_BYTES
            # The output of a script is read while it runs. Nobody reads what a serving program prints, and a full pipe would block it, so
            # that output is discarded.
            self._output = -1
            if mode == "serve":
                output = os.open(os.devnull, os.O_WRONLY)
            else:
                self._output, output = os.pipe()
                ours.callback(os.close, self._output)
            theirs.callback(os.close, output)
            self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(self._status)
            theirs.enter_context(status)
            files = [
                theirs.enter_context(_file_of(data)) for data in (source.encode(errors="replace"), stdin)
            ]
            socket.send_fds(server, [message], [status.fileno(), *files, output, *pipe])
            self._cleanup = ours.pop_all()  # after an error, nothing is kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(CannotGrade):
            self.end()
        self._cleanup.close()

    def end(self) -> ScriptResult:
        """Ends the program if it is still running. A program whose time was up before has the status TIMED_OUT."""
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)  # the monitor sees it and kills the program
        return self.wait()

    def wait(self) -> ScriptResult:
        """Waits until the program ends, by itself or by its limits. Raises CannotGrade if the sandbox could not be built."""
        if self._result is None:
            self._result = self._wait()
        return self._result

    def _wait(self) -> ScriptResult:
        output = self._read_all() if self._output >= 0 else b""
        if len(output) > self._limits.output_bytes:
            return ScriptResult(TIMED_OUT, output[: self._limits.output_bytes])
        self._status.settimeout(max(0.1, self._give_up_s - time.monotonic()))
        try:
            message = self._status.recv(MAX_JOB_BYTES)
        except TimeoutError:
            raise CannotGrade("the sandbox did not end itself in time; is the machine busy?") from None
        if not message:
            raise CannotGrade("the sandbox's monitor has ended")
        found = json.loads(message)
        if found["status"] == NOT_BUILT:
            raise CannotGrade(f"the sandbox could not be built: {found.get('error')}")
        return ScriptResult(found["status"], output, found["starved"])

    def _read_all(self) -> bytes:
        """Reads the output until it ends or exceeds the limit."""
        fd, count = self._output, 0
        pieces: list[bytes] = []
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


@functools.lru_cache(maxsize=16)  # asdict takes as long as all system calls that start a program
def _limits_of(limits: SandboxLimits) -> dict[str, object]:
    return asdict(limits)


@contextlib.contextmanager
def _file_of(data: bytes) -> Iterator[int]:
    """Opens a file in memory with these bytes, at its start."""
    fd = os.memfd_create("shoal") if data else os.open(os.devnull, os.O_RDONLY)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if data:
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
