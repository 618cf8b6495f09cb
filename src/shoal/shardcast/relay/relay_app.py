"""What an origin and a relay serve: manifests, and ranges of the files they list.

    GET /manifests/{version}                    the signed manifest
    GET /manifests/latest?after=N&wait_s=S      the newest one, as soon as it is newer than N; 204 if none came
    GET /versions/{version}/{name}?wait_s=S     the file, or one range of it
    GET /ticket                                 204 if the ticket shown is good: for a web server in front
    GET /healthz

A request for bytes that are still on their way here waits for them, so a tree of relays passes shards on as they
arrive. Every wait is bounded, and every refusal is a ProblemDetails with a stable code.
"""

import json
import os
import socket

from shoal.net.file_server import FileRequest, FileResponse, FileServer
from shoal.net.rate_limit import ServerLimits
from shoal.shardcast.relay.range_header import parse_range
from shoal.shardcast.relay.relay_access import Gate
from shoal.shardcast.store import Held, VersionStore
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.manifest import FileEntry

MAX_POLL_S = 30.0
MAX_SHARD_WAIT_S = 20.0
"""How long a request waits for a shard that is still coming, unless it asks for less."""


class RelayApp:
    """The routes over a store. `bytes_sent` counts file bytes handed to clients."""

    def __init__(self, store: VersionStore, *, log: Log | None = None, private: bool = False) -> None:
        """`private`: only for those who show a ticket of this run."""
        self.store, self.log = store, log or Log("relay")
        self.bytes_sent = 0
        self._gate = Gate(run=store.run, run_key=store.run_key) if private else None

    async def __call__(self, request: FileRequest) -> FileResponse:
        way = request.path.split("/")[1:]
        if way == ["healthz"]:
            return self._health()
        if self._gate is not None:
            self._gate.check(request.headers)
        match way:
            case ["ticket"]:
                return FileResponse(204)
            case ["manifests", "latest"]:
                return await self._latest(request)
            case ["manifests", version]:
                return _manifest(self._held(version))
            case ["versions", version, name]:
                return await self._file(request, self._held(version), name)
        raise Rejected("request.not_found", f"no route {request.path[:80]!r} here")

    def _health(self) -> FileResponse:
        health = {
            "run": self.store.run,
            "newest": self.store.newest,
            "complete": self.store.complete(),
            "bytes_sent": self.bytes_sent,
        }
        return FileResponse(200, json.dumps(health).encode(), {"content-type": "application/json"})

    async def _latest(self, request: FileRequest) -> FileResponse:
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
        return FileResponse(204)

    async def _file(self, request: FileRequest, held: Held, name: str) -> FileResponse:
        version, entry = held.sealed.body.version, held.files.get(name)
        if entry is None:
            raise Rejected("request.not_found", f"version {version} has no file {name[:80]!r}")
        header = request.headers.get("range")
        wanted = parse_range(header, entry.num_bytes) if header and request.method == "GET" else None
        part = Part(self, held, entry, wanted or (0, entry.num_bytes))
        wait_s = _number(request, "wait_s", default=MAX_SHARD_WAIT_S, lowest=0.0, highest=MAX_SHARD_WAIT_S)
        # Before the first byte there is still a status to say it with; later bytes are waited for while sending.
        if request.method != "HEAD" and await part.verified_up_to(part.start, wait_s) is None:
            raise Rejected(
                "request.too_early", f"{name} of version {version} is still coming here", retry_after_s=0.1
            )
        headers = {
            "content-type": "application/octet-stream",
            "accept-ranges": "bytes",
            "etag": f'"{entry.blake3}"',
        }
        if wanted is None:
            return FileResponse(200, part, headers)
        headers["content-range"] = f"bytes {part.start}-{part.stop - 1}/{entry.num_bytes}"
        return FileResponse(206, part, headers)

    def _held(self, text: str) -> Held:
        held = self.store.get(int(text)) if text.isascii() and text.isdigit() and len(text) <= 18 else None
        if held is None:
            raise Rejected(
                "request.not_found",
                f"no version {text[:20]!r} here; known: {list(self.store.known())}",
                retry_after_s=0.5,
            )
        return held


class Part:
    """A range of a file in the store, sendable as far as it is verified (a Body of net.file_server)."""

    def __init__(self, app: RelayApp, held: Held, entry: FileEntry, wanted: tuple[int, int]) -> None:
        self._app, self._held, self._entry = app, held, entry
        self.start, self.stop = wanted

    def open(self) -> int:
        try:
            fd = self._held.assembly.open_file(self._entry.name)
        except FileNotFoundError:
            raise Rejected(
                "request.not_found", f"version {self._held.sealed.body.version} has just been deleted here"
            ) from None
        if self._held.assembly.complete:  # else it was written just now, and looking for it takes time too
            # The loop that sends must not wait for a disk: have the kernel read ahead of it.
            os.posix_fadvise(fd, self.start, self.stop - self.start, os.POSIX_FADV_WILLNEED)
        return fd

    async def ready(self, position: int) -> int | None:
        end = await self.verified_up_to(position, MAX_SHARD_WAIT_S)
        if end is None:
            self._app.log.warning(
                "a client is left waiting: the rest does not come",
                file=self._entry.name,
                version=self._held.sealed.body.version,
            )
        return end

    async def verified_up_to(self, position: int, wait_s: float) -> int | None:
        """How far bytes are here and verified after `position`, as soon as there are some; None if late."""
        assembly, name = self._held.assembly, self._entry.name

        def reach() -> int:
            return assembly.verified_until(name, position, self.stop)

        if position < self.stop and not await self._app.store.changed.wait_async(
            lambda: reach() > position, wait_s
        ):
            return None
        return reach()

    def sent(self, num_bytes: int) -> None:
        self._app.bytes_sent += num_bytes


class RelayServer(FileServer):
    """Serves a store on a socket. Close the store before the server, to end pending waits."""

    def __init__(
        self,
        store: VersionStore,
        sock: socket.socket,
        *,
        log: Log | None = None,
        limits: ServerLimits | None = None,
        private: bool = False,
    ) -> None:
        self.app = RelayApp(store, log=log, private=private)
        super().__init__(self.app, sock, log=self.app.log, limits=limits)


def _manifest(held: Held) -> FileResponse:
    return FileResponse(200, held.sealed.canonical(), {"content-type": "application/json"})


def _number(request: FileRequest, name: str, *, default: float, lowest: float, highest: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= lowest:
        raise Rejected("request.malformed", f"{name}={text[:40]!r} must be a number from {lowest:g}")
    return min(value, highest)
