"""Versions that are sent as deltas, through real relays: the exact folder by any plan, or an error that says why."""

import logging
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import shardcast
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast.client import fetch as fetch_module
from shoal.shardcast.relay import mirror as mirror_module
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed, seal

WEIGHTS, DELTA = "model.safetensors", "model.safetensors.delta"
NUM_BYTES = 30_000


def version_files(version: int) -> dict[str, bytes]:
    """Returns weights of which a fifth changes with each version; the other files stay the same."""
    words = np.frombuffer(random.Random(0).randbytes(NUM_BYTES), "<u2").copy()
    for step in range(1, version + 1):
        rng = np.random.default_rng(step)
        places = rng.choice(words.size, words.size // 5, replace=False)
        words[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), places.size)
    return {
        "config.json": b'{"hidden_size": 128}',
        "tokenizer.json": random.Random(99).randbytes(2_300),
        WEIGHTS: words.tobytes(),
    }


class Line:
    """An origin that publishes each version as deltas against the one before."""

    def __init__(self, origin: Any, snapshot_every: int = 4) -> None:
        self.store, self.app, self.key = origin.store, origin.app, origin.key
        self.snapshot_every = snapshot_every
        self.manifests: dict[int, Sealed[Manifest]] = {}

    def publish(self, *versions: int) -> Sealed[Manifest]:
        for version in versions:
            folder = self.store.path(version)
            folder.mkdir()
            for name, data in version_files(version).items():
                (folder / name).write_bytes(data)
            before = self.store.path(version - 1)
            base = shardcast.Base(folder=before, snapshot_every=self.snapshot_every)
            self.manifests[version] = shardcast.publish(
                folder,
                run="demo",
                version=version,
                key=self.key,
                shard_bytes=1000,
                base=base if before.exists() else None,
            )
            self.store.adopt(version)
        return self.manifests[versions[-1]]


@pytest.fixture
def line(origin: Any) -> Line:
    return Line(origin)


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "STALL_S", 0.3)
    monkeypatch.setattr(fetch_module, "RETRY_S", 0.05)


@pytest.fixture
def relay(tmp_path: Path, key: Key, log: Log) -> Iterator[Callable[..., shardcast.Relay]]:
    running = []

    def start(name: str, upstream: str, keep_versions: int = 5) -> shardcast.Relay:
        config = shardcast.RelayConfig(
            folder=tmp_path / name,
            run="demo",
            run_key=key.public,
            upstreams=(upstream,),
            keep_versions=keep_versions,
        )
        one = shardcast.Relay(config, key, log=log, stop=threading.Event())
        one.startup()
        running.append(one)
        return one

    yield start
    for one in running:
        one.shutdown()


