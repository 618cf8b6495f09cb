"""Runs an ASGI app on a socket, in a thread, until it is told to stop; then drains and ends."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shoal.net.waiting import DeadlinePassed

DRAIN_S = 3
HEADER_S = 10.0
"""Timeout from the opening of a connection, or the first byte of a request, to the end of the request's headers."""


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


def close_on_unread_body(app: Any) -> Any:
    """Wraps an ASGI app: an answer to a request whose body was not read completely closes the connection.

    Without this, uvicorn reads and discards the rest of the body for as long as the client sends.
    """

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _announces_body(scope["headers"]):
            await app(scope, receive, send)
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


def _announces_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return True
    return False


class HeaderTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP protocol, with a timeout for the headers of a request.

    uvicorn limits the pause between two requests, but not the time a request's headers may take: half a request line
    would hold a connection open for ever. Relies on uvicorn's `cycle.response_complete`, `loop` and `transport`, which
    tests/net/test_http_server.py checks.
    """

    header_s = HEADER_S
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._between_requests():
            self._start_timer()
        else:
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
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


class Server:
    """Serves an ASGI app on a socket, in a thread, between `start` and `close`.

    `on_close` must end responses that have no end, such as event streams; without it `close` would wait for them.
    """

    def __init__(self, app: Any, sock: socket.socket, *, on_close: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            close_on_unread_body(app),
            http=HeaderTimeoutProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=30,
            lifespan="on",
            server_header=False,
            # X-Forwarded-For is ignored: any client can send it.
            proxy_headers=False,
        )
        self._uvicorn = uvicorn.Server(config)
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
