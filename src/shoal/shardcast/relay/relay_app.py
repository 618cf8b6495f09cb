"""The routes of an origin or relay: manifests, and ranges of the files they list.

    GET /manifests/{version}                    the signed manifest
    GET /manifests/latest?after=N&wait_s=S      the newest one, once it is newer than N; 204 if none came in time
    GET /versions/{version}/{name}?wait_s=S     the file, or one range of it
    GET /ticket                                 204 if the ticket is valid: for a web server in front
    GET /healthz

A request for bytes that the relay is still downloading waits for them, so a tree of relays passes shards on as they arrive.
Every wait has a timeout, and every refusal is a ProblemDetails with a stable code.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping

from shoal.net.file_server import FileRequest, FileResponse, FileServer, problem_response
from shoal.net.rate_limit import ServerLimits
from shoal.shardcast.assembly import ARRIVED_HEADER
from shoal.shardcast.store import StoredVersion, VersionStore
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.manifest import FileEntry
from shoal.wire.ticket import CLOCK_SKEW_S, check_ticket

MAX_POLL_S = 30.0
MAX_SHARD_WAIT_S = 20.0
"""How long a request waits for a shard that is still arriving, unless it asks for less."""
MAX_CACHED_TICKETS = 4096

_RANGE = re.compile(r"bytes=(?P<first>[0-9]{0,18})-(?P<last>[0-9]{0,18})")


class RelayApp:
    """Handles requests to a store. `bytes_sent` counts file bytes sent to clients."""

    def __init__(self, store: VersionStore, *, log: Log | None = None, private: bool = False) -> None:
        """Sets up the app; with `private`, it serves only clients with a ticket of this run."""
        self.store, self.log = store, log or Log("relay")
        self.bytes_sent = 0
        self._tickets = TicketChecker(run=store.run, run_key=store.run_key) if private else None

    async def __call__(self, request: FileRequest) -> FileResponse:
        """Answers one request; raises Rejected for a refusal."""
        parts = request.path.split("/")[1:]
        if parts == ["healthz"]:
            health = {
                "run": self.store.run,
                "newest": self.store.newest,
                "complete": self.store.complete(),
                "bytes_sent": self.bytes_sent,
            }
            return FileResponse(200, json.dumps(health).encode(), {"content-type": "application/json"})
        if self._tickets is not None:
            self._tickets.check(request.headers)
        match parts:
            case ["ticket"]:
                return FileResponse(204)
            case ["manifests", "latest"]:
                return await self._latest(request)
            case ["manifests", version]:
                return _manifest(self._find(version))
            case ["versions", version, name]:
                return await self._file(request, self._find(version), name)
        raise Rejected("request.not_found", f"no route {request.path[:80]!r}")

    async def _latest(self, request: FileRequest) -> FileResponse:
        after = _query_number(request, "after", default=-1.0, lowest=-1.0, highest=2.0**53)
        wait_s = _query_number(request, "wait_s", default=0.0, lowest=0.0, highest=MAX_POLL_S)
        newer: list[StoredVersion] = []

        def is_newer() -> bool:
            newest = self.store.newest
            stored = self.store.get(newest) if newest is not None and newest > after else None
            newer[:] = [stored] if stored is not None else []
            return bool(newer)

        if await self.store.changed.wait_async(is_newer, wait_s):
            return _manifest(newer[0])
        return FileResponse(204)

    async def _file(self, request: FileRequest, stored: StoredVersion, name: str) -> FileResponse:
        version, entry = stored.sealed.body.version, stored.files.get(name)
        if entry is None:
            raise Rejected("request.not_found", f"version {version} has no file {name[:80]!r}")
        header = request.headers.get("range")
        wanted = parse_range(header, entry.num_bytes) if header and request.method == "GET" else None
        body = VerifiedRange(self, stored, entry, wanted or (0, entry.num_bytes))
        wait_s = _query_number(
            request, "wait_s", default=MAX_SHARD_WAIT_S, lowest=0.0, highest=MAX_SHARD_WAIT_S
        )
        # Before the first byte an error status can still be sent. Later bytes are waited for while sending.
        if request.method != "HEAD" and await body.wait_verified(body.start, wait_s) is None:
            detail = f"{name} of version {version} has not arrived here yet"
            early = problem_response(Rejected("request.too_early", detail, retry_after_s=0.1))
            early.headers[ARRIVED_HEADER] = str(stored.assembly.received(name))
            return early
        headers = {
            "content-type": "application/octet-stream",
            "accept-ranges": "bytes",
            "etag": f'"{entry.blake3}"',
        }
        if wanted is None:
            return FileResponse(200, body, headers)
        headers["content-range"] = f"bytes {body.start}-{body.stop - 1}/{entry.num_bytes}"
        return FileResponse(206, body, headers)

    def _find(self, text: str) -> StoredVersion:
        stored = self.store.get(int(text)) if text.isascii() and text.isdigit() and len(text) <= 18 else None
        if stored is None:
            raise Rejected(
                "request.not_found",
                f"no version {text[:20]!r} here; known: {list(self.store.known())}",
                retry_after_s=0.5,
            )
        return stored


class VerifiedRange:
    """A range of a file in the store, of which only verified bytes are sent (a FileBody of shoal.net.file_server)."""

    def __init__(
        self, app: RelayApp, stored: StoredVersion, entry: FileEntry, wanted: tuple[int, int]
    ) -> None:
        self._app, self._stored, self._entry = app, stored, entry
        self.start, self.stop = wanted

    def open(self) -> int:
        """Returns a descriptor of the file; raises Rejected if it was deleted."""
        try:
            fd = self._stored.assembly.open_file(self._entry.name)
        except FileNotFoundError:
            raise Rejected(
                "request.not_found", f"version {self._stored.sealed.body.version} has just been deleted here"
            ) from None
        if self._stored.assembly.complete:  # the bytes of an arriving file are still in the page cache
            # Reads ahead, so that sendfile does not block the event loop on a slow disk.
            os.posix_fadvise(fd, self.start, self.stop - self.start, os.POSIX_FADV_WILLNEED)
        return fd

    async def ready(self, position: int) -> int | None:
        """Waits for verified bytes after `position`; returns where they end, None after a timeout."""
        end = await self.wait_verified(position, MAX_SHARD_WAIT_S)
        if end is None:
            self._app.log.warning(
                "closing a client's connection: the rest of the file did not arrive here",
                file=self._entry.name,
                version=self._stored.sealed.body.version,
            )
        return end

    async def wait_verified(self, position: int, wait_s: float) -> int | None:
        """Waits until bytes after `position` are verified; returns where they end, None after a timeout."""
        assembly, name = self._stored.assembly, self._entry.name

        def end() -> int:
            return assembly.verified_until(name, position, self.stop)

        if position < self.stop and not await self._app.store.changed.wait_async(
            lambda: end() > position, wait_s
        ):
            return None
        return end()

    def sent(self, num_bytes: int) -> None:
        """Counts bytes that were sent."""
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


class TicketChecker:
    """Admits clients with a valid ticket of the run to a private relay.

    The run key alone decides, without asking the coordinator. A ticket comes with every request, so valid ones are cached.
    """

    def __init__(self, *, run: str, run_key: str, clock: Callable[[], float] = time.time) -> None:
        self._run, self._run_key, self._clock = run, run_key, clock
        self._valid_until_s: dict[str, float] = {}

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises Rejected unless the Authorization header (names in lower case) has a valid ticket."""
        header, now_s = headers.get("authorization", ""), self._clock()
        if self._valid_until_s.get(header, 0.0) >= now_s:
            return
        ticket = check_ticket(header, run=self._run, run_key=self._run_key, now_s=now_s)
        if len(self._valid_until_s) >= MAX_CACHED_TICKETS:
            self._valid_until_s = {
                cached: until_s for cached, until_s in self._valid_until_s.items() if until_s >= now_s
            }
        if len(self._valid_until_s) < MAX_CACHED_TICKETS:
            self._valid_until_s[header] = ticket.expires_at_s + CLOCK_SKEW_S


def parse_range(header: str, num_bytes: int) -> tuple[int, int]:
    """Parses a Range header (RFC 9110, section 14) with one range; returns the first byte and the one after the last.

    `bytes=2-5` of 10 bytes gives (2, 6), `bytes=-3` gives (7, 10). Raises Rejected for anything else.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or not (match["first"] or match["last"]):
        raise Rejected("request.bad_range", f"{header[:80]!r} is not one range of bytes")
    if not match["first"]:
        start, stop = max(0, num_bytes - int(match["last"])), num_bytes
    else:
        start = int(match["first"])
        stop = min(int(match["last"]) + 1, num_bytes) if match["last"] else num_bytes
    if start >= stop:
        raise Rejected("request.bad_range", f"{header[:80]!r} is outside a file of {num_bytes} bytes")
    return start, stop


def _manifest(stored: StoredVersion) -> FileResponse:
    return FileResponse(200, stored.sealed.canonical(), {"content-type": "application/json"})


def _query_number(request: FileRequest, name: str, *, default: float, lowest: float, highest: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= lowest:
        raise Rejected("request.malformed", f"{name}={text[:40]!r} must be a number of at least {lowest:g}")
    return min(value, highest)
