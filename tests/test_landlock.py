"""Landlock: a confined process writes only in its folder and connects only to its ports."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal import landlock
from shoal.landlock import Confinement, landlock_version

needs_landlock = pytest.mark.skipif(
    landlock_version()[0] < landlock.SCOPE_VERSION, reason="this kernel has no Landlock, or an older one"
)


def run_confined(rules: Confinement, program: str) -> subprocess.CompletedProcess[str]:
    command = [*rules.wrapper(), sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


ATTEMPT = """
def attempt(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"
"""

TRY_ALL = (
    ATTEMPT
    + """
import json, os, pathlib, signal, socket, subprocess, sys
folder, outside, port, other, victim = {arguments}
inside, outside = pathlib.Path(folder), pathlib.Path(outside)
def listen():
    socket.socket().bind(("127.0.0.1", 0))
print(json.dumps({{
    "write inside": attempt(lambda: (inside / "a").write_text("x")),
    "folder inside": attempt(lambda: (inside / "b").mkdir()),
    "rename inside": attempt(lambda: (inside / "a").rename(inside / "b" / "a")),
    "link inside": attempt(lambda: os.link(inside / "b" / "a", inside / "c")),
    "read outside": attempt(lambda: (outside / "file").read_text()),
    "write outside": attempt(lambda: (outside / "file").write_text("x")),
    "new outside": attempt(lambda: (outside / "new").touch()),
    "remove outside": attempt(lambda: (outside / "file").unlink()),
    "move outside": attempt(lambda: (inside / "c").rename(outside / "c")),
    "link outside": attempt(lambda: os.symlink("/", outside / "root")),
    "truncate outside": attempt(lambda: os.truncate(outside / "file", 0)),
    "write through a link": attempt(lambda: (inside / "link" / "file").write_text("x")),
    "write by a child": subprocess.run(["touch", str(outside / "new")], stderr=-3).returncode,
    "device": attempt(lambda: pathlib.Path("/dev/null").write_text("x")),
    "shared memory": attempt(lambda: __import__("multiprocessing.shared_memory").shared_memory.SharedMemory(create=True, size=9).unlink()),
    "sysctl": attempt(lambda: pathlib.Path("/proc/sys/kernel/core_pattern").write_text("x")),
    "connect": attempt(lambda: socket.create_connection(("127.0.0.1", port)).close()),
    "connect elsewhere": attempt(lambda: socket.create_connection(("127.0.0.1", other)).close()),
    "listen": attempt(listen),
    "signal": attempt(lambda: os.kill(victim, 0)),
}}))
"""
)


@needs_landlock
def test_what_a_confined_process_can_do(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "file").write_text("kept")
    (inside / "link").symlink_to(outside)
    with socket.create_server(("127.0.0.1", 0)) as run, socket.create_server(("127.0.0.1", 0)) as other:
        port, another = run.getsockname()[1], other.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as victim:
            arguments = (str(inside), str(outside), port, another, victim.pid)
            rules = Confinement(writable=(inside,), ports=(port,))
            done = run_confined(rules, TRY_ALL.format(arguments=arguments))
            victim.kill()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    allowed = ("write inside", "folder inside", "rename inside", "link inside", "read outside")
    allowed += ("device", "shared memory", "connect")  # type: ignore[assignment]
    assert {name for name, result in found.items() if result == "done"} == set(allowed)
    assert found["write by a child"] == 1
    refused = {name: result for name, result in found.items() if name not in (*allowed, "write by a child")}
    assert set(refused.values()) <= {"PermissionError", "OSError"}, refused
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "kept"
    assert all(protection.active for protection in rules.protections())


TRY_TERMINAL = (
    ATTEMPT
    + """
import fcntl, os, termios, sys
terminal = {terminal!r}
def type_into(fd):
    fcntl.ioctl(fd, termios.TIOCSTI, b"\\n")
print("printed", os.isatty(1))
print("open", attempt(lambda: os.open(terminal, os.O_RDWR | os.O_NOCTTY)))
print("type", attempt(lambda: type_into(os.open(terminal, os.O_RDONLY | os.O_NOCTTY))))
print("type inherited", attempt(lambda: type_into(1)))
print("ioctl", attempt(lambda: fcntl.ioctl(os.open("/dev/urandom", os.O_RDONLY), 0x80045200, bytes(4))))
"""
)


@needs_landlock
def test_a_confined_process_prints_but_does_not_type_into_terminals(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    program = TRY_TERMINAL.format(terminal=os.ttyname(theirs))
    command = [*Confinement(writable=(tmp_path,), ports=()).wrapper(), sys.executable, "-c", program]
    try:
        subprocess.run(command, stdout=theirs, timeout=120, check=True, start_new_session=True)
        printed = os.read(ours, 4096).decode()
        typed = select.select([theirs], [], [], 0)[0]
    finally:
        os.close(ours)
        os.close(theirs)
    refused = "PermissionError"
    wanted = {
        "printed": "True",
        "open": refused,
        "type": refused,
        "type inherited": refused,
        "ioctl": refused,
    }
    assert dict(line.rsplit(" ", 1) for line in printed.splitlines()) == wanted
    assert not typed


@needs_landlock
def test_drivers_of_gpus_get_their_calls() -> None:
    program = (
        "import fcntl, os\nfrom shoal import landlock\nlandlock.GPU_DEVICES = ('/dev/urandom',)\nlandlock.DEVICES = ()\n"
        "landlock.confine([], [])\n"
        "print(int.from_bytes(fcntl.ioctl(os.open('/dev/urandom', os.O_RDWR), 0x80045200, bytes(4)), 'little') >= 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_a_confined_process_has_none_of_roots_privileges_but_those_for_files(tmp_path: Path) -> None:
    program = "import subprocess\nprint(open('/proc/self/status').read(), flush=True)\nsubprocess.run(['cat', '/proc/self/status'])"
    done = run_confined(Confinement(writable=(tmp_path,), ports=()), program)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("CapPrm", "CapEff"))]
    assert len(lines) == 4, done.stderr
    assert {int(value, 16) for _, value in lines} <= {0, 1 << 1}


@needs_landlock
def test_any_port_if_connections_are_not_restricted(tmp_path: Path) -> None:
    rules = Confinement(writable=(tmp_path,), ports=None, why_any_port="vLLM listens")
    done = run_confined(rules, "import socket; socket.create_server(('127.0.0.1', 0)); print('listens')")
    assert done.stdout == "listens\n", done.stderr
    files, connections = rules.protections()
    assert files.active
    assert str(connections) == "connects only to the run's ports; listens on none: not active: vLLM listens"


@needs_landlock
@pytest.mark.integration
def test_a_confined_process_can_use_torch(tmp_path: Path) -> None:
    program = "import torch; x = torch.randn(300, 300); print((x @ x).shape[0], torch.get_num_threads() > 0)"
    done = run_confined(Confinement(writable=(tmp_path,), ports=()), program)
    assert done.stdout == "300 True\n", done.stderr


def test_a_confined_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(100)"
    wrapper = Confinement(writable=(tmp_path,), ports=()).wrapper()
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen({[*wrapper, sys.executable, '-c', child]!r}, start_new_session=True)\ntime.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path)
    end_s = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.kill()
    process.wait()
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("version", "reason", "files", "connections"),
    [
        (0, "this kernel has no Landlock (Function not implemented)", False, False),
        (2, "", True, False),
        (4, "", True, True),
    ],
)
def test_missing_protections_are_named(
    version: int, reason: str, files: bool, connections: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "landlock_version", lambda: (version, reason))
    found = Confinement(writable=(tmp_path,), ports=(8700, 443)).protections()
    assert [protection.active for protection in found] == [files, connections]
    assert str(found[0]).startswith(f"writes files only in {tmp_path}")
    assert "ports 8700, 443" in str(found[1])
    for protection in found:
        assert protection.active != ("not active: " in str(protection))
