"""The trainer's process against a coordinator over HTTP: order of versions, crashes, and errors of waits."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from small_coordinator import SmallCoordinator, Stopper

from shoal.files import DiskFull
from shoal.model.load_model import load_decoder
from shoal.net.waiting import DeadlinePassed
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch
from shoal.trainer.distributed.lockstep import Lockstep
from shoal.trainer.io.checkpoint import Checkpoints, CheckpointState, LearnerSnapshot
from shoal.trainer.io.publisher import Publisher
from shoal.trainer.loop import run_trainer
from shoal.trainer.reporting.step_figures import StepFigures
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Announce
from shoal.wire.record import Sealed
from small_disk import fill, small_disk

CONFIG = TrainerConfig(
    learning_rate=1e-3,
    supervised_steps=2,
    row_tokens=32,
    rows_per_micro_batch=4,
)


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[SmallCoordinator, Path]:
    """An uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("whole")
    with SmallCoordinator(last_version=4).serving() as coordinator:
        run_trainer(CONFIG, coordinator.site(folder), stop=threading.Event())
    return coordinator, folder


def test_every_version_is_announced_in_order(whole: tuple[SmallCoordinator, Path]) -> None:
    coordinator, folder = whole
    assert [told.manifest.body.version for told in coordinator.announced] == [0, 1, 2, 3, 4]
    assert coordinator.announced[0].report is None
    reports = [told.report for told in coordinator.announced[1:]]
    assert [report.version for report in reports if report is not None] == [1, 2, 3, 4]
    last = reports[-1]
    assert last is not None
    assert (last.groups, last.rollouts, last.dropped_groups, last.lag_max) == (3, 12, 1, 1)
    assert last.lag_mean == pytest.approx(1 / 3)
    assert len(set(coordinator.digests().values())) == 5, "every step changed the weights"
    steps = [event for event in events(folder) if event["event"] == "step"]
    assert [step["version"] for step in steps] == [1, 2, 3, 4]


def test_each_object_is_fetched_once(whole: tuple[SmallCoordinator, Path]) -> None:
    coordinator, _ = whole
    assert len(coordinator.downloads) == len(set(coordinator.downloads)) == 8


def test_the_newest_versions_are_kept_with_their_delta_bases(whole: tuple[SmallCoordinator, Path]) -> None:
    coordinator, folder = whole
    manifests = [told.manifest.body for told in coordinator.announced]
    assert [manifest.base for manifest in manifests] == [None, 0, 1, 2, 3]
    assert all(manifest.follow_bytes < manifest.num_bytes / 2 for manifest in manifests[1:])
    # The whole file exists where it is sent (version 0), and of the last version.
    with_weights = [path.parent.name for path in (folder / "versions").glob("*/model.safetensors")]
    assert sorted(with_weights) == ["v0", "v4"]
    # Version 2 is the oldest that is kept. Of the versions before it only the files remain that are still sent.
    assert sorted(os.listdir(folder / "versions" / "v1")) == ["manifest.json", "model.safetensors.delta"]
    assert sorted(os.listdir(folder / "checkpoints")) == ["v000000", "v000004"]


def test_version_is_a_complete_model_folder(whole: tuple[SmallCoordinator, Path]) -> None:
    _, folder = whole
    assert load_decoder(folder / "versions" / "v4").shape.hidden_size == 128
    assert {"config.json", "model.safetensors", "manifest.json"} <= set(
        os.listdir(folder / "versions" / "v4")
    )


@pytest.mark.parametrize("version", [0, 2, 4])
def test_crash_before_an_announcement(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path], version: int
) -> None:
    """The version was checkpointed and published, but not announced. The next process announces it and continues."""
    stop = threading.Event()
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, version)
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        assert max(coordinator.digests(), default=-1) == version - 1
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()
    assert [told.manifest.body.version for told in coordinator.announced] == list(range(5))
    repeated = coordinator.announced[version].report
    assert (repeated is None) == (version == 0)


