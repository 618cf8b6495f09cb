"""Confines a process with Landlock, a part of Linux that needs no privileges: where it may write, and to which ports it may connect.

    rules = Confinement(writable=(folder,), ports=(8700,))
    for protection in rules.protections():                    # what this system can enforce, in words
        print(protection)
    subprocess.Popen([*rules.wrapper(), *command])            # the command and its children run under the rules

A rule covers a thread and the processes that it starts later, and can never be lifted. So it is set in a new process that then
executes the command: `python -m shoal.landlock RULES COMMAND...`.

Reading is not restricted, and Landlock knows ports, not addresses. Sockets with a path and /dev/shm of the same user stay open.
The command also loses root's privileges, except those for files.
"""

import ctypes
import errno
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, the same on every architecture that torch runs on."""
_PATH_RULE, _PORT_RULE = 1, 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 23, 24, 38
_CAPABILITY_VERSION = 0x20080522
_DAC_OVERRIDE = 1

_WRITE_FILE, _REFER, _TRUNCATE, _IOCTL = 1 << 1, 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = 1 << 6 | 1 << 11
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
"""Rights to make and remove files, folders, links, sockets and devices."""
_BIND, _CONNECT = 1, 2
_OUTSIDE_SOCKETS, _OUTSIDE_SIGNALS = 1, 2

MIN_VERSION, TRUNCATE_VERSION, NET_VERSION, IOCTL_VERSION, SCOPE_VERSION = 2, 3, 4, 5, 6
"""Versions of Landlock: Linux 5.19, 6.2, 6.7, 6.10 and 6.12."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm", "/proc/self")
"""Places outside its folder that a program with torch writes to.

No terminals: a process with an open terminal can type commands into the shell there. Output goes through inherited descriptors.
"""
GPU_DEVICES = ("/dev/dri", "/dev/kfd")
"""Devices whose drivers work by ioctl; /dev/nvidia* is added."""


@dataclass(frozen=True, slots=True)
class Protection:
    """One thing that a confined process cannot do, or the reason why it still can."""

    what: str
    active: bool
    reason: str = ""

    def __str__(self) -> str:
        return self.what if self.active else f"{self.what}: not active: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What a process may do."""

    writable: tuple[Path, ...]
    """Folders that must exist. Devices that torch uses are writable too."""
    ports: tuple[int, ...] | None
    """TCP ports that it may connect to. It may listen on none. None: connections are not restricted."""
    why_any_port: str = ""
    """Why connections are not restricted."""
    note: str = ""
    """Words for the user about the ports."""

    def protections(self) -> list[Protection]:
        """Returns what this system enforces. Nothing is confined by this call."""
        version, reason = landlock_version()
        where = ", ".join(str(path) for path in self.writable)
        files = Protection(f"writes files only in {where}", version >= MIN_VERSION, reason)
        if self.ports is None:
            listed, reason = "to the run's ports", self.why_any_port
        else:
            listed = "to ports " + ", ".join(str(port) for port in self.ports) + self.note
            reason = reason or f"this Linux has Landlock {version}, ports need {NET_VERSION} (Linux 6.7)"
        connections = Protection(
            f"connects only {listed}; listens on none",
            version >= NET_VERSION and self.ports is not None,
            reason,
        )
        return [files, connections]

    def wrapper(self) -> list[str]:
        """Returns the words that go before a command. Where Landlock is missing, the command runs without rules."""
        rules = {"writable": [str(path.resolve()) for path in self.writable], "ports": self.ports}
        return [sys.executable, "-s", "-P", "-m", "shoal.landlock", json.dumps(rules)]


def landlock_version() -> tuple[int, str]:
    """Returns the version of Landlock on this system, and why it cannot be used (an empty text if it can)."""
    if sys.platform != "linux":
        return 0, f"Landlock is a part of Linux; this is {sys.platform}"
    version = _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 0:
        number = ctypes.get_errno()
        if number == errno.EOPNOTSUPP:
            return 0, "Landlock was disabled at boot"
        return 0, f"this kernel has no Landlock ({os.strerror(number)})"
    if version < MIN_VERSION:
        return version, f"this Linux has Landlock {version}, files need {MIN_VERSION} (Linux 5.19)"
    return version, ""


def confine(writable: list[str], ports: list[int] | None) -> None:
    """Confines this thread and all processes that it starts from now on; raises OSError if the kernel refuses."""
    version, reason = landlock_version()
    if reason:
        return
    files = _WRITE_FILE | _CHANGE_FOLDER | _REFER | (_TRUNCATE if version >= TRUNCATE_VERSION else 0)
    ioctl = _IOCTL if version >= IOCTL_VERSION else 0
    net = _BIND | _CONNECT if version >= NET_VERSION and ports is not None else 0
    scope = _OUTSIDE_SOCKETS | _OUTSIDE_SIGNALS if version >= SCOPE_VERSION else 0
    size = 24 if version >= SCOPE_VERSION else 16 if version >= NET_VERSION else 8
    ruleset = _call(
        _CREATE_RULESET, (ctypes.c_uint64 * 3)(files | ioctl, net, scope), ctypes.c_size_t(size), 0
    )
    for path in writable:
        _allow_writing(ruleset, path, files & ~_MAKE_DEVICES)
    for path in filter(os.path.exists, DEVICES):
        _allow_writing(ruleset, path, files & ~_MAKE_DEVICES if path == "/dev/shm" else _WRITE_FILE)
    for path in filter(os.path.exists, (*GPU_DEVICES, *map(str, Path("/dev").glob("nvidia*")))):
        _allow_writing(ruleset, path, _WRITE_FILE | ioctl)
    for port in ports or () if net else ():
        _call(_ADD_RULE, ruleset, _PORT_RULE, (ctypes.c_uint64 * 2)(_CONNECT, port), 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def drop_capabilities() -> None:
    """Gives up the privileges of root for this process and all that it starts, but not access to files.

    With them, a worker that root started could type into other terminals, load kernel modules or mount file systems, none of which
    Landlock covers. CAP_DAC_OVERRIDE is kept: without it, `sudo shoal join` could not write to a folder of another user, and
    Landlock limits it to the node's folder.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted and inheritable capabilities 0 to 31, then the same from 32.
    sets = (ctypes.c_uint32 * 6)()
    _libc_call("capget", header, sets)
    capability = 0
    while _libc().prctl(_PR_CAPBSET_READ, ctypes.c_ulong(capability), 0, 0, 0) >= 0:
        # Root would get these again with exec. A process that may not drop them gets none by exec.
        if capability != _DAC_OVERRIDE:
            _libc().prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
        capability += 1
    kept = 1 << _DAC_OVERRIDE
    _libc_call("capset", header, (ctypes.c_uint32 * 6)(sets[0] & kept, sets[1] & kept))


class _PathRule(ctypes.Structure):
    """struct landlock_path_beneath_attr of linux/landlock.h."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _allow_writing(ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _WRITE_FILE | _TRUNCATE | _IOCTL
        _call(_ADD_RULE, ruleset, _PATH_RULE, ctypes.byref(_PathRule(rights, folder)), 0)
    finally:
        os.close(folder)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *words: object) -> int:
    result = int(_libc().syscall(number, *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result


def _libc_call(name: str, *words: object) -> None:
    if getattr(_libc(), name)(*words) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _prctl(option: int, value: int) -> None:
    _libc_call("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


def main(rules: str, command: list[str]) -> None:
    """Confines this process and executes the command in it. The command is killed when the process that started it ends."""
    parent = os.getppid()
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the signal was requested
            sys.exit(1)
        drop_capabilities()
    confine(**json.loads(rules))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
