"""Publishing: every file of a folder, hashed where it lies, signed last."""

from pathlib import Path
from typing import Any

import blake3
import pytest

from shoal.shardcast import publish
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed


@pytest.fixture
def folder(tmp_path: Path, kit: Any) -> Path:
    for name, data in kit.random_files().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_digests_are_those_of_the_files_and_their_ranges(folder: Path, key: Key, kit: Any) -> None:
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
    (tmp_path / "big").write_bytes(data)
    entry = publish(tmp_path, run="demo", version=0, key=key, shard_bytes=2 << 20).body.file("big")
    assert len(entry.shards) == 3
    assert entry.shards[1] == blake3.blake3(data[2 << 20 : 4 << 20]).hexdigest()
    assert entry.blake3 == blake3.blake3(data).hexdigest()


def test_the_manifest_on_disk_is_the_one_returned(folder: Path, key: Key) -> None:
    sealed = publish(folder, run="demo", version=3, key=key, shard_bytes=1000)
    assert Sealed[Manifest].parse((folder / "manifest.json").read_bytes()) == sealed
    assert not list(folder.glob(".*"))


def test_publishing_again_gives_the_same_manifest_even_later(folder: Path, key: Key) -> None:
    first = publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=1.0)
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=2.0) == first
    (folder / "config.json").write_text("{}")
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000, now_s=2.0) != first


def test_a_manifest_of_another_key_or_of_nonsense_is_replaced(folder: Path, key: Key) -> None:
    publish(folder, run="demo", version=3, key=Key.generate(), shard_bytes=1000)
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000).open(key.public)
    (folder / "manifest.json").write_text("{")
    assert publish(folder, run="demo", version=3, key=key, shard_bytes=1000).open(key.public)


def test_what_cannot_be_published_is_said(folder: Path, key: Key, tmp_path: Path) -> None:
    (folder / "deeper").mkdir()
    with pytest.raises(ValueError, match="deeper is not a plain file"):
        publish(folder, run="demo", version=3, key=key)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no files to publish"):
        publish(tmp_path / "nothing", run="demo", version=3, key=key)
    (tmp_path / "nothing" / ".hidden").touch()
    with pytest.raises(ValueError, match="not a plain name"):
        publish(tmp_path / "nothing", run="demo", version=3, key=key)
