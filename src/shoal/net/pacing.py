"""How TCP sends: to those who are near at once, not by a timer."""

import contextlib
import socket
import struct

NEAR_US = 1000
"""A round trip that takes less: the same machine, or the same room."""


def send_at_once_if_near(sock: socket.socket) -> None:
    """BBR, where a system uses it, sends by a timer of the kernel, one for each 64 KB. On a long way that spares others a queue; to
    somebody near, at gigabytes a second, the timers took a seventh of all that bringing a file there cost (LOG, 16 November)."""
    if not hasattr(socket, "TCP_CONGESTION"):  # a system that offers no choice
        return
    with contextlib.suppress(OSError):  # not TCP, or a system with other ways
        paced = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")
        if paced and _round_trip_us(sock) < NEAR_US:
            # The one that a process without privileges may always choose.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _round_trip_us(sock: socket.socket) -> int:
    """As the handshake had it: `tcpi_rtt` of the kernel's struct tcp_info."""
    (round_trip_us,) = struct.unpack_from("=68xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72))
    return int(round_trip_us)
