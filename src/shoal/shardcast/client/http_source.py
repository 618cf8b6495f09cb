"""One origin or relay, as its client sees it: three requests, each without retries, each limited in time and bytes.

Uses http.client of the standard library instead of httpx2: it reads a shard from the socket into our buffer, for a third of
the CPU. tests/shardcast/test_http_source.py checks the undocumented parts that this relies on.
"""

import functools
import http.client
import re
import socket
import ssl
import struct
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import httpx2

from shoal.net.rate_limit import BandwidthLimit
from shoal.shardcast.assembly import ARRIVED_HEADER, Shard
from shoal.shardcast.client.relay_choice import TicketSource
from shoal.shardcast.manifest_files import make_buffer
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.messages import ProblemDetails
from shoal.wire.record import Sealed

STALL_S = 3.0
"""Timeout without any byte, beyond the time that the server was allowed to wait."""
SHARD_WAIT_S = 2.0
"""How long a relay may wait for a shard that it is downloading itself, before it answers "too early"."""
ANSWER_DEADLINE_S, PROGRESS_BYTES = 60.0, 256 << 10
"""Time for each PROGRESS_BYTES of a shard or manifest: guards against relays that send single bytes. A shard that grows faster may
take as long as it needs."""
MAX_MANIFEST_BYTES = 16 << 20
PIECE_BYTES = 256 << 10
CHECK_EVERY_S = 0.25
"""How often a thread that waits for bytes checks whether they are still needed."""
_CHECK_EVERY = struct.pack("@ll", 0, int(CHECK_EVERY_S * 1e6))
"""CHECK_EVERY_S as a C timeval, for SO_RCVTIMEO."""


class NotOnRelay(Exception):
    """The relay answered, but does not have what was asked for, or not yet. Not counted as a failure.

    `arrived` are the bytes of the file that have reached the relay so far; 0 if it does not say.
    """

    def __init__(self, reason: str, arrived: int = 0) -> None:
        super().__init__(reason)
        self.arrived = arrived


class RelayFailed(Exception):
    """The relay did not answer, or its answer is incomplete or invalid."""


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return httpx2.create_ssl_context()  # cached: loading the certificates takes longer than a small download


