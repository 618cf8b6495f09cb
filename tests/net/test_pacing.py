"""Which congestion control a connection has, by how far away the other side is."""

import asyncio
import socket

import pytest

from shoal.net import pacing
from shoal.net.pacing import send_at_once_if_near
from shoal.net.server import listen


@pytest.mark.parametrize(("near_us", "used"), [(10_000_000, b"reno"), (0, b"bbr")], ids=["near", "far"])
def test_only_those_who_are_far_are_sent_to_by_a_timer(
    near_us: int, used: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "NEAR_US", near_us)
    found: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        send_at_once_if_near(sock)
        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))
        writer.close()

    async def meet(listening: socket.socket) -> None:
        async with await asyncio.start_server(connected, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            assert await reader.read() == b""
            writer.close()

    with listen("127.0.0.1", 0) as listening:
        try:
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this system has no BBR")
        asyncio.run(meet(listening))
    assert found == [used]