def test_crash_after_an_announcement(tmp_path: Path, whole: tuple[SmallCoordinator, Path]) -> None:
    """The next process announces the same last version again and continues."""
    stop = threading.Event()
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = lambda told: stop.set() if told.manifest.body.version == 4 else None
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        coordinator.before_announce = lambda told: None
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()
    first, second = (told for told in coordinator.announced if told.manifest.body.version == 4)
    assert (first.manifest, first.report) == (second.manifest, second.report)


def test_version_0_is_announced_while_its_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gigabytes of a 0.5B model took longer to write than everything else before version 0. If the checkpoint is lost, the
    versions since are made again from the model."""
    config = CONFIG.model_copy(update={"supervised_steps": 0})
    announced, stop, write = threading.Event(), threading.Event(), Checkpoints._write

    def late(self: Checkpoints, snapshot: LearnerSnapshot, state: CheckpointState) -> None:
        assert announced.wait(60), f"version 0 waited for the checkpoint of version {state.version}"

    with SmallCoordinator(last_version=2).serving() as coordinator:
        monkeypatch.setattr(Checkpoints, "_write", late)  # writes nothing

        def tell(told: Announce) -> None:
            announced.set()
            if told.manifest.body.version == 1:
                stop.set()

        coordinator.before_announce = tell
        run_trainer(config, coordinator.site(tmp_path / "site"), stop=stop)
        assert not list((tmp_path / "site" / "checkpoints").glob("v*"))
        monkeypatch.setattr(Checkpoints, "_write", write)
        coordinator.before_announce = lambda told: None
        run_trainer(config, coordinator.site(tmp_path / "site"), stop=threading.Event())
    with SmallCoordinator(last_version=2).serving() as other:
        run_trainer(config, other.site(tmp_path / "other"), stop=threading.Event())
    assert sorted(coordinator.digests()) == [0, 1, 2]
    assert coordinator.digests() == other.digests()


def test_the_next_step_does_not_wait_for_a_publication(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds each publication back until the step after it is done. If the step waited for it, the run would deadlock.
    The published weights are the same as without the delay."""
    stepped = {version: threading.Event() for version in range(2, 5)}
    prepare, step = Publisher.prepare, Lockstep.step
    overlapped = []

    def late(self: Publisher, changes: Any, version: int, adapters: Any) -> Path:
        if version + 1 in stepped and version:
            assert stepped[version + 1].wait(60), (
                f"the step to version {version + 1} waited for the publication of version {version}"
            )
            overlapped.append(version)
        return prepare(self, changes, version, adapters)

    def noted(self: Lockstep, batch: TrainBatch) -> StepFigures:
        figures = step(self, batch)
        if batch.version + 1 in stepped:
            stepped[batch.version + 1].set()
        return figures

    monkeypatch.setattr(Publisher, "prepare", late)
    monkeypatch.setattr(Lockstep, "step", noted)
    with SmallCoordinator(last_version=4).serving() as coordinator:
        run_trainer(CONFIG, coordinator.site(tmp_path, deadline_s=90.0), stop=threading.Event())
    assert overlapped == [1, 2, 3]
    steps = {event["version"]: event for event in events(tmp_path) if event["event"] == "step"}
    assert all(float(str(steps[version]["publish_exposed_s"])) > 0 for version in (2, 3, 4)), (
        "each waited for the one before"
    )
    assert [told.manifest.body.version for told in coordinator.announced] == list(range(5))
    assert coordinator.digests() == whole[0].digests()


