"""Checkpoints are complete or absent after any crash, and a resumed run equals an uninterrupted one."""

import logging
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_learner import make_batch, make_learner, save

from shoal.background import BackgroundTask
from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.files import DiskFull
from shoal.model.decoder import Decoder
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.trainer.io.checkpoint import (
    Checkpoint,
    Checkpoints,
    LearnerSnapshot,
    _write_shards,
    take_snapshot,
)
from shoal.trainer.io.load_checkpoint import load_checkpoint
from shoal.trainer.optim.learner import Learner
from shoal.trainer.reporting.step_figures import step_report
from shoal.wire.messages import StepReport
from small_disk import small_disk


def checkpoints(folder: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep=keep, log=Log("trainer"))


def advance(learner: Learner, num_steps: int) -> StepReport:
    for _ in range(num_steps):
        batch = make_batch(learner.version)
        report = step_report(batch, learner.step(batch, threading.Event()), wait_s=0.0)
    return report


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.decoder.parameters()]


def assert_same(left: Learner, right: Learner) -> None:
    assert left.version == right.version
    assert all(torch.equal(a, b) for a, b in zip(weights_of(left), weights_of(right), strict=True))


def resumed(folder: Path, model: Path) -> tuple[Learner, StepReport | None]:
    checkpoint = checkpoints(folder).newest()
    assert checkpoint is not None
    learner = make_learner(model)
    load_checkpoint(learner, checkpoint)
    return learner, checkpoint.state.report


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, model: Path) -> None:
    straight = make_learner(model)
    advance(straight, 2)
    report = advance(straight, 1)
    save(checkpoints(tmp_path), straight, report)
    random_state = torch.get_rng_state()
    torch.manual_seed(99)
    again, report_again = resumed(tmp_path, model)
    assert report_again == report
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(straight, again)
    advance(straight, 3)
    advance(again, 3)
    assert_same(straight, again)


def test_keeps_the_newest(tmp_path: Path, model: Path) -> None:
    learner, kept = make_learner(model), checkpoints(tmp_path)
    save(kept, learner, None)
    for _ in range(3):
        save(kept, learner, advance(learner, 1))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["v000002", "v000003"]


def test_what_a_killed_process_left_half_written_is_deleted(tmp_path: Path, model: Path) -> None:
    learner, kept = make_learner(model), checkpoints(tmp_path)
    left = tmp_path / "checkpoints" / ".v000007.partial"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(bytes(1000))
    save(kept, learner, None)
    assert os.listdir(tmp_path / "checkpoints") == ["v000000"]


def test_a_process_that_was_killed_before_it_deleted_an_old_checkpoint_leaves_none_behind(
    tmp_path: Path, model: Path
) -> None:
    """The next process may find the run complete, and then saves nothing."""
    learner, kept = make_learner(model), checkpoints(tmp_path)
    save(kept, learner, None)
    for _ in range(2):
        save(kept, learner, advance(learner, 1))
    shutil.copytree(tmp_path / "checkpoints" / "v000001", tmp_path / "checkpoints" / "v000000")
    found = checkpoints(tmp_path).newest()
    assert found is not None and found.state.version == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["v000001", "v000002"]


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    learner = make_learner(model)
    save(checkpoints(tmp_path), learner, None)
    save(checkpoints(tmp_path), learner, advance(learner, 1))
    damage(tmp_path / "checkpoints" / "v000001" / name)
    with caplog.at_level(logging.WARNING, logger="shoal.trainer"):
        found = checkpoints(tmp_path).newest()
    assert found is not None
    assert found.state.version == 0
    assert len(caplog.messages) == 1
    assert "v000001" in caplog.messages[0]


def test_a_damaged_checkpoint_is_replaced_and_not_counted_as_kept(tmp_path: Path, model: Path) -> None:
    learner, kept = make_learner(model), checkpoints(tmp_path)
    for _ in range(4):
        save(kept, learner, advance(learner, 1))
    truncate(tmp_path / "checkpoints" / "v000004" / "weights.safetensors")
    learner, _ = resumed(tmp_path, model)
    assert learner.version == 3
    save(kept, learner, advance(learner, 1))
    again, _ = resumed(tmp_path, model)
    assert_same(learner, again)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).newest() is None


def test_an_unknown_format_is_refused(tmp_path: Path, model: Path) -> None:
    """It must not be skipped like a damaged one: the run would start again from an older version."""
    save(checkpoints(tmp_path), make_learner(model), None)
    manifest = tmp_path / "checkpoints" / "v000000" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("shoal/checkpoint/1", "shoal/checkpoint/9"))
    with pytest.raises(
        ValueError, match="has checkpoint format 'shoal/checkpoint/9', this release reads shoal/"
    ):
        checkpoints(tmp_path).newest()


class Crash(Exception):
    """Simulates the end of the process."""


