"""Which relay to ask next: sampled by expected throughput, as the INTELLECT-2 report has it.

    success   <- 0.3 * (1 or 0) + 0.7 * success           after each try of that relay
    bandwidth <- 0.3 * bytes per second + 0.7 * bandwidth    a failure is a bandwidth of zero
    every relay's success += 0.01, at most 1              after each try of any: it will be tried again
    probability ~ success * bandwidth

Sampling, not the best one always: that spreads the load and adds up the links. Pure: no clock, no randomness, no
network. Not for several threads at once; the owner locks.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

ALPHA = 0.3
HEAL = 0.01
FLOOR = 0.05
"""Least bandwidth assumed of a relay, as a share of the best one's. Healing lifts only the success rate; without
this, a relay that failed often would keep a bandwidth near zero, and with it a chance near zero, after it is well."""


TicketSource = Callable[[], str]
"""Gives the Authorization header to show now, or nothing (net.tickets)."""


@dataclass
class Standing:
    """What is known of one relay. Bandwidth is None until it has delivered once."""

    success: float = 1.0
    bandwidth: float | None = None


class RelayChoice:
    def __init__(
        self, urls: Iterable[str] = (), *, heal: float = HEAL, ticket: TicketSource | None = None
    ) -> None:
        """`ticket` is asked what to show to relays that serve members only."""
        self._heal, self.ticket = heal, ticket
        self._standings: dict[str, Standing] = {}
        self.update(urls)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._standings)

    def update(self, urls: Iterable[str]) -> None:
        """Relays come and go; what is known of those that stay is kept."""
        self._standings = {
            url: self._standings.get(url) or Standing() for url in (one.rstrip("/") for one in urls)
        }

    def standing(self, url: str) -> Standing:
        return self._standings[url]

    def delivered(self, url: str, bytes_per_s: float) -> None:
        standing = self._standings[url]
        known = standing.bandwidth
        standing.bandwidth = bytes_per_s if known is None else ALPHA * bytes_per_s + (1 - ALPHA) * known
        self._tried(standing, 1.0)

    def failed(self, url: str) -> None:
        standing = self._standings[url]
        if standing.bandwidth is not None:
            standing.bandwidth *= 1 - ALPHA
        self._tried(standing, 0.0)

    def shares(self, among: Collection[str]) -> dict[str, float]:
        """Probability of each, in sum 1. One that has not delivered yet counts as an average relay."""
        known = [one.bandwidth for one in self._standings.values() if one.bandwidth is not None]
        average = sum(known) / len(known) if known else 1.0
        floor = FLOOR * max(known, default=0.0)
        weights = {}
        for url in among:
            standing = self._standings[url]
            bandwidth = average if standing.bandwidth is None else max(standing.bandwidth, floor)
            weights[url] = standing.success * bandwidth
        total = sum(weights.values())
        if total <= 0:
            return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
        return {url: weight / total for url, weight in weights.items()}

    def pick(self, among: Collection[str], uniform: float) -> str:
        """The relay that a uniform draw from [0, 1) falls on."""
        assert among, "pick needs at least one relay"
        url = ""
        for url, share in self.shares(among).items():
            uniform -= share
            if uniform < 0:
                return url
        return url

    def _tried(self, standing: Standing, observed: float) -> None:
        standing.success = ALPHA * observed + (1 - ALPHA) * standing.success
        for one in self._standings.values():
            one.success = min(1.0, one.success + self._heal)
