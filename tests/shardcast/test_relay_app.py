"""The routes of a relay: ranges, long polls, files that are still arriving, and refusals."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.shardcast import RelayApp, VersionStore
from shoal.shardcast.assembly import shards_of
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.messages import ProblemDetails
from shoal.wire.record import Sealed


@pytest.fixture
def url(origin: Any, kit: Any, serve: Any) -> str:
    origin.publish(3, kit.random_files())
    return str(serve(origin.app))


def write_shard(store: VersionStore, version: int, name: str, index: int, files: dict[str, bytes]) -> None:
    with store.writing(version) as assembly:
        shard = shards_of(assembly.manifest.file(name))[index]
        assembly.write(shard, files[name][shard.start : shard.stop])


@settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=st.integers(0, 9_499), length=st.integers(1, 12_000))
def test_a_range_equals_the_slice(http: httpx2.Client, url: str, kit: Any, first: int, length: int) -> None:
    data = kit.random_files()["model.safetensors"]
    last = first + length - 1
    response = http.get(f"{url}/versions/3/model.safetensors", headers={"Range": f"bytes={first}-{last}"})
    assert response.status_code == 206
    assert response.content == data[first : last + 1]
    assert response.headers["content-range"] == f"bytes {first}-{min(last, 9_499)}/9500"


def test_whole_files_and_head(http: httpx2.Client, url: str, kit: Any) -> None:
    for name, data in kit.random_files().items():
        whole = http.get(f"{url}/versions/3/{name}")
        assert (whole.status_code, whole.content) == (200, data)
        head = http.head(f"{url}/versions/3/{name}")
        assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(data)), b"")
        assert head.headers["accept-ranges"] == "bytes"


def test_bytes_sent_are_counted(http: httpx2.Client, url: str, origin: Any) -> None:
    http.get(f"{url}/versions/3/model.safetensors", headers={"Range": "bytes=100-2599"})
    http.head(f"{url}/versions/3/model.safetensors")
    assert http.get(f"{url}/healthz").json() == {
        "run": "demo",
        "newest": 3,
        "complete": [3],
        "bytes_sent": 2500,
    }
    assert origin.app.bytes_sent == 2500


REFUSALS: list[tuple[str, str | None, int, str]] = [
    ("/versions/9/model.safetensors", "bytes=0-1", 404, "request.not_found"),
    ("/versions/3/other.bin", "bytes=0-1", 404, "request.not_found"),
    ("/versions/3/..%2F..%2Fsecret", None, 404, "request.not_found"),
    ("/versions/3/%2e%2e", None, 404, "request.not_found"),
    ("/versions/3/manifest.json", None, 404, "request.not_found"),
    ("/versions/-3/config.json", None, 404, "request.not_found"),
    ("/versions/" + "9" * 5000 + "/config.json", None, 404, "request.not_found"),
    ("/versions/٣/config.json", None, 404, "request.not_found"),
    ("/manifests/9", None, 404, "request.not_found"),
    ("/somewhere", None, 404, "request.not_found"),
    ("/versions/3/model.safetensors", "bytes=9500-", 416, "request.bad_range"),
    ("/versions/3/model.safetensors", "bytes=0-1,5-6", 416, "request.bad_range"),
    ("/versions/3/empty.txt", "bytes=0-0", 416, "request.bad_range"),
    ("/manifests/latest?after=x", None, 422, "request.malformed"),
    ("/manifests/latest?wait_s=nan", None, 422, "request.malformed"),
    ("/manifests/latest?wait_s=-1", None, 422, "request.malformed"),
]


def test_refusals(http: httpx2.Client, url: str) -> None:
    for path, range_header, status, code in REFUSALS:
        response = http.get(url + path, headers={"Range": range_header} if range_header else {})
        problem = ProblemDetails.parse(response.content)
        assert (response.status_code, problem.code) == (status, code), path
        assert problem.fix


def test_other_methods_are_refused(http: httpx2.Client, url: str) -> None:
    response = http.post(f"{url}/versions/3/config.json", content=b"x")
    assert response.status_code == 405
    assert ProblemDetails.parse(response.content).code == "request.malformed"


def test_manifests(http: httpx2.Client, url: str, origin: Any, key: Key) -> None:
    stored = origin.store.get(3)
    assert Sealed[Manifest].parse(http.get(f"{url}/manifests/3").content) == stored.sealed
    assert Sealed[Manifest].parse(http.get(f"{url}/manifests/latest").content).open(key.public).version == 3
    assert http.get(f"{url}/manifests/latest?after=2").status_code == 200
    assert http.get(f"{url}/manifests/latest?after=3").status_code == 204


def test_a_long_poll_ends_with_the_next_version(http: httpx2.Client, url: str, origin: Any, kit: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(http.get, f"{url}/manifests/latest?after=3&wait_s=30")
        origin.publish(5, kit.random_files(seed=5))
        assert Sealed[Manifest].parse(poll.result(30).content).body.version == 5


def test_closing_the_store_ends_pending_polls(http: httpx2.Client, url: str, origin: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(http.get, f"{url}/manifests/latest?after=3&wait_s=30")
        origin.store.close()
        assert poll.result(10).status_code == 204


@pytest.fixture
def arriving(tmp_path: Any, origin: Any, kit: Any, key: Key) -> VersionStore:
    """Returns a relay's store that knows version 3 and has shards 0 and 1 of its weights."""
    store = VersionStore(tmp_path / "relay", 5, run="demo", run_key=key.public)
    store.begin(origin.publish(3, kit.random_files()))
    for index in (0, 1):
        write_shard(store, 3, "model.safetensors", index, kit.random_files())
    return store


