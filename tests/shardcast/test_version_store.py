"""The version store: bounded, of one run only, the same after a restart, and no path comes from the network."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast import VersionStore, publish
from shoal.shardcast.assembly import shards_of
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed, seal


@pytest.fixture
def store(tmp_path: Path, key: Key) -> VersionStore:
    return VersionStore(tmp_path / "relay", 2, run="demo", run_key=key.public)


def fill(store: VersionStore, version: int, files: dict[str, bytes]) -> None:
    with store.writing(version) as assembly:
        for shard in assembly.missing():
            assembly.write(shard, files[shard.name][shard.start : shard.stop])


def test_only_the_newest_versions_are_kept(store: VersionStore, origin: Any, kit: Any) -> None:
    for version in range(5):
        store.begin(origin.publish(version, kit.random_files(seed=version)))
        fill(store, version, kit.random_files(seed=version))
    assert store.complete() == (3, 4)
    assert sorted(path.name for path in store.folder.glob("v*")) == ["v3", "v4"]
    assert store.newest == 4


def test_a_version_that_is_being_written_is_deleted_afterwards(
    store: VersionStore, origin: Any, kit: Any
) -> None:
    sealed = [origin.publish(version, kit.random_files(seed=version)) for version in range(4)]
    store.begin(sealed[0])
    with store.writing(0) as assembly:
        for later in sealed[1:]:
            store.begin(later)
        assert store.known() == (0, 2, 3)
        for shard in assembly.missing():
            assembly.write(shard, kit.random_files(seed=0)[shard.name][shard.start : shard.stop])
        assert store.complete() == (0,)
    assert store.known() == (2, 3)
    assert not store.path(0).exists()
    with pytest.raises(KeyError), store.writing(0):
        pass


def test_a_restart_finds_complete_and_incomplete_versions(
    store: VersionStore, origin: Any, kit: Any, key: Key
) -> None:
    store.begin(origin.publish(1, kit.random_files(seed=1)))
    fill(store, 1, kit.random_files(seed=1))
    store.begin(origin.publish(2, kit.random_files(seed=2)))
    with store.writing(2) as assembly:
        shard = shards_of(assembly.manifest.file("model.safetensors"))[2]
        assembly.write(shard, kit.random_files(seed=2)["model.safetensors"][shard.start : shard.stop])
    (store.folder / ".deleted-v0").mkdir()
    again = VersionStore(store.folder, 2, run="demo", run_key=key.public)
    assert (again.complete(), again.incomplete(), again.newest) == ((1,), (2,), 2)
    stored = again.get(2)
    assert stored is not None
    assert stored.assembly.verified_until("model.safetensors", 2000, 3000) == 3000
    assert stored.assembly.verified_until("model.safetensors", 2000, 3001) == 3000
    assert not (store.folder / ".deleted-v0").exists()


def test_another_key_or_run_is_refused(store: VersionStore, origin: Any, kit: Any, key: Key) -> None:
    manifest = origin.publish(1, kit.random_files()).body
    with pytest.raises(Rejected, match="is signed by"):
        store.begin(seal(manifest, Key.generate()))
    with pytest.raises(Rejected, match="is for run 'other'"):
        store.begin(
            seal(Manifest(**(manifest.model_dump() | {"run": "other", "files": manifest.files})), key)
        )
    assert store.known() == ()
    assert list(store.folder.glob("v*")) == []


def test_a_version_never_changes(store: VersionStore, origin: Any, kit: Any, key: Key) -> None:
    first = origin.publish(1, kit.random_files())
    store.begin(first)
    store.begin(first)
    other = origin.publish(2, kit.random_files(seed=5)).body
    forged = Manifest(run="demo", version=1, files=other.files, created_at_s=2.0)
    with pytest.raises(Rejected, match="a version never changes"):
        store.begin(seal(forged, key))


def test_many_upstreams_announce_the_same_version_at_once(store: VersionStore, origin: Any, kit: Any) -> None:
    sealed = origin.publish(1, kit.random_files())
    start = threading.Barrier(8)

    def begin(index: int) -> Any:
        start.wait(20)
        store.begin(sealed)
        return store.get(1)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(begin, range(8)))) == 1
    fill(store, 1, kit.random_files())
    assert store.complete() == (1,)


@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", "..", "a/b", ".hidden", "v1\x00"])
def test_a_manifest_with_a_path_as_a_name_is_refused(name: str, origin: Any, kit: Any, key: Key) -> None:
    sealed = origin.publish(1, kit.random_files())
    text = sealed.model_dump_json().replace('"config.json"', f'"{name}"'.replace("\x00", "\\u0000"))
    assert text != sealed.model_dump_json()
    with pytest.raises(Rejected, match="plain name"):
        Sealed[Manifest].parse(text)


def test_the_folder_of_another_run_is_refused(origin: Any, kit: Any) -> None:
    origin.publish(1, kit.random_files())
    with pytest.raises(ValueError, match="use another folder for this run"):
        VersionStore(origin.store.folder, 2, run="demo", run_key=Key.generate().public)


def test_an_unpublished_folder_is_ignored(origin: Any, kit: Any, key: Key) -> None:
    (origin.store.path(9)).mkdir()
    (origin.store.path(9) / "model.safetensors").write_bytes(b"half")
    again = VersionStore(origin.store.folder, 1, run="demo", run_key=key.public)
    assert again.known() == ()
    assert (origin.store.path(9) / "model.safetensors").exists()
    with pytest.raises(ValueError, match="has no manifest"):
        again.adopt(9)


def test_publishing_again_replaces_what_the_origin_serves(origin: Any, kit: Any, key: Key) -> None:
    origin.publish(1, kit.random_files())
    (origin.store.path(1) / "config.json").write_text("{}")
    second = publish(origin.store.path(1), run="demo", version=1, key=key, shard_bytes=1000)
    origin.store.adopt(1)
    assert origin.store.get(1).sealed == second


def test_a_store_stays_within_max_bytes(origin: Any, kit: Any, key: Key, tmp_path: Path) -> None:
    size = sum(len(data) for data in kit.random_files().values())
    sealed = [origin.publish(version, kit.random_files(seed=version)) for version in range(4)]
    store = VersionStore(tmp_path / "relay", run=kit.RUN, run_key=key.public, max_bytes=2 * size + size // 2)
    for one in sealed:
        store.begin(one)
    assert store.known() == (2, 3)
    assert sorted(path.name for path in store.folder.glob("v*")) == ["v2", "v3"]
    # Reopened with a lower limit, it keeps the newest.
    assert VersionStore(store.folder, run=kit.RUN, run_key=key.public, max_bytes=10).known() == (3,)


def test_a_version_larger_than_max_bytes_is_refused(origin: Any, kit: Any, key: Key, tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "relay", run=kit.RUN, run_key=key.public, max_bytes=10)
    with pytest.raises(Rejected, match=r"version 7 has .* bytes, the limit of this store is 10"):
        store.begin(origin.publish(7, kit.random_files()))
    assert store.known() == ()
