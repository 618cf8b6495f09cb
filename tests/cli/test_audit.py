"""`shoal audit` of a real run: with an honest store, and with stored files that were changed afterwards."""

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
from small_run import CONFIG, RunningWorker, eventually, small_run
from test_contributor import shoal

from shoal.cli.commands.audit import describe
from shoal.cli.run_folder import RunFolder
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.tasks.code_files import ALLOWED, load_code


def test_accepted_verdicts_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG.model_copy(update={"heartbeat_s": 5.0})
    with small_run(tmp_path / "run", config) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        worker = RunningWorker(run)
        eventually("accepted work", lambda: sum(node.accepted for node in run.stats().nodes) >= 4)
        worker.stop.set()
        worker.join()
        eventually("an empty queue", lambda: run.stats().queued_checks == 0)
        key = run.keys / "validator.key"
        words = ("audit", run.url, "--key", key, "--dir", tmp_path / "audit", "--sample", "3", "--seed", "1")
        assert shoal(*words) == 0
        said = capsys.readouterr().out
        assert "verdicts that agree with the ledger: 3 of 3" in said and said.count("its seed") == 3
        # Somebody changed the files after they were accepted.
        objects = [
            path for path in (tmp_path / "run" / "coordinator" / "objects").rglob("*") if path.is_file()
        ]
        for path in objects:
            path.write_bytes(path.read_bytes()[::-1])
        assert shoal(*words) == 1
        said = capsys.readouterr().out
        assert said.count("NOT GOOD: the stored file is not") == 3
        # A worker's key gives no access.
        node = worker.config.dir / "node.key"
        assert shoal("audit", run.url, "--key", node, "--dir", tmp_path / "audit") == 2


def test_refusals_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An auditor can repeat refusals, to check that they were fair."""
    config = CONFIG.model_copy(update={"heartbeat_s": 5.0})
    with small_run(tmp_path / "run", config) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        worker, liar = RunningWorker(run), RunningWorker(run, "liar", lie="forged-proof")
        eventually("accepted work", lambda: sum(node.accepted for node in run.stats().nodes) >= 2)
        eventually("refused work", lambda: sum(node.rejected for node in run.stats().nodes) >= 1)
        for one in (worker, liar):
            one.stop.set()
            one.join()
        eventually("an empty queue", lambda: run.stats().queued_checks == 0)
        words = ("audit", run.url, "--key", run.keys / "validator.key", "--dir", tmp_path / "audit")
        assert shoal(*words, "--sample", "3", "--seed", "1") == 0
        said = capsys.readouterr().out
        assert (
            "verdicts that agree with the ledger: 3 of 3" in said
            and "repeat: 3, refusals among them: 1" in said
        )
        refused = next(
            event.body["lease_id"]
            for event in run.events("verdict.given")
            if event.body["code"] == "reject.forged_proof"
        )
        assert shoal(*words, "--lease", refused) == 0
        assert f"{refused}: agrees with the ledger" in capsys.readouterr().out
        # The coordinator has deleted the file since.
        with closing(sqlite3.connect(tmp_path / "run" / "coordinator" / DATABASE_FILE)) as db, db:
            db.execute("UPDATE uploads SET stored_at_s = NULL WHERE lease_id = ?", [refused])
        assert shoal(*words, "--lease", refused) == 1
        said = capsys.readouterr().out
        assert f"{refused}: cannot be checked: the coordinator deleted its rejected file" in said
        assert "NOTHING WAS CHECKED, because the coordinator deleted its rejected file" in said
        assert shoal(*words, "--lease", "0" * 32) == 2
        assert "cannot be repeated" in capsys.readouterr().err


def test_an_audit_that_checks_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_run(tmp_path / "run", CONFIG) as run:
        words = ("audit", run.url, "--key", run.keys / "validator.key", "--dir", tmp_path / "audit")
        assert shoal(*words) == 1
        assert "NOTHING WAS CHECKED" in capsys.readouterr().out
        assert shoal("audit", run.url) == 2
        assert "--key validator.key" in capsys.readouterr().err


def test_a_folder_is_audited_without_a_coordinator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG.model_copy(update={"heartbeat_s": 5.0})
    folder = tmp_path / "run"
    with small_run(folder, config) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        worker = RunningWorker(run)
        eventually("accepted work", lambda: sum(node.accepted for node in run.stats().nodes) >= 2)
        worker.stop.set()
        worker.join()
        eventually("an empty queue", lambda: run.stats().queued_checks == 0)
    assert shoal("ledger", "verify", folder) == 0
    assert "good: " in capsys.readouterr().out
    assert shoal("audit", folder, "--sample", "2") == 1  # this folder has no versions of a trainer
    assert "NOTHING WAS CHECKED" in capsys.readouterr().out
    (folder / "trainer").mkdir()
    shutil.copytree(folder / "origin", folder / "trainer" / "versions")
    assert shoal("audit", folder, "--sample", "2") == 0
    assert "verdicts that agree with the ledger: 2 of 2" in capsys.readouterr().out
    shutil.rmtree(
        folder / "coordinator" / "objects"
    )  # a copy without the submitted files is no reason to suspect anybody
    assert shoal("audit", folder, "--sample", "2") == 2
    said = capsys.readouterr()
    assert "NOT GOOD" not in said.out and "copy the coordinator's objects/" in said.err


def test_work_that_this_machine_cannot_check_is_not_called_bad() -> None:
    """A short memory says nothing against the node or the coordinator."""
    assert describe("cannot be checked: out of memory", None) == "cannot be checked: out of memory"
    assert describe("2 rewards, the ledger has 3", None) == "NOT GOOD: 2 rewards, the ledger has 3"


def test_a_python_file_that_a_folder_names_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may have made the folder. The auditor reads the file and names it in SHOAL_TASK_FILES."""
    monkeypatch.delenv(ALLOWED, raising=False)
    folder = tmp_path / "run"
    with small_run(folder, CONFIG):
        pass
    task = folder / "task.py"
    task.write_text("raise SystemExit('executed')")
    (folder / "run.toml").write_text(f'[task]\nname = "{task}:Task"\n')
    with RunFolder(folder) as run:
        run.local_spec()
    with pytest.raises(ValueError, match="not one that this machine may execute"):
        load_code(f"{task}:Task")
