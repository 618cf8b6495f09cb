"""Ctrl-C at any moment stops everything, cleanly, within ten seconds."""

import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from swarm_processes import Swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STOP_S = 10.0
"""The promised bound on stopping, the only one in these tests that the clock measures."""

Ready = Callable[[Swarm], object]


def assert_it_stops(swarm: Swarm, send: Callable[[], object]) -> None:
    """Asserts that the run ends within ten seconds with all its processes and says how to resume."""
    before = swarm.processes()
    sent_s = time.monotonic()
    send()
    code = swarm.wait_until_over(60.0)
    took_s = time.monotonic() - sent_s
    assert not swarm.processes() & before, "processes are left behind"
    assert not swarm.processes()
    assert took_s < STOP_S
    assert code == 130, swarm.output
    assert "stopped; continue with: shoal run " in swarm.output
    assert "Traceback" not in swarm.output
    for log in (swarm.folder / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    assert not (swarm.folder / "pids.json").exists()


def before_anything_runs(swarm: Swarm) -> object:
    return swarm.wait_for("its folder", (swarm.folder / "run.toml").exists, pause_s=0.001)


def while_roles_start(swarm: Swarm) -> object:
    return swarm.wait_for("every role to be started", lambda: "worker-1" in swarm.pids(), pause_s=0.001)


def while_the_trainer_warms_up(swarm: Swarm) -> object:
    return swarm.wait_for("the warm-up", lambda: "supervised warm-up" in swarm.log("trainer"))


def in_the_middle(swarm: Swarm) -> object:
    return swarm.wait_for_version(2)


def during_the_last_evaluation(swarm: Swarm) -> object:
    return swarm.wait_for_version(3)


@pytest.mark.parametrize(
    ("ready", "settings", "number"),
    [
        (before_anything_runs, {}, signal.SIGINT),
        (while_roles_start, {}, signal.SIGTERM),
        (while_the_trainer_warms_up, {"supervised_steps": 100_000}, signal.SIGINT),
        (in_the_middle, {"last_version": 1000}, signal.SIGINT),
        (during_the_last_evaluation, {"last_version": 3, "eval_prompts": 400}, signal.SIGINT),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_everything_stops(
    tmp_path: Path, ready: Ready, settings: dict[str, object], number: signal.Signals
) -> None:
    with Swarm(tmp_path, relays=1, workers=1, settings=settings) as swarm:
        ready(swarm)
        assert_it_stops(swarm, lambda: swarm.interrupt(number))


def test_an_impatient_person(tmp_path: Path) -> None:
    """Ctrl-C again and again does not break the stopping."""
    with Swarm(tmp_path) as swarm:
        while_roles_start(swarm)

        def press() -> None:
            for _ in range(5):
                swarm.interrupt()
                time.sleep(0.1)

        assert_it_stops(swarm, press)


def test_roles_that_hang(tmp_path: Path) -> None:
    """Neither a coordinator that does not answer nor a child that does not listen holds it up."""
    with Swarm(tmp_path) as swarm:
        while_roles_start(swarm)
        for role in ("coordinator", "worker-1"):
            os.kill(swarm.pids()[role], signal.SIGSTOP)
        assert_it_stops(swarm, swarm.interrupt)


def test_the_key_itself_on_a_terminal(tmp_path: Path) -> None:
    """The live table is drawn, and the terminal's own Ctrl-C reaches `shoal run` alone, which stops the rest."""
    swarm = Swarm(tmp_path)
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    swarm.process = subprocess.Popen(
        swarm.command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "50"} | swarm.mark,
    )
    os.close(theirs)
    copying = threading.Thread(target=copy, args=(ours, swarm.output_path))
    copying.start()
    try:
        swarm.wait_for("the table", lambda: "last verdict" in swarm.output and len(swarm.pids()) == 7)
        assert_it_stops(swarm, lambda: os.write(ours, b"\x03"))
    finally:
        swarm.__exit__()
        copying.join()
        os.close(ours)


def copy(terminal: int, path: Path) -> None:
    """Copies the terminal's output to a file until its last writer has closed it."""
    with path.open("ab", buffering=0) as file:
        try:
            while data := os.read(terminal, 65536):
                file.write(data)
        except OSError:  # Linux raises this when the other side is closed
            return
