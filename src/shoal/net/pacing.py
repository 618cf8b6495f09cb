"""How TCP sends: to those who are far by a timer, where the system would have it so; to those who are near at once.

BBR sends by a timer of the kernel, one for each 64 KB. On a long way that spares others a queue; to somebody near, at gigabytes
a second, the timers took a seventh of all that bringing a file there cost. A connection that BBR has once had keeps its timer
with whatever comes after it, a twentieth more (LOG, 16 November); so here connections begin without, and those that turn out to
be long get it then.
"""

import contextlib
import socket
import struct

NEAR_US = 1000
"""A round trip that takes less: the same machine, or the same room."""
UNTIMED = b"reno"
"""The one that a process without privileges may always choose."""


def send_at_once(listening: socket.socket) -> bytes | None:
    """Connections that are accepted from now on have no timer. What they are to have instead if the way is long, or None if
    that is what they have."""
    if not hasattr(socket, "TCP_CONGESTION"):  # a system that offers no choice
        return None
    with contextlib.suppress(OSError):  # not TCP, or a system with other ways
        usual = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
        if usual.startswith(b"bbr"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNTIMED)
            return usual
    return None


def use_if_far(sock: socket.socket, congestion_control: bytes) -> None:
    with contextlib.suppress(OSError):
        if _round_trip_us(sock) >= NEAR_US:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control)


def _round_trip_us(sock: socket.socket) -> int:
    """As the handshake had it: `tcpi_rtt` of the kernel's struct tcp_info."""
    (round_trip_us,) = struct.unpack_from("=68xI", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72))
    return int(round_trip_us)
