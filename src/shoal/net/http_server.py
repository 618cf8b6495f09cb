"""The server's side: run an ASGI app until told to stop, drain, and leave."""

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
"""From the first byte of a request, or the opening of a connection, to the end of the request's headers."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, or an error that names the address and what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio sends small writes at once only on sockets that say they are TCP. Without it a
    # response of head and body costs 40 ms, the wait for the delayed acknowledgement.
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
    """The ASGI app, but an answer to a request whose body was not read to its end closes the connection.

    Else the server would go on reading, to throw it away, for as long as somebody cares to send.
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


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP as uvicorn speaks it, but a connection whose headers do not come to an end is closed.

    Uvicorn bounds the pause between two requests, not a request that never begins: without this, half a line sent once
    holds a connection for ever, and some hundreds of them every one there is.
    """

    header_s = HEADER_S
    _headers_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._between_requests():
            self._expect_headers()
        else:
            self._stop_expecting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_headers(self) -> None:
        # Not anew for each byte: a drip must not buy time.
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(self.header_s, self._give_up)

    def _stop_expecting(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _give_up(self) -> None:
        self._headers_due = None
        if self._between_requests() and not self.transport.is_closing():
            self.transport.close()


class Server:
    """An ASGI app on a socket, served by a thread between `start` and `close`.

    `on_close` ends what would go on for ever, such as streams of events: else stopping waits for them.
    """

    def __init__(self, app: Any, sock: socket.socket, *, on_close: Callable[[], None] | None = None) -> None:
        config = uvicorn.Config(
            close_on_unread_body(app),
            http=PatientProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=30,
            lifespan="on",
            server_header=False,
            # What a client says of its own address is not taken for it.
            proxy_headers=False,
        )
        self._uvicorn = uvicorn.Server(config)
        self._sock = sock
        self._on_close = on_close
        self._thread: threading.Thread | None = None
        # Signals belong to the command line; a server only ever stops because its owner says so.
        self._uvicorn.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    def check(self) -> None:
        """Raise if the server has ended although nobody closed it."""
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError(f"the server on port {self.port} ended by itself; its log says why")

    def start(self, deadline_s: float = 20.0) -> None:
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        give_up_s = time.monotonic() + deadline_s
        while not self._uvicorn.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the server on port {self.port} ended while it started; its log says why")
            if time.monotonic() > give_up_s:
                raise DeadlinePassed(
                    f"the server on port {self.port} did not start within {deadline_s:.0f} s"
                )
            time.sleep(0.01)

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(DRAIN_S + 2)
        self._sock.close()

    def _run(self) -> None:
        # Uvicorn leaves by sys.exit when the app fails to start, after it has logged why; here only a thread ends.
        with contextlib.suppress(SystemExit):
            self._uvicorn.run(sockets=[self._sock])
