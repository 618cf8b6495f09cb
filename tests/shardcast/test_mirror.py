"""The mirror: relays pass shards on as they arrive, and accept only signed and newer manifests."""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shoal.shardcast import Mirror, RelayApp, VersionStore
from shoal.shardcast.relay import mirror as mirror_module
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.record import seal


class Node:
    """A store, the mirror that fills it, and the application over it."""

    def __init__(self, folder: Path, key: Key, upstreams: list[str], log: Log, keep_versions: int) -> None:
        self.store = VersionStore(folder, keep_versions, run="demo", run_key=key.public)
        self.app = RelayApp(self.store)
        self.stop = threading.Event()
        self.completed: list[int] = []
        self.mirror = Mirror(
            self.store,
            [functools.partial(str, url) for url in upstreams],
            log=log,
            stop=self.stop,
            on_complete=self.completed.append,
        )
        self.mirror.start()

    def close(self) -> None:
        self.stop.set()
        self.mirror.close(0.1)  # polling threads end when their upstream closes


@pytest.fixture
def node(tmp_path: Path, key: Key, log: Log) -> Iterator[Callable[..., Node]]:
    nodes = []

    def start(name: str, upstreams: list[str], keep_versions: int = 5) -> Node:
        nodes.append(Node(tmp_path / name, key, upstreams, log, keep_versions))
        return nodes[-1]

    yield start
    for one in nodes:
        one.close()