def test_a_publication_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error also ends a wait for rollouts, which cannot arrive because no worker has the version they need."""
    prepare = Publisher.prepare

    def full(self: Publisher, changes: Any, version: int, adapters: Any) -> Path:
        if version == 1:
            coordinator.has_rollouts = False
            raise OSError(28, "No space left on device")
        return prepare(self, changes, version, adapters)

    monkeypatch.setattr(Publisher, "prepare", full)
    with SmallCoordinator(last_version=4).serving() as coordinator:
        with pytest.raises(OSError, match="No space left"):
            run_trainer(CONFIG, coordinator.site(tmp_path, deadline_s=600.0), stop=threading.Event())
        monkeypatch.setattr(Publisher, "prepare", prepare)
        coordinator.has_rollouts = True
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert sorted(coordinator.digests()) == list(range(5))


def test_damaged_checkpoint_costs_steps_not_the_run(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path]
) -> None:
    """The versions since the checkpoint before it, or since the beginning, are made again."""
    stop = threading.Event()
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, 3)
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        newest = max((tmp_path / "checkpoints").glob("v*"))
        (newest / "optimizer.pt").write_bytes(b"half a file")
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()


def test_versions_that_come_out_differently_are_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another learning rate takes the place of another machine: versions 1 and 2 come out differently, and the second process
    continues from the published version 2."""
    stop = threading.Event()
    monkeypatch.setattr(
        "shoal.trainer.loop._TrainerRun.save_on_stop", lambda self: None
    )  # as if it was killed
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, 3)
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        other = CONFIG.model_copy(update={"learning_rate": 1.1e-3})
        run_trainer(other, coordinator.site(tmp_path), stop=threading.Event())
    assert sorted(coordinator.digests()) == [0, 1, 2, 3, 4], "no version was announced with two digests"
    (again,) = (told for told in coordinator.announced if told.rederived is not None)
    assert again.rederived is not None
    assert again.rederived.checkpoint_version == 0
    assert again.rederived.differing_words > 0
    (event,) = (event for event in events(tmp_path) if event["event"] == "rederived")
    assert event["differing_words"] == again.rederived.differing_words
    after = next(told for told in coordinator.announced if told.manifest.body.version == 4)
    assert after.manifest.body.base == 3


def test_deleted_versions_are_published_again_whole(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path]
) -> None:
    """They are made again from the checkpoint. The newest is published whole, because the base of its delta is gone."""
    stop = threading.Event()
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, 3)
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=stop)
        shutil.rmtree(tmp_path / "versions")
        run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())
    assert coordinator.digests() == whole[0].digests()
    bases = {told.manifest.body.version: told.manifest.body.base for told in coordinator.announced}
    assert (bases[0], bases[1], bases[4]) == (None, 0, 3)
    assert None in (bases[2], bases[3]), "the first version that the second process publishes is whole"


def test_origin_serves_while_the_trainer_waits(tmp_path: Path) -> None:
    stop, announced = threading.Event(), threading.Event()
    with SmallCoordinator(last_version=4, has_rollouts=False).serving() as coordinator:
        coordinator.before_announce = lambda told: announced.set()
        thread = threading.Thread(
            target=run_trainer, args=(CONFIG, coordinator.site(tmp_path)), kwargs={"stop": stop}
        )
        thread.start()
        try:
            assert announced.wait(30)
            while not coordinator.announced:
                announced.wait(0.01)
            told = coordinator.announced[0]
            served = httpx2.get(f"{told.origin_url}/manifests/0").content
            assert Sealed[Manifest].parse(served) == told.manifest
        finally:
            stop.set()
            thread.join(10)
        assert not thread.is_alive()


def test_a_wait_for_rollouts_times_out_with_its_reason(tmp_path: Path) -> None:
    waiting = r"rollouts for the step from version 0: .* no worker is enrolled"
    with (
        SmallCoordinator(last_version=4, has_rollouts=False).serving() as coordinator,
        pytest.raises(DeadlinePassed, match=waiting),
    ):
        run_trainer(CONFIG, coordinator.site(tmp_path, deadline_s=0.2), stop=threading.Event())


def test_an_unreachable_coordinator_is_named(tmp_path: Path) -> None:
    coordinator = SmallCoordinator(last_version=1)
    coordinator.url = "http://127.0.0.1:9"
    with pytest.raises(DeadlinePassed, match=r"the coordinator at http://127\.0\.0\.1:9"):
        run_trainer(CONFIG, coordinator.site(tmp_path, deadline_s=0.2), stop=threading.Event())


def test_a_version_conflict_names_the_remedy(tmp_path: Path) -> None:
    def refuse(told: Announce) -> None:
        raise Rejected("request.conflict", "version 0 is already published with weights 1234")

    with SmallCoordinator(last_version=1).serving() as coordinator:
        coordinator.before_announce = refuse
        with pytest.raises(ValueError, match=r"another version 0 than this trainer made .*start a new run"):
            run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())


