"""`shoal rollouts`, `shoal compare` and `shoal report` on a run's folder and on its coordinator."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_swarm import SmallSwarm
from test_rollout_texts import work

from shoal.cli.commands.compare import compare_runs, read_run
from shoal.cli.main import main


@pytest.fixture
def trained(swarm: SmallSwarm) -> SmallSwarm:
    swarm.start()
    node = swarm.node()
    for text in ("first", "second"):
        work(swarm, node, text=text)
    swarm.batch(0)
    swarm.announce(1)
    return swarm


def arguments(swarm: SmallSwarm) -> list[str]:
    database = ["--database", swarm.config.database] if swarm.config.database else []
    return [str(swarm.dir), *database]


def test_rollouts_are_printed(trained: SmallSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", *arguments(trained), "--version", "0", "--reward", "1", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "version 0" in shown and "second0" in shown and "expected: right0" in shown
    assert "z_draws 0.50" in shown and "at most 2 proof mismatches" in shown and "second1" not in shown
    assert main(["rollouts", *arguments(trained), "--search", "nowhere"]) == 0
    said = capsys.readouterr().err
    assert "no rollouts match. The newest one has version 0, task " in said and "loosen the filters" in said


def test_rollouts_are_exported(
    trained: SmallSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rollouts.parquet"
    assert main(["rollouts", *arguments(trained), "--export", str(out.with_suffix(".csv"))]) == 2
    assert "it writes Parquet; name it *.parquet" in capsys.readouterr().err
    assert main(["rollouts", *arguments(trained), "--export", str(out)]) == 0
    assert "8 answers in 4 groups" in capsys.readouterr().out
    table = pq.read_table(out).to_pylist()
    assert {row["answer"] for row in table} == {"first0", "first1", "second0", "second1"}
    assert {row["state"] for row in table} == {"batched"} and {row["trained_version"] for row in table} == {0}
    assert main(["rollouts", *arguments(trained), "--json", "--node", table[0]["node"][:8]]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 4


@pytest.mark.on_socket
def test_a_coordinator_answers_the_same(trained: SmallSwarm, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", trained.url, "--search", "SECOND1", "--reward", "0"]) == 0
    assert "second1" in capsys.readouterr().out
    assert main(["rollouts", trained.url, "--held-out"]) == 2
    assert "when the run is finished" in capsys.readouterr().err


def test_runs_are_compared(trained: SmallSwarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if trained.config.database:
        pytest.skip("a folder's run file names its database, and this folder has none")
    folder, out = str(trained.dir), tmp_path / "compare.html"
    assert main(["compare", folder, folder, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "reward, last tenth of steps" in shown and "0.500" in shown
    figures = {name: value for name, value, _ in compare_runs([read_run(folder)] * 2)}
    assert figures["clip share, last tenth"] == "0.0000" and figures["KL to version 0, last tenth"] == "-"
    page = out.read_text(encoding="utf-8")
    assert '"compare":[' in page and "<link" not in page.replace('<link rel="icon"', "")
    assert main(["compare", folder, folder, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["compare", folder]) == 2
