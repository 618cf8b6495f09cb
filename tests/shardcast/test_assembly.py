"""Assembly: only verified shards are written, they survive a restart, and a file gets its name when it is complete."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast.assembly import Assembly, Shard, WrongBytes
from shoal.shardcast.manifest_files import open_manifest, prepare_folder
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.record import Sealed, seal


@pytest.fixture
def sealed(origin: Any, kit: Any) -> Sealed[Manifest]:
    published: Sealed[Manifest] = origin.publish(1, kit.random_files())
    return published


@pytest.fixture
def folder(tmp_path: Path, sealed: Sealed[Manifest]) -> Path:
    prepare_folder(tmp_path / "v1", sealed)
    return tmp_path / "v1"


def cut(files: dict[str, bytes], shard: Shard) -> bytes:
    return files[shard.name][shard.start : shard.stop]


def test_shards_in_any_order_make_the_files(folder: Path, sealed: Sealed[Manifest], kit: Any) -> None:
    files = kit.random_files()
    assembly = Assembly(folder, sealed.body)
    missing = assembly.missing()
    assert len(missing) == 1 + 3 + 10
    random.Random(5).shuffle(missing)
    for shard in missing:
        assert not assembly.complete
        assert not assembly.has(shard)
        assembly.write(shard, cut(files, shard))
        assert assembly.has(shard)
        assembly.write(shard, cut(files, shard))  # a second request delivered the same shard
    assert assembly.complete
    assert kit.file_bytes(folder) == files
    assert not list(folder.glob(".*"))


def test_wrong_bytes_are_never_written(folder: Path, sealed: Sealed[Manifest], kit: Any) -> None:
    assembly = Assembly(folder, sealed.body)
    shard = next(one for one in assembly.missing() if one.name == "model.safetensors" and one.index == 4)
    data = bytearray(cut(kit.random_files(), shard))
    data[17] ^= 1
    with pytest.raises(WrongBytes, match="shard 4 of version 1"):
        assembly.write(shard, data)
    with pytest.raises(WrongBytes):
        assembly.write(shard, b"")
    assert shard in assembly.missing()
    assert not (folder / ".model.safetensors.partial").exists()


def test_a_restart_hashes_partial_files_and_keeps_right_shards(
    folder: Path, sealed: Sealed[Manifest], kit: Any
) -> None:
    files = kit.random_files()
    first = Assembly(folder, sealed.body)
    model = [shard for shard in first.missing() if shard.name == "model.safetensors"]
    for shard in (model[0], model[3], model[9]):
        first.write(shard, cut(files, shard))
    partial = folder / ".model.safetensors.partial"
    damaged = bytearray(partial.read_bytes())
    damaged[model[3].start] ^= 1
    partial.write_bytes(damaged)
    again = [shard for shard in Assembly(folder, sealed.body).missing() if shard.name == "model.safetensors"]
    assert [shard.index for shard in again] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_crash_between_the_last_shard_and_the_name(
    folder: Path, sealed: Sealed[Manifest], kit: Any
) -> None:
    (folder / ".model.safetensors.partial").write_bytes(kit.random_files()["model.safetensors"])
    Assembly(folder, sealed.body)
    assert (folder / "model.safetensors").read_bytes() == kit.random_files()["model.safetensors"]


def test_a_descriptor_stays_valid_when_the_file_is_renamed(
    folder: Path, sealed: Sealed[Manifest], kit: Any
) -> None:
    files = kit.random_files()
    assembly = Assembly(folder, sealed.body)
    model = [shard for shard in assembly.missing() if shard.name == "model.safetensors"]
    assembly.write(model[0], cut(files, model[0]))
    fd = assembly.open_file("model.safetensors")
    for shard in model[1:]:
        assembly.write(shard, cut(files, shard))
    assert os.pread(fd, 20_000, 0) == files["model.safetensors"]
    os.close(fd)


def test_after_close_nothing_is_written(folder: Path, sealed: Sealed[Manifest], kit: Any) -> None:
    assembly = Assembly(folder, sealed.body)
    shard = assembly.missing()[0]
    assembly.close()
    assembly.write(shard, cut(kit.random_files(), shard))
    assert shard in assembly.missing()


def test_files_of_another_manifest_are_deleted(
    folder: Path, sealed: Sealed[Manifest], origin: Any, kit: Any
) -> None:
    other = origin.publish(2, kit.random_files(seed=7))  # the same names and sizes
    (folder / "model.safetensors").write_bytes(kit.random_files(seed=0)["model.safetensors"])
    prepare_folder(folder, sealed)
    assert (folder / "model.safetensors").exists()
    prepare_folder(folder, other)
    assert not (folder / "model.safetensors").exists()


def test_equal_files_are_taken_from_another_version(
    tmp_path: Path, sealed: Sealed[Manifest], origin: Any, kit: Any
) -> None:
    second = origin.publish(2, kit.random_files(seed=7))
    prepare_folder(tmp_path / "v2", second)
    assembly = Assembly(tmp_path / "v2", second.body)
    reused = assembly.reuse_files([origin.store.path(1), tmp_path / "absent"])
    assert sorted(reused) == ["config.json", "tokenizer.json"]
    assert {shard.name for shard in assembly.missing()} == {"model.safetensors"}
    assert (tmp_path / "v2" / "tokenizer.json").stat().st_nlink == 2


def test_a_file_that_differs_from_its_manifest_is_not_reused(
    tmp_path: Path, sealed: Sealed[Manifest], origin: Any, kit: Any
) -> None:
    second = origin.publish(2, kit.random_files(seed=7))
    (origin.store.path(1) / "tokenizer.json").write_bytes(bytes(2_300))
    prepare_folder(tmp_path / "v2", second)
    assert Assembly(tmp_path / "v2", second.body).reuse_files([origin.store.path(1)]) == ["config.json"]


def test_a_file_may_not_be_named_like_the_manifest(key: Key) -> None:
    entry = FileEntry(name="manifest.json", num_bytes=0, blake3="0" * 64, shard_bytes=1, shards=())
    signed = seal(Manifest(run="demo", version=1, files=(entry,), created_at_s=1.0), key)
    with pytest.raises(Rejected, match="lists a file named"):
        open_manifest(signed, run="demo", run_key=key.public)
