"""The file server: HTTP with real clients, hostile bytes, and limits."""

import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net import file_server
from shoal.net.file_server import FileRequest, FileResponse, FileServer, NotHttp, RequestParser
from shoal.net.http_server import listen
from shoal.net.rate_limit import ServerLimits
from shoal.telemetry import Log
from shoal.wire.messages import ProblemDetails

DATA = bytes(range(256)) * 40


class Whole:
    """A whole file, of which the first bytes are ready."""

    def __init__(self, path: Path, ready_up_to: int | None = None) -> None:
        self.path, self.start, self.stop = path, 0, path.stat().st_size
        self.ready_up_to = self.stop if ready_up_to is None else ready_up_to
        self.num_sent = 0

    def open(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    async def ready(self, position: int) -> int | None:
        return self.ready_up_to if position < self.ready_up_to else None

    def sent(self, num_bytes: int) -> None:
        self.num_sent += num_bytes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    with contextlib.ExitStack() as stack:

        def begin(limits: ServerLimits | None = None) -> tuple[str, FileServer]:
            async def handle(request: FileRequest) -> FileResponse:
                match request.path:
                    case "/file":
                        return FileResponse(200, Whole(path), {"x-method": request.method})
                    case "/broken":
                        return FileResponse(200, Whole(path, ready_up_to=5000))
                    case "/disk":
                        raise OSError("the disk is on fire")
                    case "/none":
                        return FileResponse(204)
                return FileResponse(200, repr((request.path, request.query)).encode())

            server = FileServer(handle, listen("127.0.0.1", 0), log=Log("test"), limits=limits)
            server.start()
            stack.callback(server.close)
            return f"http://127.0.0.1:{server.port}", server

        yield begin


def exchange(port: int, data: bytes) -> bytes:
    """Sends these bytes and returns what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_one_connection_serves_files_text_and_heads(start: Any) -> None:
    url, _ = start()
    with httpx2.Client() as http:
        for _ in range(3):
            assert http.get(f"{url}/file").content == DATA
            head = http.head(f"{url}/file")
            assert (head.headers["content-length"], head.headers["x-method"]) == (str(len(DATA)), "HEAD")
            assert http.get(f"{url}/none").status_code == 204
            assert http.get(f"{url}/a%20b?c=%2F").text == "('/a b', {'c': '/'})"


def test_pipelined_requests(start: Any) -> None:
    _, server = start()
    get = b"GET /file HTTP/1.1\r\nHost: x\r\n"
    answer = exchange(server.port, get + b"\r\n" + get + b"connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(DATA) == 2


def test_a_client_that_reads_late_gets_everything_in_order(start: Any, tmp_path: Path) -> None:
    """The file exceeds the socket buffers, so the head of the next response has to wait as well."""
    _, server = start()
    big = bytes(range(255)) * 40_000
    (tmp_path / "data").write_bytes(big)
    get = b"GET /file HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(get + b"\r\n" + get + b"\r\n" + get + b"connection: close\r\n\r\n")
        time.sleep(0.3)  # now the server waits until we read, in the middle of the first file
        answer = b"".join(iter(lambda: sock.recv(1 << 20), b""))
    bodies = [part.split(b"\r\n\r\n", 1)[1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [big] * 3


def test_http_1_0_is_answered_and_closed(start: Any) -> None:
    _, server = start()
    assert exchange(server.port, b"GET /file HTTP/1.0\r\n\r\n").endswith(DATA)


REFUSED = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
    (b"GET http://else/where HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),  # without Host
    (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nx: a\0b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
    (b"\x16\x03\x01\x02", 400),  # TLS to a port without TLS: refused without waiting for the rest
    (b"\0" * 3, 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    (b"POST /file HTTP/1.1\r\nHost: x\r\ncontent-length: 5\r\n\r\nhello", 405),
    (b"DELETE /file HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 405),
]


@pytest.mark.parametrize(("data", "status"), REFUSED)
def test_bad_requests_get_a_problem_and_are_closed(start: Any, data: bytes, status: int) -> None:
    _, server = start()
    head, _, body = exchange(server.port, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert ProblemDetails.parse(body).code in ("request.malformed", "request.too_large")


def test_a_failing_disk_fails_one_request(start: Any) -> None:
    url, _ = start()
    response = httpx2.get(f"{url}/disk")
    assert (response.status_code, ProblemDetails.parse(response.content).code) == (500, "request.failed")
    assert "fire" not in response.text  # the reason is for the log only
    assert httpx2.get(f"{url}/file").content == DATA


def test_missing_bytes_close_the_connection(start: Any) -> None:
    url, server = start()
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{url}/broken")
    assert (
        len(exchange(server.port, b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")[2])
        == 5000
    )


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(noise: bytes) -> None:
    for head in (
        noise + b"\r\n\r\n\r\n",
        b"GET /" + noise + b" HTTP/1.1\r\nHost: x\r\nRange: " + noise + b"\r\n\r\n",
    ):
        try:
            request = RequestParser().feed(head)
            assert request is not None and request.path.startswith("/")
        except NotHttp as error:
            assert error.status == 400


def test_a_request_byte_by_byte() -> None:
    parser, data = RequestParser(), b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n"
    assert [parser.feed(bytes([byte])) for byte in data[:-1]] == [None] * (len(data) - 1)
    request = parser.feed(data[-1:])
    assert request is not None
    assert (request.path, request.query, request.keep_alive) == ("/a", {"b": "c"}, True)
    assert parser.feed(b"") is None


def test_a_request_with_a_body_is_the_last_of_its_connection() -> None:
    """Otherwise the body would be parsed as the next request."""
    get = b"GET / HTTP/1.1\r\nHost: x\r\n"
    for body in (b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"):
        request = RequestParser().feed(get + body)
        assert request is not None and not request.keep_alive
    for unread in (b"connection: close\r\n\r\n", b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"):
        request = RequestParser().feed(get + unread)
        assert request is not None and not request.keep_alive


# -- limits -----------------------------------------------------------------------------------------------


def test_connections_that_arrive_while_it_closes_are_closed_too(start: Any) -> None:
    """Sockets that stay open are found by the garbage collector, whose warnings are errors here."""
    for _ in range(12):
        _, server = start()
        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(socket.create_connection, ("127.0.0.1", server.port)) for _ in range(4)]
            server.close()
        for client in clients:
            with contextlib.suppress(OSError):
                client.result().close()
    gc.collect()


def test_slow_and_idle_connections_are_closed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "HEAD_S", 0.2)
    monkeypatch.setattr(file_server, "KEEP_ALIVE_S", 0.2)
    _, server = start()
    assert exchange(server.port, b"") == b""
    assert exchange(server.port, b"GET /file HTT") == b""
    assert exchange(server.port, b"GET /file HTTP/1.1\r\nHost: x\r\n\r\n").endswith(
        DATA
    )  # answered, then idle


def test_a_client_that_does_not_read_is_disconnected(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_server, "SEND_S", 0.3)
    _, server = start()
    with open(tmp_path / "data", "wb") as file:
        file.truncate(64 << 20)  # more than all socket buffers
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"GET /file HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(1.0)
        with contextlib.suppress(ConnectionResetError):
            received = sum(len(piece) for piece in iter(lambda: sock.recv(1 << 20), b""))
            assert received < 64 << 20


def test_too_many_connections_of_one_address_are_refused(start: Any) -> None:
    url, server = start(ServerLimits(connections_per_address=2))
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(httpx2.Client())
        assert early.get(f"{url}/file").content == DATA
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        refused = httpx2.get(f"{url}/file")
        assert (refused.status_code, ProblemDetails.parse(refused.content).code) == (429, "request.too_many")
        assert int(refused.headers["retry-after"]) >= 1
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with pytest.raises(httpx2.TransportError):  # at twice the limit there is no answer
            httpx2.get(f"{url}/file")
        assert early.get(f"{url}/file").content == DATA  # earlier connections are served
    give_up_s = time.monotonic() + 20
    while True:  # the others were closed; the server notices a little later
        with contextlib.suppress(httpx2.TransportError):
            if (answer := httpx2.get(f"{url}/file")).status_code == 200:
                break
        assert time.monotonic() < give_up_s
    assert answer.content == DATA


def test_the_limit_of_all_connections(start: Any) -> None:
    url, server = start(ServerLimits(connections=3))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/file")


def test_the_byte_rate_covers_all_connections_of_an_address(start: Any, tmp_path: Path) -> None:
    url, _ = start(ServerLimits(bytes_per_s=1_000_000))
    (tmp_path / "data").write_bytes(bytes(300_000))
    began_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        answers = [one.result() for one in [pool.submit(httpx2.get, f"{url}/file") for _ in range(3)]]
    assert [len(answer.content) for answer in answers] == [300_000] * 3
    # 900 kB at 1 MB/s; the last piece of 64 kB is sent before the rate allows it.
    assert time.monotonic() - began_s > 0.8


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("near_rtt_us", "expected"), [(10_000_000, b"reno"), (0, b"bbr")])
def test_only_far_clients_get_bbr(monkeypatch: pytest.MonkeyPatch, near_rtt_us: int, expected: bytes) -> None:
    accepted: list[bytes] = []
    use_if_far = file_server._use_if_far

    def use_and_look(sock: socket.socket, usual: bytes) -> None:
        use_if_far(sock, usual)
        accepted.append(congestion_control(sock))

    monkeypatch.setattr(file_server, "_use_if_far", use_and_look)
    monkeypatch.setattr(file_server, "NEAR_RTT_US", near_rtt_us)
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this system has no BBR")
    listening = listen("127.0.0.1", 0)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

    async def handle(request: FileRequest) -> FileResponse:
        return FileResponse(200, b"hello")

    server = FileServer(handle, listening, log=Log("files"))
    server.start()
    try:
        assert httpx2.get(f"http://127.0.0.1:{server.port}/").content == b"hello"
    finally:
        server.close()
    assert accepted == [expected]
