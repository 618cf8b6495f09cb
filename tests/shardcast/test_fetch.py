"""The client: right files from any mixture of relays, or an error that names each relay."""

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.shardcast import RelayApp, RelayChoice, fetch_manifest, fetch_newer, fetch_version, prune_versions
from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client import download as download_module
from shoal.shardcast.delta import apply_deltas, write_delta
from shoal.shardcast.manifest_files import RECYCLED_FILE, hash_file
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import seal

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


async def flip_a_byte(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    async def flipped(message: Any) -> None:
        if message.get("body"):
            message = message | {"body": bytes([message["body"][0] ^ 1]) + message["body"][1:]}
        await send(message)

    await spy.app(scope, receive, flipped)


async def hang(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    await spy.pass_gate()
    await spy.app(scope, receive, send)


async def close_half_way(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    """Sends the headers and half of the body, then closes the connection."""
    done = False

    async def half(message: Any) -> None:
        nonlocal done
        if done:
            return
        if message["type"] == "http.response.body":
            done = True
            message = message | {"body": message["body"][: len(message["body"]) // 2], "more_body": True}
        await send(message)

    await spy.app(scope, receive, half)


async def right_up_to_4000(spy: Any, start: int, scope: Any, receive: Any, send: Any) -> None:
    await (flip_a_byte(spy, start, scope, receive, send) if start >= 4000 else spy.app(scope, receive, send))


def test_a_version_from_one_relay(origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path) -> None:
    sealed = origin.publish(7, kit.random_files())
    folder = fetch(sealed, [serve(origin.app)])
    assert folder == tmp_path / "client" / "v7"
    assert kit.file_bytes(folder) == kit.random_files()
    assert (folder / "manifest.json").read_bytes() == sealed.canonical()
    assert sorted(path.name for path in (tmp_path / "client").iterdir()) == [".boot", "v7"]
    assert fetch(sealed, []) == folder  # complete already: no relay is needed


def test_a_corrupting_relay_is_dropped_and_named(
    origin: Any, kit: Any, serve: Any, fetch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sealed = origin.publish(7, kit.random_files())
    liar = kit.Spy(origin.app, flip_a_byte)
    honest = serve(origin.app)
    lying = serve(liar)
    choice = RelayChoice([lying, honest])
    choice.delivered(lying, 1e9)  # it used to be the best by far
    choice.delivered(honest, 1.0)
    with caplog.at_level(logging.WARNING):
        folder = fetch(sealed, choice)
    assert kit.file_bytes(folder) == kit.random_files()
    assert "relay dropped because it sent wrong bytes" in caplog.text
    assert lying in caplog.text
    # Dropped at the first wrong shard: only requests that were already in flight reached it.
    assert 1 <= len(liar.asked) <= download_module.NUM_STREAMS


def test_only_corrupting_relays(origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path) -> None:
    sealed = origin.publish(7, kit.random_files())
    lying = serve(kit.Spy(origin.app, flip_a_byte))
    with pytest.raises(DeadlinePassed, match=r"no usable relay; 14 of 14 shards missing.*wrong bytes"):
        fetch(sealed, [lying])
    assert not (tmp_path / "client" / "v7").exists()
    assert not list((tmp_path / "client" / "v7.partial").glob(".*"))  # no wrong byte was written


def test_a_hanging_relay_does_not_delay_the_download(
    origin: Any, kit: Any, serve: Any, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "SECOND_REQUEST_S", 0.05)
    sealed = origin.publish(7, kit.random_files())
    hung = kit.Spy(origin.app, hang)
    hanging = serve(hung)
    choice = RelayChoice([hanging, serve(origin.app)])
    # At least one shard is requested from the hanging relay, which does not answer until the test ends.
    choice.delivered(hanging, 1.0)
    assert kit.file_bytes(fetch(sealed, choice)) == kit.random_files()
    assert not hung.gate.is_set()


def test_a_relay_that_disconnects_half_way(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    sealed = origin.publish(7, kit.random_files())
    relays = [serve(kit.Spy(origin.app, close_half_way)), serve(origin.app), NOWHERE]
    assert kit.file_bytes(fetch(sealed, relays)) == kit.random_files()


def test_a_restarted_client_fetches_only_what_is_missing(
    origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    sealed = origin.publish(7, kit.random_files())
    with pytest.raises(DeadlinePassed, match="of 14 shards missing"):
        fetch(sealed, [serve(kit.Spy(origin.app, right_up_to_4000))])
    missing = Assembly(tmp_path / "client" / "v7.partial", sealed.body).missing()
    assert 0 < len(missing) < 14  # how many depends on the size of the requests, and so on timing
    spy = kit.Spy(origin.app)
    folder = fetch(sealed, [serve(spy)])
    assert kit.file_bytes(folder) == kit.random_files()
    assert set(spy.asked) <= {(shard.name, shard.start) for shard in missing}
    assert spy.asked_bytes.total() == sum(shard.num_bytes for shard in missing)


def test_the_error_names_version_relays_and_reasons(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    sealed = origin.publish(7, kit.random_files())
    behind = kit.Origin(origin.store.folder.with_name("behind"), origin.key)
    url = serve(behind.app)
    with pytest.raises(DeadlinePassed) as caught:
        fetch(sealed, [url, NOWHERE], deadline_s=0.5)
    message = str(caught.value)
    assert "version 7 did not arrive within 0.5 s" in message
    assert f"{url}: no version '7' here" in message
    assert f"{NOWHERE}: ConnectionRefusedError" in message
    with pytest.raises(DeadlinePassed, match="no relay known"):
        fetch(sealed, [])


def test_stop_ends_a_fetch(origin: Any, kit: Any, fetch: Any, stop: threading.Event) -> None:
    sealed = origin.publish(7, kit.random_files())
    stop.set()
    with pytest.raises(Stopped, match="while fetching version 7"):
        fetch(sealed, [NOWHERE])


def test_a_manifest_of_another_key_is_refused_without_a_request(
    origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    sealed = origin.publish(7, kit.random_files())
    spy = kit.Spy(origin.app)
    with pytest.raises(Rejected, match="is signed by"):
        fetch(seal(sealed.body, Key.generate()), [serve(spy)])
    assert spy.asked == []
    assert not (tmp_path / "client").exists()


def test_files_that_did_not_change_are_not_fetched_again(
    origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    spy = kit.Spy(origin.app)
    url = serve(spy)
    fetch(origin.publish(7, kit.random_files(seed=7)), [url])
    spy.asked.clear()
    folder = fetch(origin.publish(8, kit.random_files(seed=8)), [url])
    assert kit.file_bytes(folder) == kit.random_files(seed=8)
    assert {name for name, _ in spy.asked} == {"model.safetensors"}


def test_a_version_of_the_same_number_with_other_files_is_replaced(
    origin: Any, kit: Any, serve: Any, fetch: Any, tmp_path: Path
) -> None:
    fetch(origin.publish(7, kit.random_files(seed=7)), [serve(origin.app)])
    other = kit.Origin(tmp_path / "other", origin.key)
    folder = fetch(other.publish(7, kit.random_files(seed=1)), [serve(other.app)])
    assert kit.file_bytes(folder) == kit.random_files(seed=1)


def test_relay_statistics_are_kept_over_several_fetches(
    origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    url = serve(origin.app)
    choice = RelayChoice([url, NOWHERE])
    fetch(origin.publish(7, kit.random_files(seed=7)), choice)
    assert (choice.stats[url].bandwidth or 0.0) > 0
    assert choice.stats[NOWHERE].bandwidth is None


def test_manifests_by_number_and_the_newest(
    origin: Any, kit: Any, serve: Any, key: Key, log: Log, stop: threading.Event, tmp_path: Path
) -> None:
    behind = kit.Origin(tmp_path / "behind", key)
    behind.publish(6, kit.random_files())
    foreign = kit.Origin(tmp_path / "foreign", Key.generate())
    foreign.publish(9, kit.random_files())
    sealed = origin.publish(7, kit.random_files())
    relays = [NOWHERE, *(serve(one.app) for one in (behind, foreign, origin))]
    terms: dict[str, Any] = {"run_key": key.public, "log": log, "stop": stop, "run": "demo"}
    assert fetch_manifest(None, relays, deadline_s=30, **terms) == sealed
    assert fetch_manifest(6, relays, deadline_s=30, **terms).body.version == 6
    with pytest.raises(DeadlinePassed, match=r"manifest of version 9.*is signed by"):
        fetch_manifest(9, relays, deadline_s=0.1, **terms)
    with pytest.raises(DeadlinePassed, match="is for run 'demo', expected 'x'"):
        fetch_manifest(7, relays, deadline_s=0.1, **(terms | {"run": "x"}))


def test_a_newer_version_is_waited_for_at_the_relays(
    origin: Any, kit: Any, serve: Any, key: Key, log: Log, stop: threading.Event
) -> None:
    """A pending request is answered with the new version, so the client does not poll in a loop."""
    terms: dict[str, Any] = {"run_key": key.public, "log": log, "stop": stop}
    origin.publish(6, kit.random_files(1))
    asked: list[str] = []

    class Counting(RelayApp):
        async def __call__(self, request: Any) -> Any:
            asked.append(request.path)
            return await super().__call__(request)

    found: list[Any] = []
    url = serve(Counting(origin.store))
    thread = threading.Thread(
        target=lambda: found.append(fetch_newer(6, [url], deadline_s=60, **terms)), daemon=True
    )
    thread.start()
    kit.eventually(lambda: asked, "the request")
    sealed = origin.publish(7, kit.random_files(2))
    thread.join(30)
    assert found == [sealed]
    assert len(asked) < 30, "at most a few requests, even if the first was answered before the version came"
    assert fetch_newer(5, [url], deadline_s=30, **terms) == sealed
    with pytest.raises(DeadlinePassed, match=r"a version after 7: .* nothing newer"):
        fetch_newer(7, [url], deadline_s=0.1, **terms)


def test_old_versions_of_a_client_are_pruned(origin: Any, kit: Any, serve: Any, fetch: Any) -> None:
    url = serve(origin.app)
    for version in (7, 8, 9):
        folder = fetch(origin.publish(version, kit.random_files(seed=version)), [url])
    into = folder.parent
    (into / "v6.partial").mkdir()
    (into / "v10.partial").mkdir()
    assert prune_versions(into, 2, spare={7}) == [6]
    assert prune_versions(into, 2) == [7]
    assert sorted(path.name for path in into.glob("v*")) == ["v10.partial", "v8", "v9"]


def test_fetch_version_creates_the_folder_and_accepts_a_trailing_slash(
    origin: Any, kit: Any, serve: Any, key: Key, tmp_path: Path
) -> None:
    folder = fetch_version(
        origin.publish(0, kit.random_files()),
        (serve(origin.app) + "/",),
        tmp_path / "deep" / "client",
        run_key=key.public,
        log=Log("test"),
        stop=threading.Event(),
        deadline_s=30.0,
    )
    assert folder.name == "v0"


def test_a_recycled_file_is_overwritten_by_the_next_delta(tmp_path: Path) -> None:
    old, new, payload = (tmp_path / name for name in ("old", "new", "delta"))
    old.write_bytes(random.Random(0).randbytes(9001))
    new.write_bytes(old.read_bytes()[:-3] + b"abc")
    digest = hash_file(old)
    assert write_delta(old, new, payload, old_blake3=digest, max_bytes=10**6)
    for size in (0, 5000, 9001, 20_000):
        recycled, made = tmp_path / ".recycled", tmp_path / f"made{size}"
        recycled.write_bytes(b"x" * size)
        inode = recycled.stat().st_ino
        assert apply_deltas(old, [payload], made, reuse=recycled) == hash_file(new)
        assert made.read_bytes() == new.read_bytes()
        assert made.stat().st_ino == inode
        assert not recycled.exists()
    assert apply_deltas(old, [payload], tmp_path / "fresh", reuse=tmp_path / "absent") == hash_file(new)


def test_a_file_with_a_second_name_is_never_overwritten(tmp_path: Path) -> None:
    old, new, payload = (tmp_path / name for name in ("old", "new", "delta"))
    old.write_bytes(bytes(1000))
    new.write_bytes(bytes(998) + b"ab")
    assert write_delta(old, new, payload, old_blake3=hash_file(old), max_bytes=10**6)
    recycled = tmp_path / ".recycled"
    recycled.hardlink_to(old)
    assert apply_deltas(old, [payload], tmp_path / "made", reuse=recycled) == hash_file(new)
    assert old.read_bytes() == bytes(1000)


def test_pruning_recycles_the_largest_file_unless_it_is_linked(
    origin: Any, kit: Any, serve: Any, fetch: Any
) -> None:
    url = serve(origin.app)
    for version in range(4):
        folder = fetch(origin.publish(version, kit.random_files(seed=version)), [url])
    into = folder.parent
    recycled = into / RECYCLED_FILE
    assert prune_versions(into, 3) == [0]
    assert not recycled.exists(), "only a caller that knows that nobody reads the version may recycle"
    largest = max((into / "v1").iterdir(), key=lambda path: path.stat().st_size).read_bytes()
    assert prune_versions(into, 2, recycle=True) == [1]
    assert recycled.read_bytes() == largest
    recycled.unlink()
    (into / "other").hardlink_to(max((into / "v2").iterdir(), key=lambda path: path.stat().st_size))
    assert prune_versions(into, 1, recycle=True) == [2]
    assert not recycled.exists()
