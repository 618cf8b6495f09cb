"""Publishing: every file of a folder is hashed in place, and the signed manifest is written last."""

import os
import random
from pathlib import Path
from typing import Any

import blake3
import pytest
from memory_delta import apply

from shoal.shardcast import Base, manifest_files, publish
from shoal.shardcast.publish import MAX_SHARDS, SHARD_BYTES, shard_size
from shoal.swarm.coordinator.http.router import LARGE_BODY
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed


@pytest.fixture
def folder(tmp_path: Path, kit: Any) -> Path:
    for name, data in kit.random_files().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_digests_of_files_and_shards(folder: Path, key: Key, kit: Any) -> None:
    manifest = publish(folder, run="demo", version=3, key=key, shard_bytes=1000).open(key.public)
    assert [entry.name for entry in manifest.files] == sorted(kit.random_files())
    for entry in manifest.files:
        data = kit.random_files()[entry.name]
        assert entry.blake3 == blake3.blake3(data).hexdigest()
        for index, digest in enumerate(entry.shards):
            start, length = entry.shard_range(index)
            assert digest == blake3.blake3(data[start : start + length]).hexdigest()


def test_shards_larger_than_a_read_are_hashed_whole(tmp_path: Path, key: Key) -> None:
    data = bytes(range(256)) * (5 << 12)  # 5 MiB in shards of 2 MiB
    (tmp_path / "big.txt").write_bytes(data)
    entry = publish(tmp_path, run="demo", version=0, key=key, shard_bytes=2 << 20).body.file("big.txt")
    assert len(entry.shards) == 3
    assert entry.shards[1] == blake3.blake3(data[2 << 20 : 4 << 20]).hexdigest()
    assert entry.blake3 == blake3.blake3(data).hexdigest()


@pytest.mark.parametrize("data", [b"other bytes", b"fewer"], ids=["changed", "cut short"])
def test_a_file_that_changes_while_it_is_hashed_is_refused(
    data: bytes, tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.txt"
    path.write_bytes(b"these bytes")
    os.utime(path, (1.0, 1.0))
    hash_range = manifest_files.hash_range

    def meddle(*args: Any) -> str:
        path.write_bytes(data)
        return hash_range(*args)

    monkeypatch.setattr(manifest_files, "hash_range", meddle)
    with pytest.raises(ValueError, match=r"weights.txt changed while it was hashed"):
        publish(tmp_path, run="demo", version=0, key=key)
    assert [one.name for one in tmp_path.iterdir()] == ["weights.txt"]


def test_the_manifest_on_disk_is_the_one_returned(folder: Path, key: Key) -> None:
    sealed = publish(folder, run="demo", version=3, key=key, shard_bytes=1000)
    assert Sealed[Manifest].parse((folder / "manifest.json").read_bytes()) == sealed
    assert not list(folder.glob(".*"))


def test_publishing_again_returns_the_same_manifest(folder: Path, key: Key) -> None:
    first = publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=1.0)
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=2.0) == first
    (folder / "config.json").write_text("{}")
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=2.0) != first


def test_a_manifest_of_another_key_or_a_damaged_one_is_replaced(folder: Path, key: Key) -> None:
    publish(folder, run="demo", version=3, key=Key.generate(), shard_bytes=1000)
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000).open(key.public)
    (folder / "manifest.json").write_text("{")
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000).open(key.public)


def test_errors_name_what_cannot_be_published(folder: Path, key: Key, tmp_path: Path) -> None:
    (folder / "deeper").mkdir()
    with pytest.raises(ValueError, match="deeper is not a regular file"):
        publish(folder, run="demo", version=3, key=key)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no files to publish"):
        publish(tmp_path / "nothing", run="demo", version=3, key=key)
    (tmp_path / "nothing" / ".hidden").touch()
    with pytest.raises(ValueError, match="not a plain name"):
        publish(tmp_path / "nothing", run="demo", version=3, key=key)


@pytest.mark.parametrize("name", ["modeling_own.py", "pytorch_model.bin", "tokenizer.model", "extra.so"])
def test_a_publisher_learns_early_which_file_no_worker_accepts(folder: Path, key: Key, name: str) -> None:
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"file '{name}' is not allowed in a version.*move it elsewhere"):
        publish(folder, run="demo", version=3, key=key)
    assert not (folder / "manifest.json").exists()


def test_a_manifest_that_a_crash_left_unfinished_is_not_published(folder: Path, key: Key) -> None:
    (folder / ".manifest.json.123.abcd.partial").write_bytes(b"{")
    (folder / "manifest.json.bak.txt").write_bytes(b"a file of the model")
    sealed = publish(folder, run="demo", version=3, key=key)
    names = [entry.name for entry in sealed.body.files]
    assert "manifest.json.bak.txt" in names
    assert not any(name.startswith(".") for name in names)


# -- deltas -------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path: Path, key: Key, kit: Any) -> Path:
    """Publishes v0; v1, not published yet, differs in one byte of its weights."""
    for version in (0, 1):
        (tmp_path / f"v{version}").mkdir()
        for name, data in kit.random_files().items():
            (tmp_path / f"v{version}" / name).write_bytes(data)
    change(tmp_path / "v1" / "model.safetensors", 5000)
    publish(tmp_path / "v0", run="demo", version=0, key=key, shard_bytes=1000)
    return tmp_path


