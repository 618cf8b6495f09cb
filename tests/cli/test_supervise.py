"""The supervisor with real child processes: restarts, final exits, stopping, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.cli.run import supervise
from shoal.cli.run.supervise import MAX_DEADLINES, MAX_RESTARTS, RunFailed, Supervisor, last_line, lock_folder
from shoal.net.waiting import Stopped

CHILD = """
import signal, sys, time
print("pid", __import__("os").getpid(), flush=True)
how = sys.argv[1]
assert sys.argv[-1] == "--stop-with-stdin"
if how == "waits":
    sys.stdin.read()
elif how == "sleeps":
    time.sleep(600)
elif how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
else:
    sys.exit(f"shoal: because of {how}" if not how.isdecimal() else int(how))
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    (tmp_path / "child.py").write_text(CHILD)
    supervisor = Supervisor(tmp_path, program=(sys.executable, str(tmp_path / "child.py")))
    yield supervisor
    supervisor.stop()


def wait_until(look: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + 30
    while not look():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def over(supervisor: Supervisor, name: str = "it") -> None:
    supervisor.children[name].process.wait(30)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_child_is_restarted(supervisor: Supervisor) -> None:
    supervisor.start("it", ["waits"])
    supervisor.start("other", ["waits"])
    before = json.loads((supervisor.folder / "pids.json").read_text())
    assert set(before) == {"it", "other"}
    log = supervisor.folder / "logs" / "it.log"
    wait_until(lambda: log.read_text().count("pid ") == 1)
    os.kill(before["it"], signal.SIGKILL)
    over(supervisor)
    supervisor.check()
    assert supervisor.events == [f"it ended with signal SIGKILL; restarted (1 of {MAX_RESTARTS}), log: {log}"]
    after = json.loads((supervisor.folder / "pids.json").read_text())
    assert after["it"] != before["it"] and after["other"] == before["other"]
    assert is_running(after["it"])
    wait_until(lambda: log.read_text().count("pid ") == 2)  # both lives are in the one log


@pytest.mark.parametrize("code", [0, 4])
def test_a_finished_child_is_not_restarted(supervisor: Supervisor, code: int) -> None:
    supervisor.start("it", [str(code)])
    over(supervisor)
    for _ in range(3):
        supervisor.check()
    assert supervisor.children["it"].ended == code
    assert supervisor.events == []


@pytest.mark.parametrize("code", [1, 3, 130])
def test_a_failed_child_is_restarted(supervisor: Supervisor, code: int) -> None:
    supervisor.start("it", [str(code)])
    over(supervisor)
    log = supervisor.folder / "logs" / "it.log"
    log.write_text("shoal: the reason\n")
    supervisor.check()
    assert supervisor.events == [
        f"it ended with exit code {code}: the reason; restarted (1 of {MAX_RESTARTS}), log: {log}"
    ]


def test_a_usage_error_of_a_child_ends_the_run(supervisor: Supervisor) -> None:
    supervisor.start("it", ["2"])
    over(supervisor)
    log = supervisor.folder / "logs" / "it.log"
    log.write_text("09:00:00 I it  starting\nshoal: no key at K; copy it\n\n")
    with pytest.raises(ValueError, match=r"^it stopped: no key at K; copy it \(log: .*/it\.log\)$"):
        supervisor.check()


def test_repeated_deadlines_of_a_child_end_the_run(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait is as long as the deadline, so it always looks stable: that must not earn it a fresh count."""
    monkeypatch.setattr(supervise, "STABLE_AFTER_S", 0.0)
    supervisor.start("it", ["3"])
    for _ in range(MAX_DEADLINES):
        over(supervisor)
        supervisor.check()
    over(supervisor)
    with pytest.raises(RunFailed, match=r"^it gave up waiting 3 times: pid "):
        supervisor.check()


def test_a_child_that_dies_of_changing_reasons_ends_the_run(supervisor: Supervisor) -> None:
    supervisor.start("it", ["1"])  # its last line is its pid
    for _ in range(MAX_RESTARTS):
        over(supervisor)
        supervisor.check()
    over(supervisor)
    with pytest.raises(RunFailed, match=r"it died 6 times in a row, the last time with exit code 1: pid "):
        supervisor.check()


def test_dying_of_the_same_reason_twice_ends_the_run_with_the_traceback(supervisor: Supervisor) -> None:
    trace = 'Traceback (most recent call last):\n  File "mine.py", line 3, in reward\nKeyError: 5'
    supervisor.start("it", ["hunger"])
    over(supervisor)
    supervisor.check()
    over(supervisor)
    log = supervisor.folder / "logs" / "it.log"
    log.write_text(f"Traceback (most recent call last):\nold\n{trace}\nshoal: because of hunger\n")
    with pytest.raises(RunFailed, match=r"it died 2 times in a row, .*: because of hunger") as failed:
        supervisor.check()
    assert failed.value.trace == trace


def test_a_stable_child_resets_its_restarts(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STABLE_AFTER_S", 0.0)
    supervisor.start("it", ["1"])
    for _ in range(MAX_RESTARTS + 2):
        over(supervisor)
        supervisor.check()
    assert all(f"restarted (1 of {MAX_RESTARTS})" in event for event in supervisor.events)


def test_children_are_asked_to_stop(supervisor: Supervisor) -> None:
    supervisor.start("waits", ["waits"])
    supervisor.start("sleeps", ["sleeps"])
    supervisor.start("done", ["0"])
    over(supervisor, "done")
    supervisor.stop()
    assert all(child.process.poll() is not None for child in supervisor.children.values())
    assert supervisor.events == []
    assert not (supervisor.folder / "pids.json").exists()


def test_a_child_that_does_not_stop_is_killed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.2)
    supervisor.start("it", ["stubborn"])
    wait_until(lambda: "ready" in (supervisor.folder / "logs" / "it.log").read_text())
    supervisor.stop()
    assert supervisor.children["it"].process.returncode == -signal.SIGKILL
    assert supervisor.events == ["it did not stop within 0 s and was killed"]


def test_children_end_when_the_supervisor_is_killed(supervisor: Supervisor) -> None:
    """The children also hold the supervisor's folder until they have ended."""
    folder = supervisor.folder
    script = (
        "import os, sys, threading; from pathlib import Path; from shoal.cli.run.supervise import Supervisor, lock_folder\n"
        f"folder = Path({str(folder)!r})\n"
        "with lock_folder(folder, threading.Event()) as held:\n"
        f"    Supervisor(folder, held, ({sys.executable!r}, {str(folder / 'child.py')!r})).start('it', ['waits'])\n"
        "    print('up', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        pid = json.loads((folder / "pids.json").read_text())["it"]
        run.kill()
    with lock_folder(folder, threading.Event()):
        assert not is_running(pid)


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOCK_WAIT_S", 0.3)
    never = threading.Event()
    with (
        lock_folder(tmp_path, never),
        pytest.raises(ValueError, match="is in use by another `shoal`; stop that one, or choose"),
        lock_folder(tmp_path, never),
    ):
        pass
    with lock_folder(tmp_path, never):
        assert list(tmp_path.iterdir()) == [], "holding it leaves nothing in it"


def test_waiting_for_a_folder_can_be_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    with lock_folder(tmp_path, stop):
        stop.set()
        with pytest.raises(Stopped), lock_folder(tmp_path, stop):
            pass


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nshoal: the reason \xff\n \n")
    assert last_line(log) == "the reason \ufffd"
    log.write_text("\n")
    assert last_line(log) == "the log is empty"
