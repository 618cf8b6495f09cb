"""Sinks against the real packages of trackers, offline. `make trackers` installs them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from shoal.trainer.reporting.sinks import open_sinks

# The timeout is long because MLflow creates its database by dozens of migrations.
pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

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


def read_wandb(path: Path) -> list[dict[str, Any]]:
    """Returns the points in a file that W&B wrote offline: after 7 bytes a log of LevelDB's format, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, points = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # too short for the header of a part
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # a whole record, or its last part
            continue
        record = Record.FromString(whole)
        whole = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            points.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
    return points


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_all("wandb", tmp_path)
    (written,) = tmp_path.rglob("*.wandb")
    points = read_wandb(written)
    rewards = [point["shoal/reward_mean"] for point in points if "shoal/reward_mean" in point]
    held_out = [point["shoal/held_out_reward"] for point in points if "shoal/held_out_reward" in point]
    assert (rewards, held_out) == ([0.5, 0.75], [0.25])


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_all("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("shoal/reward_mean")] == [(3, 0.5), (4, 0.75)]
    assert [point.value for point in read.Scalars("shoal/held_out_reward")] == [0.25]
