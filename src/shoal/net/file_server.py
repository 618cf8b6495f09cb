"""A small HTTP/1.1 server for files: the kernel sends them (sendfile), one event loop serves all connections.

GET and HEAD only, no bodies in, keep-alive. What is answered is the owner's: `answer(request) -> Answer`. Against
those who come only to occupy it: a cap on the head of a request, a deadline for each step, limits per address.
"""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from shoal.net.bandwidth import LONGEST_DEBT_S, Account, Accounts, Limits
from shoal.net.pacing import send_at_once, use_if_far
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log
from shoal.wire.codes import CODES, Rejected
from shoal.wire.messages import Problem

MAX_HEAD_BYTES = 16 << 10
HEAD_S = 10.0
"""For a request to arrive, from its first byte or from the connection's start."""
KEEP_ALIVE_S = 30.0
SEND_S = 60.0
"""How long a client may take over one piece before it is left."""
PIECE_BYTES = 4 << 20
LIMITED_PIECE_BYTES = 64 << 10
"""Under a rate limit, so that connections of one address take turns."""
DRAIN_S = 3.0

_REQUEST_LINE = re.compile(rb"(?P<method>[A-Z]{1,16}) (?P<target>/[!-~\x80-\xff]*) HTTP/1\.(?P<minor>[01])")
_HEADER = re.compile(rb"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>[^\r\n\x00]*?)[ \t]*")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    keep_alive: bool


class Body(Protocol):
    """A range of a file that may still be growing."""

    start: int
    stop: int

    def open(self) -> int:
        """A descriptor; Rejected if the file has just gone."""
        ...

    async def ready(self, position: int) -> int | None:
        """Up to where, after `position`, bytes may be sent; None if the rest does not come."""
        ...

    def sent(self, num_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: bytes | Body = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stop - self.content.start


Handler = Callable[[Request], Awaitable[Answer]]


def problem(rejected: Rejected, *, status: int | None = None) -> Answer:
    """The refusal as every client of ours can read it."""
    meaning = CODES[rejected.code]
    body = Problem(
        code=rejected.code,
        detail=rejected.detail,
        fix=meaning.remedy,
        retry_after_s=rejected.retry_after_s,
        server_time_s=time.time(),
    )
    headers = {"content-type": "application/problem+json"}
    if rejected.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(rejected.retry_after_s)))
    return Answer(status or meaning.status, body.model_dump_json().encode(), headers)


def parse_head(head: bytes) -> Request:
    """The head of a request up to its empty line; Rejected if it is not one we take."""
    line, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    fields = [_HEADER.fullmatch(one) for one in rest]
    if match is None or None in fields:
        raise Rejected("request.malformed", f"not an HTTP/1.1 request: {line[:80]!r}")
    headers = {one["name"].decode().lower(): one["value"].decode("latin-1") for one in fields if one}
    path, _, query = match["target"].decode("latin-1").partition("?")
    connection = headers.get("connection", "").lower()
    bodied = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return Request(
        method=match["method"].decode(),
        path=urllib.parse.unquote(path),
        query=dict(urllib.parse.parse_qsl(query)),
        headers=headers,
        # A body that nobody reads would be taken for the next request.
        keep_alive=match["minor"] == b"1" and "close" not in connection and not bodied,
    )


