"""Manifests: plain file names, consistent counts, and shards that cover each file exactly."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import Delta, FileEntry, Manifest
from shoal.wire.record import Sealed, canonical_json, seal

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


def test_duplicate_file_names_are_refused() -> None:
    with pytest.raises(ValidationError, match="duplicate"):
        manifest(entry("a.json"), entry("a.json"))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "modeling_evil.py",
            "tokenizer.PY",
            "weights.pkl",
            "pytorch_model.bin",
            "optimizer.pt",
            "native.so",
        ),
        *(
            "a.json.py",
            "model.safetensors.delta",
            "tokenizer.model",
            "config.json.bak",
            "run.sh",
            "evil",
            "a.pyc",
        ),
        *("model.ckpt", "model.h5", "model.gguf", "json", "x.JSON"),
    ],
)
def test_a_manifest_with_a_file_of_another_kind_is_refused_by_its_name(name: str) -> None:
    """Everybody who receives a manifest parses it: worker, validator, relay, coordinator and `shoal eval`."""
    with pytest.raises(ValidationError, match=f"file '{name}' is not allowed"):
        manifest(entry("config.json"), entry(name))
    key, body = Key.generate(), manifest(entry("config.json")).model_dump(mode="json")
    body["files"][0]["name"] = name
    signature = key.sign(b"shoal/manifest/1\n" + canonical_json(body))
    sent = json.dumps({"body": body, "key": key.public, "signature": signature})
    with pytest.raises(Rejected, match=name) as refused:
        Sealed[Manifest].parse(sent)
    assert refused.value.code == "request.malformed"


def test_the_files_of_a_model_folder_are_allowed() -> None:
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    names += ["config.json", "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "char_tokenizer.json"]
    names += ["chat_template.jinja", "README.md", "LICENSE", "LICENSE.txt", "NOTICE"]
    assert len(manifest(*(entry(name) for name in names)).files) == len(names)


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
    with pytest.raises(Rejected, match="does not match the body"):
        Sealed[Manifest].parse(sealed.replace('"version":3', '"version":4')).open(key.public)


# -- deltas ---------------------------------------------------------------------------------------------

DELTA = Delta(num_bytes=6, blake3=DIGEST, shards=(DIGEST,) * 2)


def changed(codec: Any = "delta", delta: Delta | None = DELTA, num_shards: int = 0, **more: Any) -> FileEntry:
    fields: dict[str, Any] = {"delta": delta} if delta is not None else {}
    fields |= {"name": "model.safetensors", "num_bytes": 10, "blake3": DIGEST, "shard_bytes": 4} | more
    return FileEntry(**fields, codec=codec, shards=(DIGEST,) * num_shards)


def test_what_each_codec_sends() -> None:
    assert [payload.name for payload in entry().payloads] == ["model.safetensors"]
    assert changed("same", None).payloads == ()
    (sent,) = changed().payloads
    assert (sent.name, sent.num_bytes, sent.codec) == ("model.safetensors.delta", 6, "raw")
    assert [sent.shard_range(index) for index in range(2)] == [(0, 4), (4, 2)]
    both = changed("raw", num_shards=3)
    assert [payload.name for payload in both.payloads] == ["model.safetensors.delta", "model.safetensors"]
    assert all(payload.delta is None for payload in both.payloads)


@pytest.mark.parametrize(
    ("codec", "delta", "num_shards"),
    [
        ("delta", None, 0),
        ("same", DELTA, 0),
        ("delta", DELTA, 3),
        ("same", None, 3),
        ("raw", DELTA, 0),
        ("delta", DELTA.model_copy(update={"shards": (DIGEST,)}), 0),
        ("delta", DELTA.model_copy(update={"shards": (DIGEST,) * 3}), 0),
    ],
)
def test_codec_delta_and_shards_must_be_consistent(codec: str, delta: Delta | None, num_shards: int) -> None:
    with pytest.raises(ValidationError, match=r"model\.safetensors"):
        changed(codec, delta, num_shards)


def test_a_delta_is_left_out_where_there_is_none() -> None:
    assert "delta" not in entry().model_dump()
    assert '"delta"' not in entry().model_dump_json()
    assert FileEntry.parse(changed().model_dump_json()) == changed()
    with pytest.raises(Rejected, match="instead of setting it to null"):
        FileEntry.parse(entry().model_dump_json().replace("}", ',"delta":null}'))


def test_an_empty_delta_is_refused() -> None:
    with pytest.raises(ValidationError):
        Delta(num_bytes=0, blake3=DIGEST, shards=())


@pytest.mark.parametrize(
    ("base", "files", "words"),
    [
        (None, (changed(),), "names no base"),
        (None, (changed("same", None),), "names no base"),
        (None, (changed("raw", num_shards=3),), "names no base"),
        (2, (entry(),), "a file must use it"),
        (3, (changed(),), "must be an earlier version"),
        (4, (changed(),), "must be an earlier version"),
        (-1, (changed(),), "must be an earlier version"),
        (2, (changed(), entry("model.safetensors.delta")), "not allowed"),
    ],
)
def test_base_and_files_must_be_consistent(
    base: int | None, files: tuple[FileEntry, ...], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        Manifest(run="demo", version=3, base=base, files=files, created_at_s=1.0)


def test_a_name_too_long_for_its_delta() -> None:
    with pytest.raises(ValidationError, match="is too long"):
        changed(name="x" * 125)


def test_snapshots_and_equal_files() -> None:
    def of(*files: FileEntry) -> Manifest:
        return Manifest(run="demo", version=3, base=2, files=files, created_at_s=1.0)

    short, both = of(changed()), of(changed("raw", num_shards=3))
    assert (manifest(entry()).is_snapshot, both.is_snapshot, short.is_snapshot) == (True, True, False)
    assert short.yields_the_same(both) and short.yields_the_same(manifest(entry()))
    assert not short.sends_the_same(both)
    assert not short.yields_the_same(of(changed(num_bytes=11)))
