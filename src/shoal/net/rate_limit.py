"""Limits on what one client may take: requests per second, connections, bytes per second.

Our own code instead of a library (limits, slowapi), because it must be pure: the clock is passed in, and a file server
asks how long to sleep before the next bytes instead of whether a request is allowed.
"""

import functools
import ipaddress
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_NAMES = 65536
"""Number of names at which full token buckets are removed. A full bucket limits nothing."""
MAX_DEBT_S = 2.0
"""An address further ahead of its byte rate than this gets an error; the server sleeps off a smaller debt."""
MAX_IDLE_ADDRESSES = 4096
PIECE_S = 0.05
"""Seconds that one piece takes at a client's bandwidth limit."""


def retry_after_header(wait_s: float) -> str:
    """Returns the value of a Retry-After header: whole seconds, rounded up, at least 1.

    Rounding down would make clients return before the wait is over and be refused again.
    """
    return str(max(1, math.ceil(wait_s)))


@dataclass(slots=True)
class Buckets:
    """A token bucket for each name: `rate` tokens per second, at most `burst` at once."""

    rate: float
    burst: float
    _levels: dict[str, tuple[float, float]] = field(default_factory=dict)

    def wait_s(self, name: str, now_s: float) -> float:
        """Takes a token and returns 0, or takes none and returns the seconds until there is one."""
        level, at_s = self._levels.get(name, (self.burst, now_s))
        level = min(self.burst, level + max(0.0, now_s - at_s) * self.rate)
        if level < 1.0:
            self._levels[name] = (level, now_s)
            return (1.0 - level) / self.rate
        if len(self._levels) >= MAX_NAMES:
            self._remove_full(now_s)
        self._levels[name] = (level - 1.0, now_s)
        return 0.0

    def _remove_full(self, now_s: float) -> None:
        self._levels = {
            name: (level, at_s)
            for name, (level, at_s) in self._levels.items()
            if level + (now_s - at_s) * self.rate < self.burst
        }


