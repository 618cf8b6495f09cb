"""Compares ways to choose a relay in virtual time: drawn by expected throughput (ours and the report's), greedy, uniform.

    python bench/relay_choice.py                a minute, CPU; three relays of 10, 3 and 1 or of 5, 5 and 4 MB/s, several seeds

Clients use shoal.shardcast's RelayChoice with its real rules. A relay divides its bandwidth equally among the requests it
serves; a relay that is down fails a request after TIMEOUT_S. The best possible time is all bytes over the sum of bandwidths.
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.shardcast.client.relay_choice import RelayChoice

RELAYS = ((10e6, 3e6, 1e6), (5e6, 5e6, 4e6))
"""Bytes per second of each relay; the first is the one that goes down."""
SHARD_BYTES = 1e6
STREAMS = 4
"""Requests that a client has under way at once."""
TICK_S = 0.01
TIMEOUT_S = 1.0


def drawn(choice: RelayChoice, uniform: float) -> str:
    return choice.pick(choice.urls, uniform)


def greedy(choice: RelayChoice, uniform: float) -> str:
    """Returns the relay of the highest expected throughput; ties, as at the start, are drawn."""
    shares = choice.shares(choice.urls)
    best = [url for url in shares if shares[url] == max(shares.values())]
    return best[int(uniform * len(best))]


def even(choice: RelayChoice, uniform: float) -> str:
    return choice.urls[int(uniform * len(choice.urls))]


@dataclass
class Request:
    relay: str
    started_s: float
    left: float = SHARD_BYTES


@dataclass
class Client:
    choice: RelayChoice
    pick: Callable[[RelayChoice, float], str]
    shards: int
    requests: list[Request] = field(default_factory=list)

    def ask(self, now_s: float, rng: random.Random) -> None:
        while self.shards > 0 and len(self.requests) < STREAMS:
            self.shards -= 1
            self.requests.append(Request(self.pick(self.choice, rng.random()), now_s))


def simulate(
    pick: Callable[[RelayChoice, float], str],
    rates: dict[str, float],
    *,
    clients: int,
    shards: int,
    seed: int,
    heal: float,
    down_s: tuple[float, float] | None,
) -> tuple[float, dict[str, float]]:
    """Returns the seconds until every client has its shards, and the bytes that each relay sent after `down_s`."""
    rng = random.Random(seed)
    swarm = [Client(RelayChoice(rates, heal=heal), pick, shards) for _ in range(clients)]
    sent = dict.fromkeys(rates, 0.0)
    now_s = 0.0
    while True:
        for client in swarm:
            client.ask(now_s, rng)
        under_way = [request for client in swarm for request in client.requests]
        if not under_way:
            return now_s, sent
        now_s += TICK_S
        is_down = down_s is not None and down_s[0] <= now_s < down_s[1]
        load = {url: sum(request.relay == url for request in under_way) for url in rates}
        for client in swarm:
            for request in list(client.requests):
                if request.relay == "first" and is_down:
                    if now_s - request.started_s >= TIMEOUT_S:
                        client.choice.failed(request.relay)
                        client.requests.remove(request)
                        client.shards += 1
                    continue
                moved = rates[request.relay] / load[request.relay] * TICK_S
                request.left -= moved
                sent[request.relay] += moved if down_s is None or now_s >= down_s[1] else 0.0
                if request.left <= 0:
                    client.choice.delivered(request.relay, SHARD_BYTES / (now_s - request.started_s))
                    client.requests.remove(request)


POLICIES = {
    "drawn": (drawn, 0.01),
    "drawn, no healing": (drawn, 0.0),
    "greedy": (greedy, 0.01),
    "uniform": (even, 0.01),
}


def report(
    rates: dict[str, float], clients: int, down_s: tuple[float, float] | None, options: argparse.Namespace
) -> None:
    best_s = options.megabytes * 1e6 / sum(rates.values())
    if down_s is not None:
        best_s += (down_s[1] - down_s[0]) * rates["first"] / sum(rates.values())
    for label, (pick, heal) in POLICIES.items():
        shards = options.megabytes // clients
        ended = [
            simulate(pick, rates, clients=clients, shards=shards, seed=seed, heal=heal, down_s=down_s)
            for seed in range(options.seeds)
        ]
        times = [took_s for took_s, _ in ended]
        total = {url: sum(sent[url] for _, sent in ended) for url in rates}
        shares = " : ".join(f"{100 * total[url] / sum(total.values()):.0f}" for url in rates)
        print(
            f"{' : '.join(f'{rate / 1e6:g}' for rate in rates.values()):<12}{clients:>8}  {'first down' if down_s else 'all up':<12}"
            f"{label:<20}{statistics.median(times):>8.1f}{f'{min(times):.1f} to {max(times):.1f}':>16}"
            f"{statistics.median(times) / best_s:>12.2f}{shares:>16}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=640, help="that the clients fetch together")
    options = parser.parse_args()
    print(
        f"{'MB/s':<12}{'clients':>8}  {'relays':<12}{'choice':<20}{'s':>8}{'range':>16}{'of the best':>12}{'% sent':>16}"
    )
    for rates in RELAYS:
        named = dict(zip(("first", "second", "third"), rates, strict=True))
        for clients in (1, 4, 16):
            for down_s in (None, (5.0, 15.0)):
                report(named, clients, down_s, options)


if __name__ == "__main__":
    main()
