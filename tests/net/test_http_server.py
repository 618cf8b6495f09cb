"""The ASGI server: start, drain, stop, and its timeouts."""

import contextlib
import inspect
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI, Request

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
