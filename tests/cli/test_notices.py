"""Warnings of roles, from their logs to the terminal and the page's data."""

from pathlib import Path

from shoal.cli.run.notices import LogFollower, NoticeFiles
from shoal.swarm.coordinator.views.stats import read_names, read_notices


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
        file.write("09:00:05 W validator   cut o")
    (tmp_path / "worker-1.log").write_text("09:00:02 W worker   the lease is lost\n")
    assert follower.new_warnings() == [
        f"warning, validator-1: grading 8 answers took 9.1 s; make reward() faster (log: {log})"
    ]
    with log.open("a") as file:
        file.write("ff\n")
    assert follower.new_warnings() == [f"warning, validator-1: cut off (log: {log})"]


def test_notices_and_names_reach_the_page(tmp_path: Path) -> None:
    files = NoticeFiles(tmp_path)
    assert read_notices(tmp_path) == [] and read_names(tmp_path) == {}
    files.add("worker-1 ended; restarted")
    files.set_names({"ab": "worker-1"})
    (notice,) = read_notices(tmp_path)
    assert (notice.source, notice.text) == ("shoal run", "worker-1 ended; restarted")
    assert read_names(tmp_path) == {"ab": "worker-1"}
