"""A contributor's commands against a real run: join, status, pause, check-local, leave, identity."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
from small_run import CONFIG, SmallRun, eventually, small_run

from shoal.cli.commands.doctor import _protocol
from shoal.cli.commands.join import read_lease
from shoal.cli.main import parse, run_command
from shoal.cli.public_api import PublicApi
from shoal.wire.keys import Key
from shoal.wire.messages import Info


def shoal(*words: object, stop: threading.Event | None = None) -> int:
    return run_command(parse([str(word) for word in words]), stop or threading.Event())


class Joined:
    """`shoal join` in a thread."""

    def __init__(self, run: SmallRun, dir: Path, *more: str) -> None:
        self.dir, self.stop = dir, threading.Event()
        self.codes: list[int] = []
        words = ("join", run.url, "--dir", dir, "--yes", "--deadline-s", "30", *more)
        self.thread = threading.Thread(target=lambda: self.codes.append(shoal(*words, stop=self.stop)))
        self.thread.start()

    def end(self) -> int:
        self.stop.set()
        return self.wait()

    def wait(self) -> int:
        self.thread.join(60)
        return int(self.codes[0])


@pytest.mark.integration
def test_join_work_pause_check_and_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dir = tmp_path / "node"
    with small_run(tmp_path / "run", CONFIG.model_copy(update={"heartbeat_s": 5.0})) as run:
        run.publish(0)
        run.start_relay()
        eventually("a relay that serves", lambda: any(0 in relay.versions for relay in run.stats().relays))
        run.start_validator()
        began_s = time.monotonic()
        joined = Joined(run, dir)
        eventually("an accepted lease", lambda: any(node.accepted for node in run.stats().nodes))
        assert time.monotonic() - began_s < 600
        said = capsys.readouterr().out
        assert (
            "Made this node's key" in said
            and "What joining means" in said
            and "shoal identity backup" in said
        )
        assert f"limits    writes files only in {dir}" in said and "connects only to ports 53, " in said
        assert "cores, as much memory as it needs" in said and "MB to download first" in said
        node = Key.load(dir / "node.key").public

        assert shoal("status", "--dir", dir) == 0
        assert shoal("whoami", "--dir", dir) == 0
        said = capsys.readouterr().out
        assert "credit" in said and node in said and run.url in said

        # A second start in the same folder is refused.
        assert shoal("join", run.url, "--dir", dir, "--yes") == 2
        assert "is in use by another worker" in capsys.readouterr().err

        shoal("doctor", run.url, "--dir", dir)
        said = capsys.readouterr().out
        assert "BAD" not in said and "a worker writes files only in" in said

        assert shoal("pause", "--dir", dir) == 0
        (dir / "last" / "rollouts.parquet").stat()
        eventually("the pause", lambda: run.stats().open_leases == 0 and run.stats().queued_checks == 0)
        assert shoal("check-local", "--dir", dir) == 0
        assert "accepted: " in capsys.readouterr().out
        file = dir / "last" / "rollouts.parquet"
        file.write_bytes(file.read_bytes()[:-100])
        assert shoal("check-local", "--dir", dir) == 1
        assert "reject.malformed_file" in capsys.readouterr().out

        assert shoal("leave", "--dir", dir) == 0
        assert joined.wait() == 0
        assert run.stats().nodes[0].trust == "retired"
        # No worker runs there now, so the command itself tells the coordinator.
        assert shoal("pause", "--off", "--dir", dir) == 0
        assert shoal("leave", "--dir", dir) == 0
        assert "left; joining again" in capsys.readouterr().out

        (dir / "own.txt").write_text("mine")
        assert shoal("remove", "--dir", dir) == 2  # no terminal here
        assert (dir / "node.key").exists()
        assert shoal("remove", "--dir", dir, "--yes", "--keep-key") == 0
        assert sorted(path.name for path in dir.iterdir()) == ["node.key", "own.txt"]
        (dir / "own.txt").unlink()
        assert shoal("remove", "--dir", dir, "--yes") == 0
        assert not dir.exists()
        assert "pip uninstall shoal-rl" in capsys.readouterr().out


def test_a_machine_that_cannot_work_does_not_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal("join", "http://127.0.0.1:1", "--dir", tmp_path / "node", "--yes") == 1
    said = capsys.readouterr().out
    assert "BAD  coordinator" in said and "Not joining: coordinator" in said
    assert not (tmp_path / "node" / "node.key").exists()


def test_doctor_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        assert shoal("doctor", run.url, "--dir", tmp_path / "node", "--json") == 0
        findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
        assert findings["clock"]["state"] == findings["coordinator"]["state"] == "good"
        assert findings["weights"]["words"] == "the trainer has not published version 0 yet"
        run.publish(0)
        run.serve_from_origin()
        eventually("a relay", lambda: any(0 in relay.versions for relay in run.stats().relays))
        assert shoal("doctor", run.url, "--dir", tmp_path / "node") == 0
        said = capsys.readouterr().out
        assert "ok   relay" in said and "ok   disk" in said


def test_doctor_tells_a_finished_run_and_old_software(tmp_path: Path) -> None:
    with small_run(tmp_path / "run", CONFIG) as run, PublicApi(run.url) as api:
        info = api.read("/v1/info", Info)
    found = _protocol(info.model_copy(update={"finished": True}))
    assert (found.state, found.remedy) == ("bad", "it needs no more work; join another run")
    found = _protocol(info.model_copy(update={"min_software": "shoal 99.0.0"}))
    assert found.state == "weak" and "it needs shoal 99.0.0, and this is shoal" in found.words
    assert _protocol(info.model_copy(update={"min_software": "shoal 0.1.0"})).state == "good"


def test_join_without_consent_sends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        assert shoal("join", run.url, "--dir", tmp_path / "node") == 2  # no terminal here
        assert "join with --yes" in capsys.readouterr().err
        assert run.stats().nodes == ()


def test_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = Key.load_or_create(tmp_path / "a" / "node.key").public
    assert shoal("identity", "backup", tmp_path / "safe", "--dir", tmp_path / "a") == 0
    assert os.stat(tmp_path / "safe").st_mode & 0o777 == 0o600
    assert shoal("identity", "backup", tmp_path / "safe", "--dir", tmp_path / "a") == 2
    assert shoal("identity", "restore", tmp_path / "safe", "--dir", tmp_path / "a") == 2
    assert shoal("identity", "restore", tmp_path / "safe", "--dir", tmp_path / "b") == 0
    assert Key.load(tmp_path / "b" / "node.key").public == key
    assert os.stat(tmp_path / "b" / "node.key").st_mode & 0o777 == 0o600
    for junk in ("[]", '{"node.key": 5}', '{"node.key": "cut off"}'):
        (tmp_path / "junk").write_text(junk)
        assert shoal("identity", "restore", tmp_path / "junk", "--dir", tmp_path / "c") == 2
        assert "is not a backup of a node" in capsys.readouterr().err
        assert not (tmp_path / "c" / "node.key").exists()

    owner, word = tmp_path / "owner.key", tmp_path / "b" / "delegation.json"
    assert shoal("identity", "delegate", key, "--owner", owner, "--days", "7", "--out", word) == 0
    capsys.readouterr()
    assert shoal("whoami", "--dir", tmp_path / "b") == 0
    assert Key.load(owner).public in capsys.readouterr().out
    assert shoal("identity", "delegate", "me", "--owner", owner) == 2
    assert shoal("status", "--dir", tmp_path / "b") == 2
    assert "has joined no run yet" in capsys.readouterr().err


@pytest.mark.integration
def test_worker_limits_thread_spinning_unless_the_owner_sets_it(tmp_path: Path) -> None:
    """The setting has no effect after torch is imported, so the command must not import torch first."""
    code = (
        "import os, sys, threading; from shoal.cli.main import parse; import shoal.cli.commands.join\n"
        "assert 'torch' not in sys.modules\n"
        "words = ['worker', '--coordinator', 'http://127.0.0.1:1', '--dir', sys.argv[1], '--device', 'none']\n"
        "options = parse(words)\n"
        "try: options.action(options, threading.Event())\n"
        "except ValueError as error: print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules, error)\n"
    )
    for setting, expected in (
        ({}, "1000 True"),
        ({"GOMP_SPINCOUNT": "7"}, "7 True"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None True"),
    ):
        environ = {name: value for name, value in os.environ.items() if "OMP_" not in name} | setting
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environ,
        )
        assert expected in done.stdout, done


def test_a_broken_file_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Key.load_or_create(tmp_path / "node.key")
    (tmp_path / "node.json").write_text('{"coord')
    assert shoal("status", "--dir", tmp_path) == 2
    assert f"{tmp_path / 'node.json'} cannot be read; delete it" in capsys.readouterr().err
    (tmp_path / "node.json").write_text("{}")
    assert shoal("status", "--dir", tmp_path) == 2
    assert "does not name a coordinator" in capsys.readouterr().err
    (tmp_path / "node.json").unlink()
    (tmp_path / "delegation.json").write_text("x")
    assert shoal("whoami", "--dir", tmp_path) == 2
    assert "is not a delegation" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lease": {}, "policy_version": 1}', '{"lease": 1}'])
def test_a_file_that_is_no_lease_is_named(text: str, tmp_path: Path) -> None:
    lease = tmp_path / "lease.json"
    lease.write_text(text)
    with pytest.raises(ValueError, match=r"lease\.json is not the lease of a file"):
        read_lease(lease)


@pytest.mark.parametrize(
    "words", [("--threads", "-1"), ("--max-rows", "0"), ("--deadline-s", "0"), ("--deadline-s", "nan")]
)
def test_wrong_values_are_refused_before_joining(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        shoal("join", "http://127.0.0.1:1", "--dir", tmp_path / "node", *words)
    assert exit.value.code == 2
    assert words[1] in capsys.readouterr().err
    assert not (tmp_path / "node").exists()


def test_a_trailing_slash_of_the_url_is_removed() -> None:
    assert parse(["join", "http://127.0.0.1:8000/"]).url == "http://127.0.0.1:8000"
    assert parse(["doctor", "https://run.example/pool/"]).url == "https://run.example/pool"


def test_stopping_before_joining(tmp_path: Path) -> None:
    with small_run(tmp_path) as run:
        run.publish(0)
        stop = threading.Event()
        stop.set()
        assert shoal("join", run.url, "--dir", tmp_path / "node", "--yes", stop=stop) == 130
        assert shoal("worker", "--coordinator", run.url, "--dir", tmp_path / "other", stop=stop) == 130
        assert not run.stats().nodes


@pytest.mark.integration
def test_ctrl_c_ends_the_question(tmp_path: Path) -> None:
    """The question waits at a terminal without an answer."""
    with small_run(tmp_path) as run:
        run.publish(0)
        run.serve_from_origin()
        ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "shoal", "join", run.url, "--dir", str(tmp_path / "node")]
        asked = subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert asked.stdout is not None
        said = b""
        while b"Join? [y/N]" not in said:
            piece = os.read(asked.stdout.fileno(), 65536)
            assert piece, said
            said += piece
        asked.send_signal(signal.SIGINT)
        assert asked.wait(60) == 130
        asked.stdout.close()
        for end in (ours, theirs):
            os.close(end)
        assert not run.stats().nodes


def test_too_little_disk_is_refused_before_joining(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        run.publish(0)
        run.serve_from_origin()
        eventually("a relay", lambda: any(0 in relay.versions for relay in run.stats().relays))
        assert shoal("join", run.url, "--dir", tmp_path / "node", "--yes", "--disk-gb", "0.001") == 2
        assert "--disk-gb 0.001 is too little: two versions" in capsys.readouterr().err
        assert run.stats().nodes == ()


@pytest.mark.integration
def test_at_a_terminal_a_few_lines_change_in_place(tmp_path: Path) -> None:
    """The log goes to a file; p pauses, q stops, and the terminal is as it was."""
    with small_run(tmp_path / "run", CONFIG) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        ours, theirs = pty.openpty()
        before = termios.tcgetattr(theirs)
        words = [sys.executable, "-m", "shoal", "join", run.url, "--dir", str(tmp_path / "node"), "--yes"]
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        joined = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        said = b""

        def wait_for(text: bytes) -> None:
            nonlocal said
            end_s = time.monotonic() + 100
            while text not in said:
                assert time.monotonic() < end_s and joined.poll() is None, said.decode()[-3000:]
                if select.select([ours], [], [], 0.2)[0]:
                    said += os.read(ours, 65536)

        wait_for(b"small at http")
        wait_for(b"accepted 1")
        os.write(ours, b"p")
        wait_for(b"p continue")
        assert (tmp_path / "node" / "paused").exists()
        os.write(ours, b"q")
        wait_for(b"Delete all of it: shoal remove")
        assert joined.wait(60) == 130
        assert termios.tcgetattr(theirs) == before
        for end in (ours, theirs):
            os.close(end)
        assert b" I worker" not in said
        assert "I worker" in (tmp_path / "node" / "worker.log").read_text()
