"""`shoal eval URL`: a published version, also from relays that serve members only."""

import contextlib
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_stats import stats
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal import shardcast
from shoal.cli.commands.doctor import _relay
from shoal.cli.commands.evaluate import _open_model, _willing, fetch_published
from shoal.cli.main import parse
from shoal.cli.public_api import PublicApi
from shoal.net.http_client import Unreachable
from shoal.net.http_server import Server, listen
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Info, RelayView
from shoal.wire.record import Record, Sealed, seal
from shoal.wire.request import Target, verify_request
from shoal.wire.run_spec import PROTOCOL, OwnSampling, RunSpec, Sampling, TaskSpec
from shoal.wire.ticket import Ticket


@dataclass
class Run:
    """A minimal coordinator for `shoal eval`, and one private relay."""

    run_key: Key
    member: Key
    url: str
    relay_url: str
    manifest: Sealed[Manifest]
    relay: shardcast.RelayServer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run_key, member = Key.generate(), Key.load_or_create(tmp_path / "node.key")
    store = shardcast.VersionStore(tmp_path / "relay", run="test", run_key=run_key.public)
    store.path(3).mkdir()
    (store.path(3) / "model.safetensors").write_bytes(b"weights" * 1000)
    manifest = shardcast.publish(store.path(3), run="test", version=3, key=run_key)
    store.adopt(3)
    relay = shardcast.RelayServer(store, listen("127.0.0.1", 0), private=True)
    relay.start()
    relay_url = f"http://127.0.0.1:{relay.port}"

    async def ticket(request: Request) -> Response:
        target = Target(
            method="POST", authority=request.headers["host"], path=request.url.path, query=request.url.query
        )
        try:
            signer = verify_request(request.headers, target, await request.body(), now_s=time.time())
        except Rejected:
            return Response(status_code=401)
        if signer.key != member.public:
            return Response(status_code=403)
        sealed = seal(Ticket(run="test", holder=signer.key, expires_at_s=time.time() + 900), run_key)
        return Response(sealed.model_dump_json())

    def says(record: Record) -> Response:
        return Response(record.model_dump_json())

    info = Info(
        protocol=PROTOCOL,
        software="test",
        run_key=run_key.public,
        spec=RunSpec(
            run="test",
            task=TaskSpec(name="sort", options={"length": 3}, sampling=OwnSampling(temperature=0.5)),
            compute_dtype="float32",
            sampling=Sampling(temperature=0.8, max_new_tokens=5, samples_per_prompt=4),
            keep_versions=3,
            last_version=9,
        ),
        newest_version=3,
        finished=False,
        server_time_s=time.time(),
    )
    view = RelayView(url=relay_url, liveness="live", versions=(3,), bytes_sent=0)
    routes = [
        Route("/v1/info", lambda request: says(info)),
        Route("/v1/policies/latest", lambda request: says(manifest)),
        Route("/v1/stats", lambda request: says(stats(relays=(view,)))),
        Route("/v1/tickets", ticket, methods=["POST"]),
    ]
    server = Server(Starlette(routes=routes), listen("127.0.0.1", 0))
    server.start()
    try:
        yield Run(run_key, member, f"http://127.0.0.1:{server.port}", relay_url, manifest, relay)
    finally:
        store.close()
        relay.close()
        server.close()


def fetch(run: Run, into: Path, key: Path | None) -> tuple[Info, Path, int]:
    with PublicApi(run.url) as api:
        return fetch_published(api, "newest", into, key, threading.Event())


def test_a_member_gets_a_version_from_a_private_relay(run: Run, tmp_path: Path) -> None:
    _, folder, version = fetch(run, tmp_path / "into", tmp_path / "node.key")
    assert version == 3 and (folder / "model.safetensors").read_bytes() == b"weights" * 1000


def test_a_private_relay_needs_a_members_key(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"serve members of the run only; give --key FILE"):
        fetch(run, tmp_path / "into", None)
    Key.load_or_create(tmp_path / "stranger.key")
    with pytest.raises(ValueError, match=r"accept no ticket that --key gets"):
        fetch(run, tmp_path / "into", tmp_path / "stranger.key")


def test_a_version_that_no_relay_serves_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    run.relay.close()
    with pytest.raises(ValueError, match=r"neither relays nor origin answer \(http://.*\); try again when"):
        fetch(run, tmp_path / "into", None)


def test_a_tasks_own_sampling_is_the_default(run: Run, tmp_path: Path) -> None:
    options = parse(["eval", run.url, "--key", str(tmp_path / "node.key")])
    with _open_model(options, threading.Event()) as model:
        assert model.task.name == "sort" and model.version == 3
        assert model.sampling.temperature == 0.5 and model.sampling.max_new_tokens == 5


class EndlessServer:
    """Answers every request with 256 MiB; `sent` counts the bytes that clients took."""

    def __init__(self) -> None:
        self.sent = 0
        owner = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(1 << 16)
                self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 268435456\r\n\r\n")
                with contextlib.suppress(OSError):  # the client disconnected
                    while owner.sent < 256 << 20:
                        self.request.sendall(bytes(1 << 20))
                        owner.sent += 1 << 20

        self._server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "EndlessServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_doctor_does_not_read_an_answer_without_end(run: Run) -> None:
    """A relay chooses what it sends: one that ignores the range must not fill the memory of a machine that joins."""
    with EndlessServer() as server:
        finding = _relay(server.url, run.manifest.body)
        assert finding.state == "good" and server.sent < 128 << 20


def test_a_coordinators_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shoal join URL` asks a stranger's coordinator before it confines itself."""
    monkeypatch.setattr("shoal.cli.public_api.MAX_ANSWER_BYTES", 1 << 20, raising=False)
    with EndlessServer() as server, PublicApi(server.url) as api:
        with pytest.raises(Unreachable, match="/v1/info gives more than 1,048,576 bytes"):
            api.read("/v1/info", Info)
        assert server.sent < 128 << 20


def test_a_coordinators_answer_that_comes_too_slowly_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.public_api.ANSWER_S", 0.0, raising=False)
    refused = pytest.raises(Unreachable, match="/v1/info takes more than 0 s")
    with EndlessServer() as server, PublicApi(server.url) as api, refused:
        api.read("/v1/info", Info)


@pytest.mark.parametrize("url", ["http://[::1", "http://relay.example:port", "http://relay.example\x00"])
def test_a_relays_url_that_is_none(run: Run, url: str) -> None:
    """A coordinator chooses the URLs of its relays."""
    assert _relay(url, run.manifest.body).state == "bad"
    with pytest.raises(ValueError, match="neither relays nor origin answer"):
        _willing([url], None)


def test_doctor_accepts_a_private_relay(run: Run) -> None:
    finding = _relay(run.relay_url, run.manifest.body)
    assert finding.state == "good" and "serves members only" in finding.words
