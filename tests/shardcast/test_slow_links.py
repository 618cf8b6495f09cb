"""Slow, distant and lossy links: a growing shard is progress, nothing is sent twice, and the origin is the last source."""

import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import shardcast
from shoal.net.file_server import FileRequest, FileResponse
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast import RelayChoice
from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client import download as download_module
from shoal.shardcast.client import http_source
from shoal.shardcast.client.download import Download
from shoal.shardcast.manifest_files import prepare_folder
from shoal.shardcast.relay import mirror as mirror_module
from shoal.telemetry import Log
from shoal.wire.keys import Key

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from throttle import Link

RUN = "demo"


@pytest.fixture
def link() -> Iterator[Callable[..., Link]]:
    """Returns a function that puts a link in front of a URL."""
    links: list[Link] = []

    def make(url: str, **values: Any) -> Link:
        links.append(Link(int(url.rsplit(":", 1)[1]), **values))
        return links[-1]

    yield make
    for one in links:
        one.close()


def publish(origin: Any, version: int, num_bytes: int, shard_bytes: int) -> Any:
    """Publishes one file in few, large shards."""
    folder = origin.store.path(version)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (num_bytes // 256))
    sealed = shardcast.publish(folder, run=RUN, version=version, key=origin.key, shard_bytes=shard_bytes)
    origin.store.adopt(version)
    return sealed


# -- growing shards ---------------------------------------------------------------------------------------


def shorten(monkeypatch: pytest.MonkeyPatch, stall_s: float) -> None:
    """Makes every timeout shorter than a shard takes, but longer than the pauses between its bytes."""
    for module in (http_source, download_module):
        monkeypatch.setattr(module, "PROGRESS_BYTES", 2000)
    monkeypatch.setattr(http_source, "ANSWER_DEADLINE_S", stall_s)
    monkeypatch.setattr(mirror_module, "STALL_S", stall_s)


def test_a_relay_finishes_a_shard_that_takes_longer_than_every_timeout(
    origin: Any,
    kit: Any,
    serve: Any,
    link: Any,
    key: Key,
    log: Log,
    stop: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten(monkeypatch, 0.4)
    publish(origin, 1, 30_000, 30_000)
    slow = link(serve(origin.app), bytes_per_s=40_000)
    store = shardcast.VersionStore(tmp_path / "relay", run=RUN, run_key=key.public)
    mirror = mirror_module.Mirror(store, [lambda: slow.url], log=log, stop=stop)
    mirror.start()
    try:
        kit.eventually(lambda: store.complete() == (1,), "the whole version over the slow link")
    finally:
        stop.set()
        mirror.close()


def test_a_fetch_without_another_deadline_takes_as_long_as_it_needs(
    origin: Any, serve: Any, link: Any, key: Key, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 1.2)
    sealed = publish(origin, 1, 30_000, 30_000)
    slow = link(serve(origin.app), bytes_per_s=15_000)
    terms: dict[str, Any] = {"run_key": key.public, "log": log, "stop": threading.Event()}
    folder = shardcast.fetch_version(
        sealed, [slow.url], tmp_path / "client", deadline_s=1.2, while_growing=True, **terms
    )
    assert (folder / "model.safetensors").stat().st_size == 29_952


def test_single_bytes_are_no_progress(
    origin: Any, serve: Any, fetch: Any, link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that sends next to nothing does not keep a fetch from its other plans, or from its end."""
    shorten(monkeypatch, 0.2)
    for module in (http_source, download_module):
        monkeypatch.setattr(module, "PROGRESS_BYTES", 1 << 30)
    sealed = publish(origin, 1, 30_000, 30_000)
    drip = link(serve(origin.app), bytes_per_s=10_000)
    with pytest.raises(DeadlinePassed, match=r"1 of 1 shards missing"):
        fetch(sealed, [drip.url], deadline_s=0.8)


class Clock:
    """Stands in for the module `time`."""

    passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed_s


class GrowingRelay(shardcast.RelayApp):
    """A relay that is receiving its only shard: it gets `num_bytes` more, and 4 seconds pass, at each request for it.

    At the eighth request the shard is complete, if `data` is given.
    """

    def __init__(self, store: shardcast.VersionStore, data: bytes, *, num_bytes: int, clock: Clock) -> None:
        super().__init__(store)
        self._data, self._num_bytes, self._clock = data, num_bytes, clock
        self.asked = 0

    async def __call__(self, request: FileRequest) -> FileResponse:
        stored = self.store.get(1)
        assert stored is not None
        self.asked += 1
        self._clock.passed_s += 4.0
        stored.assembly.count_received("model.safetensors", self._num_bytes)
        if self.asked == 8 and self._data:
            stored.assembly.write(stored.assembly.missing()[0], self._data)
        return await super().__call__(request)


@pytest.mark.parametrize("num_bytes", [3000, 0])
def test_a_shard_that_grows_at_the_relay_is_progress(
    origin: Any,
    serve: Any,
    key: Key,
    log: Log,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
) -> None:
    """The relay has no complete shard to send for 32 s. Without growth the download ends after 10."""
    shorten(monkeypatch, 60.0)
    monkeypatch.setattr(http_source, "SHARD_WAIT_S", 0.0)
    monkeypatch.setattr(download_module, "time", clock := Clock())
    sealed = publish(origin, 1, 30_000, 30_000)
    store = shardcast.VersionStore(tmp_path / "relay", run=RUN, run_key=key.public)
    store.begin(sealed)
    data = (origin.store.path(1) / "model.safetensors").read_bytes() if num_bytes else b""
    relay = GrowingRelay(store, data, num_bytes=num_bytes, clock=clock)
    prepare_folder(tmp_path / "client", sealed)
    assembly = Assembly(tmp_path / "client", sealed.body)
    download = Download(assembly, RelayChoice([serve(relay)]), log=log, stop=threading.Event())
    if num_bytes:
        download.run(math.inf, stall_s=10.0)
        assert assembly.complete and relay.asked == 8
    else:
        with pytest.raises(DeadlinePassed, match=r"1 of 1 shards missing.*has not arrived here yet"):
            download.run(math.inf, stall_s=10.0)


def test_a_relay_cannot_claim_growth_for_ever(
    origin: Any, serve: Any, key: Key, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, 60.0)
    monkeypatch.setattr(http_source, "SHARD_WAIT_S", 0.0)
    monkeypatch.setattr(download_module, "time", clock := Clock())
    sealed = publish(origin, 1, 30_000, 30_000)
    store = shardcast.VersionStore(tmp_path / "relay", run=RUN, run_key=key.public)
    store.begin(sealed)
    relay = GrowingRelay(store, b"", num_bytes=40_000, clock=clock)
    prepare_folder(tmp_path / "client", sealed)
    assembly = Assembly(tmp_path / "client", sealed.body)
    download = Download(assembly, RelayChoice([serve(relay)]), log=log, stop=threading.Event())
    with pytest.raises(DeadlinePassed):
        download.run(math.inf, stall_s=10.0)


# -- the last source --------------------------------------------------------------------------------------


def test_the_origin_is_asked_when_relays_deliver_too_little(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "LAST_SOURCE_S", 0.05)
    sealed = origin.publish(7, kit.random_files())
    with socket.socket() as hung:  # accepts connections and never reads from them
        hung.bind(("127.0.0.1", 0))
        hung.listen(64)
        choice = RelayChoice([f"http://127.0.0.1:{hung.getsockname()[1]}"], last=serve(origin.app))
        assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files()


def test_the_origin_is_asked_at_once_if_there_is_no_relay(
    origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    sealed = origin.publish(7, kit.random_files())
    assert kit.file_bytes(fetch(sealed, RelayChoice([], last=serve(origin.app)))) == kit.random_files()


def test_the_origin_is_asked_if_every_relay_sends_wrong_bytes(
    origin: Any, kit: Any, serve: Any, fetch: Any, link: Any
) -> None:
    sealed = origin.publish(7, kit.random_files())
    url = serve(origin.app)
    liar = link(url, corrupt_every=1)
    assert kit.file_bytes(fetch(sealed, RelayChoice([liar.url], last=url))) == kit.random_files()


def test_the_origin_is_left_alone_while_relays_deliver(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "LAST_SOURCE_S", 600.0)
    sealed = origin.publish(7, kit.random_files())
    relay, spy = serve(origin.app), kit.Spy(origin.app)
    choice = RelayChoice([relay], last=serve(spy))
    assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files()
    assert spy.asked == []
    choice.update([relay, choice.last], last=choice.last)
    assert choice.last == "" and len(choice.urls) == 2, "a relay stays one if it is the origin too"


# -- distant and lossy links ------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.parametrize("latency_ms", [20, 150])
@pytest.mark.parametrize("mbit", [40, 590])
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_links_with_latency_and_loss(
    origin: Any, serve: Any, link: Any, fetch: Any, latency_ms: int, mbit: int, loss: float
) -> None:
    """Two relays behind such links; the bytes that were sent for nothing stay few. No speed is asserted."""
    sealed = publish(origin, 1, 16 << 20, 1 << 20)
    far = {"bytes_per_s": mbit * 1e6 / 8, "latency_s": latency_ms / 1e3, "loss": loss}
    links = [link(serve(origin.app), **far) for _ in range(2)]
    folder = fetch(sealed, [one.url for one in links], deadline_s=240.0)
    assert (folder / "model.safetensors").stat().st_size == 16 << 20
    sent = sum(one.num_bytes for one in links)
    assert sent < 1.5 * (16 << 20), f"{sent / (16 << 20):.2f} times the file was sent"


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_chain_of_relays_over_slow_links_sends_large_shards_once(
    origin: Any, kit: Any, serve: Any, link: Any, key: Key, log: Log, stop: threading.Event, tmp_path: Path
) -> None:
    """4 MB/s and 64 MiB shards: each takes longer than any timeout."""
    publish(origin, 1, 128 << 20, 64 << 20)
    slow = link(serve(origin.app), bytes_per_s=4e6, latency_s=0.02)
    store = shardcast.VersionStore(tmp_path / "relay", run=RUN, run_key=key.public)
    mirror = mirror_module.Mirror(store, [lambda: slow.url], log=log, stop=stop)
    mirror.start()
    try:
        kit.eventually(lambda: store.complete() == (1,), "the whole version", deadline_s=200.0)
    finally:
        stop.set()
        mirror.close()
    assert slow.num_bytes < 1.1 * (128 << 20)
