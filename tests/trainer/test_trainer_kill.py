"""kill -9 at any point of a trainer's run: nothing that was announced changes, no step is lost or counted twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def kill_everywhere(scratch: Path, *, minutes: float, every: int) -> None:
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{HERE}:{HERE.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "kill_worker.py"), str(scratch), str(minutes), str(every)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    whole, *killed = json.loads((scratch / "results.json").read_text())
    assert sorted(whole["digests"]) == ["0", "1", "2", "3"]
    assert whole["points"] > 100
    assert killed
    for one in killed:
        assert one["ended"] == 0, (
            f"the process after a kill at point {one['at']} failed:\n{run.stderr[-3000:]}"
        )
        assert one["digests"] == whole["digests"], f"killed at point {one['at']}"
        assert one["differing"] == 0
        # A kill between the announcement of a step and its line in the metrics must not lose the line.
        assert one["steps"] == whole["steps"] == [1, 2, 3], f"killed at point {one['at']}"
        # At most `keep_checkpoints`, and nothing half written.
        assert len(one["checkpoints"]) <= 2 and all(name.startswith("v") for name in one["checkpoints"])


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_killed_at_some_points_without_checkpoints_between(tmp_path: Path) -> None:
    """Only version 0 and the last have a checkpoint: all versions between are made again."""
    kill_everywhere(tmp_path, minutes=10, every=29)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("minutes", [0, 10])
def test_killed_at_every_point(tmp_path: Path, minutes: float) -> None:
    kill_everywhere(tmp_path, minutes=minutes, every=1)