async def gate_after_the_first(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    if start > 0:
        await spy.pass_gate()
    await spy.app(scope, receive, send)


async def flip_a_byte(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    async def flipped(message: Any) -> None:
        if message.get("body"):
            message = message | {"body": bytes([message["body"][0] ^ 1]) + message["body"][1:]}
        await send(message)

    await spy.app(scope, receive, flipped)


def fixed_latest(sealed: Any) -> Any:
    """Returns an upstream that always answers with this manifest."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": message["type"] + ".complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": sealed.canonical()})

    return app


def test_a_tree_of_depth_two(
    origin: Any, kit: Any, serve: Any, node: Any, fetch: Any, http: httpx2.Client
) -> None:
    spy = kit.Spy(origin.app)
    middle = node("middle", [serve(spy)])
    leaf = node("leaf", [serve(middle.app)])
    url = serve(leaf.app)
    for version in (1, 2):
        sealed = origin.publish(version, kit.random_files(seed=version))
        kit.eventually(lambda version=version: version in leaf.store.complete(), f"version {version}")
        assert kit.file_bytes(fetch(sealed, [url], into=f"c{version}")) == kit.random_files(seed=version)
    kit.eventually(lambda: leaf.completed == [1, 2], "both versions")
    assert http.get(f"{url}/manifests/2").content == sealed.canonical()
    # The origin sent each byte once, to its only relay, and unchanged files not again.
    kit.eventually(lambda: origin.app.bytes_sent == 2 * 9_500 + 2_300 + 20, "the count of what was sent")


def test_a_shard_is_served_while_others_are_missing(
    origin: Any, kit: Any, serve: Any, node: Any, http: httpx2.Client
) -> None:
    gated = kit.Spy(origin.app, gate_after_the_first)
    middle = node("middle", [serve(gated)])
    leaf = node("leaf", [serve(middle.app)])
    url = serve(leaf.app) + "/versions/1/model.safetensors"
    data = kit.random_files()["model.safetensors"]
    origin.publish(1, kit.random_files())
    kit.eventually(lambda: leaf.store.newest == 1, "the manifest at the leaf")
    # Two relays further the first shard is available; the origin holds back all others.
    assert http.get(url, headers={"Range": "bytes=0-999"}).content == data[:1000]
    assert leaf.store.complete() == middle.store.complete() == ()
    assert http.get(url + "?wait_s=0", headers={"Range": "bytes=9000-9499"}).status_code == 425
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(http.get, url, headers={"Range": "bytes=9000-9499"})
        gated.gate.set()
        assert last.result(30).content == data[9000:]
    kit.eventually(lambda: leaf.store.complete() == (1,), "the whole version at the leaf")


def test_a_restarted_relay_continues_its_download(
    origin: Any, kit: Any, serve: Any, node: Any, key: Key, tmp_path: Path
) -> None:
    gated = kit.Spy(origin.app, gate_after_the_first)
    origin.publish(1, kit.random_files())
    first = node("relay", [serve(gated)])

    def first_shards() -> bool:
        stored = first.store.get(1)
        return stored is not None and stored.assembly.verified_until("model.safetensors", 0, 1000) == 1000

    kit.eventually(first_shards, "the first shard")
    # No thread may write any more: end its poll, its downloads and pending responses.
    first.stop.set()
    origin.store.close()
    first.mirror.close(30)
    gated.gate.set()
    stored = VersionStore(tmp_path / "relay", 5, run="demo", run_key=key.public).get(1)
    assert stored is not None
    missing = stored.assembly.missing()
    assert 0 < len(missing) < 14
    spy = kit.Spy(kit.Origin(origin.store.folder, key).app)
    second = node("relay", [serve(spy)])
    kit.eventually(lambda: second.store.complete() == (1,), "the rest")
    assert set(spy.asked) <= {(shard.name, shard.start) for shard in missing}
    assert spy.asked_bytes.total() == sum(shard.num_bytes for shard in missing)
    assert kit.file_bytes(second.store.path(1)) == kit.random_files()


def test_two_upstreams_of_which_one_corrupts(
    origin: Any, kit: Any, serve: Any, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        relay = node("relay", [serve(kit.Spy(origin.app, flip_a_byte)), serve(origin.app)])
        origin.publish(1, kit.random_files())
        kit.eventually(
            lambda: relay.store.complete() == (1,), "version 1 in spite of the corrupting upstream"
        )
    assert kit.file_bytes(relay.store.path(1)) == kit.random_files()


def test_missed_versions_are_downloaded_newest_first(origin: Any, kit: Any, serve: Any, node: Any) -> None:
    for version in range(5):
        origin.publish(version, kit.random_files(seed=version))
    relay = node("relay", [serve(origin.app)], keep_versions=3)
    kit.eventually(lambda: relay.store.complete() == (2, 3, 4), "the window")
    kit.eventually(lambda: relay.completed == [4, 3, 2], "that order")
    origin.publish(9, kit.random_files(seed=9))
    kit.eventually(lambda: 9 in relay.completed, "version 9")
    kit.eventually(
        lambda: sorted(path.name for path in relay.store.folder.glob("v*")) == ["v3", "v4", "v9"],
        "the end of version 2",
    )


@pytest.mark.parametrize("kind", ["rollback", "other key", "other run", "nonsense"])
def test_manifests_that_are_not_signed_or_not_newer_are_refused(
    kind: str,
    *,
    origin: Any,
    kit: Any,
    serve: Any,
    node: Any,
    key: Key,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "WARN_AFTER_S", 0.1)
    old = origin.publish(1, kit.random_files(seed=1))
    relay = node("relay", [serve(origin.app)])
    origin.publish(2, kit.random_files(seed=2))
    kit.eventually(lambda: 2 in relay.store.complete(), "version 2")
    relay.close()
    later = old.body.model_copy(update={"version": 7})

    class Nonsense:
        def canonical(self) -> bytes:
            return b"<html>"

    offered, words = {
        "rollback": (old, "upstream offered version 1 as newer than 2; ignored"),
        "other key": (seal(later, Key.generate()), "is signed by"),
        "other run": (seal(later.model_copy(update={"run": "x"}), key), "is for run 'x'"),
        "nonsense": (Nonsense(), "not a manifest"),
    }[kind]
    with caplog.at_level(logging.INFO):
        crooked = node("relay", [serve(fixed_latest(offered))])
        kit.eventually(lambda: words in caplog.text, words)
    assert crooked.store.newest == 2
    assert not (crooked.store.folder / "v7").exists()


def test_an_unreachable_upstream_is_logged_and_retried(
    origin: Any,
    kit: Any,
    serve: Any,
    node: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "WARN_AFTER_S", 0.1)
    with caplog.at_level(logging.INFO):
        relay = node("relay", ["http://127.0.0.1:9", serve(origin.app)])
        kit.eventually(
            lambda: "http://127.0.0.1:9: ConnectionRefusedError" in caplog.text,
            "a log line about the upstream",
        )
    relay.mirror.check()
    origin.publish(1, kit.random_files())
    kit.eventually(lambda: relay.store.complete() == (1,), "version 1 from the other")


def test_a_version_in_progress_is_finished_before_a_newer_one(
    origin: Any, kit: Any, serve: Any, node: Any
) -> None:
    gated = kit.Spy(origin.app, gate_after_the_first)
    relay = node("relay", [serve(gated)])
    origin.publish(1, kit.random_files(seed=1))
    kit.eventually(lambda: gated.asked, "the first request for version 1")
    origin.publish(2, kit.random_files(seed=2))
    kit.eventually(lambda: relay.store.newest == 2, "the manifest of version 2")
    gated.gate.set()
    kit.eventually(lambda: relay.completed == [1, 2], "both, in this order")
