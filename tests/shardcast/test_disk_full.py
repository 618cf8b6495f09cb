"""A full disk at a relay, a client and a publisher: the error names folder and remedy, no half-written file is trusted, and
work continues by itself when there is space."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal import shardcast
from shoal.files import DiskFull
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.wire.keys import Key
from small_disk import fill, small_disk

DISK_BYTES = 4 << 20
WEIGHTS_BYTES = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, DISK_BYTES) as folder:
        yield folder


def weights(kit: Any, version: int) -> dict[str, bytes]:
    files: dict[str, bytes] = kit.random_files(seed=version, num_bytes=WEIGHTS_BYTES)
    return files


@pytest.fixture
def relay(disk: Path, origin: Any, key: Key, serve: Any, log: Log) -> Iterator[shardcast.Relay]:
    stop = threading.Event()
    config = shardcast.RelayConfig(
        folder=disk / "relay", run=origin.store.run, run_key=key.public, upstreams=(serve(origin.app),)
    )
    relay = shardcast.Relay(config, key, log=log, stop=stop)
    relay.startup()
    yield relay
    relay.shutdown()


@pytest.mark.parametrize("leave", [0, 256 << 10], ids=["no byte", "space for the small files"])
def test_a_relay_waits_for_space(
    leave: int,
    relay: shardcast.Relay,
    disk: Path,
    origin: Any,
    kit: Any,
    http: httpx2.Client,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    origin.publish(1, weights(kit, 1))
    kit.eventually(lambda: 1 in relay.store.complete(), "version 1 at the relay")
    filler = fill(disk, leave=leave)
    origin.publish(2, weights(kit, 2))
    kit.eventually(
        lambda: f"no space left in {disk / 'relay' / 'v2'}" in caplog.text, "the error about the full disk"
    )
    relay._mirror.check()
    assert "cannot store new versions" in caplog.text and "free some space there" in caplog.text
    answer = http.get(f"{relay.url}/versions/1/model.safetensors")
    assert answer.content == weights(kit, 1)["model.safetensors"]
    assert 2 not in relay.store.complete()

    filler.unlink()
    kit.eventually(lambda: 2 in relay.store.complete(), "version 2, without a restart")
    assert kit.file_bytes(disk / "relay" / "v2") == weights(kit, 2)
    assert caplog.text.count("cannot store new versions") == 1
    relay._mirror.check()
    assert "Traceback" not in caplog.text


def test_a_relay_starts_on_a_full_disk(disk: Path, key: Key, kit: Any) -> None:
    origin = kit.Origin(disk / "relay", key)
    origin.publish(1, kit.random_files())
    (disk / "relay" / ".boot").unlink()
    fill(disk)
    again = shardcast.VersionStore(disk / "relay", run=kit.RUN, run_key=key.public)
    assert again.complete() == (1,)


def test_a_relay_starts_on_a_full_disk_with_a_file_that_was_not_reserved(
    disk: Path, origin: Any, key: Key, kit: Any
) -> None:
    sealed = origin.publish(1, weights(kit, 1))
    store = shardcast.VersionStore(disk / "relay", run=kit.RUN, run_key=key.public)
    store.begin(sealed)
    (disk / "relay" / "v1" / ".model.safetensors.partial").touch()
    fill(disk)
    again = shardcast.VersionStore(disk / "relay", run=kit.RUN, run_key=key.public)
    assert again.known() == again.incomplete() == (1,)


def test_space_that_does_not_suffice_is_given_back(
    disk: Path, origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    sealed = origin.publish(1, weights(kit, 1))
    url = serve(origin.app)
    fill(disk, leave=WEIGHTS_BYTES // 2)
    with pytest.raises(
        DeadlinePassed,
        match=rf"disk space for version 1: no space left in {disk}/client/v1.partial .*MB free",
    ):
        fetch(sealed, [url], into="disk/client", deadline_s=1.0)
    (disk / "other").write_bytes(bytes(WEIGHTS_BYTES // 4))
    assert not (disk / "client" / "v1").exists()
    assert not (disk / "client" / "v1.partial" / "model.safetensors").exists()


def test_a_client_continues_when_there_is_space(
    disk: Path, origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    sealed = origin.publish(1, weights(kit, 1))
    url = serve(origin.app)
    filler = fill(disk)
    timer = threading.Timer(1.0, filler.unlink)
    timer.start()
    folder = fetch(sealed, [url], into="disk/client")
    assert kit.file_bytes(folder) == weights(kit, 1)


def test_a_client_without_space_to_apply_a_delta(
    disk: Path, origin: Any, kit: Any, key: Key, serve: Any, fetch: Any
) -> None:
    """The delta is downloaded but the file does not fit: none of it stays, and the delta is not downloaded again."""
    first = origin.publish(1, weights(kit, 1))
    url = serve(origin.app)
    fetch(first, [url], into="disk/client")
    changed = weights(kit, 1)
    changed["model.safetensors"] = b"\x01\x02" + changed["model.safetensors"][2:]
    folder = origin.store.path(2)
    folder.mkdir()
    for name, data in changed.items():
        (folder / name).write_bytes(data)
    sealed = shardcast.publish(
        folder, run=kit.RUN, version=2, key=key, base=shardcast.Base(folder=origin.store.path(1))
    )
    origin.store.adopt(2)
    filler = fill(disk, leave=WEIGHTS_BYTES // 2)
    with pytest.raises(DeadlinePassed, match="no space left in"):
        fetch(sealed, [url], into="disk/client", deadline_s=1.0)
    partial = disk / "client" / "v2.partial"
    assert {path.name for path in partial.iterdir()} >= {"manifest.json", "model.safetensors.delta"}
    assert not (partial / ".model.safetensors.made").exists()
    filler.unlink()
    assert kit.file_bytes(fetch(sealed, [url], into="disk/client")) == changed


def test_a_client_frees_the_recycled_file_before_it_reports_a_full_disk(
    disk: Path, origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    """A version that is sent whole overwrites nothing: the space of the deleted version is needed for it."""
    url = serve(origin.app)
    for version in (1, 2):
        fetch(origin.publish(version, weights(kit, version)), [url], into="disk/client")
    assert shardcast.prune_versions(disk / "client", 1, recycle=True) == [1]
    assert (disk / "client" / ".recycled").stat().st_size == WEIGHTS_BYTES
    shutil.rmtree(origin.store.path(1))
    sealed = origin.publish(3, weights(kit, 3))
    fill(disk, leave=WEIGHTS_BYTES // 2)
    folder = fetch(sealed, [url], into="disk/client", deadline_s=5.0)
    assert kit.file_bytes(folder) == weights(kit, 3)
    assert kit.file_bytes(disk / "client" / "v2") == weights(kit, 2)
    assert not (disk / "client" / ".recycled").exists()


def test_a_publisher_gets_an_error_and_may_publish_again(disk: Path, key: Key, kit: Any) -> None:
    origin = kit.Origin(disk / "origin", key)
    origin.publish(1, weights(kit, 1))
    folder = origin.store.path(2)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights(kit, 1)["model.safetensors"][:-2] + b"\x01\x02")
    terms: dict[str, Any] = {"run": kit.RUN, "version": 2, "key": key}
    base = shardcast.Base(folder=origin.store.path(1))
    filler = fill(disk)
    with pytest.raises(DiskFull, match=f"no space left in {folder} "):
        shardcast.publish(folder, **terms, base=base)
    with pytest.raises(DiskFull, match="free some space there"):
        shardcast.publish(folder, **terms)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert 2 not in shardcast.VersionStore(disk / "origin", run=kit.RUN, run_key=key.public).known()
    filler.unlink()
    sealed = shardcast.publish(folder, **terms, base=base)
    assert sealed.body.base == 1 and origin.store.adopt(2) == sealed
