"""Shards from one server, byte by byte if need be: what drips is waited for, what hangs is left, and so is what nobody wants."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shoal.shardcast.assembly import Shard
from shoal.shardcast.client import http_source
from shoal.shardcast.client.http_source import Broken, Connections, ask_shards

DATA = bytes(range(256)) * 400
SHARDS = [
    Shard("model", index, start, min(40_000, len(DATA) - start), "")
    for index, start in enumerate(range(0, len(DATA), 40_000))
]
HEAD = f"HTTP/1.1 206 Partial Content\r\ncontent-length: {len(DATA)}\r\n\r\n".encode()


@pytest.fixture
def serve() -> Iterator[Callable[[list[bytes], float], str]]:
    """A server that answers once with these pieces, so far apart, and then says nothing until the test is over."""
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


def fetched(url: str, give_up: Callable[[], bool] = lambda: False) -> bytes:
    with Connections() as connections:
        return b"".join(bytes(data) for data in ask_shards(connections, url, 7, SHARDS, give_up=give_up))


@pytest.mark.parametrize("with_head", [0, 1, 5000, 50_000, len(DATA)])
def test_the_body_may_begin_anywhere(serve: Callable[..., str], with_head: int) -> None:
    assert fetched(serve([HEAD + DATA[:with_head], DATA[with_head:]], 0.05)) == DATA


def test_what_drips_is_waited_for(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "STALL_S", 1.5)
    pieces = [DATA[start : start + 20_000] for start in range(0, len(DATA), 20_000)]
    assert fetched(serve([HEAD, *pieces], 0.4)) == DATA  # longer than LOOK_S apart, and than STALL_S in all


def test_what_hangs_is_left(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_source, "STALL_S", 0.5)
    with pytest.raises(Broken, match=r"no byte for 0\.5 s"):
        fetched(serve([HEAD + DATA[:60_000]], 0.0))


def test_what_nobody_wants_any_more_is_left(serve: Callable[..., str]) -> None:
    began_s = time.monotonic()
    with pytest.raises(Broken, match="20000 bytes for shard 1"):
        fetched(serve([HEAD + DATA[:60_000]], 0.0), lambda: time.monotonic() - began_s > 1.0)
