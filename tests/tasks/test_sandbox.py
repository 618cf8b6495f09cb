"""Runs hostile programs: each is contained, none passes, and none leaves a process or file."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from shoal.tasks.grading import sandbox
from shoal.tasks.grading.sandbox import (
    LEVELS,
    Level,
    SandboxLimits,
    ScriptResult,
    best_level,
    passes,
    run_script,
)
from shoal.tasks.grading.sandbox_child import NOT_BUILT

LIMITS = SandboxLimits(cpu_s=1, wall_s=6.0, memory_bytes=200 << 20)
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
GOOD = "def add(a, b):\n    return a + b\n"


def allowed(level: Level) -> bool:
    return level == "limits" or best_level() == "namespace" or (level == "user" and os.getuid() == 0)


def levels() -> list[Level]:
    """Returns the levels that this machine allows."""
    return [level for level in LEVELS if allowed(level) and (level != "user" or os.getuid() == 0)]


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
}


@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_program_cannot_pretend_to_have_passed(source: str) -> None:
    assert not passes(source, TESTS, limits=LIMITS)


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


@pytest.mark.parametrize("source", EXHAUSTING.values(), ids=EXHAUSTING.keys())
def test_no_program_takes_more_than_its_limits(source: str) -> None:
    started_s = time.monotonic()
    ended = run_script(source, b"", limits=SandboxLimits(cpu_s=1, wall_s=2.0, memory_bytes=200 << 20))
    assert ended.status != 0 and b"got it" not in ended.output
    assert time.monotonic() - started_s < 60
    assert not remaining_processes(), "nothing is left running"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the test's folder in the arguments of its sandboxes, to tell their processes from others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def remaining_processes() -> list[str]:
    """Returns the processes of this test's sandboxes, after waiting a moment for them to be reaped."""
    for _ in range(100):
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        found = [
            line for line in listed.splitlines() if "sandbox_child" in line and str(tempfile.tempdir) in line
        ]
        if not found:
            return []
        time.sleep(0.1)
    return found


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


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES.keys())
def test_no_program_escapes(source: str) -> None:
    ended = run_script(f"{source}\nprint('got it')", b"", limits=LIMITS)
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


@pytest.mark.skipif(best_level() != "namespace", reason="this system allows no namespaces")
def test_no_file_of_the_machine_is_visible(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    source = (
        f"import os\nprint(os.path.exists({str(secret)!r}), os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))\n"
        "print(os.getuid() != 0, os.listdir('/tmp'))"
    )
    assert run_script(source, b"", limits=LIMITS) == ScriptResult(0, b"False False False\nTrue []\n")


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


@pytest.mark.parametrize("level", levels())
def test_a_daemon_does_not_outlive_its_sandbox(level: Level) -> None:
    source = (
        "import os, time, sys\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.close(1)\n        time.sleep(1000)\n    os._exit(0)\n"
        "time.sleep(0.2)\nprint('left')"
    )
    assert run_script(source, b"", limits=LIMITS, level=level) == ScriptResult(0, b"left\n")
    assert not remaining_processes()


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


@pytest.mark.skipif(os.getuid() != 0 or not PYTHON.exists(), reason="needs root to become nobody")
def test_without_root_a_user_namespace_is_enough() -> None:
    """Builds the sandbox as user nobody, with an interpreter that nobody may run."""
    source = (
        "import os\nprint(os.getuid(), os.listdir('/tmp'), os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))\n"
        "for path in ('/x', '/usr/lib/x', '/usr/x'):\n    try: open(path, 'w')\n    except OSError: print('no')\n"
        "open('mine', 'w')\nprint('yes')"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # a folder that user nobody may enter
        folder = Path(name)
        folder.chmod(0o755)
        for part in ("sandbox_child.py", "sandbox_modes.py"):
            shutil.copy(Path(sandbox.__file__).with_name(part), folder)
        (folder / "program.py").write_text(source)
        (folder / "root").mkdir()
        job = asdict(LIMITS) | {
            "mode": "script",
            "level": "namespace",
            "folder": f"{folder}/root",
            "pipe": (),
        }
        with (folder / "program.py").open() as file:
            ran = subprocess.run(
                [
                    PYTHON,
                    "-I",
                    "-S",
                    folder / "sandbox_child.py",
                    json.dumps(job | {"source_fd": file.fileno()}),
                ],
                user=65534,
                group=65534,
                extra_groups=(),
                pass_fds=(file.fileno(),),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                cwd="/",
                check=False,
            )
    if ran.returncode == NOT_BUILT:
        pytest.skip("this system allows no namespaces to user nobody")
    assert (ran.returncode, ran.stdout) == (0, "65534 [] False False\nno\nno\nno\nyes\n"), ran.stderr
