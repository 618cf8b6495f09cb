"""Requests for several shards at once: from fast relays, and without loss when a response ends early."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.shardcast import RelayChoice
from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client import download as download_module
from shoal.shardcast.client.download import Download
from shoal.shardcast.manifest_files import prepare_folder
from shoal.telemetry import Log

NUM_BYTES = 100_000  # 100 shards


def asked_of(origin: Any, kit: Any, serve: Any, fetch: Any, bytes_per_s: float, treat: Any = None) -> Any:
    sealed = origin.publish(7, kit.random_files(num_bytes=NUM_BYTES))
    spy = kit.Spy(origin.app, treat)
    urls = [serve(spy)] + ([serve(origin.app)] if treat else [])
    choice = RelayChoice(urls)
    choice.delivered(urls[0], bytes_per_s)
    assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files(num_bytes=NUM_BYTES)
    return spy


def test_a_fast_relay_is_asked_for_many_shards_at_once(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    spy = asked_of(origin, kit, serve, fetch, 1e9)
    assert len(spy.asked) < 60
    assert spy.asked_bytes["model.safetensors"] == NUM_BYTES


def test_a_slow_relay_is_asked_for_one_shard_at_a_time(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "REQUEST_S", 0.0)
    assert len(asked_of(origin, kit, serve, fetch, 1e9).asked) == 1 + 3 + 100


def test_shards_before_an_early_end_are_kept(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    """Every response ends in its second shard: the first is kept, the others are requested elsewhere."""

    async def end_early(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
        sent = 0

        async def some(message: Any) -> None:
            nonlocal sent
            body = message.get("body", b"")
            if sent < 1500:
                await send(message | ({"body": body[: 1500 - sent], "more_body": True} if body else {}))
            sent += len(body)

        await spy.app(scope, receive, some)

    spy = asked_of(origin, kit, serve, fetch, 1e9, end_early)
    assert spy.asked, "the relay whose responses end early was never asked"


@pytest.mark.parametrize(
    ("last_request_s", "end"), [(0.0, [1, 1, 1, 1]), (1e-8, [2, 2, 2, 1, 1, 1]), (1.0, [6, 3, 1, 1, 1, 1])]
)
def test_requests_get_smaller_towards_the_end(
    origin: Any,
    kit: Any,
    tmp_path: Path,
    log: Log,
    stop: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    last_request_s: float,
    end: list[int],
) -> None:
    """Shards of 1,000 bytes from a relay with 1e12 bytes per second, four threads; the last three are of another file."""
    monkeypatch.setattr(download_module, "LAST_REQUEST_S", last_request_s)
    sealed = origin.publish(7, kit.random_files(num_bytes=NUM_BYTES))
    prepare_folder(tmp_path / "v7", sealed)
    choice = RelayChoice(["http://a"])
    choice.delivered("http://a", 1e12)
    download = Download(Assembly(tmp_path / "v7", sealed.body), choice, log=log, stop=stop)
    lengths = []
    while download._pending:
        lengths.append(len(download._take_run(download._pending[0], "http://a")))
    assert sum(lengths) == 1 + 3 + 100
    assert max(lengths) > 5
    assert lengths[-len(end) :] == end, lengths


@pytest.mark.parametrize(("fast_bytes_per_s", "num_streams"), [(-1.0, 2), (1e18, 4)])
def test_a_single_relay_gets_more_threads_unless_it_is_fast(
    origin: Any,
    kit: Any,
    serve: Any,
    tmp_path: Path,
    log: Log,
    stop: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    fast_bytes_per_s: float,
    num_streams: int,
) -> None:
    monkeypatch.setattr(download_module, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(download_module, "FAST_BYTES_PER_S", fast_bytes_per_s)
    monkeypatch.setattr(download_module, "REQUEST_S", 0.0)

    async def slowly(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)  # 104 requests: the number of threads is checked many times
        await spy.app(scope, receive, send)

    sealed = origin.publish(7, kit.random_files(num_bytes=NUM_BYTES))
    prepare_folder(tmp_path / "v7", sealed)
    choice = RelayChoice([serve(kit.Spy(origin.app, slowly))])
    download = Download(Assembly(tmp_path / "v7", sealed.body), choice, log=log, stop=stop)
    download.run(60)
    assert len(download._threads) == num_streams
