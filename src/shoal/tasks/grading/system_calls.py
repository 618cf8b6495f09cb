"""The system calls that a sandboxed program may make, as a seccomp filter. Loaded by sandbox_child.py; imports nothing of shoal.

The list allows what Python's standard library needs for computing, files, threads and child processes. Every other call fails with
EPERM: signals to processes (kill, rt_sigqueueinfo), limits of other processes, sockets, exec, namespaces and mounts (setns, unshare,
open_tree, move_mount, fsopen), tracing, keys, bpf, io_uring, and calls that newer kernels add. Five calls are allowed only with
some arguments:

    clone      without new namespaces. clone3, whose arguments a filter cannot read, fails with ENOSYS: libc then uses clone
    prlimit64  of the process itself
    fcntl      without F_SETOWN, F_SETSIG and F_SETOWN_EX, which let the kernel send a signal to any process of the user
    ioctl      that asks about terminals and sets flags of a file descriptor
    sendto     without an address: event loops write to a socket pair, nobody else may be reached
"""

import struct

Step = tuple[int, int, int, int]
"""One instruction of a classic BPF program: code, jump if true, jump if false, constant."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables of numbers, and the architecture as seccomp reports it."""

_ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, preadv 295 69, pwritev 296 70, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, mincore 27 232, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102,
alarm 37 -, setitimer 38 103, getpid 39 172, fork 57 -, vfork 58 -, exit 60 93, wait4 61 260, waitid 247 95,
uname 63 160, flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45, ftruncate 77 46, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -,
unlink 87 -, symlink 88 -, readlink 89 -, chmod 90 -, fchmod 91 52, umask 95 166, gettimeofday 96 169,
getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176, geteuid 107 175,
getegid 108 177, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156, setsid 112 157, setpgid 109 154,
getgroups 115 158, getresuid 118 148, getresgid 120 150, sigaltstack 131 132, utime 132 -, utimes 235 -, statfs 137 43,
fstatfs 138 44, arch_prctl 158 -, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
getpriority 140 141, set_tid_address 218 96, fadvise64 221 223, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, exit_group 231 94, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, openat 257 56, mkdirat 258 34, unlinkat 263 35,
renameat 264 38, renameat2 316 276, newfstatat 262 79, faccessat 269 48, faccessat2 439 439, readlinkat 267 78,
symlinkat 266 36, linkat 265 37, fchmodat 268 53, futimesat 261 -, utimensat 280 88, pselect6 270 72, ppoll 271 73,
set_robust_list 273 99, get_robust_list 274 100, eventfd 284 -, eventfd2 290 19, pipe2 293 59, dup3 292 24,
getrandom 318 278, getcpu 309 168, statx 332 291, rseq 334 293, membarrier 324 283, copy_file_range 326 285,
close_range 436 436, fallocate 285 47, socketpair 53 199, recvfrom 45 207, getsockopt 55 209, setsockopt 54 208,
getsockname 51 204, getpeername 52 205, shutdown 48 210, restart_syscall 219 128
"""
_CLONE, _CLONE3, _FCNTL, _IOCTL = (56, 220), (435, 435), (72, 25), (16, 29)
_PRLIMIT64, _SENDTO = (302, 261), (44, 206)

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FCNTL_SIGNALS = (8, 10, 15)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ENOSYS, _EPERM = 0x7FFF0000, 0x80000000, 0x00050000 | 38, 0x00050000 | 1
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data. Arguments have 8 bytes, the low half first."""


def allowed_numbers(machine: str) -> dict[str, int]:
    """Returns the numbers of the calls that are allowed with any arguments."""
    column, _ = ARCHITECTURES[machine]
    rows = (row.split() for row in _ALLOWED.replace("\n", " ").split(",") if row.strip())
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def filter_program(machine: str) -> bytes | None:
    """Returns the filter as an array of struct sock_filter, or None for an architecture without a table."""
    if machine not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[machine]
    steps: list[Step] = [
        *((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)),
        # Numbers of the x32 interface name the same calls again.
        *((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)),
    ]
    for numbers, body in _CONDITIONS:
        steps += [(_EQUAL, 0, len(body), numbers[column]), *body]
    numbers_allowed = set(allowed_numbers(machine).values())
    # The first number of each range that is allowed, and of each that is refused, in turns.
    edges = sorted(numbers_allowed ^ {number + 1 for number in numbers_allowed})
    steps += _search(edges, 0, len(edges))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _search(edges: list[int], low: int, high: int) -> list[Step]:
    """Returns steps that find a number's range by halves. The kernel tries a filter with every number when a process installs it, so a
    list that is compared one by one would cost each program as long as a fork."""
    if low == high:
        return [(_RETURN, 0, 0, _ALLOW if low % 2 else _EPERM)]
    middle = (low + high) // 2
    below = _search(edges, low, middle)
    return [(_AT_LEAST, len(below), 0, edges[middle]), *below, *_search(edges, middle + 1, high)]


def _argument(index: int, *, high: bool = False) -> Step:
    return _LOAD, 0, 0, _ARGUMENTS + 8 * index + 4 * high


def _verdict_of(*steps: Step) -> list[Step]:
    """Returns the steps with two endings: falling through allows the call, jumping over one step refuses it."""
    return [*steps, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]


def _without(values: tuple[int, ...]) -> list[Step]:
    """Returns steps that refuse these values of the second argument."""
    count = len(values)
    return _verdict_of(
        _argument(1), *((_EQUAL, count - place, 0, value) for place, value in enumerate(values))
    )


def _only(values: tuple[int, ...]) -> list[Step]:
    """Returns steps that allow only these values of the second argument."""
    count = len(values)
    tests = [(_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    return [_argument(1), *tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


_CONDITIONS: list[tuple[tuple[int, int], list[Step]]] = [
    (_CLONE, _verdict_of(_argument(0), (_ANY_BIT, 1, 0, _NEW_NAMESPACES))),
    (_CLONE3, [(_RETURN, 0, 0, _ENOSYS)]),
    (_PRLIMIT64, _verdict_of(_argument(0), (_EQUAL, 0, 1, 0))),
    (_FCNTL, _without(_FCNTL_SIGNALS)),
    (_IOCTL, _only(_IOCTLS)),
    (_SENDTO, _verdict_of(_argument(4), (_EQUAL, 0, 3, 0), _argument(4, high=True), (_EQUAL, 0, 1, 0))),
]
