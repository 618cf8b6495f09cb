"""A small HTTP/1.1 server for files: the kernel sends them (sendfile), one event loop serves all connections.

GET and HEAD only, no request bodies, keep-alive. Our own server instead of a library's (aiohttp, granian, nginx), because
it sends files that are still growing and limits bytes per client address; h11 parses the requests. The owner's
`handle(request) -> FileResponse` decides what to send. Against clients that only occupy the server it has a limit for the size
of a request's head, a timeout for each step, and limits per address.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import h11

from shoal.net.rate_limit import MAX_DEBT_S, AddressUsage, ServerLimits, UsageByAddress, retry_after_header
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.wire.codes import CODES, Rejected
from shoal.wire.messages import ProblemDetails

MAX_HEAD_BYTES = 16 << 10
HEAD_S = 10.0
"""Timeout for the head of a connection's first request."""
KEEP_ALIVE_S = 30.0
"""Timeout for the head of each further request."""
SEND_S = 60.0
"""Timeout for a client to take one piece."""
PIECE_BYTES = 4 << 20
LIMITED_PIECE_BYTES = 64 << 10
"""Piece size under a rate limit: small, so that connections of one address take turns."""
DRAIN_S = 3.0
DRAIN_POLL_S = 0.05
NEAR_RTT_US = 1000
"""Round trips below this are those of one machine or one room."""


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A parsed request. Header names are in lower case; of duplicate headers the last one counts."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    keep_alive: bool


class FileBody(Protocol):
    """A range of a file that may still be growing."""

    start: int
    stop: int

    def open(self) -> int:
        """Returns a file descriptor; raises Rejected if the file was deleted."""

    async def ready(self, position: int) -> int | None:
        """Waits for bytes after `position`; returns the position up to which they may be sent, None if no more come."""

    def sent(self, num_bytes: int) -> None:
        """Counts bytes that were sent."""


@dataclass(frozen=True, slots=True)
class FileResponse:
    """The status, headers and content of an answer. The server adds Content-Length."""

    status: int
    content: bytes | FileBody = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Returns the size of the content."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stop - self.content.start


FileHandler = Callable[[FileRequest], Awaitable[FileResponse]]