class Connections:
    """Keep-alive connections of one thread, one per server."""

    def __init__(self, ticket: TicketSource | None = None, limit: BandwidthLimit | None = None) -> None:
        self._ticket, self.limit = ticket, limit
        self._open: dict[tuple[str, str], http.client.HTTPConnection] = {}
        self._buffer = memoryview(b"")

    def buffer(self, num_bytes: int) -> memoryview:
        """Returns memory for one shard, always the same: faulting in new pages would cost as much as hashing a shard."""
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
        """Sends a GET; gives the response and its socket, for the caller to read the body.

        Raises RelayFailed for any network or protocol error, also one inside the block.
        """
        parts = urllib.parse.urlsplit(url)
        server = (parts.scheme, parts.netloc)
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        reusable = False
        try:
            if ticket := self._ticket() if self._ticket is not None else "":
                headers = headers | {"Authorization": ticket}
            response, sock = self._send(server, target, {"Accept-Encoding": "identity", **headers}, read_s)
            yield response, sock
            # After the end of the body the connection can be reused, unless the server wants to close it.
            reusable = response.length == 0 and not response.will_close
            response.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RelayFailed(f"{type(error).__name__}: {error}") from None
        finally:
            # The rest of its body would be read as the next response.
            if not reusable and server in self._open:
                self._open.pop(server).close()

    def _send(
        self, server: tuple[str, str], target: str, headers: dict[str, str], read_s: float
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        while True:
            is_new = server not in self._open
            connection = self._open.pop(server, None) or _new_connection(*server)
            try:
                if connection.sock is None:
                    connection.connect()
                sock = connection.sock
                sock.settimeout(read_s)
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                sock.settimeout(STALL_S)  # the response has begun: the server no longer waits for anything
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if is_new:
                    raise
                continue  # the server had closed the idle connection: not a failure, retry with a new one
            except (OSError, http.client.HTTPException):
                connection.close()
                raise
            self._open[server] = connection
            return response, sock


def _new_connection(scheme: str, netloc: str) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(netloc, timeout=STALL_S, context=_tls_context())
    if scheme != "http":
        raise ValueError(f"URL scheme {scheme!r} is not http or https")
    return http.client.HTTPConnection(netloc, timeout=STALL_S)


def ask_latest(
    connections: Connections, url: str, *, after: int = -1, wait_s: float = 0.0
) -> Sealed[Manifest] | None:
    """Returns the relay's newest manifest, not verified, once it is newer than `after`; None if none came in `wait_s`."""
    body = _get_manifest(connections, f"{url}/manifests/latest?after={after}&wait_s={wait_s:g}", wait_s)
    return _parse_manifest(body) if body else None


def ask_manifest(connections: Connections, url: str, version: int) -> Sealed[Manifest]:
    """Returns the manifest of one version, not verified."""
    sealed = _parse_manifest(_get_manifest(connections, f"{url}/manifests/{version}", 0.0))
    if sealed.body.version != version:
        raise RelayFailed(f"sent the manifest of version {sealed.body.version} instead of version {version}")
    return sealed


def ask_shards(
    connections: Connections,
    url: str,
    version: int,
    shards: Sequence[Shard],
    *,
    cancelled: Callable[[], bool],
    received: Callable[[int], None] = lambda num_bytes: None,
) -> Generator[memoryview, None, None]:
    """Yields the bytes of consecutive shards of one file, not verified; each is valid until the next is requested.

    `received` is called with the number of bytes whenever some have arrived, several times for a shard that arrives slowly.
    """
    first, last = shards[0], shards[-1]
    where = f"{url}/versions/{version}/{first.name}?wait_s={SHARD_WAIT_S:g}"
    headers = {"Range": f"bytes={first.start}-{last.stop - 1}"}
    buffer = connections.buffer(max(shard.num_bytes for shard in shards))
    with connections.get(where, headers, read_s=SHARD_WAIT_S + STALL_S) as (response, sock):
        _check_status(response)
        if response.length != last.stop - first.start:
            raise RelayFailed(
                f"announced {response.length} bytes for shards {first.index} to {last.index} of {first.name}, "
                f"which have {last.stop - first.start}"
            )
        if isinstance(sock, ssl.SSLSocket):
            read: ReadInto = response.fp.readinto1
        else:
            read = _socket_reader(response, sock, cancelled)
        for shard in shards:
            data = buffer[: shard.num_bytes]
            count = _fill(data, read, cancelled, received, connections.limit)
            response.length -= count
            if count != len(data):
                raise RelayFailed(
                    f"sent {count} bytes for shard {shard.index} of {shard.name}, which has {len(data)}"
                )
            yield data


ReadInto = Callable[[memoryview], int]
"""Reads bytes of a body into memory and returns how many, 0 at its end."""


def _socket_reader(
    response: http.client.HTTPResponse, sock: socket.socket, cancelled: Callable[[], bool]
) -> ReadInto:
    """Returns a reader that lets the kernel fill the memory with one call, instead of waking up for each packet."""
    num_buffered = len(response.fp.peek())  # bytes of the body that arrived together with the head
    # Without a Python timeout, because with one the socket is non-blocking and MSG_WAITALL has no effect.
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _CHECK_EVERY)
    last_byte_s = time.monotonic()

    def read(data: memoryview) -> int:
        nonlocal num_buffered, last_byte_s
        if num_buffered:
            count = response.fp.readinto(data[:num_buffered])
            num_buffered -= count
            return count
        while not cancelled():
            try:
                count = sock.recv_into(data, len(data), socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - last_byte_s > STALL_S:
                    raise TimeoutError(f"no byte for {STALL_S:g} s") from None
            else:
                last_byte_s = time.monotonic()
                return count
        return 0

    return read


def _fill(
    data: memoryview,
    read: ReadInto,
    cancelled: Callable[[], bool],
    received: Callable[[int], None],
    limit: BandwidthLimit | None,
) -> int:
    """Reads until `data` is full, the body ends, or it grows too slowly; returns the number of bytes."""
    piece = len(data) if limit is None else limit.piece_bytes
    deadline = _GrowthDeadline()
    position = 0
    while position < len(data) and not cancelled() and not deadline.passed(position):
        count = read(data[position : position + piece])
        if not count:
            break
        if limit is not None:
            limit.wait(count)
        position += count
        received(count)
    return position


class _GrowthDeadline:
    """A deadline that moves on whenever another PROGRESS_BYTES have arrived."""

    def __init__(self) -> None:
        self._end_s, self._next_bytes = time.monotonic() + ANSWER_DEADLINE_S, PROGRESS_BYTES

    def passed(self, num_bytes: int) -> bool:
        """Returns whether time is up, after `num_bytes` in all."""
        if num_bytes >= self._next_bytes:
            self._end_s, self._next_bytes = time.monotonic() + ANSWER_DEADLINE_S, num_bytes + PROGRESS_BYTES
        return time.monotonic() >= self._end_s


def _get_manifest(connections: Connections, where: str, wait_s: float) -> bytes:
    deadline = _GrowthDeadline()
    body = bytearray()
    with connections.get(where, {}, read_s=wait_s + STALL_S) as (response, _):
        _check_status(response)
        while piece := response.read1(PIECE_BYTES):
            body += piece
            if len(body) > MAX_MANIFEST_BYTES or deadline.passed(len(body)):
                raise RelayFailed(
                    f"the manifest exceeds {MAX_MANIFEST_BYTES} bytes, or {PROGRESS_BYTES} bytes of it took over "
                    f"{ANSWER_DEADLINE_S:.0f} s"
                )
        if response.length:
            raise RelayFailed(f"the manifest ended {response.length} bytes too early")
    return bytes(body)


def _check_status(response: http.client.HTTPResponse) -> None:
    if 200 <= response.status < 300:
        return
    reason = f"HTTP {response.status}"
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        try:
            reason = ProblemDetails.parse(response.read(min(response.length or 0, 4096))).detail
        except Rejected:
            reason += " with an unreadable problem"
    if response.status in (404, 425, 429, 503):
        arrived = response.headers.get(ARRIVED_HEADER, "")
        raise NotOnRelay(reason, int(arrived) if re.fullmatch("[0-9]{1,18}", arrived) else 0)
    raise RelayFailed(reason)


def _parse_manifest(body: bytes) -> Sealed[Manifest]:
    try:
        return Sealed[Manifest].parse(body)
    except Rejected as rejected:
        raise RelayFailed(f"not a manifest: {rejected.detail}") from None
