"""Manifests: only plain names, only counts that fit, and shards that tile each file exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.record import Sealed, seal

DIGEST = "ab" * 32


def entry(name: str = "model.safetensors", num_bytes: int = 10, shard_bytes: int = 4) -> FileEntry:
    num_shards = -(-num_bytes // shard_bytes)
    return FileEntry(
        name=name, num_bytes=num_bytes, blake3=DIGEST, shard_bytes=shard_bytes, shards=(DIGEST,) * num_shards
    )


def manifest(*files: FileEntry) -> Manifest:
    return Manifest(run="demo", version=3, files=files, created_at_s=1.0)


@given(num_bytes=st.integers(0, 1000), shard_bytes=st.integers(1, 300))
@settings(deadline=None, derandomize=True)
def test_shards_tile_the_file(num_bytes: int, shard_bytes: int) -> None:
    file = entry(num_bytes=num_bytes, shard_bytes=shard_bytes)
    position = 0
    for index in range(len(file.shards)):
        start, length = file.shard_range(index)
        assert start == position
        assert 0 < length <= shard_bytes
        position += length
    assert position == num_bytes


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "a", "tokenizer-2_b.JSON"])
def test_plain_names(name: str) -> None:
    assert entry(name).name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "../config.json",
        "a/b",
        "a\\b",
        "/etc/passwd",
        "a\x00b",
        "a\n",
        "a b",
        "ä",
        "x" * 129,
    ],
)
def test_names_that_could_become_another_path_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="not a plain name"):
        entry(name)


@pytest.mark.parametrize("num_shards", [0, 2, 4])
def test_a_wrong_number_of_shards_is_refused(num_shards: int) -> None:
    with pytest.raises(ValidationError, match="expected 3"):
        FileEntry(name="f", num_bytes=10, blake3=DIGEST, shard_bytes=4, shards=(DIGEST,) * num_shards)


@pytest.mark.parametrize("digest", ["", "AB" * 32, "ab" * 31, "ab" * 32 + "\n", "../" + "a" * 61])
def test_a_digest_is_64_hex_digits(digest: str) -> None:
    with pytest.raises(ValidationError):
        FileEntry(name="f", num_bytes=1, blake3=digest, shard_bytes=4, shards=(DIGEST,))
    with pytest.raises(ValidationError):
        FileEntry(name="f", num_bytes=1, blake3=DIGEST, shard_bytes=4, shards=(digest,))


def test_a_file_stands_once() -> None:
    with pytest.raises(ValidationError, match="repeat"):
        manifest(entry("a"), entry("a"))


def test_sums_and_lookups() -> None:
    made = manifest(entry("config.json", 3), entry("model.safetensors", 10))
    assert made.num_bytes == 13
    assert made.weights_digest == DIGEST
    with pytest.raises(KeyError, match=r"has no file 'x'; it has"):
        made.file("x")


def test_an_unknown_codec_is_refused_not_guessed() -> None:
    raw = entry().model_dump_json().replace('"raw"', '"zip"')
    with pytest.raises(Rejected, match="codec"):
        FileEntry.parse(raw)


def test_a_relay_cannot_pass_one_version_off_as_another() -> None:
    key = Key.generate()
    sealed = seal(manifest(entry()), key).model_dump_json()
    assert Sealed[Manifest].parse(sealed).open(key.public).version == 3
    with pytest.raises(Rejected, match="does not fit the body"):
        Sealed[Manifest].parse(sealed.replace('"version":3', '"version":4')).open(key.public)
