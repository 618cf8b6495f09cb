"""Sinks against the real packages of trackers, offline. `make trackers` installs them."""

from pathlib import Path
from typing import Any

import pytest

from shoal.trainer.reporting.sinks import open_sinks

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("ignore")]

STEP = {"version": 3, "reward_mean": 0.5, "lags": (5, 0), "waited_on": "workers"}
EVALUATION = {"version": 0, "held_out_reward": 0.25}
WARNING = {"version": 3, "kind": "starving", "sentence": "the trainer waited"}


def write_all(name: str, folder: Path) -> None:
    (sink,) = open_sinks([name], folder=folder, run="demo")
    sink.write("step", STEP)
    sink.write("evaluation", EVALUATION)
    sink.write("warning", WARNING)
    sink.write("step", STEP | {"version": 4, "reward_mean": 0.75})
    sink.close()


def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    write_all("mlflow", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [one for one in client.search_experiments() if one.name == "shoal"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "demo" and run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "shoal/reward_mean")
    assert [(point.step, point.value) for point in points] == [(3, 0.5), (4, 0.75)]
    (held_out,) = client.get_metric_history(run.info.run_id, "shoal/held_out_reward")
    assert (held_out.step, held_out.value) == (0, 0.25)
    assert run.data.tags["shoal.warning.starving"] == "version 3: the trainer waited"
    # A resumed run continues in the same place.
    write_all("mlflow", tmp_path)
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path, raising=False)
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path, raising=False)
    write_all("trackio", tmp_path)
    logs: list[dict[str, Any]] = SQLiteStorage.get_logs("shoal", "demo")
    rewards = {one["step"]: one["shoal/reward_mean"] for one in logs if "shoal/reward_mean" in one}
    assert rewards == {3: 0.5, 4: 0.75}
    assert [one["shoal/held_out_reward"] for one in logs if "shoal/held_out_reward" in one] == [0.25]


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (sink,) = open_sinks(["wandb"], folder=tmp_path, run="demo")
    sink.write("step", STEP)
    sink.write("evaluation", EVALUATION)
    sink.write("step", STEP | {"version": 4, "reward_mean": 0.75})
    run: Any = sink
    summary = dict(run._run.summary)
    sink.close()
    assert (summary["shoal/reward_mean"], summary["shoal/held_out_reward"]) == (0.75, 0.25)
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_all("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("shoal/reward_mean")] == [(3, 0.5), (4, 0.75)]
    assert [point.value for point in read.Scalars("shoal/held_out_reward")] == [0.25]