def change(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def codecs(sealed: Sealed[Manifest]) -> dict[str, str]:
    return {entry.name: entry.codec for entry in sealed.body.files}


def test_only_what_changed_is_sent(versions: Path, key: Key) -> None:
    base = Base(folder=versions / "v0")
    first = publish(versions / "v1", run="demo", version=1, key=key, base=base, now_s=1.0)
    assert first.body.base == 0
    assert codecs(first) == {
        "config.json": "same",
        "empty.txt": "same",
        "model.safetensors": "delta",
        "tokenizer.json": "same",
    }
    payload = (versions / "v1" / "model.safetensors.delta").read_bytes()
    entry = first.body.file("model.safetensors")
    assert entry.delta is not None
    assert (entry.delta.num_bytes, entry.delta.blake3) == (len(payload), blake3.blake3(payload).hexdigest())
    assert (
        apply((versions / "v0" / entry.name).read_bytes(), payload)
        == (versions / "v1" / entry.name).read_bytes()
    )
    # Publishing again later, also without the base, returns the same manifest.
    assert publish(versions / "v1", run="demo", version=1, key=key, base=base, now_s=2.0) == first
    assert publish(versions / "v1", run="demo", version=1, key=key, now_s=2.0) == first
    (versions / "v1" / "model.safetensors.delta").write_bytes(b"damaged")
    assert publish(versions / "v1", run="demo", version=1, key=key, base=base, now_s=1.0) == first
    assert (versions / "v1" / "model.safetensors.delta").read_bytes() == payload


def test_a_snapshot_is_sent_whole_and_as_a_delta(versions: Path, key: Key) -> None:
    base = Base(folder=versions / "v0", snapshot_every=1)
    sealed = publish(versions / "v1", run="demo", version=1, key=key, base=base)
    assert set(codecs(sealed).values()) == {"raw"}
    assert sealed.body.is_snapshot and sealed.body.base == 0
    assert sealed.body.file("model.safetensors").delta is not None
    with pytest.raises(ValueError, match="snapshot_every=0"):
        Base(folder=versions, snapshot_every=0)


@pytest.mark.parametrize("why", ["much changed", "another size", "base without its file", "base damaged"])
def test_the_version_is_sent_whole_if_a_delta_is_useless(
    versions: Path, key: Key, kit: Any, why: str
) -> None:
    weights = versions / "v1" / "model.safetensors"
    if why == "much changed":
        weights.write_bytes(kit.random_files(seed=5)["model.safetensors"])
    elif why == "another size":
        weights.write_bytes(weights.read_bytes() + b"x")
    elif why == "base without its file":
        (versions / "v0" / "model.safetensors").unlink()
    else:
        change(versions / "v0" / "model.safetensors", 9)
    base = Base(folder=versions / "v0")
    sealed = publish(versions / "v1", run="demo", version=1, key=key, base=base, now_s=1.0)
    assert set(codecs(sealed).values()) == {"raw"}
    assert sealed.body.base is None
    assert not list(versions.glob("v1/*.delta"))
    assert publish(versions / "v1", run="demo", version=1, key=key, now_s=1.0) == sealed


def test_nothing_changed(versions: Path, key: Key, kit: Any) -> None:
    (versions / "v1" / "model.safetensors").write_bytes(kit.random_files()["model.safetensors"])
    sealed = publish(versions / "v1", run="demo", version=1, key=key, base=Base(folder=versions / "v0"))
    assert set(codecs(sealed).values()) == {"same"}
    assert sealed.body.payloads == ()


def test_errors_name_an_unusable_base(versions: Path, key: Key) -> None:
    def attempt(run: str = "demo", version: int = 1, key: Key = key, folder: str = "v0") -> None:
        publish(versions / "v1", run=run, version=version, key=key, base=Base(folder=versions / folder))

    with pytest.raises(ValueError, match="needs an earlier one"):
        attempt(version=0)
    with pytest.raises(ValueError, match="of the same run"):
        attempt(run="other")
    with pytest.raises(ValueError, match="not published with this key"):
        attempt(key=Key.generate())
    with pytest.raises(ValueError, match="has no manifest"):
        attempt(folder="v1")


def test_a_large_file_has_larger_shards_so_that_its_manifest_fits_a_coordinator(
    tmp_path: Path, key: Key
) -> None:
    folder = tmp_path / "v1"
    folder.mkdir()
    data = random.Random(1).randbytes(MAX_SHARDS * 4)
    (folder / "model.safetensors").write_bytes(data)
    sealed = publish(folder, run="demo", version=1, key=key, shard_bytes=3)
    (entry,) = sealed.body.files
    assert (entry.shard_bytes, len(entry.shards)) == (6, -(-len(data) // 6))
    assert 1.5 * MAX_SHARDS * 67 < LARGE_BODY, "digests of a file and of a delta of half of it, as JSON"
    assert shard_size(62 * 10**9, SHARD_BYTES) == SHARD_BYTES, "the report's model"
    assert shard_size(2 * 10**12, SHARD_BYTES) == 64 << 20
