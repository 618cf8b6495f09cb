"""Which congestion control a connection has, by how far away the other side is."""

import socket
import time
from collections.abc import Iterator

import pytest

from shoal.net import file_server, pacing
from shoal.net.file_server import Answer, FileServer, Request
from shoal.net.http_server import listen
from shoal.net.pacing import send_at_once, use_if_far
from shoal.telemetry import Log


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """As on a system whose usual way is BBR."""
    with listen("127.0.0.1", 0) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError:
            pytest.skip("this system has no BBR")
        yield sock


def used_by(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize(("near_us", "used"), [(10_000_000, b"reno"), (0, b"bbr")], ids=["near", "far"])
def test_only_those_who_are_far_are_sent_to_by_a_timer(
    near_us: int, used: bytes, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "NEAR_US", near_us)
    usual = send_at_once(listening)
    assert usual == b"bbr"
    with socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            # BBR must not have had it even for a moment: its timer would stay.
            assert used_by(accepted) == b"reno"
            use_if_far(accepted, usual)
            assert used_by(accepted) == used


def test_a_file_server_begins_every_connection_without_a_timer(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(file_server, "use_if_far", lambda sock, usual: met.append((used_by(sock), usual)))

    async def answer(request: Request) -> Answer:
        return Answer(204)

    server = FileServer(answer, listening, log=Log("test"))
    server.start()
    try:
        with socket.create_connection(listening.getsockname()):
            give_up_s = time.monotonic() + 20
            while not met and time.monotonic() < give_up_s:
                time.sleep(0.01)
    finally:
        server.close()
    assert met == [(b"reno", b"bbr")]


def test_a_system_with_another_way_keeps_it() -> None:
    with listen("127.0.0.1", 0) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:
            pytest.skip("this system has no CUBIC")
        assert send_at_once(sock) is None
        assert used_by(sock) == b"cubic"
