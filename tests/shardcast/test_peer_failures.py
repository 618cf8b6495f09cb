"""Failures that break the package `shardcast` 0.3.2, which we compare with: one test each that Shoal survives them."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.net.http_server import listen
from shoal.net.rate_limit import ServerLimits
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast import RelayServer, VersionStore, fetch_manifest
from shoal.shardcast.client import download as download_module
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed, canonical_json


class FixedAnswer:
    """A server that answers every request with the same bytes."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture
def terms(key: Key, log: Log, stop: threading.Event) -> dict[str, Any]:
    return {"run_key": key.public, "log": log, "stop": stop, "run": "demo"}


def test_a_hanging_relay_is_bypassed(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package `shardcast`, with a timeout of 1 s, is delayed by 169 s by one hanging relay of two."""
    monkeypatch.setattr(download_module, "SECOND_REQUEST_S", 0.05)
    sealed = origin.publish(7, kit.random_files())
    with socket.socket() as hung:  # accepts connections and never reads from them
        hung.bind(("127.0.0.1", 0))
        hung.listen(64)
        hanging = f"http://127.0.0.1:{hung.getsockname()[1]}"
        assert kit.file_bytes(fetch(sealed, [hanging, serve(origin.app)])) == kit.random_files()


def test_an_idle_connection_blocks_no_client(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    """One silent connection blocks a relay of the package `shardcast` for all clients."""
    sealed = origin.publish(7, kit.random_files())
    url = serve(origin.app)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))):
        assert kit.file_bytes(fetch(sealed, [url])) == kit.random_files()


def test_clients_succeed_in_spite_of_refused_connections(
    origin: Any, kit: Any, fetch: Any, tmp_path: Path
) -> None:
    """Most connections are refused and closed repeatedly, and every client still gets its version."""
    sealed = origin.publish(7, kit.random_files())
    server = RelayServer(origin.store, listen("127.0.0.1", 0), limits=ServerLimits(connections_per_address=2))
    server.start()
    try:
        with ThreadPoolExecutor(5) as pool:
            url = f"http://127.0.0.1:{server.port}"
            fetched = [pool.submit(fetch, sealed, [url], into=f"client{index}") for index in range(5)]
            assert all(kit.file_bytes(one.result(100)) == kit.random_files() for one in fetched)
    finally:
        server.close()


def test_a_wrong_bit_costs_one_shard(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package `shardcast` loads the whole file again, and leaves the corrupt file in place."""
    monkeypatch.setattr(download_module, "SECOND_REQUEST_S", 1000.0)
    monkeypatch.setattr(download_module, "LAST_REQUEST_S", 0.0)  # one request per shard

    async def flip(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
        async def spoil(message: Any) -> None:
            if message.get("body"):
                message = message | {"body": message["body"][:-1] + bytes([message["body"][-1] ^ 1])}
            await send(message)

        await spy.app(scope, receive, spoil)

    sealed = origin.publish(7, kit.random_files())
    faulty, honest = kit.Spy(origin.app, flip), kit.Spy(origin.app)
    assert kit.file_bytes(fetch(sealed, [serve(faulty), serve(honest)])) == kit.random_files()
    # An unknown relay gets one shard at a time, so exactly one was requested again elsewhere.
    assert len(faulty.asked) == 1
    assert len(honest.asked) == 14


def test_a_forged_manifest_is_refused(origin: Any, kit: Any, serve: Any, terms: Any, tmp_path: Path) -> None:
    """The package `shardcast` trusts any server that lists the checksums."""
    liar = kit.Origin(tmp_path / "liar", Key.generate())
    liar.publish(8, kit.random_files(seed=666))
    sealed = origin.publish(7, kit.random_files())
    lying = serve(liar.app)
    assert fetch_manifest(None, [lying, serve(origin.app)], deadline_s=30, **terms) == sealed
    with pytest.raises(DeadlinePassed, match="is signed by"):
        fetch_manifest(None, [lying], deadline_s=0.1, **terms)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "..", ".hidden", "a/b", "a\\b", "", "a\x00b"])
def test_no_name_leaves_the_folder(
    origin: Any, kit: Any, serve: Any, key: Key, terms: Any, tmp_path: Path, name: str
) -> None:
    """The package `shardcast` writes a version named ../../x outside of the folder."""
    body = json.loads(origin.publish(7, kit.random_files()).canonical())["body"]
    body["files"][0]["name"] = name
    signature = key.sign(Manifest.tag.encode() + b"\n" + canonical_json(body))
    forged = canonical_json({"body": body, "key": key.public, "signature": signature})
    with pytest.raises(Rejected, match="malformed"):  # even from the run key itself
        Sealed[Manifest].parse(forged)
    with pytest.raises(DeadlinePassed, match="not a manifest"):
        fetch_manifest(7, [serve(FixedAnswer(forged))], deadline_s=0.1, **terms)


@pytest.mark.parametrize("version", [-1, "../../x", "7/../8", 1.5, None])
def test_a_version_is_a_number(origin: Any, kit: Any, key: Key, version: Any, tmp_path: Path) -> None:
    value = json.loads(origin.publish(7, kit.random_files()).canonical())
    value["body"]["version"] = version
    with pytest.raises(Rejected, match="malformed"):
        Sealed[Manifest].parse(json.dumps(value))
    store = VersionStore(tmp_path / "relay", run="demo", run_key=key.public)
    assert list(store.folder.glob("v*")) == []
