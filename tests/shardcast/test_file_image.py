"""A version that is published from memory equals one that is published from files."""

from pathlib import Path

import numpy as np
import pytest
from memory_delta import apply, encode

from shoal.files import DiskFull
from shoal.shardcast import delta, file_image
from shoal.shardcast.file_image import ChangedWords, FileImage, file_hasher, restore_image
from shoal.shardcast.manifest_files import hash_shards
from shoal.shardcast.publish import ImageDelta, Signing, publish_image
from shoal.shardcast.store import VersionStore
from shoal.wire.keys import Key
from shoal.wire.manifest import Delta

NAME = "model.safetensors"
KEY = Key.generate()
SIGNING = Signing(run="test", key=KEY, shard_bytes=1000)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 512 words and ranges of 1,024, so that small files have several."""
    for module in (delta, file_image):
        monkeypatch.setattr(module, "CHUNK_WORDS", 512)
    monkeypatch.setattr(file_image, "RANGE_WORDS", 1024)


def make_image(num_bytes: int = 5001) -> FileImage:
    image = FileImage(num_bytes)
    image.view[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8).tobytes()
    return image


def random_changes(
    image: FileImage, share: float, *, seed: int = 1, largest: int = 4, has_dense: bool = True
) -> list[ChangedWords]:
    rng = np.random.default_rng(seed)
    changes = []
    for start in range(0, image.words.size, 1024):
        old = image.words[start : start + 1024]
        places = np.flatnonzero(rng.random(old.size) < share).astype(np.int32)
        if start + old.size == image.words.size:
            places = places[places < old.size - 1]  # the last word is half padding
        new = old.copy()
        new[places] += rng.integers(1, largest, places.size).astype(np.uint16)
        dense = has_dense and start == 1024
        changes.append(ChangedWords(start, None if dense else places, new if dense else new[places]))
    return changes


def publish(store: VersionStore, version: int, image: FileImage, changes: list[ChangedWords] | None) -> None:
    folder = store.path(version)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = store.get(version - 1)
    since = None
    if changes is not None:
        assert before is not None
        hasher = file_hasher()
        since = ImageDelta(before.sealed.body, image.change(changes, hasher), hasher)
    publish_image(folder, NAME, image, version=version, signing=SIGNING, delta=since, whole=version == 0)
    store.adopt(version)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "versions", 5, run="test", run_key=KEY.public)


@pytest.mark.parametrize("num_bytes", [60_001, 5001, 4096, 1])
@pytest.mark.parametrize("has_dense", [True, False])
def test_a_delta_of_changed_words_equals_one_of_two_files(
    num_bytes: int, has_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_image, "NUM_THREADS", 2)
    image = make_image(num_bytes)
    before = bytes(image.view)
    payload = b"".join(image.change(random_changes(image, 0.1, has_dense=has_dense)))
    assert payload == encode(before, bytes(image.view))
    assert apply(before, payload) == bytes(image.view)


def test_a_delta_is_hashed_while_it_is_written(store: VersionStore) -> None:
    image = make_image(60_001)
    publish(store, 0, image, None)
    publish(store, 1, image, random_changes(image, 0.05))
    manifest = store.manifest(1)
    assert manifest is not None
    entry = manifest.file(NAME)
    assert entry.delta is not None and entry.blake3 == image.digest()
    num_bytes, whole, shards = hash_shards(store.path(1) / f"{NAME}.delta", 1000)
    assert entry.delta == Delta(num_bytes=num_bytes, blake3=whole, shards=shards)
    assert len(entry.delta.shards) > 5


def test_words_are_replaced_without_a_delta() -> None:
    changed, replaced = make_image(), make_image()
    changes = random_changes(changed, 0.1)
    list(changed.change(changes))
    replaced.replace(changes)
    assert replaced.digest() == changed.digest() != make_image().digest()


def test_a_version_is_restored_from_a_whole_file_and_deltas(store: VersionStore) -> None:
    image = make_image()
    publish(store, 0, image, None)
    for version in (1, 2):
        publish(store, version, image, random_changes(image, 0.02, seed=version))
    assert not (store.path(2) / NAME).exists(), "only the delta is written"
    manifest = store.get(2)
    assert manifest is not None
    assert [entry.codec for entry in manifest.sealed.body.files] == ["same", "delta"]
    restored = restore_image(store, 2, NAME)
    assert restored is not None
    assert bytes(restored.view) == bytes(image.view)


def test_a_damaged_or_missing_delta_restores_nothing(store: VersionStore) -> None:
    image = make_image()
    publish(store, 0, image, None)
    publish(store, 1, image, random_changes(image, 0.02))
    payload = store.path(1) / f"{NAME}.delta"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    assert restore_image(store, 1, NAME) is None
    payload.unlink()
    assert restore_image(store, 1, NAME) is None
    assert restore_image(store, 7, NAME) is None


def test_a_delta_that_saves_too_little_is_not_sent(store: VersionStore) -> None:
    image = make_image()
    publish(store, 0, image, None)
    publish(store, 1, image, random_changes(image, 1.0, largest=60_000))
    stored = store.get(1)
    assert stored is not None
    assert stored.sealed.body.is_snapshot
    assert stored.sealed.body.base is None
    assert (store.path(1) / NAME).read_bytes() == bytes(image.view)


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_image, "write_at", full)
    with pytest.raises(DiskFull, match=r"no space left in .* MB free\)"):
        make_image().write(tmp_path / NAME)
    assert list(tmp_path.iterdir()) == []