def test_verified_shards_are_served_and_missing_ones_are_too_early(
    http: httpx2.Client, arriving: VersionStore, serve: Any, kit: Any
) -> None:
    url = serve(RelayApp(arriving)) + "/versions/3/model.safetensors"
    data = kit.random_files()["model.safetensors"]
    assert http.get(url, headers={"Range": "bytes=500-1999"}).content == data[500:2000]
    early = http.get(url + "?wait_s=0", headers={"Range": "bytes=2000-2000"})
    assert early.status_code == 425
    problem = ProblemDetails.parse(early.content)
    assert problem.code == "request.too_early"
    assert problem.retry_after_s


def test_a_request_waits_for_an_arriving_shard(
    http: httpx2.Client, arriving: VersionStore, serve: Any, kit: Any
) -> None:
    url = serve(RelayApp(arriving)) + "/versions/3/model.safetensors"
    data = kit.random_files()["model.safetensors"]
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(http.get, url, headers={"Range": "bytes=4000-4999"})
        whole = pool.submit(http.get, url)
        for index in range(2, 10):
            write_shard(arriving, 3, "model.safetensors", index, kit.random_files())
        assert later.result(30).content == data[4000:5000]
        assert whole.result(30).content == data


def test_a_response_over_missing_shards_starts_at_once(
    http: httpx2.Client, arriving: VersionStore, serve: Any, kit: Any
) -> None:
    url = serve(RelayApp(arriving)) + "/versions/3/model.safetensors"
    data = kit.random_files()["model.safetensors"]
    with http.stream("GET", url) as response:
        pieces = response.iter_raw(1000)
        assert next(pieces) + next(pieces) == data[:2000]  # shard 2 is still missing
        for index in range(2, 10):
            write_shard(arriving, 3, "model.safetensors", index, kit.random_files())
        assert b"".join(pieces) == data[2000:]


def test_idle_connections_block_no_client(http: httpx2.Client, url: str, kit: Any) -> None:
    host, port = url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    try:
        idle[0].sendall(b"GET /versions/3/model.safetensors HTTP/1.1\r\nHo")
        response = http.get(f"{url}/versions/3/model.safetensors", timeout=20)
        assert response.content == kit.random_files()["model.safetensors"]
    finally:
        for connection in idle:
            connection.close()


def test_many_clients_at_once(http: httpx2.Client, url: str, kit: Any) -> None:
    data = kit.random_files()["model.safetensors"]
    start = threading.Barrier(20)

    def get(index: int) -> bool:
        start.wait(20)
        part = http.get(
            f"{url}/versions/3/model.safetensors", headers={"Range": f"bytes={index}-"}, timeout=30
        )
        return bool(part.content == data[index:])

    with ThreadPoolExecutor(20) as pool:
        assert all(pool.map(get, range(20)))
