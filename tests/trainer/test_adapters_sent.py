"""A trainer with adapters sends them as adapters: a client that has version 0 merges exactly what was announced."""

import threading
from pathlib import Path

import pytest
from small_coordinator import SmallCoordinator, Stopper

from shoal.shardcast import fetch_version
from shoal.shardcast.client.fetch import fetch_manifest
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.shardcast.manifest_files import prune_versions, version_folders
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.io.weights_diff import count_changed
from shoal.trainer.loop import _TrainerRun, run_trainer
from shoal.wire.messages import Announce

ADAPTERS = TrainerConfig(learning_rate=1e-2, row_tokens=32, rows_per_micro_batch=4, lora_rank=2)
LAST_VERSION = 9
"""Version 8 would be sent whole if it were not made of adapters; version 0 is not among the newest three."""


class FollowingClient:
    """Fetches every version when it is announced, as a worker does, and keeps only the newest two."""

    def __init__(self, coordinator: SmallCoordinator, into: Path) -> None:
        self.coordinator, self.into = coordinator, into
        self.fetched: dict[int, Path] = {}

    def __call__(self, told: Announce) -> None:
        version = told.manifest.body.version
        self.fetch(told, self.into)
        prune_versions(self.into, 2)
        self.fetched[version] = self.into

    def fetch(self, told: Announce, into: Path) -> Path:
        return fetch_version(
            told.manifest,
            [told.origin_url],
            into,
            run_key=self.coordinator.run_key.public,
            log=Log("client"),
            stop=threading.Event(),
            deadline_s=60.0,
        )


@pytest.mark.parametrize("supervised_steps", [0, 2])
def test_a_client_follows_by_adapters(tmp_path: Path, supervised_steps: int) -> None:
    config = ADAPTERS.model_copy(update={"supervised_steps": supervised_steps})
    with SmallCoordinator(last_version=LAST_VERSION).serving() as coordinator:
        client = FollowingClient(coordinator, tmp_path / "client")
        late: list[int] = []

        def announced(told: Announce) -> None:
            client(told)
            if told.manifest.body.version == LAST_VERSION:
                folder = client.fetch(told, tmp_path / "late")
                late.append(sum(path.stat().st_size for path in folder.iterdir()))
                choice = RelayChoice([told.origin_url])
                fetch_manifest(
                    0, choice, run_key=coordinator.run_key.public, log=Log("client"), stop=threading.Event(),
                    deadline_s=10.0, run="test",
                )  # fmt: skip

        coordinator.before_announce = announced
        run_trainer(config, coordinator.site(tmp_path / "trainer"), stop=threading.Event())
    manifests = [told.manifest.body for told in coordinator.announced]
    assert late
    if supervised_steps:
        assert [one.base for one in manifests[1:]] == list(range(LAST_VERSION))
        return
    assert [one.base for one in manifests[1:]] == [0] * LAST_VERSION
    assert {one.file("model.safetensors").codec for one in manifests[1:]} == {"delta"}
    assert max(one.follow_bytes for one in manifests[1:]) < manifests[0].payload_bytes / 8
    # The base of later versions is not deleted with the old versions.
    assert sorted(version_folders(tmp_path / "client")) == [0, LAST_VERSION - 1, LAST_VERSION]


def test_a_resumed_trainer_announces_the_same_adapters(tmp_path: Path) -> None:
    whole: dict[int, str] = {}
    for minutes in (0.0, 10.0):
        folder = tmp_path / str(minutes)
        config = ADAPTERS.model_copy(update={"checkpoint_minutes": minutes})
        with SmallCoordinator(last_version=4).serving() as coordinator:
            stop = threading.Event()

            def stop_at_2(told: Announce, stop: threading.Event = stop) -> None:
                if told.manifest.body.version == 2:
                    stop.set()

            coordinator.before_announce = stop_at_2
            run_trainer(config, coordinator.site(folder), stop=stop)
            run_trainer(config, coordinator.site(folder), stop=threading.Event())
            digests = coordinator.digests()
        assert sorted(digests) == [0, 1, 2, 3, 4]
        whole = whole or digests
        assert digests == whole


def test_adapters_that_come_out_differently_are_those_that_were_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another learning rate takes the place of another machine: the second process continues from the published adapters."""
    stop, left = threading.Event(), []
    compare = _TrainerRun._compare_with_published

    def compare_again(self: _TrainerRun) -> int:
        differing = compare(self)
        diff = self._publisher.diff
        left.append((differing, count_changed(diff.changes(self._lockstep.weights()), diff.image)))
        return differing

    monkeypatch.setattr(_TrainerRun, "save_on_stop", lambda self: None)  # as if it was killed
    with SmallCoordinator(last_version=4).serving() as coordinator:
        coordinator.before_announce = Stopper(stop, 3)
        run_trainer(ADAPTERS, coordinator.site(tmp_path), stop=stop)
        monkeypatch.setattr(_TrainerRun, "_compare_with_published", compare_again)
        other = ADAPTERS.model_copy(update={"learning_rate": 1.1e-2})
        run_trainer(other, coordinator.site(tmp_path), stop=threading.Event())
    assert sorted(coordinator.digests()) == [0, 1, 2, 3, 4], "no version was announced with two digests"
    ((differing, after),) = left
    # The float32 scales of A and B may round differently than their product.
    assert after <= differing / 1000 < differing
    (again,) = (told.rederived for told in coordinator.announced if told.rederived is not None)
    assert again.differing_words == differing