def test_key_of_another_run(tmp_path: Path) -> None:
    with SmallCoordinator(last_version=1).serving() as coordinator:
        mine = coordinator.site(tmp_path)
        coordinator.run_key = Key.generate()
        with pytest.raises(ValueError, match=r"copy run\.key"):
            run_trainer(CONFIG, mine, stop=threading.Event())


def test_broken_object_is_named(tmp_path: Path) -> None:
    with SmallCoordinator(last_version=1).serving() as coordinator:
        sha256 = coordinator.make_batch(0).groups[0].sha256
        coordinator.objects[sha256] = b"not those bytes"
        with pytest.raises(ValueError, match=f"object {sha256}: received 15 bytes of another digest"):
            run_trainer(CONFIG, coordinator.site(tmp_path), stop=threading.Event())


def test_a_checkpoint_on_a_full_disk_ends_the_run_with_numbers_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[SmallCoordinator, Path]
) -> None:
    every = CONFIG.model_copy(update={"checkpoint_minutes": 0.0})
    usage = shutil.disk_usage

    def nearly_full(path: Any) -> Any:
        is_full = (tmp_path / "checkpoints" / "v000001").exists()
        return usage(path)._replace(free=1000) if is_full else usage(path)

    with SmallCoordinator(last_version=4).serving() as coordinator:
        monkeypatch.setattr(shutil, "disk_usage", nearly_full)
        with pytest.raises(DiskFull, match=r"needs 3\.\d MB, and 0\.0 MB are free; free some space there or"):
            run_trainer(every, coordinator.site(tmp_path), stop=threading.Event())
        assert (tmp_path / "checkpoints" / "v000001").exists()
        monkeypatch.setattr(shutil, "disk_usage", usage)
        run_trainer(every, coordinator.site(tmp_path), stop=threading.Event())
        assert coordinator.digests() == whole[0].digests()


@pytest.mark.parametrize("minutes", [0.0, 10.0], ids=["in a checkpoint", "in a publication"])
def test_a_real_disk_that_fills_up_ends_the_run_and_the_run_goes_on(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path], minutes: float
) -> None:
    """The disk is filled to the last byte when version 1 is announced, and freed before the second process."""
    config = CONFIG.model_copy(update={"checkpoint_minutes": minutes})
    fillers: list[Path] = []

    def fill_disk(told: Announce) -> None:
        if told.manifest.body.version == 1 and not fillers:
            fillers.append(fill(disk))

    with small_disk(tmp_path, 48 << 20) as disk, SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = fill_disk
        with pytest.raises(
            DiskFull, match=r"(no space left in|needs \d+\.\d MB).*(free some space|then).*"
        ) as full:
            run_trainer(config, coordinator.site(disk / "trainer"), stop=threading.Event())
        assert "MB" in str(full.value) and str(disk) in str(full.value), "folder and numbers"
        fillers[0].unlink()
        run_trainer(config, coordinator.site(disk / "trainer"), stop=threading.Event())
        assert coordinator.digests() == whole[0].digests()


@pytest.mark.parametrize("damage", ["altered", "half"])
def test_a_damaged_checkpoint_costs_only_time(
    tmp_path: Path, whole: tuple[SmallCoordinator, Path], damage: str
) -> None:
    every = CONFIG.model_copy(update={"checkpoint_minutes": 0.0})
    with SmallCoordinator(last_version=4).serving() as coordinator:
        stop = threading.Event()
        coordinator.before_announce = Stopper(stop, 3)
        run_trainer(every, coordinator.site(tmp_path), stop=stop)
        newest = max((tmp_path / "checkpoints").glob("v*"))
        weights = newest / "weights.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[: len(content) // 2] if damage == "half" else content[:-1] + b"?")
        run_trainer(every, coordinator.site(tmp_path), stop=threading.Event())
        assert coordinator.digests() == whole[0].digests()
