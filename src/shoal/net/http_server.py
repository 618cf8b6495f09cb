"""Runs an ASGI app on a socket, in a thread, until it is told to stop; then drains and ends."""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shoal.net.rate_limit import AddressUsage, ServerLimits, UsageByAddress, is_this_machine
from shoal.net.waiting import DeadlinePassed
from shoal.telemetry import Log

DRAIN_S = 3
HEADER_S = 10.0
"""Timeout from the opening of a connection, or the first byte of a request, to the end of the request's headers."""

MAX_CONNECTIONS, ADDRESS_CONNECTIONS = 8192, 256
"""Most connections of a server, and of one client address (or IPv6 prefix); beyond twice that many they are closed."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; raises OSError that names the address and the remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP explicitly: asyncio sets TCP_NODELAY only on sockets that report this protocol. Without it a
    # response of head and body takes 40 ms longer, the delay of the TCP acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or stop what uses it"
        ) from None
    sock.listen(1024)
    return sock


def allow_open_files(wanted: int, log: Log) -> None:
    """Raises the limit of open files, of which many systems allow only 1024. Each connection needs one, and a second one while a file is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "the system's limit of open files is too low for so many connections; raise `ulimit -n`",
            files=allowed,
            need=wanted,
        )


def authority(host: str, port: int) -> str:
    """Returns HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def guard_bodies(app: Any) -> Any:
    """Wraps an ASGI app: refuses ambiguous bodies, and closes the connection after an answer that did not read the whole body.

    Without this, uvicorn reads and discards the rest of the body for as long as the client sends. A request with Content-Length
    and Transfer-Encoding is refused because a proxy in front may see its end elsewhere: the rest would become a request of
    the next client on that connection.
    """

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        announced = {
            name: value for name, value in headers if name in (b"transfer-encoding", b"content-length")
        }
        if announced in ({}, {b"content-length": b"0"}):
            await app(scope, receive, send)
            return
        if len(announced) > 1:
            ended = [(b"connection", b"close"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 400, "headers": ended})
            await send({"type": "http.response.body"})
            return
        read = False

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read = read or not message.get("more_body", False)
            return message

        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start" and not read:
                message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, counted, closing)

    return wrapped


class HeaderTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, with a timeout for the headers of a request.

    uvicorn limits the pause between two requests, but not the time a request's headers may take: half a request line
    would hold a connection open for ever. Relies on uvicorn's `cycle.response_complete`, `loop` and `transport`, which
    tests/net/test_http_server.py checks.
    """

    header_s = HEADER_S
    usages: UsageByAddress
    """Connections of each client address; each server has its own."""
    _header_timer: asyncio.TimerHandle | None = None
    _usage: AddressUsage | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        if peer and self._is_limited(peer[0]):
            self._usage = self.usages.connect(peer[0], time.monotonic())
            if self._usage is None:
                transport.abort()
                return
        self._start_timer()

    def _is_limited(self, address: str) -> bool:
        """Returns whether an address has a limit. Clients of a reverse proxy on this machine share its address."""
        return not is_this_machine(address)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._between_requests():
            self._start_timer()
        else:
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if self._usage is not None:
            self.usages.disconnect(self._usage)
            self._usage = None
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        # Not restarted by each byte: a client that sends one byte at a time must not get more time.
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self._on_timeout)

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_timeout(self) -> None:
        self._header_timer = None
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()


class _DrainingServer(uvicorn.Server):
    """uvicorn's server, which also ends the connections that are still open after the time to drain."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Stops accepting before uvicorn closes the server: asyncio leaks the socket of a connection that it accepted last.
        for sock in sockets or ():
            asyncio.get_running_loop().remove_reader(sock)
        await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        # uvicorn leaves connections open whose client does not read, and those that were accepted while it shut down.
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next iteration of the loop


class Server:
    """Serves an ASGI app on a socket, in a thread, between `start` and `close`.

    `on_close` must end responses that have no end, such as event streams; without it `close` would wait for them.
    """

    def __init__(self, app: Any, sock: socket.socket, *, on_close: Callable[[], None] | None = None) -> None:
        limits = ServerLimits(connections=MAX_CONNECTIONS, connections_per_address=ADDRESS_CONNECTIONS)
        config = uvicorn.Config(
            guard_bodies(app),
            http=type("LimitedProtocol", (HeaderTimeoutProtocol,), {"usages": UsageByAddress(limits)}),
            # Not warnings: each malformed request is one, and strangers could fill the disk with them.
            log_level="error",
            access_log=False,
            # The apps have no websockets; with a library for them uvicorn would pass such requests on, and log each failure.
            ws="none",
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=30,
            lifespan="on",
            server_header=False,
            # Any client can send X-Forwarded-For; rate_limit.py decides when it is believed.
            proxy_headers=False,
        )
        self._uvicorn = _DrainingServer(config)
        self._sock = sock
        self._on_close = on_close
        self._thread: threading.Thread | None = None
        # The command line handles signals; without this, uvicorn would replace its handlers.
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    @property
    def port(self) -> int:
        """The port that the socket listens on."""
        return int(self._sock.getsockname()[1])

    def check(self) -> None:
        """Raises RuntimeError if the server ended without `close`."""
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError(f"the server on port {self.port} stopped unexpectedly; its log says why")

    def start(self, deadline_s: float = 20.0) -> None:
        """Starts the thread and waits until the server accepts connections."""
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        give_up_s = time.monotonic() + deadline_s
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the server on port {self.port} failed to start; its log says why")
            if time.monotonic() > give_up_s:
                raise DeadlinePassed(
                    f"the server on port {self.port} did not start within {deadline_s:.0f} s"
                )
            time.sleep(0.01)

    def close(self) -> None:
        """Stops accepting connections, drains for at most DRAIN_S, and closes the socket."""
        if self._on_close is not None:
            self._on_close()
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(DRAIN_S + 2)
        self._sock.close()

    def _run(self) -> None:
        # uvicorn calls sys.exit when the app fails to start, after logging why; here that must end only the thread.
        with contextlib.suppress(SystemExit):
            self._uvicorn.run(sockets=[self._sock])