class NotHttp(Exception):
    """The client sent bytes that are not a request this server accepts."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def problem_response(rejected: Rejected, *, status: int | None = None) -> FileResponse:
    """Returns a refusal as a ProblemDetails, which every client of ours can parse."""
    meaning = CODES[rejected.code]
    body = ProblemDetails(
        code=rejected.code,
        detail=rejected.detail,
        fix=meaning.remedy,
        retry_after_s=rejected.retry_after_s,
        server_time_s=time.time(),
    )
    headers = {"content-type": "application/problem+json"}
    if rejected.retry_after_s is not None:
        headers["retry-after"] = retry_after_header(rejected.retry_after_s)
    return FileResponse(status or meaning.status, body.model_dump_json().encode(), headers)


class RequestParser:
    """Parses the requests of one connection, from bytes that arrive in any portions."""

    def __init__(self) -> None:
        self._unparsed = b""
        self._begin_request()

    def _begin_request(self) -> None:
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._num_fed = 0

    def feed(self, data: bytes) -> FileRequest | None:
        """Takes more bytes; returns the next request if its head is complete. Raises NotHttp for anything else."""
        try:
            if pending := self._unparsed + data:  # h11 takes b"" for the end of the stream
                self._h11.receive_data(pending)
            self._num_fed, self._unparsed = self._num_fed + len(pending), b""
            event = self._h11.next_event()
            if not isinstance(event, h11.Request):
                return None
            # Bodies are not read: the connection is closed after a request that has one.
            ended = isinstance(self._h11.next_event(), h11.EndOfMessage)
            keep_alive = ended and self._h11.their_state is h11.DONE and not _has_body(event)
        except h11.RemoteProtocolError as error:
            status = 431 if error.error_status_hint == 431 else 400
            raise NotHttp(status, f"not an HTTP/1.1 request: {error}"[:200]) from None
        if event.http_version not in (b"1.0", b"1.1") or not event.target.startswith(b"/"):
            raise NotHttp(400, f"expected HTTP/1.1 and a path, got {event.target[:80]!r}")
        self._unparsed = self._h11.trailing_data[0]  # what the client has already sent of its next request
        # h11 limits incomplete heads only; the last read may have completed one that is too large.
        if self._num_fed - len(self._unparsed) > MAX_HEAD_BYTES:
            raise NotHttp(431, f"the head of the request exceeds {MAX_HEAD_BYTES} bytes")
        self._begin_request()
        path, _, query = event.target.decode("ascii").partition("?")
        return FileRequest(
            method=event.method.decode("ascii"),
            path=urllib.parse.unquote(path),
            query=dict(urllib.parse.parse_qsl(query)),
            headers={name.decode("ascii"): value.decode("latin-1") for name, value in event.headers},
            keep_alive=keep_alive,
        )


def _has_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in request.headers
    )


class FileServer:
    """Serves requests in a thread between `start` and `close`, which may be called from any thread."""

    def __init__(
        self, handle: FileHandler, sock: socket.socket, *, log: Log, limits: ServerLimits | None = None
    ) -> None:
        self._handle, self._sock, self._log = handle, sock, log
        self._far_congestion_control = _begin_without_bbr(sock)
        self._usages = UsageByAddress(limits or ServerLimits())
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._closing = asyncio.Event()
        self._idle: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)

    @property
    def port(self) -> int:
        """The port that the socket listens on."""
        return int(self._sock.getsockname()[1])

    def start(self, deadline_s: float = 20.0) -> None:
        """Starts the thread and waits until the server accepts connections."""
        self._thread.start()
        if not self._started.wait(deadline_s):
            raise DeadlinePassed(f"the server on port {self.port} did not start within {deadline_s:.0f} s")

    def check(self) -> None:
        """Raises RuntimeError if the server ended without `close`."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server on port {self.port} stopped unexpectedly; its log says why")

    def close(self) -> None:
        """Stops the server. Responses in progress get DRAIN_S to finish."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(DRAIN_S + 2)
        self._sock.close()

    # -- the loop ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        # The reader buffers at most one head; the rest of what a client sends stays in the kernel.
        server = await asyncio.start_server(
            self._connected, sock=self._sock, limit=MAX_HEAD_BYTES, backlog=1024
        )
        self._started.set()
        await self._closing.wait()
        # Before server.close: asyncio leaks the socket of a connection that it accepted last if the server is closed then.
        self._loop.remove_reader(self._sock)
        await self._drain()
        server.close()

    async def _drain(self) -> None:
        """Ends every connection: idle ones at once, the others after DRAIN_S.

        All tasks of the loop count, not only those in `_tasks`: a connection that was accepted last is not among them yet, and
        would keep its socket open when the loop ends.
        """
        give_up_s = time.monotonic() + DRAIN_S
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in self._idle:
                writer.transport.abort()
            if time.monotonic() > give_up_s:
                for task in self._tasks:
                    task.cancel()
            await asyncio.wait(others, timeout=DRAIN_POLL_S)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next iteration

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        usage = self._usages.connect(str(peer[0]) if peer else "?", time.monotonic())
        if self._far_congestion_control is not None:
            _use_if_far(writer.get_extra_info("socket"), self._far_congestion_control)
        # With a limit of 0, drain waits until the buffer is empty, as sendfile past that buffer requires.
        writer.transport.set_write_buffer_limits(0)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if usage is not None:
                await self._serve_connection(reader, writer, usage)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client disconnected or timed out
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        finally:
            self._tasks.discard(task)
            if usage is not None:
                self._usages.disconnect(usage)
            # abort, not close: close would wait for a client that does not read.
            writer.transport.abort()

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, usage: AddressUsage
    ) -> None:
        too_many = self._usages.has_too_many(usage)
        parser = RequestParser()
        timeout_s, keep_alive = HEAD_S, True
        while keep_alive and not self._closing.is_set():
            try:
                request = await self._read_request(parser, reader, writer, timeout_s)
                keep_alive = request.keep_alive and not too_many
                response = await self._respond(request, usage, too_many=too_many)
                head_only = request.method == "HEAD"
            except NotHttp as error:
                code = "request.too_large" if error.status == 431 else "request.malformed"
                response = problem_response(Rejected(code, str(error)), status=error.status)
                keep_alive = head_only = False
            await self._write_response(writer, response, usage, head_only=head_only, keep_alive=keep_alive)
            timeout_s = KEEP_ALIVE_S
        await _read_until_closed(reader, writer)

    async def _read_request(
        self,
        parser: RequestParser,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
    ) -> FileRequest:
        self._idle.add(writer)
        try:
            async with asyncio.timeout(timeout_s):
                data = b""
                while (request := parser.feed(data)) is None:
                    data = await reader.read(MAX_HEAD_BYTES)
                    if not data:
                        raise ConnectionAbortedError("the client disconnected")
                return request
        finally:
            self._idle.discard(writer)

    async def _respond(self, request: FileRequest, usage: AddressUsage, *, too_many: bool) -> FileResponse:
        try:
            if request.method not in ("GET", "HEAD"):
                wrong = Rejected(
                    "request.malformed",
                    f"{request.method[:16]} {request.path[:80]!r}: only GET and HEAD are served here",
                )
                return problem_response(wrong, status=405)
            if too_many:
                raise Rejected(
                    "request.too_many", "too many connections from this address", retry_after_s=1.0
                )
            debt_s = self._usages.debt_s(usage, time.monotonic())
            if debt_s > MAX_DEBT_S:
                raise Rejected("request.too_many", "this address exceeds its byte rate", retry_after_s=debt_s)
            return await self._handle(request)
        except Rejected as rejected:
            return problem_response(rejected)
        except OSError as error:
            # A disk error, or too many open files: only this request may fail.
            self._log.error(f"{request.path[:80]}: {error}")
            return problem_response(
                Rejected("request.failed", "the server cannot read the file now", retry_after_s=1.0)
            )

    async def _write_response(
        self,
        writer: asyncio.StreamWriter,
        response: FileResponse,
        usage: AddressUsage,
        *,
        head_only: bool,
        keep_alive: bool,
    ) -> None:
        fd: int | None = None
        try:
            if not isinstance(response.content, bytes) and not head_only:
                try:
                    fd = response.content.open()
                except Rejected as rejected:
                    response = problem_response(rejected)
            writer.write(_format_head(response, keep_alive))
            if isinstance(response.content, bytes):
                writer.write(b"" if head_only else response.content)
            async with asyncio.timeout(SEND_S):
                await writer.drain()
            if fd is not None and not isinstance(response.content, bytes):
                await self._send_file(writer, fd, response.content, usage)
        finally:
            if fd is not None:
                os.close(fd)

    async def _send_file(
        self, writer: asyncio.StreamWriter, fd: int, body: FileBody, usage: AddressUsage
    ) -> None:
        """Sends a file range as it becomes ready; raises ConnectionError, which closes the connection, if it does not.

        The status line was sent already, so closing is the only way to report an error.
        """
        limited = self._usages.limits.bytes_per_s is not None
        max_bytes = LIMITED_PIECE_BYTES if limited else PIECE_BYTES
        position = yielded_at = body.start
        with _SocketSender(writer) as sender:
            while position < body.stop:
                ready = await body.ready(position)
                if ready is None:
                    raise ConnectionAbortedError("no more bytes came")
                count = min(ready, position + max_bytes) - position
                if limited:
                    await asyncio.sleep(self._usages.take_bytes(usage, count, time.monotonic()))
                sent = await sender.send(fd, position, count)
                if sent < count:
                    self._log.error("a served file is shorter than its manifest says")
                    raise ConnectionAbortedError("short file")
                position += sent
                body.sent(sent)
                if position - yielded_at >= max_bytes:
                    # Without this, a client that reads fast enough would block all others.
                    await asyncio.sleep(0)
                    yielded_at = position


class _SocketSender:
    """Sends file ranges with os.sendfile, past asyncio's write buffer, which must be empty meanwhile.

    The event loop's own sendfile makes a dozen calls for each of ours, and a relay sends shards one by one.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        assert not writer.transport.get_write_buffer_size(), "the head of the response was not drained"
        self._loop = asyncio.get_running_loop()
        # A duplicated descriptor: asyncio refuses add_writer for one that belongs to a transport.
        self._fd = os.dup(writer.get_extra_info("socket").fileno())

    def __enter__(self) -> "_SocketSender":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    async def send(self, fd: int, start: int, count: int) -> int:
        """Sends within SEND_S and returns how much was sent; less than `count` only where the file ends."""
        sent = self._try(fd, start, count)
        if sent is None or 0 < sent < count:
            async with asyncio.timeout(SEND_S):
                sent = await self._send_rest(fd, start, sent or 0, count)
        return sent

    async def _send_rest(self, fd: int, start: int, sent: int, count: int) -> int:
        while sent < count:
            more = self._try(fd, start + sent, count - sent)
            if more == 0:
                break
            sent += more or 0
            if more is None:
                await self._wait_until_writable()
        return sent

    def _try(self, fd: int, start: int, count: int) -> int | None:
        """Returns how much was sent; None if the socket's buffer is full."""
        try:
            return os.sendfile(self._fd, fd, start, count)
        except BlockingIOError:
            return None

    async def _wait_until_writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._fd, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(self._fd)


def _begin_without_bbr(listening: socket.socket) -> bytes | None:
    """Lets connections begin with Reno where the system's congestion control is BBR; returns what far clients get instead.

    BBR sends by a timer for every 64 KB, which costs near clients a third more CPU, and a connection keeps the timer after a change.
    """
    # Suppressed: the socket is not TCP, or the system lacks this option.
    with contextlib.suppress(OSError, AttributeError):
        usual = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if usual.startswith(b"bbr"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            return usual
    return None


def _use_if_far(sock: socket.socket, congestion_control: bytes) -> None:
    with contextlib.suppress(OSError):
        (rtt_us,) = struct.unpack_from("=68xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72))
        if rtt_us >= NEAR_RTT_US:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control)


def _format_head(response: FileResponse, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if response.status != HTTPStatus.NO_CONTENT:
        lines.append(f"content-length: {response.num_bytes}")
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads what the client still sends, for a second: closing a socket with unread bytes discards the response."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(1.0):
            for _ in range(64):
                if not await reader.read(MAX_HEAD_BYTES):
                    return
