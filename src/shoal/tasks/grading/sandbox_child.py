"""A fork server that builds sandboxes and runs programs in them: `python -I -S sandbox_child.py JSON`, started by sandbox.py.

Imports no other module of shoal, since it runs without packages. It loads Python's modules once; each job then costs one fork, or two:
    server   enters a file system with only Python's library, without network, and waits for jobs on its standard input, a socket
    monitor  waits, and ends everything after the time limit. The server itself where each job has namespaces of its own, so that the
             kernel ends its processes; at the other levels one process for each job
    program  the untrusted code, under limits, as a user of its own. It is process 1 of a new process namespace: when it ends, the
             kernel kills all other processes in it

A job is one message with JSON and file descriptors: status socket, source, standard input, standard output, and the pipe to the other
sandbox. The server never reads the source, since every later program could find it in its memory. The monitor answers on the status
socket {"status": EXIT STATUS, "starved": whether it could not be graded because the machine is too busy}; it ends the program when the
other end is closed.

sandbox_modes.py runs the program itself, system_calls.py has the filter, sandbox_files.py counts and removes a program's files and
processes.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

Job = dict[str, Any]

NOBODY = 65534
NOT_BUILT = 125
"""Status of a sandbox that could not be built: a failure on our side."""
TIMED_OUT = 124
MAX_PROGRAM_STATUS = 123
"""Highest exit status that a program can cause."""
READY = b"ready"
MAX_JOB_BYTES = 1 << 16
MAX_FILES = 4096
"""Files and folders in the /tmp of a program. The kernel keeps each in memory, whatever its size."""
DISK_WATCH_S = 0.1
"""Seconds between two looks at a program's files at the levels `user` and `limits`, where no /tmp of its own limits them."""
LONGEST_LOOK_S = 0.2
"""Longest time between two looks at how long a program waited for a processor."""
MAX_STRETCH = 3
"""Times `wall_s` after which a program that waits for a processor is given up: the machine is too busy to grade it."""
WARM = (
    *("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
    *("functools", "heapq", "itertools", "math", "operator", "random", "re", "statistics"),
    *("string", "typing"),
)
"""Modules that programs often import, loaded once."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PYTHON_LIBC = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter's lock
_CLONE = {"x86_64": 56, "aarch64": 220}  # number of the system call
_NEWUSER = 0x10000000
_SERVER_NAMESPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x40000000
"""New namespaces of the server for mounts, host name, IPC and network. Jobs share that for IPC: the filter of system calls allows
no call that could use it."""
_PROCESSES = 0x20000000
"""A new namespace for processes."""
_JOB_NAMESPACES = 0x20000 | _PROCESSES
"""New namespaces of each job: that and one for mounts."""
_ISOLATED = ("bubblewrap", "namespace")
"""Levels at which every job has namespaces of its own."""
_OWN_PROCESSES = (*_ISOLATED, "gvisor")
"""Levels at which a job's processes end with its process 1."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_SUBREAPER, _PR_NO_NEW_PRIVS = 1, 4, 22, 36, 38


# -- server -----------------------------------------------------------------------------------------------


def main(level: str, folder: str) -> NoReturn:
    """Builds what all jobs share, then runs jobs until the socket is closed."""
    server = socket.socket(fileno=os.dup(0))
    modes, calls, files = map(_load, ("sandbox_modes", "system_calls", "sandbox_files"))
    code = calls.filter_program(os.uname().machine)
    for name in WARM:
        importlib.import_module(name)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    proc = os.open("/proc", os.O_RDONLY)
    host = {"proc": proc, "mapped_bytes": mapped_bytes, "filter": code, "level": level}
    if code is None or not _build_server(level, folder):
        os._exit(NOT_BUILT)
    gc.collect()
    gc.freeze()
    server.send(READY)
    if level in _ISOLATED:
        _serve_isolated(server, Monitor(modes, files), host)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended monitors leave no zombies
    while True:
        message, fds, _, _ = socket.recv_fds(server, MAX_JOB_BYTES, 8)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            server.close()
            _run_one(json.loads(message) | host, fds, modes, files)
        for fd in fds:
            os.close(fd)


def _serve_isolated(server: socket.socket, monitor: "Monitor", host: Job) -> NoReturn:
    """Starts and watches the programs of all jobs until the socket is closed. Its end also ends the programs that still run."""
    monitor.poll.register(server, select.POLLIN)
    while True:
        if server.fileno() not in monitor.wait():
            continue
        message, fds, _, _ = socket.recv_fds(server, MAX_JOB_BYTES, 8)
        if not message:
            os._exit(0)
        monitor.start(json.loads(message) | host, fds)


def _run_one(job: Job, fds: list[int], modes: Any, files: Any) -> NoReturn:
    """Runs one job in a monitor of its own, at the levels at which a program's remaining processes must be found and killed."""
    monitor = Monitor(modes, files)
    monitor.start(job, fds)
    os.close(0)  # the server's socket: otherwise nobody would notice that the server has ended
    while monitor.programs:
        monitor.wait()
    os._exit(0)


def _load(name: str) -> Any:
    """Loads a module of this folder by path: without site-packages it could not be imported."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build_server(level: str, folder: str) -> bool:
    """Enters the file system that all jobs see; returns False where the system does not allow it."""
    if level == "namespace":
        for flags in (_SERVER_NAMESPACES, _SERVER_NAMESPACES | _NEWUSER):
            # Tried in a child process first: a sandbox that is built halfway could not be left again.
            if _works(lambda flags=flags: _enter(folder, flags)):  # type: ignore[misc]
                _enter(folder, flags)
                return True
        return False
    if level == "bubblewrap":
        # Otherwise the mounts of jobs would appear in the server and in other jobs.
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    if level == "gvisor":
        # Hides /proc, where jobs would see each other's processes. Once for all jobs: gVisor has one mount namespace.
        _mount("tmpfs", "/proc", "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    return level != "user" or os.getuid() == 0


def _enter(folder: str, flags: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", flags)
    if flags & _NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
    _build_root(folder, strict=not flags & _NEWUSER)


def _works(act: Callable[[], object]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _build_root(folder: str, *, strict: bool) -> None:
    """Makes a root folder with Python's library, read-only, and an empty /tmp for each job's own; nothing else is visible."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in needed_folders():
        target = folder + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(target, strict=strict)
    for path in package_folders():
        _mount("tmpfs", folder + path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    os.makedirs(f"{folder}/tmp")
    _make_read_only(folder, strict=strict)
    os.chroot(folder)
    os.chdir("/tmp")


def _make_read_only(target: str, *, strict: bool) -> None:
    try:
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    except OSError:
        # Without root, a mount's other flags may be locked; then file permissions prevent writing.
        if strict:
            raise


def needed_folders() -> list[str]:
    """Returns the folders of the standard library and its shared libraries, without folders inside others."""
    library = (os.path.dirname(os.__file__), f"{sys.base_prefix}/lib")
    wanted = {*library, "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    found = sorted((path for path in wanted if os.path.exists(path)), key=lambda path: (len(path), path))
    outer = [path for path in found if not os.path.islink(path)]
    return [path for path in found if not any(path.startswith(f"{other}/") for other in outer)]


def package_folders() -> list[str]:
    """Returns the folders of installed packages inside the needed ones. They are hidden: some contain a data set and its tests."""
    patterns = ("site-packages", "dist-packages", "python3*/site-packages", "python3*/dist-packages")
    folders = [Path(folder) for folder in needed_folders() if not os.path.islink(folder)]
    found = [path for folder in folders for one in patterns for path in folder.glob(one)]
    return sorted(str(path) for path in found if path.is_dir() and not path.is_symlink())


# -- monitor ----------------------------------------------------------------------------------------------


class Monitor:
    """Starts programs, ends those whose time or disk is used up, and sends their results."""

    def __init__(self, modes: Any, files: Any) -> None:
        """`modes` and `files` are the modules sandbox_modes and sandbox_files."""
        self._modes, self._files = modes, files
        self.programs: dict[int, Running] = {}
        """Programs that run, by status socket."""
        self.poll = select.poll()
        # A pipe that becomes readable when a child process ends, since gVisor has no pidfd_open.
        self._ended_fd, wakeup_fd = os.pipe()
        os.set_blocking(wakeup_fd, False)
        signal.set_wakeup_fd(wakeup_fd)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.poll.register(self._ended_fd, select.POLLIN)
        self._pidfd: list[int] = []
        with contextlib.suppress(OSError):  # gVisor has none
            self._pidfd.append(os.pidfd_open(os.getpid()))

    def start(self, job: Job, fds: list[int]) -> None:
        """Starts a program, or sends the result that it could not be started. Closes all files of the job but the status socket."""
        status_fd, job["monitor"] = fds[0], self._pidfd
        # A user id that no other process has: limits count and signals reach only the program's processes.
        job["uid"] = None if os.getuid() != 0 else (1 << 30) + int.from_bytes(os.urandom(3), "big")
        if job["level"] == "limits":
            # The program has no user of its own: this user's threads count towards its limit.
            job["processes"] += self._files.count_own_threads()
        try:
            if job["level"] not in _ISOLATED:
                _use_folder(job)
            self.programs[status_fd] = Running(_start_program(job, fds, self._modes), job)
            self.poll.register(status_fd, select.POLLIN | select.POLLRDHUP)
        except OSError as error:
            _send(status_fd, NOT_BUILT, error=str(error))
            os.close(status_fd)
        for fd in fds[1:]:
            os.close(fd)

    def wait(self) -> set[int]:
        """Waits for the next event, at most until the next look at a program. Returns the files that can be read."""
        left_s = min((one.look_s - time.monotonic() for one in self.programs.values()), default=60.0)
        ready = {fd for fd, _ in self.poll.poll(1000 * min(max(left_s, 0.0), 60.0) + 1)}
        if self._ended_fd in ready:
            os.read(self._ended_fd, 64)
        for status_fd, one in list(self.programs.items()):
            if status_fd in ready:
                self.poll.unregister(status_fd)
                one.kill()  # nobody waits for the result
            if (status := one.look(self._files)) is not None:
                del self.programs[status_fd]
                with contextlib.suppress(KeyError):  # it was ready before
                    self.poll.unregister(status_fd)
                _send(status_fd, status, starved=one.starved)
                os.close(status_fd)
        return ready


def _send(status_fd: int, status: int, *, starved: bool = False, error: str = "") -> None:
    with contextlib.suppress(OSError):  # nobody waits for the result
        os.write(status_fd, json.dumps({"status": status, "starved": starved, "error": error}).encode())


def _use_folder(job: Job) -> None:
    """Gives a job a folder, and makes its monitor the parent of orphaned processes, where there are no mount namespaces."""
    if job["level"] == "gvisor":
        _call("unshare", _PROCESSES)
        job["folder"] = f"/tmp/{job['uid']}"
        os.mkdir(job["folder"], 0o700)
    if job["uid"] is not None:
        os.chown(job["folder"], job["uid"], NOBODY)
    os.chdir(job["folder"])
    if job["level"] not in _OWN_PROCESSES:
        _prctl(_PR_SET_SUBREAPER, 1)


def _start_program(job: Job, fds: list[int], modes: Any) -> int:
    """Starts the program's process and returns its id."""
    status_fd, source_fd, stdin_fd, stdout_fd, *pipe = fds
    isolated = job["level"] in _ISOLATED
    pid = _fork(_JOB_NAMESPACES) if isolated else os.fork()
    if pid == 0:
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(stdin_fd, 0)
            os.dup2(stdout_fd, 1)
            if isolated:
                _mount_tmp(job)
            _be_program(job, source_fd, pipe, modes.MODES[job["mode"]])
        except OSError as error:
            # Of the sandbox: before the program's own code runs, its copy of this socket is closed.
            _send(status_fd, NOT_BUILT, error=str(error))
        finally:
            os._exit(1)  # an error must not return into the monitor's code
    return pid


def _mount_tmp(job: Job) -> None:
    """Gives a job a /tmp of its own, in its mount namespace."""
    limits = f"size={job['disk_bytes']},nr_inodes={MAX_FILES},mode=1777"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, limits)
    if job["level"] == "bubblewrap":
        _mount("tmpfs", "/proc", "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k")
    os.chdir("/tmp")


def _fork(namespaces: int) -> int:
    """Forks a child process into new namespaces. With os.fork(), after unshare(), a process could do so only once."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_PYTHON_LIBC.syscall(_CLONE[os.uname().machine], namespaces | signal.SIGCHLD, 0, 0, 0, 0))
    ctypes.pythonapi["PyOS_AfterFork_Parent" if pid else "PyOS_AfterFork_Child"]()
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"clone: {os.strerror(number)}")
    return pid


class Running:
    """A program that runs, and what is known of its time."""

    def __init__(self, pid: int, job: Job) -> None:
        self._pid, self._job = pid, job
        self._started_s = time.monotonic()
        self._longest_s = MAX_STRETCH * job["wall_s"]
        self._give_up_s, self._waited_s = self._started_s + job["wall_s"], 0.0
        self._before_s: float | None = None
        counted_by_kernel = job["level"] in _OWN_PROCESSES
        self._disk_look_s = float("inf") if counted_by_kernel else self._started_s + DISK_WATCH_S
        self._timed_out = self.starved = self._killed = False
        self._plan_look()

    def kill(self) -> None:
        """Ends the program; `look` returns the result when it has ended."""
        self._killed = True
        os.kill(self._pid, signal.SIGKILL)
        self.look_s = float("inf")

    def look(self, files: Any) -> int | None:
        """Returns the status of a program that has ended, after its processes and files are gone. Ends one whose time or disk is used up."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._clean_up(files)
            found = min(os.waitstatus_to_exitcode(status) & 0xFF, MAX_PROGRAM_STATUS)
            return TIMED_OUT if self._timed_out else found
        now_s = time.monotonic()
        if self._killed or now_s < self.look_s:
            return None
        job, over_disk = self._job, False
        if now_s >= self._disk_look_s:
            over_disk = files.uses_more_than(job["folder"], job["uid"], job["disk_bytes"], MAX_FILES)
            # A fifth of a processor at most: /tmp may hold many files of others.
            self._disk_look_s = time.monotonic() + max(DISK_WATCH_S, 4 * (time.monotonic() - now_s))
        # Time in which the program was ready to run, but the machine was busy with others, does not count.
        found_s = files.waited_s(self._pid, job["proc"], adopts=job["level"] not in _OWN_PROCESSES)
        if found_s is not None and self._before_s is not None:
            self._waited_s += found_s - self._before_s
        self._before_s = found_s
        stretched_s = job["wall_s"] + self._waited_s
        self._give_up_s = self._started_s + min(stretched_s, self._longest_s)
        self._timed_out = over_disk or time.monotonic() >= self._give_up_s
        self.starved = self._timed_out and not over_disk and stretched_s >= self._longest_s
        self._plan_look()
        if self._timed_out:
            self.kill()
        return None

    def _plan_look(self) -> None:
        # At times that the program cannot know: it could otherwise end its own processes before each look.
        pause_s = LONGEST_LOOK_S * (1 + os.urandom(1)[0]) / 256
        self.look_s = min(time.monotonic() + pause_s, self._give_up_s)

    def _clean_up(self, files: Any) -> None:
        if self._job["level"] not in _OWN_PROCESSES:
            files.kill_remaining(self._job["uid"])
            files.remove_files_of(self._job["uid"])
        if self._job["level"] == "gvisor":
            os.chdir("/")
            files.remove_tree(self._job["folder"])


# -- program ----------------------------------------------------------------------------------------------


def _be_program(job: Job, source_fd: int, pipe: list[int], run: Callable[[str, list[int]], None]) -> NoReturn:
    uid = job["uid"]
    with os.fdopen(source_fd, "rb") as file:
        source = file.read().decode()
    os.environ.clear()
    gc.unfreeze()
    # The server's own objects remember what kind of file its standard input was.
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    _limit(job)
    _close_all_but({0, 1, 2, *pipe, *job["monitor"]})
    if uid is not None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(uid, uid, uid)
    # Drops all capabilities.
    _call("capset", struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", 0, 0, 0, 0, 0, 0))
    # Again: changing the user cleared it. If the monitor is killed, so are all processes of the program.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The monitor may have ended before, and this process would run without a limit of time.
    if select.select(job["monitor"], [], [], 0)[0]:
        os._exit(1)
    for fd in job["monitor"]:
        os.close(fd)
    # Processes of the same user must not read the memory of this one: the tests' sandbox has the tests in it.
    _prctl(_PR_SET_DUMPABLE, 0)
    for number in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF):
        _LIBC.signal(number, _LIBC._exit)  # without a handler, process 1 would ignore them
    filter_calls(job["filter"])
    run(source, pipe)
    os._exit(1)


def _limit(job: Job) -> None:
    for kind, wanted in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"] + job["mapped_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, job["files"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))


def filter_calls(code: bytes) -> None:
    """Refuses all system calls of this process but the ones that a filter of system_calls.py allows."""
    _prctl(_PR_NO_NEW_PRIVS, 1)
    steps = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(steps)))
    _prctl(_PR_SET_SECCOMP, 2, program)


# -- system calls -----------------------------------------------------------------------------------------


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, *arguments: object) -> None:
    _call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _close_all_but(keep: Collection[int]) -> None:
    lowest, highest = 0, 256  # this process opens few files, and the limit on open files may be a million
    for fd in (*sorted(keep), highest):
        if lowest < fd:  # closerange(0, 0) closes all files
            os.closerange(lowest, fd)
        lowest = fd + 1


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
