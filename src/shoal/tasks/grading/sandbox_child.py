"""Builds the sandbox and runs the program in it: `python -I -S sandbox_child.py JSON`, started by sandbox.py.

Imports no other module of shoal, since it runs without packages. Three processes, each the parent of the next:
    monitor  enters new namespaces, waits, and ends everything after the time limit
    init     process 1 of the new process namespace: when it ends, the kernel kills all other processes in it
    program  the untrusted code, under limits, as user nobody, in a file system with only Python's library

sandbox_modes.py runs the program itself.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

Job = dict[str, Any]

NOBODY = 65534
NOT_BUILT = 125
"""Exit status of a monitor that could not build the sandbox: a failure on our side."""
TIMED_OUT = 124
MAX_PROGRAM_STATUS = 123
"""Highest exit status that a program can cause."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWUSER = 0x10000000
_NEW_OTHERS = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
"""New namespaces for mounts, host name, IPC, processes and network."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_SUBREAPER, _PR_NO_NEW_PRIVS = 1, 22, 36, 38


def main(job: Job) -> NoReturn:
    """Runs as the monitor process."""
    with os.fdopen(job["source_fd"], "rb") as file:
        source = file.read().decode()
    run = _load_modes().MODES[job["mode"]]
    job["mapped_bytes"], job["processes"] = _mapped_bytes(), job["processes"] + _own_processes(job["level"])
    uid = _unused_uid()
    if not _build(job, uid):
        os._exit(NOT_BUILT)
    init = os.fork()
    if init == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _be_init(job, uid, lambda: run(source, job["pipe"]))
    _close_all_but({2})
    os._exit(_watch(init, job, uid))


def _load_modes() -> Any:
    """Loads sandbox_modes.py by path: without site-packages it could not be imported."""
    spec = importlib.util.spec_from_file_location(
        "sandbox_modes", Path(__file__).with_name("sandbox_modes.py")
    )
    assert spec is not None and spec.loader is not None
    modes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modes)
    return modes


# -- monitor ----------------------------------------------------------------------------------------------


def _build(job: Job, uid: int | None) -> bool:
    """Builds the sandbox of the requested level; returns False where the system does not allow it."""
    if job["level"] == "namespace":
        for flags in (_NEW_OTHERS, _NEW_OTHERS | _NEWUSER):
            # Tried in a child process first: a sandbox that is built halfway could not be left again.
            if _works(lambda flags=flags: _enter(job, flags)):  # type: ignore[misc]
                _enter(job, flags)
                return True
        return False
    if job["level"] == "user" and uid is None:
        return False
    if uid is not None:
        os.chown(job["folder"], uid, NOBODY)
    os.chdir(job["folder"])
    _prctl(_PR_SET_SUBREAPER, 1)
    return True


def _enter(job: Job, flags: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", flags)
    if flags & _NEWUSER:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {uid} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    _build_root(job["folder"], job["disk_bytes"], strict=not flags & _NEWUSER)


def _works(act: Callable[[], object]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _build_root(folder: str, disk_bytes: int, *, strict: bool) -> None:
    """Makes a root folder with Python's library, read-only, and a small /tmp; nothing else is visible."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in _needed_folders():
        target = folder + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(target, strict=strict)
    os.makedirs(f"{folder}/tmp")
    _make_read_only(folder, strict=strict)
    _mount("tmpfs", f"{folder}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},mode=1777")
    os.chroot(folder)
    os.chdir("/tmp")


def _make_read_only(target: str, *, strict: bool) -> None:
    try:
        _mount(None, target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    except OSError:
        # Without root, a mount's other flags may be locked; then file permissions prevent writing.
        if strict:
            raise


def _needed_folders() -> list[str]:
    """Returns the folders of the standard library and its shared libraries, without folders inside others."""
    wanted = {
        os.path.dirname(os.__file__),
        f"{sys.base_prefix}/lib",
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
    }
    found = sorted((path for path in wanted if os.path.exists(path)), key=lambda path: (len(path), path))
    outer = [path for path in found if not os.path.islink(path)]
    return [path for path in found if not any(path.startswith(f"{other}/") for other in outer)]


def _unused_uid() -> int | None:
    """Returns a user id that no other process has, so that limits count and signals reach only the program's processes."""
    return None if os.getuid() != 0 else (1 << 30) + int.from_bytes(os.urandom(3), "big")


def _watch(init: int, job: Job, uid: int | None) -> int:
    give_up_s = time.monotonic() + job["wall_s"]
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    status = None
    while status is None and time.monotonic() < give_up_s and not signals:
        pid, found = os.waitpid(init, os.WNOHANG)
        status = found if pid else None
        time.sleep(0 if pid else 0.002)
    if status is None:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
    if job["level"] != "namespace":
        _kill_remaining(uid)
    return TIMED_OUT if status is None else os.waitstatus_to_exitcode(status) & 0xFF


def _kill_remaining(uid: int | None) -> None:
    """Kills the program's remaining processes: all of its user, or all that became our children when their parents ended."""
    if uid is not None:
        _works(lambda: _kill_all_of(uid))
    for _ in range(100):
        children = [pid for pid in _processes() if _parent(pid) == os.getpid()]
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if not children:
            return


def _kill_all_of(uid: int) -> None:
    os.setresuid(uid, uid, uid)
    os.kill(-1, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


# -- init -------------------------------------------------------------------------------------------------


def _be_init(job: Job, uid: int | None, run: Callable[[], None]) -> NoReturn:
    program = os.fork()
    if program == 0:
        _be_program(job, uid, run)
    _close_all_but({2})
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(min(os.waitstatus_to_exitcode(status) & 0xFF, MAX_PROGRAM_STATUS))


# -- program ----------------------------------------------------------------------------------------------


def _be_program(job: Job, uid: int | None, run: Callable[[], None]) -> NoReturn:
    os.environ.clear()
    _limit(job)
    _close_all_but({0, 1, 2, *job["pipe"]})
    if uid is not None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()
    _prctl(_PR_NO_NEW_PRIVS, 1)
    _forbid_calls()
    run()
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


def _mapped_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _own_processes(level: str) -> int:
    """Returns how many threads this user runs, which count towards the program's limit if it has no user of its own."""
    if level != "limits":
        return 0
    count = 0
    for pid in _processes():
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # the process has ended
    return count


def _drop_capabilities() -> None:
    header = struct.pack("<Ii", 0x20080522, 0)
    _call("capset", header, struct.pack("<6I", 0, 0, 0, 0, 0, 0))


_DENIED = {
    # socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, kill, tkill, tgkill, pidfd_send_signal,
    # unshare, mount, keyctl, bpf, userfaultfd, perf_event_open
    "x86_64": (0xC000003E, (41, 101, 310, 311, 425, 62, 200, 234, 424, 272, 165, 250, 321, 323, 298)),
    "aarch64": (0xC00000B7, (198, 117, 270, 271, 425, 129, 130, 131, 424, 97, 40, 219, 280, 282, 241)),
}


def _forbid_calls() -> None:
    """Refuses system calls that programs do not need. Namespaces are safe without it; the other levels need it."""
    known = _DENIED.get(os.uname().machine)
    if known is None:
        return
    arch, numbers = known
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # x32 numbers of the same calls
    for number in numbers:
        steps += [(equal, 0, 1, number), (give, 0, 0, deny)]
    steps.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(code)))
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


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _close_all_but(keep: Collection[int]) -> None:
    highest = 256  # this process opens few files, and the limit on open files may be a million
    for fd in range(highest):
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                continue  # it was not open


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
