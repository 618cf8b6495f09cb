"""Tests of streams: frames survive, and a stream can take over a connection that asyncio's streams opened.

`Stream` replaces the protocol of asyncio's transport. The only private part of asyncio that it uses is
`StreamReader._buffer`, the bytes that arrived before the takeover; these tests fail if asyncio changes it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from blake3 import blake3

from shoal.diloco.transport.stream import MAX_FRAME, Stream, StreamBroken

PAYLOADS = (b"", b"one", bytes(range(256)) * 4096)


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + blake3(payload).digest() + payload


def with_socket_pair(test: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        async with asyncio.timeout(30):
            await test(ours, theirs)
        await asyncio.sleep(0.05)  # transports close in the next iterations of the loop

    asyncio.run(run())


def test_asyncio_keeps_received_bytes_in_the_readers_buffer() -> None:
    """Checks what taking over a connection relies on: `_buffer` is a bytearray, and `at_eof` needs it to be empty."""

    async def test(ours: socket.socket, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.sendall(b"early")
        theirs.close()
        await asyncio.sleep(0.1)
        buffer = reader._buffer  # type: ignore[attr-defined]
        assert isinstance(buffer, bytearray) and buffer == b"early"
        assert not reader.at_eof()
        buffer.clear()
        assert reader.at_eof()
        writer.close()

    with_socket_pair(test)


@pytest.mark.parametrize("early", [0, 1, 20, 36, 39, 10_000, 1 << 20])
def test_no_byte_is_lost_when_some_arrive_before_the_takeover(early: int) -> None:
    content = b"".join(map(frame, PAYLOADS))

    async def test(ours: socket.socket, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        _, sender = await asyncio.open_connection(sock=theirs)
        sender.write(content[:early])
        await asyncio.sleep(0.05)
        stream = Stream(reader, writer)
        sender.write(content[early:])
        assert [bytes(await stream.receive()) for _ in PAYLOADS] == list(PAYLOADS)
        sender.close()
        with pytest.raises(StreamBroken, match="the stream ended"):
            await stream.receive()
        stream.close()

    with_socket_pair(test)


def test_end_of_stream_before_the_takeover_is_noticed() -> None:
    """The other side sends a frame and closes at once: the frame is delivered, then the stream ends."""

    async def test(ours: socket.socket, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        theirs.sendall(frame(b"last"))
        theirs.close()
        await asyncio.sleep(0.1)
        stream = Stream(reader, writer)
        assert await stream.receive() == b"last"
        with pytest.raises(StreamBroken, match="the stream ended"):
            await stream.receive()
        stream.close()

    with_socket_pair(test)


def test_reader_paused_by_asyncio_is_resumed() -> None:
    """asyncio pauses reading at twice its limit, here far below one frame."""
    payload = PAYLOADS[2]

    async def test(ours: socket.socket, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=ours, limit=1024)
        _, sender = await asyncio.open_connection(sock=theirs)
        sender.write(frame(payload))
        await asyncio.sleep(0.1)
        stream = Stream(reader, writer)
        assert await stream.receive() == payload
        sender.close()
        stream.close()

    with_socket_pair(test)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (frame(b"damaged")[:-1] + b"x", "does not match its digest"),
        ((MAX_FRAME + 1).to_bytes(4, "little") + bytes(32), "exceeds the limit"),
    ],
)
def test_damaged_or_oversized_frame_is_not_delivered(content: bytes, reason: str) -> None:
    async def test(ours: socket.socket, theirs: socket.socket) -> None:
        stream = Stream(*await asyncio.open_connection(sock=ours))
        theirs.sendall(content)
        with pytest.raises(StreamBroken, match=reason):
            await stream.receive()
        theirs.close()
        stream.close()

    with_socket_pair(test)
