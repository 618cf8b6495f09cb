"""docs/wire/manifest.md: its golden vector is what publish makes, to the byte."""

import re
from pathlib import Path

from blake3 import blake3

from shoal.shardcast import publish
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed

PAGE = Path(__file__).parents[2] / "docs" / "wire" / "manifest.md"


def test_the_vector(tmp_path: Path) -> None:
    golden = PAGE.read_text().split("## Golden vector")[1]
    public, body, signature, digest = re.findall(r"```(?:json)?\n(.*?)\n```", golden, re.DOTALL)
    (tmp_path / "config.json").write_bytes(b'{"hidden_size": 128}\n')
    (tmp_path / "model.safetensors").write_bytes(bytes(index % 251 for index in range(2500)))
    key = Key.from_seed(bytes(range(32)))
    sealed = publish(tmp_path, run="golden", version=7, key=key, shard_bytes=1024, now_s=1735689600.5)
    assert key.public == public
    assert sealed.body.canonical().decode() == body
    assert sealed.signature == signature
    written = (tmp_path / "manifest.json").read_bytes()
    assert blake3(written).hexdigest() == digest
    assert Sealed[Manifest].parse(written).open(public) == sealed.body


def test_every_field_stands_in_the_page() -> None:
    page = PAGE.read_text()
    fields = [*Manifest.model_fields, "name", "num_bytes", "blake3", "codec", "shard_bytes", "shards"]
    assert [name for name in fields if f"| `{name}` |" not in page] == []