async def flip_deltas(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    async def flipped(message: Any) -> None:
        if message.get("body") and scope["path"].endswith(".delta"):
            message = message | {"body": bytes([message["body"][0] ^ 1]) + message["body"][1:]}
        await send(message)

    await spy.app(scope, receive, flipped)


async def gate_deltas_after_the_first_shard(
    spy: Any, start: int, scope: Any, receive: Any, send: Any
) -> None:
    if start > 0 and scope["path"].endswith(".delta"):
        await spy.pass_gate()
    await spy.app(scope, receive, send)


# -- what is sent ---------------------------------------------------------------------------------------


def test_a_client_that_follows_fetches_only_deltas_even_of_snapshots(
    line: Line, kit: Any, serve: Any, relay: Any, fetch: Any
) -> None:
    spy = kit.Spy(line.app)
    url = serve(spy)
    for version in range(7):
        folder = fetch(line.publish(version), [url])
        assert kit.file_bytes(folder) == version_files(version)
        assert {path.name for path in folder.parent.glob("v*")} == {f"v{one}" for one in range(version + 1)}
        names = {name for name, _ in spy.asked}
        assert names == (set(version_files(0)) if version == 0 else {DELTA})
        spy.asked.clear()
    assert line.manifests[4].body.is_snapshot
    assert line.manifests[4].body.base == 3
    assert not line.manifests[5].body.is_snapshot


def test_a_chain_through_a_tree_and_a_late_joiner(
    line: Line, kit: Any, serve: Any, relay: Any, fetch: Any
) -> None:
    line.snapshot_every = 8
    middle = relay("middle", serve(line.app))
    leaf = relay("leaf", middle.url)
    for version in range(6):
        sealed = line.publish(version)
        kit.eventually(lambda version=version: version in leaf.store.complete(), f"version {version}")
    # Of a delta version the leaf has only what is sent.
    assert {path.name for path in leaf.store.path(3).iterdir()} == {"manifest.json", DELTA}
    folder = fetch(sealed, [leaf.url])
    assert kit.file_bytes(folder) == version_files(5)
    assert [path.name for path in folder.parent.glob("v*")] == ["v5"]
    assert (folder / "manifest.json").read_bytes() == sealed.canonical()


def test_after_a_long_absence_the_cheapest_plan_is_used(line: Line, kit: Any, serve: Any, fetch: Any) -> None:
    spy = kit.Spy(line.app)
    url = serve(spy)
    line.publish(0, 1, 2, 3, 4)
    fetch(line.manifests[1], [url])
    spy.asked.clear()
    # Three deltas are smaller than version 4 as a snapshot.
    assert kit.file_bytes(fetch(line.manifests[4], [url])) == version_files(4)
    assert {name for name, _ in spy.asked} == {DELTA}
    # The tokenizer is reused from version 1 by its digest, the weights come from the newest snapshot.
    shutil.rmtree(fetch(line.manifests[4], [url]))
    (fetch(line.manifests[1], [url]) / WEIGHTS).unlink()
    spy.asked.clear()
    spy.asked_bytes.clear()
    line.publish(5)
    assert kit.file_bytes(fetch(line.manifests[5], [url])) == version_files(5)
    assert {name for name, _ in spy.asked} == {DELTA, WEIGHTS}
    assert spy.asked_bytes[WEIGHTS] == len(version_files(0)[WEIGHTS])


def test_an_origin_keeps_of_old_versions_only_what_newer_ones_need(
    line: Line, fetch: Any, serve: Any
) -> None:
    line.snapshot_every = 20
    line.store.keep_versions = 2
    line.publish(0, 1, 2, 3, 4)
    names = {path.name: {file.name for file in path.iterdir()} for path in line.store.folder.glob("v*")}
    assert names["v0"] == set(version_files(0)) | {"manifest.json"}
    assert names["v1"] == names["v2"] == {"manifest.json", DELTA}
    assert names["v3"] == names["v4"] == set(version_files(0)) | {"manifest.json", DELTA}
    assert (fetch(line.manifests[4], [serve(line.app)]) / WEIGHTS).read_bytes() == version_files(4)[WEIGHTS]


def test_versions_that_a_new_snapshot_makes_useless_are_deleted(
    line: Line, relay: Any, serve: Any, kit: Any
) -> None:
    line.store.keep_versions = 2
    one = relay("relay", serve(line.app), keep_versions=2)
    line.publish(0, 1, 2, 3)
    kit.eventually(lambda: one.store.complete() == (0, 1, 2, 3), "the chain down to its snapshot")
    line.publish(4)
    kit.eventually(lambda: 4 in one.store.complete(), "version 4")
    assert 0 in one.store.known()  # version 3 is kept, and builds on it
    line.publish(5)
    kit.eventually(lambda: one.store.complete() == (4, 5), "the end of versions 0 to 3")
    assert line.store.known() == (4, 5)


def test_a_relay_that_comes_late_gets_the_whole_chain(
    line: Line, relay: Any, serve: Any, kit: Any, fetch: Any
) -> None:
    line.snapshot_every = 20
    line.publish(0, 1, 2, 3, 4, 5, 6)
    one = relay("relay", serve(line.app), keep_versions=2)
    kit.eventually(lambda: one.store.complete() == (0, 1, 2, 3, 4, 5, 6), "all it needs")
    assert kit.file_bytes(fetch(line.manifests[6], [one.url])) == version_files(6)


# -- what goes wrong ------------------------------------------------------------------------------------


def forget(store: Any, version: int) -> None:
    """Makes the store forget a version."""
    with store._lock:
        store._versions.pop(version)


def test_a_snapshot_replaces_a_missing_version(
    line: Line, kit: Any, serve: Any, fetch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(line.app)
    line.publish(0, 1, 2, 3, 4, 5)
    fetch(line.manifests[1], [url])
    forget(line.store, 2)
    with caplog.at_level(logging.WARNING):
        folder = fetch(line.manifests[5], [url])
    assert kit.file_bytes(folder) == version_files(5)
    assert "builds on version 2, whose manifest is not available" in caplog.text


def test_a_snapshot_replaces_a_delta_that_no_relay_sends(
    line: Line, kit: Any, serve: Any, fetch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    line.publish(0, 1, 2, 3, 4)
    relays = [serve(kit.Spy(line.app, flip_deltas))]
    fetch(line.manifests[0], relays)
    with caplog.at_level(logging.WARNING):
        folder = fetch(line.manifests[4], relays)
    assert kit.file_bytes(folder) == version_files(4)
    assert "relay dropped because it sent wrong bytes" in caplog.text
    assert "looking for another plan" in caplog.text


def test_the_error_without_any_plan_names_the_reason(
    line: Line, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    url = serve(line.app)
    line.publish(0, 1, 2, 3)
    forget(line.store, 2)
    with pytest.raises(DeadlinePassed, match=r"cannot fetch version 3: .*the manifest of version 2"):
        fetch(line.manifests[3], [url], deadline_s=1.0)
    with pytest.raises(DeadlinePassed, match=r"no usable relay.*wrong bytes"):
        fetch(line.manifests[1], [serve(kit.Spy(line.app, flip_deltas))])
    assert not (tmp_path / "client" / "v3").exists()
    assert not (tmp_path / "client" / "v1").exists()


def test_an_honest_relay_replaces_a_corrupting_one(
    line: Line, kit: Any, serve: Any, fetch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    line.publish(0, 1, 2, 3)
    liar = serve(kit.Spy(line.app, flip_deltas))
    choice = shardcast.RelayChoice([liar, serve(line.app)])
    choice.delivered(liar, 1e9)
    assert kit.file_bytes(fetch(line.manifests[3], choice)) == version_files(3)


def test_a_damaged_base_is_detected_and_not_used(
    line: Line, kit: Any, serve: Any, fetch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(line.app)
    line.publish(0, 1, 2)
    here = fetch(line.manifests[1], [url]) / WEIGHTS
    data = bytearray(here.read_bytes())
    data[777] ^= 1
    here.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        folder = fetch(line.manifests[2], [url])
    assert kit.file_bytes(folder) == version_files(2)
    assert "has a wrong digest and was deleted" in caplog.text


def test_a_wrong_digest_in_a_signed_manifest_leaves_no_file(
    line: Line, key: Key, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    """The manifest is signed and every shard is right, but the delta does not yield the listed file."""
    line.publish(0, 1)
    body = line.manifests[1].body
    files = tuple(
        entry.model_copy(update={"blake3": "0" * 64}) if entry.name == WEIGHTS else entry
        for entry in body.files
    )
    wrong = seal(body.model_copy(update={"files": files}), key)
    with pytest.raises(
        CorruptData, match=r"every plan for model\.safetensors gave wrong bytes; tried: .*delta of v1"
    ):
        fetch(wrong, [serve(line.app)])
    assert not (tmp_path / "client" / "v1").exists()
    assert not (tmp_path / "client" / "v1.partial" / WEIGHTS).exists()
    assert not list((tmp_path / "client" / "v1.partial").glob(".*"))


@pytest.mark.parametrize("kind", ["other key", "other run"])
def test_manifests_of_base_versions_are_verified_too(
    kind: str, line: Line, key: Key, serve: Any, fetch: Any
) -> None:
    line.publish(0, 1)
    body = line.manifests[0].body
    forged = (
        seal(body, Key.generate())
        if kind == "other key"
        else seal(body.model_copy(update={"run": "other"}), key)
    )
    stored = line.store.get(0)
    stored.sealed = forged
    with pytest.raises(DeadlinePassed, match=r"the manifest of version 0.*(is signed by|is for run)"):
        fetch(line.manifests[1], [serve(line.app)], deadline_s=0.5)


# -- restarts -------------------------------------------------------------------------------------------


def test_a_restarted_client_continues_a_chain(
    line: Line, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    line.publish(0, 1, 2, 3)
    gated = kit.Spy(line.app, gate_deltas_after_the_first_shard)
    with pytest.raises(DeadlinePassed):
        fetch(line.manifests[3], [serve(gated)], deadline_s=1.0)
    assert (tmp_path / "client" / "v3.partial" / f".{DELTA}.partial").exists()
    spy = kit.Spy(line.app)
    assert kit.file_bytes(fetch(line.manifests[3], [serve(spy)])) == version_files(3)
    assert spy.asked.count((DELTA, 0)) == 2  # of versions 1 and 2; that of version 3 was already here


def test_a_relay_restarted_in_the_middle_of_a_delta_version(
    line: Line, kit: Any, serve: Any, relay: Any, fetch: Any, key: Key
) -> None:
    line.publish(0, 1)
    gated = kit.Spy(line.app, gate_deltas_after_the_first_shard)
    first = relay("relay", serve(gated))

    def first_shard() -> bool:
        stored = first.store.get(1)
        return stored is not None and stored.assembly.verified_until(DELTA, 0, 1000) == 1000

    kit.eventually(first_shard, "the first shard of the delta")
    line.store.close()
    gated.gate.set()
    first.shutdown()
    spy = kit.Spy(kit.Origin(line.store.folder, key).app)
    second = relay("relay", serve(spy))
    kit.eventually(lambda: second.store.complete() == (0, 1), "the rest")
    assert (DELTA, 0) not in spy.asked
    assert kit.file_bytes(fetch(line.manifests[1], [second.url])) == version_files(1)


def test_pruning_keeps_the_newest_version_as_a_base(line: Line, kit: Any, serve: Any, fetch: Any) -> None:
    spy = kit.Spy(line.app)
    url = serve(spy)
    for version in range(4):
        folder = fetch(line.publish(version), [url])
        shardcast.prune_versions(folder.parent, 1)
        assert [path.name for path in folder.parent.glob("v*")] == [f"v{version}"]
    assert kit.file_bytes(folder) == version_files(3)
    assert {name for name, _ in spy.asked if name == WEIGHTS} == {WEIGHTS}
    assert spy.asked_bytes[WEIGHTS] == len(version_files(0)[WEIGHTS])


def test_a_client_that_recycles_has_the_right_files_after_every_delta(
    line: Line, kit: Any, serve: Any, fetch: Any
) -> None:
    spy = kit.Spy(line.app)
    url = serve(spy)
    for version in range(6):
        folder = fetch(line.publish(version), [url])
        into = folder.parent
        assert all(kit.file_bytes(path) == version_files(int(path.name[1:])) for path in into.glob("v*"))
        shardcast.prune_versions(into, 2, recycle=True)
        assert (into / ".recycled").exists() == (version >= 2)
    (into / ".recycled").write_bytes(b"damaged")
    spy.treat = flip_deltas
    folder = fetch(line.publish(6), [url, serve(line.app)])
    assert kit.file_bytes(folder) == version_files(6)
    assert not (into / ".recycled").exists()


# -- a publisher that lost its versions -------------------------------------------------------------------


def sent_whole(line: Line, kit: Any, tmp_path: Path, version: int) -> Any:
    """Returns an origin of the same run with the same weights, but without the older versions that deltas need."""
    again = kit.Origin(tmp_path / "again", line.key)
    sealed = again.publish(version, version_files(version))
    assert sealed.body.is_snapshot
    assert not line.manifests[version].body.is_snapshot
    return again


def test_a_client_with_a_delta_manifest_takes_the_whole_version(
    line: Line, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    line.publish(0, 1)
    again = sent_whole(line, kit, tmp_path, 1)
    folder = fetch(line.manifests[1], [serve(again.app)])
    assert kit.file_bytes(folder) == version_files(1)
    assert fetch(line.manifests[1], []) == folder  # the folder satisfies both manifests


def test_a_relay_with_a_delta_manifest_takes_the_whole_version(
    line: Line, kit: Any, serve: Any, fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "STALL_S", 0.3)
    line.publish(0, 1)
    store = shardcast.VersionStore(tmp_path / "relay", run="demo", run_key=line.key.public)
    store.begin(line.manifests[1])
    url, stop = serve(sent_whole(line, kit, tmp_path, 1).app), threading.Event()
    mirror = shardcast.Mirror(store, [lambda: url], log=Log("test"), stop=stop)
    mirror.start()
    kit.eventually(lambda: store.complete() == (1,), "the version, whole")
    stop.set()
    mirror.close()
    relay = serve(shardcast.RelayApp(store))
    assert kit.file_bytes(fetch(line.manifests[1], [relay])) == version_files(1)


def test_a_complete_version_is_not_replaced(line: Line, kit: Any, tmp_path: Path) -> None:
    line.publish(0, 1)
    again = sent_whole(line, kit, tmp_path, 1)
    line.store.begin(again.store.get(1).sealed)
    assert line.store.get(1).sealed == line.manifests[1]