class BandwidthLimit:
    """A client's limit of bytes per second over all its connections. Thread-safe.

    A client that reads less often makes the server send less: the sockets' buffers fill up.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.piece_bytes = max(1024, min(256 << 10, int(bytes_per_s * PIECE_S)))
        """Bytes to transfer at a time: few enough that no pause looks like a dead connection."""
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._paid_until_s = clock()

    def wait(self, num_bytes: int) -> None:
        """Counts bytes, and sleeps until they are within the rate."""
        with self._lock:
            self._paid_until_s = max(self._paid_until_s, self._clock()) + num_bytes / self._bytes_per_s
            pause_s = self._paid_until_s - self._clock()
        if pause_s > 0:
            self._sleep(pause_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one file server. `bytes_per_s` is per client address; None means no limit."""

    connections: int = 2048
    connections_per_address: int = 512
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.connections, self.connections_per_address) < 1:
            raise ValueError(f"{self}: the connection limits must be at least 1")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s} must be positive; leave it out for no limit")

    @property
    def connections_per_network(self) -> int:
        """Most connections of one network (IPv4 /24, IPv6 /48): half of all. A client with many addresses must leave room for others."""
        return max(2 * self.connections_per_address, self.connections // 2)


@dataclass(slots=True)
class AddressUsage:
    """What one client address uses: its open connections and its byte rate as a token bucket that may go into debt."""

    network: str = ""
    connections: int = 0
    paid_until_s: float = 0.0
    """Time at which the bytes sent so far are within the rate. In the past: no debt."""


@dataclass(slots=True)
class UsageByAddress:
    """Counts connections and bytes of each client address of one server."""

    limits: ServerLimits
    connections: int = 0
    _usages: dict[str, AddressUsage] = field(default_factory=dict)
    _networks: Counter[str] = field(default_factory=Counter)
    """Open connections of each network; see network_prefix."""

    def connect(self, address: str, now_s: float) -> AddressUsage | None:
        """Counts a new connection and returns its address's usage; None if it must be closed without an answer.

        An address with up to twice its number of connections still gets an error message; beyond that its connections
        are closed, because otherwise the error messages themselves would occupy the server.
        """
        if len(self._usages) > MAX_IDLE_ADDRESSES:
            self._usages = {
                name: usage
                for name, usage in self._usages.items()
                if usage.connections or usage.paid_until_s > now_s
            }
        network = network_prefix(address)
        usage = self._usages.setdefault(limited_network(address), AddressUsage(network))
        if (
            self.connections >= self.limits.connections
            or usage.connections >= 2 * self.limits.connections_per_address
            or self._networks[network] >= self.limits.connections_per_network
        ):
            return None
        self.connections += 1
        usage.connections += 1
        self._networks[network] += 1
        return usage

    def disconnect(self, usage: AddressUsage) -> None:
        """Counts a connection as closed."""
        self.connections -= 1
        usage.connections -= 1
        self._networks[usage.network] -= 1
        if not self._networks[usage.network]:
            del self._networks[usage.network]

    def has_too_many(self, usage: AddressUsage) -> bool:
        """Returns whether the newest connection of this address exceeds its limit.

        Call it once, for the connection just counted: earlier connections of the address continue to be served.
        """
        return usage.connections > self.limits.connections_per_address

    def debt_s(self, usage: AddressUsage, now_s: float) -> float:
        """Returns how many seconds the address is ahead of its byte rate."""
        return max(0.0, usage.paid_until_s - now_s)

    def take_bytes(self, usage: AddressUsage, num_bytes: int, now_s: float) -> float:
        """Counts bytes that are about to be sent; returns how long to wait before sending them."""
        if self.limits.bytes_per_s is None:
            return 0.0
        wait_s = self.debt_s(usage, now_s)
        usage.paid_until_s = now_s + wait_s + num_bytes / self.limits.bytes_per_s
        return wait_s


@functools.lru_cache(maxsize=4096)
def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the address, also of an IPv4 address that is written as IPv6; None for a text that is no address."""
    try:
        parsed = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


@functools.lru_cache(maxsize=4096)
def _network(address: str, v4_bits: int, v6_bits: int) -> str:
    """Returns the network of an address. A text that is no address is returned as it is."""
    parsed = _parse_address(address)
    if parsed is None:
        return address
    bits = v4_bits if parsed.version == 4 else v6_bits
    return str(ipaddress.ip_network((parsed, bits), strict=False)).removesuffix("/32")


def network_prefix(address: str) -> str:
    """Returns the network that shares one account: 24 bits of IPv4 or 48 bits of IPv6, which one organisation usually owns."""
    return _network(address, 24, 48)


def viewer_network(address: str) -> str:
    """Returns the network whose event streams and costly questions are counted together: one IPv4 address, or 48 bits of IPv6.

    With 64 bits, one customer could have a stream from each of its 65,536 networks.
    """
    return _network(address, 32, 48)


def limited_network(address: str) -> str:
    """Returns the network that limits apply to: one IPv4 address, or 64 bits of IPv6, which one customer usually owns."""
    return _network(address, 32, 64)


def is_local(address: str) -> bool:
    """Returns whether an address is of this machine or of a private network, as that of a reverse proxy usually is."""
    parsed = _parse_address(address)
    return parsed is None or not parsed.is_global


def is_this_machine(address: str) -> bool:
    """Returns whether an address is a loopback address."""
    parsed = _parse_address(address)
    return parsed is not None and parsed.is_loopback


# -- clients of a reverse proxy ---------------------------------------------------------------------------

FORWARDED = b"x-forwarded-for"
BEHIND_PROXY = "shoal.behind_proxy"
"""Key of a request's ASGI scope whose client's address a proxy named."""
PROXY_HEADERS = frozenset({FORWARDED, b"forwarded", b"x-real-ip"})


def with_client_address(scope: Any) -> Any:
    """Returns the ASGI scope of a request with the client's own address, if a proxy on this machine passed it on; else as it is.

    Any client can send an X-Forwarded-For header, so it is believed only from this machine itself. A proxy writes the address of
    its own client at the end of the header; what stands before it may be invented. Without this, all clients of the proxy would
    be one network, and a stranger that uses up its limits would keep everybody out.
    """
    client = scope.get("client")
    if not client or not is_this_machine(client[0]):
        return scope
    forwarded = [value for name, value in scope["headers"] if name == FORWARDED]
    address = forwarded[-1].decode("latin-1").rpartition(",")[2].strip() if forwarded else ""
    if _parse_address(address) is None:
        return scope
    headers = [(name, value) for name, value in scope["headers"] if name not in PROXY_HEADERS]
    return {**scope, "client": (address, 0), "headers": headers, BEHIND_PROXY: True}
