"""What an origin and a relay serve: manifests, and ranges of the files they list.

    GET /manifests/{version}                    the signed manifest
    GET /manifests/latest?after=N&wait_s=S      the newest one, as soon as it is newer than N; 204 if none came
    GET /versions/{version}/{name}?wait_s=S     the file, or one range of it
    GET /healthz

A request for bytes that are still on their way here waits for them, so a tree of relays passes shards on as they
arrive. Every wait is bounded, and every refusal is a Problem with a stable code.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.shardcast.ranges import parse_range
from shoal.shardcast.store import Held, VersionStore
from shoal.telemetry import Log
from shoal.wire.codes import CODES, Rejected
from shoal.wire.manifest import FileEntry
from shoal.wire.messages import Problem

MAX_POLL_S = 30.0
SHARD_WAIT_S = 20.0
"""How long a request waits for a shard that is still coming, unless it asks for less."""
SEND_S = 60.0
"""How long a client may take over one piece before it is left."""
PIECE_BYTES = 256 << 10
"""Read and sent at once: what one connection holds in memory."""


class RelayApp:
    """The ASGI application over a store. `bytes_sent` counts file bytes handed to clients."""

    def __init__(self, store: VersionStore, log: Log) -> None:
        self.store, self.log = store, log
        self.bytes_sent = 0
        handlers: dict[Any, Any] = {Rejected: _refuse, HTTPException: _refuse_http}
        self._app = Starlette(
            routes=[
                Route("/healthz", self.handle_health),
                Route("/manifests/latest", self.handle_latest),
                Route("/manifests/{version}", self.handle_manifest),
                Route("/versions/{version}/{name}", self.handle_file),
            ],
            exception_handlers=handlers,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def handle_health(self, request: Request) -> Response:
        return JSONResponse(
            {
                "run": self.store.run,
                "newest": self.store.newest,
                "complete": self.store.complete(),
                "bytes_sent": self.bytes_sent,
            }
        )

    async def handle_manifest(self, request: Request) -> Response:
        return _manifest(self._held(request))

    async def handle_latest(self, request: Request) -> Response:
        after = _number(request, "after", default=-1.0, lowest=-1.0, highest=2.0**53)
        wait_s = _number(request, "wait_s", default=0.0, lowest=0.0, highest=MAX_POLL_S)
        newer: list[Held] = []

        def look() -> bool:
            newest = self.store.newest
            held = self.store.get(newest) if newest is not None and newest > after else None
            newer[:] = [held] if held is not None else []
            return bool(newer)

        if await self.store.changed.wait_async(look, wait_s):
            return _manifest(newer[0])
        return Response(status_code=204)

    async def handle_file(self, request: Request) -> Response:
        held = self._held(request)
        entry = held.files.get(request.path_params["name"])
        if entry is None:
            raise Rejected(
                "request.not_found",
                f"version {held.sealed.body.version} has no file {request.path_params['name'][:80]!r}",
            )
        header = request.headers.get("range")
        wanted = parse_range(header, entry.num_bytes) if header and request.method == "GET" else None
        sending = Sending(self, held, entry, wanted)
        wait_s = _number(request, "wait_s", default=SHARD_WAIT_S, lowest=0.0, highest=SHARD_WAIT_S)
        # Before the first byte there is still a status to say it with; later bytes are waited for while sending.
        if request.method != "HEAD" and not await sending.ready(sending.start, wait_s):
            raise Rejected(
                "request.too_early",
                f"{entry.name} of version {held.sealed.body.version} is still coming here",
                retry_after_s=0.1,
            )
        return sending

    def _held(self, request: Request) -> Held:
        text = request.path_params["version"]
        held = self.store.get(int(text)) if text.isascii() and text.isdigit() and len(text) <= 18 else None
        if held is None:
            raise Rejected(
                "request.not_found",
                f"no version {text[:20]!r} here; known: {list(self.store.known())}",
                retry_after_s=0.5,
            )
        return held


class Sending(Response):
    """A range of a file, read in pieces by a thread so that no disk holds up the other connections."""

    def __init__(self, app: RelayApp, held: Held, entry: FileEntry, wanted: tuple[int, int] | None) -> None:
        self._relay, self._held, self._entry = app, held, entry
        self.start, self.stop = wanted or (0, entry.num_bytes)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(self.stop - self.start),
            "accept-ranges": "bytes",
            "etag": f'"{entry.blake3}"',
        }
        if wanted is not None:
            headers["content-range"] = f"bytes {self.start}-{self.stop - 1}/{entry.num_bytes}"
        super().__init__(status_code=200 if wanted is None else 206, headers=headers)

    async def ready(self, position: int, wait_s: float) -> bool:
        """Whether the shard around `position`, as far as it is asked for, is verified in time."""
        end = min(self.stop, _shard_end(self._entry, position))
        assembly, name = self._held.assembly, self._entry.name
        return await self._relay.store.changed.wait_async(
            lambda: assembly.verified(name, position, end), wait_s
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD" or self.start == self.stop:
            await send(head)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        fd = await to_thread.run_sync(self._open)
        left = asyncio.ensure_future(_disconnected(receive))
        try:
            await send(head)
            await self._send_body(fd, send, left.done)
        finally:
            left.cancel()
            os.close(fd)

    def _open(self) -> int:
        try:
            return self._held.assembly.open_file(self._entry.name)
        except FileNotFoundError:
            raise Rejected(
                "request.not_found", f"version {self._held.sealed.body.version} has just been deleted here"
            ) from None

    async def _send_body(self, fd: int, send: Send, left: Callable[[], bool]) -> None:
        """Returning early cuts the connection, which is all that can be said once the status is out."""
        position = self.start
        while position < self.stop and not left():
            if not await self.ready(position, SHARD_WAIT_S):
                self._relay.log.warning(
                    "a client is left waiting: the rest does not come",
                    file=self._entry.name,
                    version=self._held.sealed.body.version,
                )
                return
            end = min(self.stop, _shard_end(self._entry, position), position + PIECE_BYTES)
            piece = await to_thread.run_sync(os.pread, fd, end - position, position)
            if not piece:
                self._relay.log.error("a file of ours has lost its end", file=self._entry.name)
                return
            position += len(piece)
            message = {"type": "http.response.body", "body": piece, "more_body": position < self.stop}
            try:
                async with asyncio.timeout(SEND_S):
                    await send(message)
            except TimeoutError:
                return
            self._relay.bytes_sent += len(piece)


def make_app(store: VersionStore, *, log: Log | None = None) -> RelayApp:
    """The application to run with net.server.Server. Close the store before the server, to end pending waits."""
    return RelayApp(store, log or Log("relay"))


def _shard_end(entry: FileEntry, position: int) -> int:
    return (position // entry.shard_bytes + 1) * entry.shard_bytes


def _manifest(held: Held) -> Response:
    return Response(held.sealed.canonical(), media_type="application/json")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _number(request: Request, name: str, *, default: float, lowest: float, highest: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= lowest:
        raise Rejected("request.malformed", f"{name}={text[:40]!r} must be a number from {lowest:g}")
    return min(value, highest)


async def _refuse(request: Request, rejected: Rejected) -> Response:
    return _problem(CODES[rejected.code].status, rejected.code, rejected.detail, rejected.retry_after_s)


async def _refuse_http(request: Request, error: HTTPException) -> Response:
    code = "request.not_found" if error.status_code == 404 else "request.malformed"
    return _problem(
        error.status_code, code, f"{request.method} {request.url.path[:80]}: {error.detail}", None
    )


def _problem(status: int, code: str, detail: str, retry_after_s: float | None) -> Response:
    problem = Problem(
        code=code,
        detail=detail,
        fix=CODES[code].remedy,
        retry_after_s=retry_after_s,
        server_time_s=time.time(),
    )
    return Response(problem.model_dump_json(), status_code=status, media_type="application/problem+json")
