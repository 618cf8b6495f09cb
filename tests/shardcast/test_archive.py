"""The archive of versions: every version is restored bit for bit from version 0 and deltas."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from shoal.shardcast.archive import VersionArchive
from shoal.shardcast.publish import Base, publish
from shoal.wire.codes import CorruptData
from shoal.wire.keys import Key

NAME = "model.safetensors"
KEY = Key.generate()


def publish_versions(folder: Path, archive: VersionArchive, count: int) -> list[bytes]:
    """Publishes versions that differ in a few words, archives each, and deletes what the archive does not need."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, 4000, dtype="<u2")
    contents = []
    for version in range(count):
        words[rng.integers(0, words.size, 20)] += 1
        path = folder / f"v{version}"
        path.mkdir(parents=True)
        (path / NAME).write_bytes(words.tobytes())
        (path / "config.json").write_text("{}")
        base = Base(folder=folder / f"v{version - 1}", snapshot_every=4) if version else None
        publish(path, run="run", version=version, key=KEY, base=base)
        archive.add(path, version)
        contents.append(words.tobytes())
    shutil.rmtree(folder)
    return contents


def test_every_version_is_restored(tmp_path: Path) -> None:
    archive = VersionArchive(tmp_path / "archive")
    contents = publish_versions(tmp_path / "versions", archive, 10)
    assert archive.versions() == list(range(10))
    for version in (0, 3, 4, 9):
        manifest = archive.restore(version, tmp_path / f"out{version}", run_key=KEY.public)
        assert manifest.version == version
        assert (tmp_path / f"out{version}" / NAME).read_bytes() == contents[version]
        assert (tmp_path / f"out{version}" / "config.json").read_text() == "{}"
    whole = list((tmp_path / "archive").rglob(NAME))
    assert whole == [tmp_path / "archive" / "v0" / NAME]  # a snapshot is restored by its delta


def test_what_cannot_be_restored_is_an_error(tmp_path: Path) -> None:
    archive = VersionArchive(tmp_path / "archive")
    publish_versions(tmp_path / "versions", archive, 4)
    with pytest.raises(ValueError, match=r"version 7 is not in .*versions 0 to 3"):
        archive.restore(7, tmp_path / "out", run_key=KEY.public)
    with pytest.raises(CorruptData, match="signed by"):
        archive.restore(2, tmp_path / "out", run_key=Key.generate().public)
    (tmp_path / "archive" / "v1" / f"{NAME}.delta").unlink()
    with pytest.raises(CorruptData, match="cannot be restored"):
        archive.restore(2, tmp_path / "out", run_key=KEY.public)
