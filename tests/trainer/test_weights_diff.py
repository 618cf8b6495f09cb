"""The words that changed since the last published version, and weights taken over from it."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_learner import CONFIG, make_batch

from shoal.diloco.ranks import SINGLE_PROCESS
from shoal.model.weights import save_tensors
from shoal.shardcast.file_image import FileImage
from shoal.telemetry import Log
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io import weights_diff
from shoal.trainer.io.weights_diff import WeightsDiff, count_changed


def make_lockstep(model: Path) -> Lockstep:
    lockstep = Lockstep(CONFIG, SINGLE_PROCESS, device="cpu", log=Log("trainer"), stop=threading.Event())
    lockstep.create_learner(model)
    return lockstep


def save(lockstep: Lockstep, path: Path) -> Path:
    save_tensors(lockstep.whole_weights(lockstep.weights()), path)
    return path


@pytest.mark.parametrize("range_words", [1 << 12, 1 << 20])
def test_changes_turn_the_old_file_into_the_new_one(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, range_words: int
) -> None:
    monkeypatch.setattr(weights_diff, "RANGE_WORDS", range_words)
    lockstep = make_lockstep(model)
    diff = WeightsDiff(FileImage.read(save(lockstep, tmp_path / "old")), torch.device("cpu"))
    assert count_changed(diff.changes(lockstep.weights()), diff.image) == 0
    lockstep.step(make_batch(0))
    changes = diff.changes(lockstep.weights())
    new = FileImage.read(save(lockstep, tmp_path / "new"))
    assert count_changed(changes, diff.image) == int((diff.image.words != new.words).sum()) > 0
    for change in changes:
        words = diff.image.words[change.start : change.start + range_words]
        words[slice(None) if change.places is None else change.places] = change.words
    assert bytes(diff.image.view) == bytes(new.view)


def test_published_weights_replace_only_those_that_differ(tmp_path: Path, model: Path) -> None:
    lockstep = make_lockstep(model)
    lockstep.step(make_batch(0))
    diff = WeightsDiff(FileImage.read(save(lockstep, tmp_path / "published")), torch.device("cpu"))
    own = {name: one.detach().clone() for name, one in lockstep.learner.trained_parameters().items()}
    first = next(iter(own))
    with torch.no_grad():
        lockstep.learner.trained_parameters()[first].view(-1)[3] += 1.0
    lockstep.take_weights(diff.published)
    assert count_changed(diff.changes(lockstep.weights()), diff.image) == 0
    taken = lockstep.learner.trained_parameters()
    expected = own[first].clone()
    expected.view(-1)[3] = expected.view(-1)[3].to(torch.bfloat16).float()
    assert torch.equal(taken[first], expected)
    assert all(torch.equal(taken[name], own[name]) for name in own if name != first), "float32 values stay"


def test_a_tensor_that_the_file_does_not_have_is_named(tmp_path: Path, model: Path) -> None:
    lockstep = make_lockstep(model)
    diff = WeightsDiff(FileImage.read(save(lockstep, tmp_path / "file")), torch.device("cpu"))
    with pytest.raises(ValueError, match="has no tensor 'other'"):
        diff.changes({"other": partial(torch.zeros, 2)})
