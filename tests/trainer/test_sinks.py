"""Sinks get the numbers of every event; metrics.jsonl has every event."""

import json
import sys
from pathlib import Path

import httpx2
import pytest

from shoal.telemetry import Metrics
from shoal.trainer.reporting.sinks import PrometheusSink, check_packages, numbers_of, open_sinks

STEP = {"version": 3, "reward_mean": 0.5, "lags": (5, 0, 2), "waited_on": "workers", "complete": True}


def test_numbers_of_an_event() -> None:
    assert numbers_of(STEP) == {"version": 3, "reward_mean": 0.5, "lags_0": 5, "lags_1": 0, "lags_2": 2}


def test_prometheus_serves_the_newest_numbers(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    sink = PrometheusSink("127.0.0.1", 0, run="demo")
    metrics.add_sinks([sink])
    try:
        metrics.write("step", **(STEP | {"version": 2}))
        metrics.write("step", **STEP)
        metrics.write("warning", version=3, kind="starving", sentence="the trainer waited")
        answer = httpx2.get(f"http://127.0.0.1:{sink.port}/metrics")
    finally:
        metrics.close()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    lines = answer.text.splitlines()
    assert 'shoal_version{run="demo"} 3.0' in lines
    assert 'shoal_lags_2{run="demo"} 2.0' in lines
    assert 'shoal_warnings_total{kind="starving",run="demo"} 1.0' in lines
    assert "# TYPE shoal_reward_mean gauge" in lines
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_run_file_names_sinks(tmp_path: Path) -> None:
    (sink,) = open_sinks(["prometheus:127.0.0.1:0"], folder=tmp_path, run="demo")
    sink.close()
    assert open_sinks([], folder=tmp_path, run="demo") == []


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'shoal-rl\[{name}\]'"):
        open_sinks([name], folder=tmp_path, run="demo")
    with pytest.raises(ValueError, match=rf"pip install 'shoal-rl\[{name}\]'"):
        check_packages(["prometheus:9400", name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = open_sinks(["tensorboard"], folder=tmp_path, run="demo")
    sink.write("step", STEP)
    sink.write("warning", {"version": 3, "kind": "starving", "sentence": "the trainer waited"})
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (point,) = read.Scalars("shoal/reward_mean")
    assert (point.step, point.value) == (3, 0.5)
    assert "shoal/warnings/text_summary" in read.Tags()["tensors"]


def test_events_are_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write("step", **STEP)
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["lags"] == [5, 0, 2]
