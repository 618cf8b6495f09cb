"""Chooses the relay to ask next: sampled by expected throughput, as in the INTELLECT-2 report.

    success   <- 0.3 * (1 or 0) + 0.7 * success             after each request to that relay
    bandwidth <- 0.3 * bytes per second + 0.7 * bandwidth   a failure counts as a bandwidth of zero
    success of every relay += 0.01, at most 1               after each request to any relay: failed ones are retried
    probability ~ success * bandwidth

Sampling, instead of always taking the best relay, spreads the load and adds up the bandwidths. No clock, no network. Not
thread-safe; the owner locks.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from shoal.net.rate_limit import BandwidthLimit

ALPHA = 0.3
HEAL = 0.01
MIN_BANDWIDTH_SHARE = 0.05
"""Least bandwidth assumed of a relay, as a share of the best one's. Healing raises only the success rate; without this, a relay
that failed often would keep a probability near zero after it has recovered."""


ProgressReceiver = Callable[[int, int, int], None]
"""Is called with a version, the bytes of it that are here, and all its bytes."""
TicketSource = Callable[[], str]
"""Returns the Authorization header for relays, or "" (shoal.net.http_client)."""


@dataclass
class RelayStats:
    """Success rate and bandwidth of one relay. The bandwidth is None until it has delivered once."""

    success: float = 1.0
    bandwidth: float | None = None


class RelayChoice:
    """Knows the relays of a client and how well each has served it."""

    def __init__(
        self,
        urls: Iterable[str] = (),
        *,
        last: str = "",
        heal: float = HEAL,
        ticket: TicketSource | None = None,
        limit: BandwidthLimit | None = None,
        on_progress: ProgressReceiver | None = None,
    ) -> None:
        """`last` is a source for when no relay delivers; `ticket` is called for the Authorization header of private relays.

        `limit` bounds the bytes per second of all downloads; `on_progress` is called a few times a second
        during one, and with all bytes when it has ended.
        """
        self._heal, self.ticket, self.limit, self.on_progress = heal, ticket, limit, on_progress
        self.stats: dict[str, RelayStats] = {}
        """Statistics of each relay, by URL."""
        self.update(urls, last=last)

    @property
    def urls(self) -> tuple[str, ...]:
        """The known relays, and the last source behind them."""
        return tuple(self.stats)

    def update(self, urls: Iterable[str], *, last: str = "") -> None:
        """Replaces the list of relays, and keeps the statistics of those that stay.

        `last`, the origin, is asked only while the relays deliver next to nothing: it serves them all, and its link is the
        trainer's. A relay with the same URL stays a relay.
        """
        relays = [url.rstrip("/") for url in urls]
        last = last.rstrip("/")
        self.last = "" if last in relays else last
        self.stats = {
            url: self.stats.get(url) or RelayStats() for url in [*relays, *([self.last] if self.last else [])]
        }

    def in_random_order(self) -> list[str]:
        """Returns the relays in random order, and the last source at the end."""
        relays = [url for url in self.urls if url != self.last]
        return [*random.sample(relays, len(relays)), *([self.last] if self.last else [])]

    def delivered(self, url: str, bytes_per_s: float) -> None:
        """Counts a successful request."""
        stats = self.stats[url]
        known = stats.bandwidth
        stats.bandwidth = bytes_per_s if known is None else ALPHA * bytes_per_s + (1 - ALPHA) * known
        self._update_success(stats, 1.0)

    def failed(self, url: str) -> None:
        """Counts a failed request."""
        stats = self.stats[url]
        if stats.bandwidth is not None:
            stats.bandwidth *= 1 - ALPHA
        self._update_success(stats, 0.0)

    def shares(self, among: Collection[str]) -> dict[str, float]:
        """Returns the probability of each relay; they add up to 1. A relay without deliveries counts as average."""
        known = [stats.bandwidth for stats in self.stats.values() if stats.bandwidth is not None]
        average = sum(known) / len(known) if known else 1.0
        lowest = MIN_BANDWIDTH_SHARE * max(known, default=0.0)
        weights = {}
        for url in among:
            stats = self.stats[url]
            bandwidth = average if stats.bandwidth is None else max(stats.bandwidth, lowest)
            weights[url] = stats.success * bandwidth
        total = sum(weights.values())
        if total <= 0:
            return dict.fromkeys(weights, 1 / len(weights)) if weights else {}
        return {url: weight / total for url, weight in weights.items()}

    def pick(self, among: Collection[str], uniform: float) -> str:
        """Returns the relay that a uniform draw from [0, 1) selects."""
        assert among, "pick needs at least one relay"
        url = ""
        for url, share in self.shares(among).items():
            uniform -= share
            if uniform < 0:
                return url
        return url

    def _update_success(self, stats: RelayStats, observed: float) -> None:
        stats.success = ALPHA * observed + (1 - ALPHA) * stats.success
        for each in self.stats.values():
            each.success = min(1.0, each.success + self._heal)
