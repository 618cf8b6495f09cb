"""The file server: HTTP as others speak it, and nobody who can occupy it."""

import contextlib
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
from shoal.net.bandwidth import Account, Accounts, Limits
from shoal.net.file_server import Answer, FileServer, Request, parse_head
from shoal.net.http_server import listen
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.messages import Problem

DATA = bytes(range(256)) * 40


class Whole:
    """All of one file, up to where it is said to be ready."""

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

        def begin(limits: Limits | None = None) -> tuple[str, FileServer]:
            async def answer(request: Request) -> Answer:
                match request.path:
                    case "/file":
                        return Answer(200, Whole(path), {"x-method": request.method})
                    case "/broken":
                        return Answer(200, Whole(path, ready_up_to=5000))
                    case "/disk":
                        raise OSError("the disk is on fire")
                    case "/none":
                        return Answer(204)
                return Answer(200, repr((request.path, request.query)).encode())

            server = FileServer(answer, listen("127.0.0.1", 0), log=Log("test"), limits=limits)
            server.start()
            stack.callback(server.close)
            return f"http://127.0.0.1:{server.port}", server

        yield begin


def converse(port: int, data: bytes) -> bytes:
    """Send these bytes; everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_files_words_and_heads_on_one_connection(start: Any) -> None:
    url, _ = start()
    with httpx2.Client() as http:
        for _ in range(3):
            assert http.get(f"{url}/file").content == DATA
            head = http.head(f"{url}/file")
            assert (head.headers["content-length"], head.headers["x-method"]) == (str(len(DATA)), "HEAD")
            assert http.get(f"{url}/none").status_code == 204
            assert http.get(f"{url}/a%20b?c=%2F").text == "('/a b', {'c': '/'})"


def test_requests_one_behind_the_other(start: Any) -> None:
    _, server = start()
    get = b"GET /file HTTP/1.1\r\nHost: x\r\n"
    answer = converse(server.port, get + b"\r\n" + get + b"connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(DATA) == 2


def test_one_who_reads_late_gets_everything_in_order(start: Any, tmp_path: Path) -> None:
    """More than the kernel holds for a connection: the head of the next answer has to wait as well."""
    _, server = start()
    big = bytes(range(255)) * 40_000
    (tmp_path / "data").write_bytes(big)
    get = b"GET /file HTTP/1.1\r\nHost: x\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(get + b"\r\n" + get + b"\r\n" + get + b"connection: close\r\n\r\n")
        time.sleep(0.3)  # now the server waits for us, amid the first
        answer = b"".join(iter(lambda: sock.recv(1 << 20), b""))
    bodies = [part.split(b"\r\n\r\n", 1)[1] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [big] * 3


def test_a_client_of_http_1_0_is_answered_and_left(start: Any) -> None:
    _, server = start()
    assert converse(server.port, b"GET /file HTTP/1.0\r\n\r\n").endswith(DATA)


REFUSED = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET /\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
    (b"GET http://else/where HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    (b"POST /file HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello", 405),
    (b"DELETE /file HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 405),
]


@pytest.mark.parametrize(("data", "status"), REFUSED)
def test_what_is_not_for_us_is_refused_in_words_and_closed(start: Any, data: bytes, status: int) -> None:
    _, server = start()
    head, _, body = converse(server.port, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert Problem.parse(body).code in ("request.malformed", "request.too_large")


def test_a_failing_disk_fails_one_request(start: Any) -> None:
    url, _ = start()
    response = httpx2.get(f"{url}/disk")
    assert (response.status_code, Problem.parse(response.content).code) == (500, "request.failed")
    assert "fire" not in response.text  # the log's, not the stranger's
    assert httpx2.get(f"{url}/file").content == DATA


def test_bytes_that_do_not_come_cut_the_connection(start: Any) -> None:
    url, server = start()
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{url}/broken")
    assert len(converse(server.port, b"GET /broken HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")[2]) == 5000


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.binary(max_size=200))
def test_any_head_is_parsed_or_refused(noise: bytes) -> None:
    for head in (noise + b"\r\n\r\n", b"GET /" + noise + b" HTTP/1.1\r\nRange: " + noise + b"\r\n\r\n"):
        try:
            assert parse_head(head).path.startswith("/")
        except Rejected as rejected:
            assert rejected.code == "request.malformed"


# -- limits -----------------------------------------------------------------------------------------------


def test_slow_and_idle_connections_are_left(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_server, "HEAD_S", 0.2)
    monkeypatch.setattr(file_server, "KEEP_ALIVE_S", 0.2)
    _, server = start()
    assert converse(server.port, b"") == b""
    assert converse(server.port, b"GET /file HTT") == b""
    assert converse(server.port, b"GET /file HTTP/1.1\r\n\r\n").endswith(DATA)  # answered, then idle


def test_a_client_that_does_not_read_is_left(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(file_server, "SEND_S", 0.3)
    _, server = start()
    with open(tmp_path / "data", "wb") as file:
        file.truncate(64 << 20)  # more than all buffers between us
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(b"GET /file HTTP/1.1\r\n\r\n")
        give_up_s = time.monotonic() + 20
        for num_connections in (1, 0):  # it is served, and then it is not
            while server.num_connections != num_connections:
                assert time.monotonic() < give_up_s, f"never {num_connections} connections"
                time.sleep(0.005)


def test_an_address_with_too_many_connections_is_told_so(start: Any) -> None:
    url, server = start(Limits(connections_per_address=2))
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(httpx2.Client())
        assert early.get(f"{url}/file").content == DATA
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        refused = httpx2.get(f"{url}/file")
        assert (refused.status_code, Problem.parse(refused.content).code) == (429, "request.too_many")
        assert int(refused.headers["retry-after"]) >= 1
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with pytest.raises(httpx2.TransportError):  # at twice its share there is not even an answer
            httpx2.get(f"{url}/file")
        assert early.get(f"{url}/file").content == DATA  # who came in time is not disturbed
    give_up_s = time.monotonic() + 20
    while True:  # they left, and it is as before; a close takes its time to be seen
        with contextlib.suppress(httpx2.TransportError):
            if (answer := httpx2.get(f"{url}/file")).status_code == 200:
                break
        assert time.monotonic() < give_up_s
    assert answer.content == DATA


def test_the_server_takes_so_many_and_no_more(start: Any) -> None:
    url, server = start(Limits(connections=3))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{url}/file")


def test_a_rate_is_kept_over_all_connections_of_an_address(start: Any, tmp_path: Path) -> None:
    url, _ = start(Limits(bytes_per_s=1_000_000))
    (tmp_path / "data").write_bytes(bytes(300_000))
    began_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        answers = [one.result() for one in [pool.submit(httpx2.get, f"{url}/file") for _ in range(3)]]
    assert [len(answer.content) for answer in answers] == [300_000] * 3
    # 900 kB at 1 MB/s; the last piece of 64 kB is sent before it is earned.
    assert time.monotonic() - began_s > 0.8


def test_debts_and_shares() -> None:
    accounts = Accounts(Limits(connections_per_address=1, bytes_per_s=100.0))
    mine = accounts.enter("1.2.3.4", 0.0)
    assert isinstance(mine, Account)
    assert accounts.take(mine, 500, 0.0) == 0.0
    assert accounts.take(mine, 100, 1.0) == 4.0
    assert accounts.debt_s(mine, 1.0) == 5.0
    assert accounts.debt_s(mine, 7.0) == 0.0
    again = accounts.enter("::ffff:1.2.3.4", 1.0)
    assert again is mine and accounts.crowded(mine)
    accounts.leave(mine)
    assert not accounts.crowded(mine)
    assert accounts.enter("2001:db8::1", 0.0) is accounts.enter("2001:db8::2", 0.0)
    assert accounts.enter("2001:db8:0:1::1", 0.0) is not accounts.enter("2001:db8::2", 0.0)


def test_forgotten_addresses_take_no_memory() -> None:
    accounts = Accounts(Limits())
    for index in range(20_000):
        account = accounts.enter(f"10.{index >> 16}.{(index >> 8) & 255}.{index & 255}", float(index))
        assert account is not None
        accounts.leave(account)
    assert len(accounts._accounts) < 5_000
    assert accounts.connections == 0


@pytest.mark.parametrize("bad", [{"connections": 0}, {"connections_per_address": 0}, {"bytes_per_s": 0.0}])
def test_limits_that_serve_nobody_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|must be positive"):
        Limits(**bad)
