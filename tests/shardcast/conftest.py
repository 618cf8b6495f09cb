"""Origins, relays and corrupting relays for these tests: real servers on loopback, small files, small shards."""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx2
import pytest

from shoal import shardcast
from shoal.net.file_server import FileRequest, FileServer, problem_response
from shoal.net.http_server import Server, listen
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import seal
from shoal.wire.ticket import Ticket, to_header

RUN = "demo"
SHARD_BYTES = 1000


def random_files(seed: int = 0, num_bytes: int = 9_500) -> dict[str, bytes]:
    """Returns the files of a version: small ones that stay the same, weights that depend on `seed`, and an empty one."""
    return {
        "config.json": b'{"hidden_size": 128}',
        "tokenizer.json": random.Random(99).randbytes(2_300),
        "model.safetensors": random.Random(seed).randbytes(num_bytes),
        "empty.txt": b"",
    }


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "manifest.json" and not path.name.startswith(".")
    }


def eventually(ready: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
    end_s = time.monotonic() + deadline_s
    while not (value := ready()):
        assert time.monotonic() < end_s, f"did not happen: {what}"
        time.sleep(0.01)
    return value


def ticket(key: Key, *, run: str = RUN, expires_in_s: float = 900.0) -> str:
    """Returns the header of a ticket that the run's coordinator would issue."""
    holder = Key.from_seed(bytes([7]) * 32).public
    return to_header(seal(Ticket(run=run, holder=holder, expires_at_s=time.time() + expires_in_s), key))


class Origin:
    """A store to publish into, and its routes."""

    def __init__(self, folder: Path, key: Key, keep_versions: int = 5) -> None:
        self.key = key
        self.store = shardcast.VersionStore(folder, keep_versions, run=RUN, run_key=key.public)
        self.app = shardcast.RelayApp(self.store)

    def publish(self, version: int, files: dict[str, bytes]) -> Any:
        folder = self.store.path(version)
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        sealed = shardcast.publish(folder, run=RUN, version=version, key=self.key, shard_bytes=SHARD_BYTES)
        self.store.adopt(version)
        return sealed


class Asgi:
    """A relay as an ASGI application, so that tests can change its responses."""

    def __init__(self, app: shardcast.RelayApp) -> None:
        self.relay = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        query = dict(parse_qsl(scope["query_string"].decode()))
        request = FileRequest(scope["method"], scope["path"], query, headers, True)
        try:
            answer = await self.relay(request)
        except Rejected as rejected:
            answer = problem_response(rejected)
        lines = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        lines.append((b"content-length", str(answer.num_bytes).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        body = answer.content
        if isinstance(body, bytes):
            await send({"type": "http.response.body", "body": body})
            return
        fd, position = body.open(), body.start
        try:
            while position < body.stop and (end := await body.ready(position)) is not None:
                data = os.pread(fd, end - position, position)
                body.sent(len(data))
                position = end
                await send({"type": "http.response.body", "body": data, "more_body": position < body.stop})
        finally:
            os.close(fd)


class Spy:
    """An application in front of a relay: records every file request, and can change its response.

    `treat(self, start, scope, receive, send)` is called for file requests, with the first byte of their range.
    """

    def __init__(self, app: Any, treat: Any = None) -> None:
        self.app, self.treat = Asgi(app), treat
        self.asked: list[tuple[str, int]] = []
        self.asked_bytes: Counter[str] = Counter()
        self.gate = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if not scope["path"].startswith("/versions/"):
            await self.app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"range", b"bytes=0-").decode()
        start, last = (int(number or 0) for number in header.removeprefix("bytes=").split("-"))
        self.asked.append((scope["path"].rsplit("/", 1)[1], start))
        self.asked_bytes[self.asked[-1][0]] += last + 1 - start
        if self.treat is None:
            await self.app(scope, receive, send)
        else:
            await self.treat(self, start, scope, receive, send)

    async def pass_gate(self) -> None:
        while not self.gate.is_set():  # noqa: ASYNC110 - set by the test's thread, not by this loop
            await asyncio.sleep(0.01)


async def lifespan(receive: Any, send: Any) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


@pytest.fixture
def key() -> Key:
    return Key.from_seed(bytes(32))


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


@pytest.fixture
def log() -> Log:
    return Log("test")


@pytest.fixture(scope="session")
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=40) as client:
        yield client


@pytest.fixture
def origin(tmp_path: Path, key: Key) -> Origin:
    return Origin(tmp_path / "origin", key)


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Starts applications and returns their URLs. Stops them at the end of the test."""
    running: list[tuple[Any, Any]] = []

    def start(app: Any) -> str:
        sock = listen("127.0.0.1", 0)
        is_relay = isinstance(app, shardcast.RelayApp)
        server = FileServer(app, sock, log=app.log) if is_relay else Server(app, sock)
        server.start()
        running.append((app, server))
        return f"http://127.0.0.1:{server.port}"

    yield start
    for app, _ in running:
        if isinstance(app, Spy):
            app.gate.set()
            app = app.app.relay
        if isinstance(app, shardcast.RelayApp):
            app.store.close()
    for _, server in running:
        server.close()


@pytest.fixture
def fetch(key: Key, tmp_path: Path, log: Log, stop: threading.Event) -> Callable[..., Path]:
    """Returns fetch_version with the test's key, log and stop, into tmp/client."""

    def run(sealed: Any, relays: Any, *, into: str = "client", deadline_s: float = 60.0) -> Path:
        return shardcast.fetch_version(
            sealed, relays, tmp_path / into, run_key=key.public, log=log, stop=stop, deadline_s=deadline_s
        )

    return run


@pytest.fixture
def kit() -> Any:
    """Returns the functions of this file: tests cannot import it by name."""

    class Kit:
        pass

    made = Kit()
    made.random_files, made.file_bytes, made.eventually = random_files, file_bytes, eventually  # type: ignore[attr-defined]
    made.Origin, made.Spy, made.RUN, made.SHARD_BYTES = Origin, Spy, RUN, SHARD_BYTES  # type: ignore[attr-defined]
    made.ticket = ticket  # type: ignore[attr-defined]
    return made
