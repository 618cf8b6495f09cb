"""Shards from one server: slow, hanging and cancelled responses, and the parts of http.client that we rely on."""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shoal.shardcast.assembly import Shard
from shoal.shardcast.client import http_source
from shoal.shardcast.client.http_source import Connections, RelayFailed, ask_shards

DATA = bytes(range(256)) * 400
SHARDS = [
    Shard("model", index, start, min(40_000, len(DATA) - start), "")
    for index, start in enumerate(range(0, len(DATA), 40_000))
]
HEAD = f"HTTP/1.1 206 Partial Content\r\ncontent-length: {len(DATA)}\r\n\r\n".encode()


@pytest.fixture
def serve() -> Iterator[Callable[[list[bytes], float], str]]:
    """Starts a server that sends these pieces with a pause after each, and then nothing until the test ends."""
    over, threads = threading.Event(), []

    def begin(pieces: list[bytes], pause_s: float) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            with listening, listening.accept()[0] as connection:
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                    time.sleep(pause_s)
                over.wait(60)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield begin
    over.set()
    for thread in threads:
        thread.join(60)


def fetched(url: str, cancelled: Callable[[], bool] = lambda: False) -> bytes:
    with Connections() as connections:
        return b"".join(bytes(data) for data in ask_shards(connections, url, 7, SHARDS, cancelled=cancelled))


@pytest.mark.parametrize("with_head", [0, 1, 5000, 50_000, len(DATA)])
def test_the_body_may_begin_in_any_packet(serve: Callable[..., str], with_head: int) -> None:
    assert fetched(serve([HEAD + DATA[:with_head], DATA[with_head:]], 0.05)) == DATA


def test_a_slow_response_is_waited_for(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "STALL_S", 1.5)
    pieces = [DATA[start : start + 20_000] for start in range(0, len(DATA), 20_000)]
    assert fetched(serve([HEAD, *pieces], 0.4)) == DATA  # pauses above CHECK_EVERY_S, in total above STALL_S


def test_a_hanging_response_times_out(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "STALL_S", 0.5)
    with pytest.raises(RelayFailed, match=r"no byte for 0\.5 s"):
        fetched(serve([HEAD + DATA[:60_000]], 0.0))


def test_a_cancelled_response_ends(serve: Callable[..., str]) -> None:
    began_s = time.monotonic()
    with pytest.raises(RelayFailed, match="sent 20000 bytes for shard 1"):
        fetched(serve([HEAD + DATA[:60_000]], 0.0), lambda: time.monotonic() - began_s > 1.0)


def test_what_we_rely_on_in_http_client(serve: Callable[..., str]) -> None:
    """HTTPResponse.fp and .length are not documented: the reader takes buffered bytes from fp and then reads the socket."""
    url = serve([HEAD + DATA[:10], DATA[10:]], 0.05)
    with Connections() as connections, connections.get(f"{url}/x", {}, read_s=5.0) as (response, sock):
        assert isinstance(sock, socket.socket) and isinstance(response.fp, io.BufferedReader)
        assert (response.length, response.will_close) == (len(DATA), False)
        buffered = response.fp.peek()
        assert DATA.startswith(buffered)
        rest = bytearray(len(DATA) - len(buffered))
        assert response.fp.readinto(bytearray(len(buffered))) == len(buffered)
        sock.settimeout(None)
        assert sock.recv_into(rest, len(rest), socket.MSG_WAITALL) == len(rest)
        assert buffered + rest == DATA
        response.length = 0  # the connection counts as reusable