class FileServer:
    """`start` and `close` from any thread; `check` raises if it ended by itself."""

    def __init__(
        self, answer: Handler, sock: socket.socket, *, log: Log, limits: Limits | None = None
    ) -> None:
        self._answer, self._sock, self._log = answer, sock, log
        self._if_far = send_at_once(sock)
        self._accounts = Accounts(limits or Limits())
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._closing = asyncio.Event()
        self._idle: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    @property
    def num_connections(self) -> int:
        return self._accounts.connections

    def start(self, deadline_s: float = 20.0) -> None:
        self._thread.start()
        if not self._started.wait(deadline_s):
            raise DeadlinePassed(f"the server on port {self.port} did not start within {deadline_s:.0f} s")

    def check(self) -> None:
        if not self._thread.is_alive():
            raise RuntimeError(f"the server on port {self.port} ended by itself; its log says why")

    def close(self) -> None:
        """Answers under way get DRAIN_S to end."""
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
        # A reader holds one head at most; the rest of what a client pushes stays in the kernel.
        server = await asyncio.start_server(
            self._connected, sock=self._sock, limit=MAX_HEAD_BYTES, backlog=1024
        )
        self._started.set()
        await self._closing.wait()
        server.close()
        for writer in self._idle:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        account = self._accounts.enter(_peer(writer), time.monotonic())
        if self._if_far is not None:
            use_if_far(writer.get_extra_info("socket"), self._if_far)
        # drain waits until all has gone: what follows may be a file.
        writer.transport.set_write_buffer_limits(0)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if account is not None:
                await self._converse(reader, writer, account)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # it went away, or is too slow to wait for
        except asyncio.CancelledError:
            if not self._closing.is_set():
                raise
        finally:
            self._tasks.discard(task)
            if account is not None:
                self._accounts.leave(account)
            # What was written was awaited; anything that is left belongs to somebody who does not read.
            writer.transport.abort()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, account: Account
    ) -> None:
        crowded = self._accounts.crowded(account)
        wait_s, keep_alive = HEAD_S, True
        while keep_alive and not self._closing.is_set():
            try:
                request = await self._read(reader, writer, wait_s)
                keep_alive = request.keep_alive and not crowded
                answer = await self._decide(request, account, crowded=crowded)
                head_only = request.method == "HEAD"
            except asyncio.LimitOverrunError:
                too_long = Rejected("request.too_large", f"a head of over {MAX_HEAD_BYTES} bytes")
                answer, keep_alive, head_only = problem(too_long, status=431), False, False
            except Rejected as rejected:  # not HTTP
                answer, keep_alive, head_only = problem(rejected, status=400), False, False
            await self._reply(writer, answer, account, head_only=head_only, keep_alive=keep_alive)
            wait_s = KEEP_ALIVE_S
        await _linger(reader, writer)

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_s: float
    ) -> Request:
        self._idle.add(writer)
        try:
            async with asyncio.timeout(wait_s):
                return parse_head(await reader.readuntil(b"\r\n\r\n"))
        finally:
            self._idle.discard(writer)

    async def _decide(self, request: Request, account: Account, *, crowded: bool) -> Answer:
        try:
            if request.method not in ("GET", "HEAD"):
                wrong = Rejected(
                    "request.malformed", f"{request.method} {request.path[:80]!r}: only GET and HEAD"
                )
                return problem(wrong, status=405)
            if crowded:
                raise Rejected(
                    "request.too_many", "too many connections from this address", retry_after_s=1.0
                )
            debt_s = self._accounts.debt_s(account, time.monotonic())
            if debt_s > LONGEST_DEBT_S:
                raise Rejected("request.too_many", "this address is over its rate", retry_after_s=debt_s)
            return await self._answer(request)
        except Rejected as rejected:
            return problem(rejected)
        except OSError as error:
            # The disk's, or too many open files: this request fails, the server does not.
            self._log.error(f"{request.path[:80]}: {error}")
            return problem(Rejected("request.failed", "the server cannot read it now", retry_after_s=1.0))

    async def _reply(
        self,
        writer: asyncio.StreamWriter,
        answer: Answer,
        account: Account,
        *,
        head_only: bool,
        keep_alive: bool,
    ) -> None:
        fd: int | None = None
        try:
            if not isinstance(answer.content, bytes) and not head_only:
                try:
                    fd = answer.content.open()
                except Rejected as rejected:
                    answer = problem(rejected)
            writer.write(_head(answer, keep_alive))
            if isinstance(answer.content, bytes):
                writer.write(b"" if head_only else answer.content)
            async with asyncio.timeout(SEND_S):
                await writer.drain()
            if fd is not None and not isinstance(answer.content, bytes):
                await self._send(writer, fd, answer.content, account)
        finally:
            if fd is not None:
                os.close(fd)

    async def _send(self, writer: asyncio.StreamWriter, fd: int, body: Body, account: Account) -> None:
        """ConnectionError cuts the connection, which is all that can be said once the status is out."""
        limited = self._accounts.limits.bytes_per_s is not None
        most = LIMITED_PIECE_BYTES if limited else PIECE_BYTES
        position = turn = body.start
        with _Outlet(writer) as outlet:
            while position < body.stop:
                ready = await body.ready(position)
                if ready is None:
                    raise ConnectionAbortedError("the rest does not come")
                count = min(ready, position + most) - position
                if limited:
                    await asyncio.sleep(self._accounts.take(account, count, time.monotonic()))
                sent = await outlet.send(fd, position, count)
                if sent < count:
                    self._log.error("a file of ours has lost its end")
                    raise ConnectionAbortedError("short file")
                position += sent
                body.sent(sent)
                if position - turn >= most:
                    # Others want to be served too, also when this client takes all at once.
                    await asyncio.sleep(0)
                    turn = position


class _Outlet:
    """A connection as the kernel's, past asyncio's own buffer, which is empty while a file is sent. The loop's sendfile makes a
    dozen calls for each of ours, and in a relay shards come one by one."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        assert not writer.transport.get_write_buffer_size(), "drain has not waited for the head of the answer"
        self._loop = asyncio.get_running_loop()
        # A descriptor of its own: asyncio lets nobody wait for one that belongs to a transport.
        self._fd = os.dup(writer.get_extra_info("socket").fileno())

    def __enter__(self) -> "_Outlet":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    async def send(self, fd: int, start: int, count: int) -> int:
        """How much was sent, within SEND_S; less than `count` only where the file ends."""
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
                await self._writable()
        return sent

    def _try(self, fd: int, start: int, count: int) -> int | None:
        """None while it takes nothing."""
        try:
            return os.sendfile(self._fd, fd, start, count)
        except BlockingIOError:
            return None

    async def _writable(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._fd, _finish, turn)
        try:
            await turn
        finally:
            self._loop.remove_writer(self._fd)


def _finish(turn: "asyncio.Future[None]") -> None:
    if not turn.done():  # the loop may call twice before the one who waits runs
        turn.set_result(None)


def _head(answer: Answer, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != HTTPStatus.NO_CONTENT:
        lines.append(f"content-length: {answer.num_bytes}")
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let the last answer arrive: closing over unread bytes would have the kernel throw it away."""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write_eof()
        async with asyncio.timeout(1.0):
            for _ in range(64):
                if not await reader.read(MAX_HEAD_BYTES):
                    return


def _peer(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else "?"
