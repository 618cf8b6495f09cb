"""A stranger's two commands, as processes: `shoal join`, killed in the middle of a lease, joined again, looked at, left.

SHOAL_JOIN names the `shoal` of another environment, such as a fresh one made as the README says; the time it takes is printed.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from swarm_processes import SHOAL, Swarm

from shoal.wire.codes import CODES
from shoal.wire.keys import Key
from shoal.wire.messages import NodeView

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

COMMAND = [os.environ["SHOAL_JOIN"]] if "SHOAL_JOIN" in os.environ else SHOAL


def run(*words: object, status: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
    # What takes its time says so on stderr, which is no part of JSON.
    return done.stdout if "--json" in words else done.stdout + done.stderr


class Joined:
    def __init__(self, url: str, dir: Path, *options: str) -> None:
        self.log = dir.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "join", url, "--yes", "--dir", str(dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_from_nothing_to_credit_through_a_crash(tmp_path: Path) -> None:
    dir = tmp_path / "node"
    swarm = Swarm(tmp_path / "run", last_version=5000, relays=1, workers=1, settings={"lease_s": 120.0})
    with contextlib.ExitStack() as running:
        running.push(swarm.start("--set", "coordinator.admission=invite"))
        swarm.wait_for_version(1)  # the run's own worker needs no invitation
        swarm.pause("worker-1")
        assert "--invite CODE" in run("join", swarm.url, "--yes", "--dir", dir, status=2)
        began_s = time.monotonic()
        joined = Joined(swarm.url, dir, "--invite", swarm.invite())
        try:
            view = wait_for_node(swarm, joined, dir, lambda view: view.accepted > 0)
            print(f"{time.monotonic() - began_s:.0f} s from `shoal join` to the first accepted lease")  # noqa: T201
            assert "in use by another worker" in run("join", swarm.url, "--yes", "--dir", dir, status=2)
            assert view.node in run("whoami", "--dir", dir)
            assert "credit" in run("status", "--dir", dir)
            # On a slow machine standard error says how long it takes.
            findings, _ = json.JSONDecoder().raw_decode(run("doctor", swarm.url, "--dir", dir, "--json"))
            assert not [finding for finding in findings if finding["state"] == "bad"]

            wait_for_node(swarm, joined, dir, lambda now: now.phase.startswith("generating"))
            joined.process.send_signal(signal.SIGKILL)
            joined.process.wait()
            joined = Joined(swarm.url, dir)
            wait_for_node(swarm, joined, dir, lambda now: now.accepted > view.accepted)
            mine = [event for event in swarm.ledger() if event.body.get("node") == view.node]
            assert not [event for event in mine if event.body.get("code") == "void.expired"]

            run("pause", "--dir", dir)
            wait_for_node(swarm, joined, dir, lambda now: now.phase.startswith("paused"))
            assert "accepted: " in run("check-local", "--dir", dir)
            run("identity", "backup", tmp_path / "kept.json", "--dir", dir)
            run("identity", "restore", tmp_path / "kept.json", "--dir", tmp_path / "again")
            assert view.node in run("whoami", "--dir", tmp_path / "again")
            run("pause", "--off", "--dir", dir)
            run("leave", "--dir", dir)
            assert joined.process.wait(120) == 0, joined.log.read_text()
            assert "retired" in run("status", "--dir", dir)
        finally:
            joined.end()


def wait_for_node(swarm: Swarm, joined: Joined, dir: Path, good: Callable[[NodeView], bool]) -> NodeView:
    def look() -> NodeView | None:
        assert joined.process.poll() is None, f"`shoal join` ended with {joined.process.returncode}"
        if not (dir / "node.key").exists():
            return None
        answer = httpx2.get(f"{swarm.url}/v1/nodes/{Key.load(dir / 'node.key').public}", timeout=30)
        view = NodeView.parse(answer.content) if answer.is_success else None
        return view if view is not None and good(view) else None

    try:
        view: NodeView = swarm.wait_for("the node that joined", look, deadline_s=300)
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe node's own log:\n{joined.log.read_text()[-8000:]}") from None
    return view


def test_every_code_is_explained() -> None:
    """Runs the command for one code and calls its function for the rest: a process per code would take minutes."""
    said = run("explain")
    for code, meaning in CODES.items():
        assert code in said and meaning.meaning in said
    code = "reject.wrong_computation"
    assert CODES[code].remedy in run("explain", code)
