"""One origin or relay as its client sees it: three questions, each asked once, each bounded in time and bytes."""

import functools
import http.client
import socket
import ssl
import struct
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import httpx2

from shoal.shardcast.assembly import Shard
from shoal.shardcast.client.buffer import make_buffer
from shoal.shardcast.client.relay_choice import TicketSource
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.messages import ProblemDetails
from shoal.wire.record import Sealed

STALL_S = 3.0
"""No byte for this long, over what the server was allowed to wait: it hangs."""
SHARD_WAIT_S = 2.0
"""How long the server may wait for a shard that is on its way to it, before it says that it is too early."""
ANSWER_DEADLINE_S = 60.0
"""For one answer in all: bytes that drip are no better than none."""
MAX_MANIFEST_BYTES = 16 << 20
PIECE_BYTES = 256 << 10
LOOK_S = 0.25
"""How often somebody who waits for bytes looks whether it is still worth while."""
_LOOK = struct.pack("@ll", 0, int(LOOK_S * 1e6))
"""As a C timeval, for the kernel."""


class NotThere(Exception):
    """It answered, and does not have this, or not yet. Nobody's fault."""


class Broken(Exception):
    """No answer, half an answer, or nonsense."""


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # reading the certificates takes longer than a small fetch


class Connections:
    """Kept-alive connections of one thread, one per server.

    The standard library's client, not httpx2: it hands a shard on as the kernel gives it, for a third of the work.
    """

    def __init__(self, ticket: TicketSource | None = None) -> None:
        self._ticket = ticket
        self._open: dict[tuple[str, str], http.client.HTTPConnection] = {}
        self._buffer = memoryview(b"")

    def buffer(self, num_bytes: int) -> memoryview:
        """Memory for one shard, the same for each: new pages would cost as much as hashing what goes into them."""
        if len(self._buffer) < num_bytes:
            self._buffer = make_buffer(num_bytes)
        return self._buffer[:num_bytes]

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open.values():
            connection.close()

    @contextmanager
    def get(
        self, url: str, headers: dict[str, str], *, read_s: float
    ) -> Iterator[tuple[http.client.HTTPResponse, socket.socket]]:
        """The answer, and what it comes through, whose body is still to be read; anything that goes wrong, then too, is Broken."""
        parts = urllib.parse.urlsplit(url)
        server = (parts.scheme, parts.netloc)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        done = False
        try:
            if shown := self._ticket() if self._ticket is not None else "":
                headers = headers | {"Authorization": shown}
            response, sock = self._send(server, target, {"Accept-Encoding": "identity", **headers}, read_s)
            yield response, sock
            # At the body's end the connection is free for the next request, unless the server is to close it.
            done = response.length == 0 and not response.will_close
            response.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        finally:
            if not done and server in self._open:  # the rest of its body would be taken for the next answer
                self._open.pop(server).close()

    def _send(
        self, server: tuple[str, str], target: str, headers: dict[str, str], read_s: float
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        while True:
            fresh = server not in self._open
            connection = self._open.pop(server, None) or _connection(*server)
            try:
                if connection.sock is None:
                    connection.connect()
                sock = connection.sock
                sock.settimeout(read_s)
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                sock.settimeout(STALL_S)  # it has begun to answer: there is nothing to wait for now
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if fresh:
                    raise
                continue  # an idle connection that the server has closed meanwhile says nothing about the server
            except (OSError, http.client.HTTPException):
                connection.close()
                raise
            self._open[server] = connection
            return response, sock


def _connection(scheme: str, netloc: str) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(netloc, timeout=STALL_S, context=_tls())
    if scheme != "http":
        raise ValueError(f"{scheme!r} is neither http nor https")
    return http.client.HTTPConnection(netloc, timeout=STALL_S)


def ask_latest(
    connections: Connections, url: str, *, after: int = -1, wait_s: float = 0.0
) -> Sealed[Manifest] | None:
    """The newest manifest there, unverified, as soon as it is newer than `after`; None if none came in time."""
    body = _ask(connections, f"{url}/manifests/latest?after={after}&wait_s={wait_s:g}", wait_s)
    return _parse(url, body) if body else None


def ask_manifest(connections: Connections, url: str, version: int) -> Sealed[Manifest]:
    """The manifest of one version, unverified but for that."""
    sealed = _parse(url, _ask(connections, f"{url}/manifests/{version}", 0.0))
    if sealed.body.version != version:
        raise Broken(f"the manifest of version {sealed.body.version} for that of version {version}")
    return sealed


def ask_shards(
    connections: Connections, url: str, version: int, shards: Sequence[Shard], *, give_up: Callable[[], bool]
) -> Generator[memoryview, None, None]:
    """The bytes of consecutive shards of one file, unverified, each good until the next is asked for."""
    first, last = shards[0], shards[-1]
    where = f"{url}/versions/{version}/{first.name}?wait_s={SHARD_WAIT_S:g}"
    headers = {"Range": f"bytes={first.start}-{last.stop - 1}"}
    buffer = connections.buffer(max(shard.num_bytes for shard in shards))
    with connections.get(where, headers, read_s=SHARD_WAIT_S + STALL_S) as (response, sock):
        _check_status(response)
        if response.length != last.stop - first.start:
            raise Broken(
                f"{response.length} bytes for shards {first.index} to {last.index} of {first.name}, which have "
                f"{last.stop - first.start}"
            )
        read = (
            _buffered(response) if isinstance(sock, ssl.SSLSocket) else _unbuffered(response, sock, give_up)
        )
        for shard in shards:
            data = buffer[: shard.num_bytes]
            count = _fill(data, read, give_up)
            response.length -= count
            if count != len(data):
                raise Broken(f"{count} bytes for shard {shard.index} of {shard.name}, which has {len(data)}")
            yield data


Read = Callable[[memoryview], int]
"""Put what comes of a body into that memory: how many bytes, 0 at its end."""


def _buffered(response: http.client.HTTPResponse) -> Read:
    return response.fp.readinto1


def _unbuffered(response: http.client.HTTPResponse, sock: socket.socket, give_up: Callable[[], bool]) -> Read:
    """The kernel fills the memory as a whole, as long as it comes: a thread that wakes up for each packet, and asks the kernel
    each time whether there is more, spends a part of a fetch on that."""
    begun = len(response.fp.peek())  # what came with the head
    sock.settimeout(None)  # to Python; with one, it would have the kernel not wait at all
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK)
    moved_s = time.monotonic()

    def read(data: memoryview) -> int:
        nonlocal begun, moved_s
        if begun:
            count = response.fp.readinto(data[:begun])
            begun -= count
            return count
        while not give_up():
            try:
                count = sock.recv_into(data, len(data), socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - moved_s > STALL_S:
                    raise TimeoutError(f"no byte for {STALL_S:g} s") from None
            else:
                moved_s = time.monotonic()
                return count
        return 0

    return read


def _fill(data: memoryview, read: Read, give_up: Callable[[], bool]) -> int:
    """How much came in time."""
    late_s = time.monotonic() + ANSWER_DEADLINE_S
    position = 0
    while position < len(data) and not give_up() and time.monotonic() < late_s:
        count = read(data[position:])
        if not count:
            break
        position += count
    return position


def _ask(connections: Connections, where: str, wait_s: float) -> bytes:
    late_s = time.monotonic() + ANSWER_DEADLINE_S
    body = b""
    with connections.get(where, {}, read_s=wait_s + STALL_S) as (response, _):
        _check_status(response)
        while piece := response.read1(PIECE_BYTES):
            body += piece
            if len(body) > MAX_MANIFEST_BYTES or time.monotonic() > late_s:
                raise Broken(f"a manifest of over {MAX_MANIFEST_BYTES} bytes, or {ANSWER_DEADLINE_S:.0f} s")
        if response.length:
            raise Broken(f"the manifest ended {response.length} bytes too early")
    return body


def _check_status(response: http.client.HTTPResponse) -> None:
    if 200 <= response.status < 300:
        return
    reason = f"HTTP {response.status}"
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        try:
            reason = ProblemDetails.parse(response.read(min(response.length or 0, 4096))).detail
        except Rejected:
            reason += " with a problem we cannot read"
    if response.status in (404, 425, 429, 503):
        raise NotThere(reason)
    raise Broken(reason)


def _parse(url: str, body: bytes) -> Sealed[Manifest]:
    try:
        return Sealed[Manifest].parse(body)
    except Rejected as rejected:
        raise Broken(f"not a manifest: {rejected.detail}") from None
