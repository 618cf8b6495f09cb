"""What one address may take of a server: connections, and bytes per second. Pure: the clock is passed in."""

import ipaddress
from dataclasses import dataclass, field

LONGEST_DEBT_S = 2.0
"""An address that is further ahead of its rate than this is told to come back; a smaller lead is slept off."""
MAX_IDLE_ACCOUNTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one server. The third is per address and None means no limit."""

    connections: int = 2048
    connections_per_address: int = 512
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if min(self.connections, self.connections_per_address) < 1:
            raise ValueError(f"{self}: a server without connections serves nobody; give at least 1")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s} must be positive; leave it out for no limit")


@dataclass(slots=True)
class Account:
    """One address: its open connections, and a token bucket that may run into debt."""

    connections: int = 0
    paid_until_s: float = 0.0
    """When what it took will have been earned at its rate. In the past: it owes nothing."""


@dataclass(slots=True)
class Accounts:
    limits: Limits
    connections: int = 0
    _accounts: dict[str, Account] = field(default_factory=dict)

    def enter(self, address: str, now_s: float) -> Account | None:
        """A new connection's account; None if it is too many to even be answered.

        Up to twice its share an address is let in to be told so, beyond that it is cut off: else the refusals
        themselves would be the way to fill the server.
        """
        if len(self._accounts) > MAX_IDLE_ACCOUNTS:
            self._accounts = {
                name: one
                for name, one in self._accounts.items()
                if one.connections or one.paid_until_s > now_s
            }
        account = self._accounts.setdefault(_owner(address), Account())
        if (
            self.connections >= self.limits.connections
            or account.connections >= 2 * self.limits.connections_per_address
        ):
            return None
        self.connections += 1
        account.connections += 1
        return account

    def leave(self, account: Account) -> None:
        self.connections -= 1
        account.connections -= 1

    def crowded(self, account: Account) -> bool:
        """Whether the connection that has just entered is one too many. Those before it are served on: refusing all
        of a crowd would serve nobody."""
        return account.connections > self.limits.connections_per_address

    def debt_s(self, account: Account, now_s: float) -> float:
        """How far ahead of its rate the address is."""
        return max(0.0, account.paid_until_s - now_s)

    def take(self, account: Account, num_bytes: int, now_s: float) -> float:
        """Book bytes that are about to be sent; how long to wait before sending them."""
        if self.limits.bytes_per_s is None:
            return 0.0
        wait_s = self.debt_s(account, now_s)
        account.paid_until_s = now_s + wait_s + num_bytes / self.limits.bytes_per_s
        return wait_s


def _owner(address: str) -> str:
    """Whoever has one IPv6 address has the 2**64 beside it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