@pytest.mark.parametrize("survives", range(8))
def test_crash_between_any_two_writes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """`survives` flushes and renames succeed; the next one raises."""
    learner = make_learner(model)
    save(checkpoints(tmp_path), learner, None)
    report = advance(learner, 1)
    left = [survives]

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync))
        patch.setattr(os, "rename", failing(os.rename))
        try:
            save(checkpoints(tmp_path), learner, report)
            crashed = False
        except Crash:
            crashed = True
    # Five flushes (three files, manifest, folder), the rename, one more flush: 7 calls in all.
    assert crashed == (survives < 7)
    found = checkpoints(tmp_path).newest()
    assert found is not None
    assert found.state.version == (1 if survives >= 6 else 0)
    save(checkpoints(tmp_path), learner, report)
    again, _ = resumed(tmp_path, model)
    assert_same(learner, again)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: Path) -> None:
    learner = make_learner(model)
    save(checkpoints(tmp_path), learner, None)
    checkpoint = checkpoints(tmp_path).newest()
    assert checkpoint is not None
    other = make_learner(model)
    assert isinstance(other.decoder, Decoder)
    other.decoder.model.layers = other.decoder.model.layers[:1]
    with pytest.raises(ValueError, match="holds another model than the run file names"):
        load_checkpoint(other, checkpoint)


def test_an_optimizer_state_of_another_layout_changes_nothing(tmp_path: Path, model: Path) -> None:
    learner = make_learner(model)
    advance(learner, 1)
    kept = checkpoints(tmp_path)
    snapshot = take_snapshot(learner)
    snapshot.optimizer["state"][0]["exp_avg"] = torch.zeros(3, 5)
    kept.begin(1, lambda: snapshot, None)
    kept.finish(30)
    other = make_learner(model)
    before = weights_of(other)
    checkpoint = kept.newest()
    assert checkpoint is not None
    with pytest.raises(
        ValueError, match=r"optimizer state of another layout: moments of \[\(3, 5\), .* for parameter 0 of"
    ):
        load_checkpoint(other, checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(other), before, strict=True))
    assert other.version == 0
    snapshot.optimizer["param_groups"].pop()
    kept.begin(2, lambda: snapshot, None)
    kept.finish(30)
    with pytest.raises(ValueError, match=r"parameter groups of \[\d+\], this run has \[\d+, \d+\]; continue"):
        load_checkpoint(
            other, Checkpoint(tmp_path / "checkpoints" / "v000002", checkpoint.format, checkpoint.state)
        )


def test_a_checkpoint_is_written_in_the_background(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, kept = make_learner(model), checkpoints(tmp_path)
    save(kept, learner, None)
    report = advance(learner, 1)
    go_on, rename = threading.Event(), os.rename

    def held(*arguments: Any) -> None:
        assert go_on.wait(30)
        rename(*arguments)

    monkeypatch.setattr(os, "rename", held)
    kept.begin(1, partial(take_snapshot, learner), report)
    kept.wait_for_copy(30)
    expected = weights_of(learner)
    advance(learner, 1)  # changes the weights while the checkpoint is written
    with pytest.raises(DeadlinePassed, match=r"waited 0 s for checkpoint 1 to be written to .*; is its disk"):
        kept.finish(0.05)
    assert not kept.close(0.05), "a disk that hangs does not keep the process"
    found = checkpoints(tmp_path).newest()
    assert found is not None
    assert found.state.version == 0
    go_on.set()
    assert kept.close(30)
    again, report_again = resumed(tmp_path, model)
    assert report_again == report
    assert all(torch.equal(a, b) for a, b in zip(weights_of(again), expected, strict=True))


def test_finish_raises_the_error_of_the_writer(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkpoints(tmp_path)
    kept.begin(0, partial(take_snapshot, make_learner(model)), None)
    kept.finish(30)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
        kept.begin(0, partial(take_snapshot, make_learner(model)), None)
        with pytest.raises(OSError, match="No space left"):
            kept.finish(30)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_shards_on_a_full_disk_raise_an_error_with_the_numbers_and_the_remedy(tmp_path: Path) -> None:
    """What ranks write with torch.distributed.checkpoint, here by one process. What was there before stays."""
    with small_disk(tmp_path, 4 << 20) as disk:
        kept = checkpoints(disk)
        (disk / "checkpoints" / "v000001").mkdir()

        def take(num_values: int = 1 << 21) -> LearnerSnapshot:
            shards, folder = {"weights.a": torch.zeros(num_values)}, kept.shard_folder(2)
            saving = BackgroundTask("shards", partial(_write_shards, shards, folder, SINGLE_PROCESS))
            optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
            return LearnerSnapshot(version=2, weights={}, optimizer=optimizer, random={"cpu": torch.zeros(1)}, saving=saving)  # fmt: skip

        kept.begin(2, take, None)
        with pytest.raises(DiskFull, match=r"no space left in .*checkpoints .*MB free\); free some space"):
            kept.finish(60)
        assert os.listdir(disk / "checkpoints") == ["v000001"], "what was half written gives its space back"
        kept.begin(2, partial(take, 1 << 10), None)
        kept.finish(60)
        assert (disk / "checkpoints" / "v000002" / "manifest.json").exists()
