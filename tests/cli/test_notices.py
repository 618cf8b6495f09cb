"""Warnings of roles, from their logs to the terminal and the page's data."""

from pathlib import Path

import pytest
from small_stats import stats

from shoal.cli.run.notices import LogFollower, NoticeFiles
from shoal.swarm.coordinator.config import NOTICES_FILE
from shoal.swarm.coordinator.views.stats import read_names, read_notices
from shoal.trainer.optim import learner


def test_each_kind_of_warning_is_said_once(tmp_path: Path) -> None:
    log = tmp_path / "validator-1.log"
    log.write_text("09:00:00 W validator   before this start\n")
    (tmp_path / "worker-1.log").write_text("")
    follower = LogFollower(tmp_path)
    assert follower.new_warnings() == []
    with log.open("a") as file:
        file.write("09:00:01 I validator   checking  lease=ab\n")
        file.write("09:00:02 W validator   grading 8 answers took 9.1 s; make reward() faster  version=3\n")
        file.write("09:00:03 W validator   grading 9 answers took 7.5 s; make reward() faster  version=4\n")
        file.write("09:00:04 W validator   reject.early_stop  lease=ab\n")
        file.write("09:00:04 I validator   waiting for a claim: the queue is empty\n")
        file.write(
            "09:00:04 I validator   waiting for disk space for version 1: no space left in v1; free some\n"
        )
        file.write(
            "09:00:05 I validator   waiting for disk space for version 3: no space left in v3; free some\n"
        )
        file.write("09:00:05 W validator   cut o")
    (tmp_path / "worker-1.log").write_text("09:00:02 W worker   the lease is lost\n")
    assert follower.new_warnings() == [
        f"warning, validator-1: grading 8 answers took 9.1 s; make reward() faster (log: {log})",
        f"warning, validator-1: waiting for disk space for version 1: no space left in v1; free some (log: {log})",
    ]
    with log.open("a") as file:
        file.write("ff\n")
    assert follower.new_warnings() == [f"warning, validator-1: cut off (log: {log})"]


def test_a_worker_that_gets_no_lease_is_mentioned(tmp_path: Path) -> None:
    follower, log = LogFollower(tmp_path), tmp_path / "worker-1.log"
    reason = (
        "leases of this node that ended without valid work: 7.3 not made up for; the next lease is in 113 s"
    )
    log.write_text(
        "09:00:01 I worker      waiting for a lease: no work now  waited_s=61 deadline_s=900\n"
        f"09:00:02 I worker      waiting for a lease: {reason}  waited_s=61 deadline_s=900\n"
    )
    assert follower.new_warnings() == [f"warning, worker-1: waiting for a lease: {reason} (log: {log})"]


def test_the_progress_of_a_long_step_is_shown_while_the_run_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(learner, "PROGRESS_EVERY_S", 0.0)
    follower = LogFollower(tmp_path)
    progress = learner.StepProgress(3, 4)
    with caplog.at_level("INFO", "shoal.trainer"):
        for _ in range(4):
            progress.add()
    assert len(caplog.messages) == 3, "the last micro-batch needs no line"
    (tmp_path / "trainer.log").write_text("".join(f"09:00:02 I {line}\n" for line in caplog.messages))
    assert follower.new_warnings() == []
    waits = stats(waiting_for="the trainer: it is training version 3")
    shown = follower.with_progress(waits).waiting_for
    assert "training version 3 (3 of 4 micro-batches, about 0" in shown
    for other in ("the trainer: it is training version 4", "rollouts: 1 of 4 groups ready"):
        assert follower.with_progress(stats(waiting_for=other)).waiting_for == other


def test_notices_and_names_reach_the_page(tmp_path: Path) -> None:
    files = NoticeFiles(tmp_path)
    assert read_notices(tmp_path) == [] and read_names(tmp_path) == {}
    files.add("worker-1 ended; restarted")
    files.set_names({"ab": "worker-1"})
    (notice,) = read_notices(tmp_path)
    assert (notice.source, notice.text) == ("shoal run", "worker-1 ended; restarted")
    assert read_names(tmp_path) == {"ab": "worker-1"}


def test_a_line_that_a_full_disk_cut_hides_no_other_notice(tmp_path: Path) -> None:
    files = NoticeFiles(tmp_path)
    files.add("before\u2028the cut")
    path = tmp_path / NOTICES_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: whole.index("\u2028".encode()) + 1])
    files.add("on the line that was cut")
    files.add("after")
    assert [one.text for one in read_notices(tmp_path)] == ["before\u2028the cut", "after"]
