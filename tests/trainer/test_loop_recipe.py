"""The trainer's process with every part of the recipe: the reference survives a restart, and metrics have all figures."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from small_coordinator import SmallCoordinator, Stopper

from shoal.trainer.config import TrainerConfig
from shoal.trainer.loop import run_trainer
from shoal.trainer.optim.learner import Learner, Minibatch
from shoal.trainer.reporting.step_figures import StepSums

CONFIG = TrainerConfig(
    learning_rate=1e-3,
    supervised_steps=2,
    row_tokens=32,
    rows_per_micro_batch=4,
    kl=0.1,
    entropy_bonus=0.01,
    behaviour="recompute",
    correction="truncate",
    optimizer_steps=3,
    metrics=("prometheus:0",),
)


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallCoordinator, Path]:
    folder = tmp_path_factory.mktemp("whole")
    with SmallCoordinator(last_version=6).serving() as coordinator:
        run_trainer(CONFIG, coordinator.site(folder), stop=threading.Event())
    return coordinator, folder


def test_resumed_run_has_the_same_reference(tmp_path: Path, whole: tuple[SmallCoordinator, Path]) -> None:
    stop = threading.Event()
    with SmallCoordinator(last_version=6).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, 2)
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        assert (tmp_path / "reference.safetensors").exists()
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()


@pytest.mark.parametrize(("updates", "kept"), [(0, "v000002"), (1, "v000000")])
def test_a_stop_in_a_step_saves_only_weights_without_its_updates(
    tmp_path: Path,
    whole: tuple[SmallCoordinator, Path],
    monkeypatch: pytest.MonkeyPatch,
    updates: int,
    kept: str,
) -> None:
    """A checkpoint with some of the updates would make the next process train on the same groups again."""
    stop, update = threading.Event(), Learner._update

    def stopping(self: Learner, minibatch: Minibatch, index: int, sums: StepSums, stopped: Any) -> float:
        if self.version == 2 and index == updates:
            stop.set()
        return update(self, minibatch, index, sums, stopped)

    with SmallCoordinator(last_version=6).serving() as coordinator:
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "_update", stopping)
            run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()


def test_step_events_have_the_figures_of_the_recipe(whole: tuple[SmallCoordinator, Path]) -> None:
    steps = events(whole[1], "step")
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert {step["optimizer_steps"] for step in steps} == {3}
    assert steps[0]["lags"] == [12], "before version 0 there is no older version"
    assert steps[1]["lags"] == [8, 4]
    assert all(isinstance(step["entropy"], float) and step["entropy"] > 0 for step in steps)
    assert all(isinstance(step["kl"], float) and step["kl"] > 0 for step in steps)


def test_random_logprobs_give_one_warning(whole: tuple[SmallCoordinator, Path]) -> None:
    """The log-probs of this coordinator's workers are random numbers."""
    warned = [event for event in events(whole[1], "warning") if event["kind"] == "engine-gap"]
    assert len(warned) == 1
    assert warned[0]["version"] == 1
    assert "above 0.01" in str(warned[0]["sentence"])
