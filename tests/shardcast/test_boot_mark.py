"""After a restart of the machine all files are hashed: right ones stay, damaged ones are fetched again."""

from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast import VersionStore, manifest_files
from shoal.shardcast.manifest_files import BOOT_MARK, mark_boot, same_boot
from shoal.wire.keys import Key


def reboot(folder: Path) -> None:
    """Leaves the folder as the next process finds it after a restart of the machine."""
    (folder / BOOT_MARK).write_bytes(b"another boot\n")


def test_the_mark_is_valid_for_this_boot_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not same_boot(tmp_path)
    mark_boot(tmp_path)
    assert same_boot(tmp_path)
    reboot(tmp_path)
    assert not same_boot(tmp_path)
    monkeypatch.setattr(manifest_files, "_BOOT_ID", tmp_path / "absent")
    mark_boot(tmp_path)
    assert not same_boot(tmp_path)  # without a boot id nothing is trusted


def test_a_store_hashes_its_files(origin: Any, kit: Any, key: Key) -> None:
    for version in (7, 8):
        origin.publish(version, kit.random_files(seed=version))
    folder = origin.store.folder
    weights = folder / "v8" / "model.safetensors"
    lost = bytearray(weights.read_bytes())
    lost[4000:6000] = bytes(2000)  # its size is right, two shards never reached the disk
    weights.write_bytes(lost)
    assert VersionStore(folder, run=kit.RUN, run_key=key.public).complete() == (7, 8)
    reboot(folder)
    store = VersionStore(folder, run=kit.RUN, run_key=key.public)
    assert store.complete() == (7,)
    stored = store.get(8)
    assert stored is not None
    assert [shard.index for shard in stored.assembly.missing()] == [4, 5]
    assert kit.file_bytes(folder / "v7") == kit.random_files(seed=7)
    assert same_boot(folder)


def test_a_manifest_that_never_reached_the_disk(origin: Any, kit: Any, key: Key) -> None:
    origin.publish(7, kit.random_files())
    folder = origin.store.folder
    (folder / "v7" / "manifest.json").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a manifest; delete"):
        VersionStore(folder, run=kit.RUN, run_key=key.public)
    reboot(folder)
    assert VersionStore(folder, run=kit.RUN, run_key=key.public).known() == ()
    assert not (folder / "v7").exists()


def test_a_client_fetches_damaged_versions_again(
    origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    first, second = (origin.publish(version, kit.random_files(seed=version)) for version in (7, 8))
    url = serve(origin.app)
    for sealed in (first, second):
        folder = fetch(sealed, [url])
    (folder / "model.safetensors").write_bytes(bytes(9_500))
    reboot(tmp_path / "client")
    assert fetch(first, []) == tmp_path / "client" / "v7"
    assert not folder.exists()
    assert kit.file_bytes(fetch(second, [url])) == kit.random_files(seed=8)


def test_a_download_continues_with_the_right_shards(
    origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    sealed = origin.publish(7, kit.random_files())
    partial = tmp_path / "client" / "v7.partial"
    fetch(sealed, [serve(origin.app)]).rename(partial)
    data = bytearray((partial / "model.safetensors").read_bytes())
    data[0] ^= 1
    (partial / "model.safetensors").write_bytes(data)
    reboot(tmp_path / "client")
    spy = kit.Spy(origin.app)
    assert kit.file_bytes(fetch(sealed, [serve(spy)])) == kit.random_files()
    assert spy.asked == [("model.safetensors", 0)]
