"""docs/wire/manifest.md: `publish` reproduces its golden vector byte for byte."""

import re
from pathlib import Path
from typing import Any

from blake3 import blake3

from shoal.shardcast import Base, publish
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "manifest.md"


def write_golden(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(b'{"hidden_size": 128}\n')
    (folder / "model.safetensors").write_bytes(bytes(index % 251 for index in range(2500)))


def test_the_vector(tmp_path: Path) -> None:
    golden = PAGE.read_text().split("## Golden vector")[1]
    public, body, signature, digest = re.findall(r"```(?:json)?\n(.*?)\n```", golden, re.DOTALL)
    write_golden(tmp_path)
    key = Key.from_seed(bytes(range(32)))
    sealed = publish(tmp_path, run="golden", version=7, key=key, shard_bytes=1024, now_s=1735689600.5)
    assert key.public == public
    assert sealed.body.canonical().decode() == body
    assert sealed.signature == signature
    written = (tmp_path / "manifest.json").read_bytes()
    assert blake3(written).hexdigest() == digest
    assert Sealed[Manifest].parse(written).open(public) == sealed.body


def test_the_vector_with_a_delta(tmp_path: Path) -> None:
    golden = PAGE.read_text().split("## Golden vector, with a delta")[1]
    body, signature = re.findall(r"```(?:json)?\n(.*?)\n```", golden, re.DOTALL)
    key = Key.from_seed(bytes(range(32)))
    told = Manifest.parse(body)
    assert told.canonical().decode() == body
    assert Sealed[Manifest](body=told, key=key.public, signature=signature).open(key.public) == told
    write_golden(tmp_path / "v7")
    write_golden(tmp_path / "v9")
    with (tmp_path / "v9" / "model.safetensors").open("r+b") as file:
        file.write(b"\x01")
    publish(tmp_path / "v7", run="golden", version=7, key=key, shard_bytes=1024, now_s=1735689600.5)
    base = Base(folder=tmp_path / "v7")
    made = publish(
        tmp_path / "v9", run="golden", version=9, key=key, shard_bytes=1024, base=base, now_s=1735689660.5
    ).body
    # Without the payload's digests: another version of zstd may write another frame.
    assert without_digests(made) == without_digests(told)


def without_digests(manifest: Manifest) -> Any:
    return manifest.model_dump(exclude={"files": {"__all__": {"delta"}}})


def test_the_page_lists_every_field() -> None:
    page = PAGE.read_text()
    fields = [
        *Manifest.model_fields,
        "name",
        "num_bytes",
        "blake3",
        "codec",
        "shard_bytes",
        "shards",
        "delta",
    ]
    assert [name for name in fields if f"| `{name}` |" not in page] == []
