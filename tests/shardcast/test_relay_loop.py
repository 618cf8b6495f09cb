"""The whole relay: asks the coordinator, mirrors, reports, works without the coordinator, and stops."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.http_client import Refused
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast import Relay, RelayConfig, run_relay
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.messages import Info, Origin, ProblemDetails, RelayReport
from shoal.wire.request import Target, verify_request
from shoal.wire.run_spec import PROTOCOL, RunSpec, Sampling, TaskSpec


class Coordinator:
    """The routes of a coordinator that a relay uses."""

    def __init__(self, run_key: str, relay_key: str) -> None:
        self.run_key, self.relay_key = run_key, relay_key
        self.origin_url: str | None = None
        self.refuses: str | None = None
        self.reports: list[RelayReport] = []
        self.app = Starlette(
            routes=[
                Route("/v1/info", self.info),
                Route("/v1/origin", self.origin),
                Route("/v1/relays", self.relays, methods=["POST"]),
            ]
        )

    async def info(self, request: Request) -> Response:
        spec = RunSpec(
            run="demo",
            task=TaskSpec(name="sort"),
            compute_dtype="float32",
            sampling=Sampling(),
            keep_versions=4,
            last_version=3,
        )
        info = Info(
            protocol=PROTOCOL,
            software="test",
            run_key=self.run_key,
            spec=spec,
            newest_version=None,
            finished=False,
            server_time_s=time.time(),
        )
        return Response(info.model_dump_json())

    async def origin(self, request: Request) -> Response:
        await self._check(request)
        if self.origin_url is None:
            problem = ProblemDetails(
                code="request.too_early",
                detail="no trainer yet",
                fix="wait",
                retry_after_s=0.05,
                server_time_s=1.0,
            )
            return Response(problem.model_dump_json(), status_code=425)
        return Response(Origin(url=self.origin_url).model_dump_json())

    async def relays(self, request: Request) -> Response:
        if self.refuses is not None:
            problem = ProblemDetails(code=self.refuses, detail="no", fix="another key", server_time_s=1.0)
            return Response(problem.model_dump_json(), status_code=403)
        self.reports.append(RelayReport.parse(await self._check(request)))
        return Response("{}")

    async def _check(self, request: Request) -> bytes:
        body = await request.body()
        target = Target(
            method=request.method, authority=request.headers["host"], path=request.url.path, query=""
        )
        assert verify_request(request.headers, target, body, now_s=time.time()).key == self.relay_key
        return body


@pytest.fixture
def relay_key() -> Key:
    return Key.generate()


@pytest.fixture
def coordinator(key: Key, relay_key: Key) -> Coordinator:
    return Coordinator(key.public, relay_key.public)


@pytest.fixture
def running(stop: threading.Event, log: Log, relay_key: Key) -> Any:
    """Starts relays in this process and stops them at the end of the test."""
    relays: list[tuple[Relay, threading.Thread]] = []

    def start(config: RelayConfig) -> Relay:
        relay = Relay(config, relay_key, log=log, stop=stop)
        relay.startup()
        thread = threading.Thread(target=relay.main_loop)
        thread.start()
        relays.append((relay, thread))
        return relay

    yield start
    stop.set()
    for relay, thread in relays:
        thread.join(10)
        relay.shutdown()


def test_a_relay_needs_only_its_coordinator(
    origin: Any, kit: Any, serve: Any, running: Any, coordinator: Coordinator, fetch: Any, tmp_path: Path
) -> None:
    relay = running(RelayConfig(folder=tmp_path / "relay", coordinator=serve(coordinator.app)))
    assert relay.store.keep_versions == 4, "from the run's terms"
    kit.eventually(lambda: coordinator.reports, "the first report")
    assert coordinator.reports[0] == RelayReport(url=relay.url, versions=(), bytes_sent=0)
    sealed = origin.publish(1, kit.random_files())
    coordinator.origin_url = serve(origin.app)
    # A complete version is reported at once, not at the next interval.
    kit.eventually(lambda: coordinator.reports[-1].versions == (1,), "the report of version 1")
    assert kit.file_bytes(fetch(sealed, [relay.url])) == kit.random_files()
    # Bytes are counted after sendfile returns, possibly after the client received them.
    kit.eventually(lambda: relay.app.bytes_sent == sealed.body.num_bytes, "the count of what was sent")


def test_an_origin_at_a_new_address_is_found(
    origin: Any,
    kit: Any,
    serve: Any,
    running: Any,
    coordinator: Coordinator,
    tmp_path: Path,
) -> None:
    coordinator.origin_url = "http://127.0.0.1:9"
    relay = running(RelayConfig(folder=tmp_path / "relay", coordinator=serve(coordinator.app)))
    origin.publish(1, kit.random_files())
    coordinator.origin_url = serve(origin.app)
    kit.eventually(lambda: relay.store.complete() == (1,), "version 1 from the new address")


def test_a_relay_works_without_its_coordinator(
    origin: Any,
    kit: Any,
    serve: Any,
    running: Any,
    key: Key,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    relay = running(
        RelayConfig(
            folder=tmp_path / "relay",
            coordinator="http://127.0.0.1:9",
            run="demo",
            run_key=key.public,
            upstreams=(serve(origin.app),),
        )
    )
    origin.publish(1, kit.random_files())
    kit.eventually(lambda: relay.store.complete() == (1,), "version 1")
    kit.eventually(lambda: "report to the coordinator failed" in caplog.text, "a warning")


def test_a_key_of_another_role_ends_the_relay(
    serve: Any, coordinator: Coordinator, relay_key: Key, log: Log, stop: threading.Event, tmp_path: Path
) -> None:
    coordinator.refuses = "request.not_allowed"
    config = RelayConfig(folder=tmp_path / "relay", coordinator=serve(coordinator.app))
    with pytest.raises(Refused, match=r"request\.not_allowed: no"):
        run_relay(config, key=relay_key, log=log, stop=stop)


def test_an_unreachable_coordinator_at_startup_is_an_error(
    tmp_path: Path, log: Log, stop: threading.Event, relay_key: Key
) -> None:
    config = RelayConfig(folder=tmp_path / "relay", coordinator="http://127.0.0.1:9", deadline_s=0.1)
    with pytest.raises(DeadlinePassed, match="for the coordinator: "):
        run_relay(config, key=relay_key, log=log, stop=stop)


def test_stop_ends_a_relay_with_a_pending_poll(
    origin: Any, kit: Any, serve: Any, key: Key, tmp_path: Path, log: Log
) -> None:
    stop = threading.Event()
    config = RelayConfig(
        folder=tmp_path / "relay", run="demo", run_key=key.public, upstreams=(serve(origin.app),)
    )
    thread = threading.Thread(target=run_relay, args=(config,), kwargs={"key": key, "log": log, "stop": stop})
    thread.start()
    origin.publish(1, kit.random_files())
    kit.eventually(lambda: (tmp_path / "relay" / "v1" / "model.safetensors").exists(), "version 1")
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def test_incomplete_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs run, run_key and upstreams"):
        RelayConfig(folder=tmp_path)
    with pytest.raises(ValueError, match="set url to the one that others use"):
        RelayConfig(folder=tmp_path, coordinator="http://c:1", host="0.0.0.0")


def test_limits_apply_to_the_server(
    origin: Any, kit: Any, serve: Any, running: Any, key: Key, tmp_path: Path
) -> None:
    origin.publish(1, kit.random_files())
    relay = running(
        RelayConfig(
            folder=tmp_path / "relay",
            run=kit.RUN,
            run_key=key.public,
            upstreams=(serve(origin.app),),
            max_connections_per_address=1,
            max_bytes=10**9,
        )
    )
    with httpx2.Client() as first, httpx2.Client() as second:
        assert first.get(f"{relay.url}/healthz").status_code == 200
        refused = second.get(f"{relay.url}/healthz")
        assert (refused.status_code, ProblemDetails.parse(refused.content).code) == (429, "request.too_many")


def test_the_library_imports_no_torch() -> None:
    program = "import sys; from shoal import shardcast; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
