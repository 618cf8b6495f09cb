"""The ASGI server: start, drain, stop, and its timeouts."""

import contextlib
import gc
import inspect
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI, Request

from shoal.net import http_server
from shoal.net.http_server import HeaderTimeoutProtocol, Server, listen


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/hello")
    def hello() -> str:
        return "hello"

    return app


def test_it_serves_until_it_is_closed() -> None:
    server = Server(make_app(), listen("127.0.0.1", 0))
    server.start()
    url = f"http://127.0.0.1:{server.port}/hello"
    assert httpx2.get(url).json() == "hello"
    server.close()
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_close_waits_for_a_request_in_progress() -> None:
    entered, leave = threading.Event(), threading.Event()
    app = FastAPI()

    @app.get("/slow")
    def slow() -> str:
        entered.set()
        leave.wait(20)
        return "done"

    server = Server(app, listen("127.0.0.1", 0))
    server.start()
    answers: list[str] = []
    url = f"http://127.0.0.1:{server.port}/slow"
    client = threading.Thread(target=lambda: answers.append(httpx2.get(url, timeout=20).json()))
    client.start()
    assert entered.wait(20)
    closing = threading.Thread(target=server.close)
    closing.start()
    leave.set()
    client.join(20)
    closing.join(20)
    assert answers == ["done"]


def test_the_error_for_a_used_port_names_it_and_the_remedy() -> None:
    with contextlib.closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_an_app_that_fails_to_start_is_reported() -> None:
    @contextlib.asynccontextmanager
    async def broken(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no database")
        yield

    server = Server(FastAPI(lifespan=broken), listen("127.0.0.1", 0))
    with pytest.raises(RuntimeError, match="failed to start"):
        server.start()
    server.close()


def test_an_unread_body_closes_the_connection() -> None:
    server = Server(make_app(), listen("127.0.0.1", 0))
    server.start()
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(1000):
                raw.sendall(chunk)
    server.close()


def test_a_connection_stays_open_after_a_body_that_was_read() -> None:
    app = FastAPI()

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    server = Server(app, listen("127.0.0.1", 0))
    server.start()
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.port}") as http:
        for content in (b"", b"x" * 100_000):
            answer = http.post("/length", content=content)
            assert (answer.json(), answer.headers.get("connection")) == (len(content), None)
        refused = http.post("/nowhere", content=b"unread")
        assert (refused.status_code, refused.headers["connection"]) == (404, "close")
        assert http.post("/length", content=b"again").json() == 5
    server.close()


@pytest.mark.parametrize("length", [0, 5, 50])
def test_a_body_with_two_lengths_is_refused_and_hides_no_second_request(length: int) -> None:
    """A proxy that goes by Content-Length and a server that goes by the chunks would see different requests."""
    server = Server(make_app(), listen("127.0.0.1", 0))
    server.start()
    head = (
        f"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(f"{head}0\r\n\r\nGET /hello HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    server.close()
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"no request at all\r\n\r\n",
        b"GET /hello HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    ],
)
def test_malformed_requests_are_not_logged(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Strangers could otherwise fill the disk with lines."""
    server = Server(make_app(), listen("127.0.0.1", 0))
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(request_bytes)
        while sock.recv(4096):
            pass
    server.close()
    assert caplog.records == [] and capfd.readouterr() == ("", "")


def test_headers_that_never_end_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderTimeoutProtocol, "header_s", 0.3)
    server = Server(make_app(), listen("127.0.0.1", 0))
    server.start()
    address = ("127.0.0.1", server.port)
    whole = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
    for said in (b"", b"GET /hel", whole[:-2]):
        with socket.create_connection(address, timeout=20) as half:
            half.sendall(said)
            assert half.recv(4096) == b""  # the server closed it
    with socket.create_connection(address, timeout=20) as second:
        second.sendall(whole)
        assert b"200 OK" in second.recv(4096)
        second.sendall(b"GET /hel")
        assert b"HTTP/1.1" not in b"".join(iter(lambda: second.recv(4096), b""))
    # Sending byte by byte does not extend the timeout.
    with socket.create_connection(address, timeout=20) as drip:
        drip.settimeout(0.05)
        for byte in b"GET /hello HTTP/1.1\r\nX-Long: " + b"a" * 1000:
            try:
                drip.sendall(bytes([byte]))
                if drip.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("single bytes held the connection open")
    # The timeout does not apply between two requests.
    with httpx2.Client() as client:
        for _ in range(2):
            assert client.get(f"http://127.0.0.1:{server.port}/hello").json() == "hello"
            threading.Event().wait(0.5)
    server.close()


def test_what_the_header_timeout_relies_on() -> None:
    """HeaderTimeoutProtocol reads attributes of uvicorn's protocols that uvicorn does not document."""
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

    implementations: list[tuple[Any, Any]] = [(H11Protocol, RequestResponseCycle)]
    with contextlib.suppress(ImportError):
        from uvicorn.protocols.http import httptools_impl

        implementations.append((httptools_impl.HttpToolsProtocol, httptools_impl.RequestResponseCycle))
    for protocol, cycle in implementations:
        made = inspect.getsource(protocol.__init__)
        assert all(f"self.{name}" in made for name in ("cycle", "loop", "transport"))
        assert "self.response_complete = False" in inspect.getsource(cycle.__init__)
        assert callable(protocol.connection_made) and callable(protocol.data_received)
    assert issubclass(HeaderTimeoutProtocol, tuple(protocol for protocol, _ in implementations))
    assert callable(uvicorn.Server.capture_signals)


def test_close_ends_connections_whose_client_does_not_read() -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})

    server = Server(endless, listen("127.0.0.1", 0))
    server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        server.close()
        gc.collect()  # a connection that is still open would be reported here


def test_one_address_cannot_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ADDRESS_CONNECTIONS", 2)
    monkeypatch.setattr(
        HeaderTimeoutProtocol, "_is_limited", lambda self, address: True
    )  # this test has loopback only
    server = Server(FastAPI(), listen("127.0.0.1", 0))
    server.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with socket.create_connection(("127.0.0.1", server.port)) as fifth:
                fifth.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert fifth.recv(1) == b""
        assert httpx2.get(f"http://127.0.0.1:{server.port}/none", timeout=10).status_code == 404
    finally:
        server.close()


@pytest.mark.parametrize(
    ("address", "limited"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("8.8.8.8", True),
        ("fe80::1%eth0", True),
    ],
)
def test_only_addresses_of_other_machines_are_limited(address: str, limited: bool) -> None:
    assert HeaderTimeoutProtocol._is_limited(cast("Any", None), address) is limited
