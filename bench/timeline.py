"""The life of a step in virtual time: broadcast, generation, checks, training; by the report's numbers and by others.

From the report: 62 GB of weights, 590 Mbit/s to a node, batches of 4,096 rollouts, about a minute to check a file, first files
about 10 minutes after a node has the weights, 22 (or 21) minutes of training. The number of rows the swarm makes a minute is not in
the report: one number each is fitted, so that a batch is ready 22 minutes (short targets) or 29 minutes (long targets) after the
broadcast. Everything else below follows. See `python bench/swarm.py timeline`.
"""

import heapq
import itertools
import math
import random
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Setting:
    nodes: int = 100
    weights_bytes: float = 62e9
    sent_bytes: float = 62e9
    """What a version weighs on the wire: less with deltas."""
    node_bits_per_s: float = 590e6
    relays: int = 12
    relay_bits_per_s: float = 10e9
    batch_rows: int = 4096
    file_rows: int = 32
    first_file_s: float = 600.0
    """What the fastest nodes take for a file."""
    spread: float = 0.35
    check_s: float = 60.0
    validators: int = 64
    train_s: float = 22 * 60.0
    max_lag: int = 2
    steps: int = 14


@dataclass(frozen=True)
class Timeline:
    broadcast_s: float
    """Of the last node."""
    first_file_s: float
    ready_s: float
    """After the broadcast, a batch's worth of verified rows made with that version alone."""
    step_s: float
    starved_s: float
    """Of a step: how long the trainer waited for data."""
    stale_share: float
    lag_mean: float


def _file_times(setting: Setting, rng: random.Random) -> list[float]:
    return [setting.first_file_s * math.exp(abs(rng.gauss(0, setting.spread))) for _ in range(setting.nodes)]


def broadcast_s(setting: Setting) -> float:
    """Returns the seconds until the last node has a version: limited by its own link or by its share of the relays' links."""
    share = setting.relays * setting.relay_bits_per_s / setting.nodes
    return setting.sent_bytes * 8 / min(setting.node_bits_per_s, share)


def ready_after_broadcast_s(setting: Setting, seed: int = 1) -> tuple[float, float]:
    """First verified file, and a batch's worth, in a swarm that begins a version all at once."""
    rng = random.Random(seed)
    times = _file_times(setting, rng)
    queue = [(time_s, node) for node, time_s in enumerate(times)]
    heapq.heapify(queue)
    checkers = [0.0] * setting.validators
    rows, verified = 0, []
    while rows < setting.batch_rows * 1.5:
        done_s, node = heapq.heappop(queue)
        heapq.heappush(queue, (done_s + times[node], node))
        free_s = heapq.heappop(checkers)
        checked_s = max(done_s, free_s) + setting.check_s
        heapq.heappush(checkers, checked_s)
        verified.append(checked_s)
        rows += setting.file_rows
    verified.sort()
    needed = -(-setting.batch_rows // setting.file_rows)
    return min(times), verified[needed - 1]


def simulate(setting: Setting, seed: int = 1) -> Timeline:
    rng = random.Random(seed)
    times = _file_times(setting, rng)
    sent_s = broadcast_s(setting)
    published = [0.0]
    # Each node works with the newest version it has; a version takes `sent_s` to come, beside the work.
    queue = [(sent_s + times[node], node, 0) for node in range(setting.nodes)]
    heapq.heapify(queue)
    checkers = [0.0] * setting.validators
    waiting: list[tuple[float, int]] = []
    """When verified, and the version it was made with."""
    stale = made = 0
    now_s, starved, lags = 0.0, [], []
    for step in range(setting.steps):
        began_s = now_s
        while True:
            fresh = [item for item in waiting if step - item[1] <= setting.max_lag]
            stale += len(waiting) - len(fresh)
            waiting = fresh
            ready = sorted(item for item in waiting if item[0] <= now_s)
            if len(ready) * setting.file_rows >= setting.batch_rows:
                break
            if len(waiting) * setting.file_rows >= setting.batch_rows:
                needed = -(-setting.batch_rows // setting.file_rows)
                now_s = sorted(waiting)[needed - 1][0]
                continue
            made += _advance(setting, queue, checkers, waiting, times, published, sent_s)
        starved.append(now_s - began_s)
        used = ready[: -(-setting.batch_rows // setting.file_rows)]
        lags.append(sum(step - version for _, version in used) / len(used))
        for item in used:
            waiting.remove(item)
        end_s = now_s + setting.train_s
        while queue[0][0] < end_s:
            made += _advance(setting, queue, checkers, waiting, times, published, sent_s)
        now_s = end_s
        published.append(now_s)
    # The first steps fill the pipe.
    late = slice(setting.steps // 2, None)
    steps_s = [after - before for before, after in itertools.pairwise(published)][late]
    first_s, ready_s = ready_after_broadcast_s(setting, seed)
    return Timeline(
        broadcast_s=sent_s,
        first_file_s=first_s,
        ready_s=ready_s,
        step_s=sum(steps_s) / len(steps_s),
        starved_s=sum(starved[late]) / len(starved[late]),
        stale_share=stale / max(1, made),
        lag_mean=sum(lags[late]) / len(lags[late]),
    )


def _advance(
    setting: Setting,
    queue: list[tuple[float, int, int]],
    checkers: list[float],
    waiting: list[tuple[float, int]],
    times: list[float],
    published: list[float],
    sent_s: float,
) -> int:
    """Adds one file: it is checked, and its node continues with the newest version that it has by then."""
    done_s, node, version = heapq.heappop(queue)
    free_s = heapq.heappop(checkers)
    checked_s = max(done_s, free_s) + setting.check_s
    heapq.heappush(checkers, checked_s)
    # No work is leased that the trainer cannot use: the coordinator issues `max_lag + 1` steps' worth at most.
    limit = setting.batch_rows * (setting.max_lag + 1)
    if len(waiting) * setting.file_rows < limit:
        waiting.append((checked_s, version))
        counted = 1
    else:
        counted = 0
    newest = max(v for v, at_s in enumerate(published) if at_s + sent_s <= done_s or v == 0)
    heapq.heappush(queue, (done_s + times[node], node, newest))
    return counted


def fit_nodes(setting: Setting, ready_min: float) -> Setting:
    """The number of nodes with which a batch is ready so long after the broadcast."""
    low, high = 8, 4096
    while low < high:
        middle = (low + high) // 2
        if ready_after_broadcast_s(replace(setting, nodes=middle))[1] <= ready_min * 60:
            high = middle
        else:
            low = middle + 1
    return replace(setting, nodes=low)


def requests_per_s(setting: Setting) -> float:
    """What reaches the coordinator: a heartbeat every 13.5 s (15 less jitter), six requests a file, three a check."""
    return setting.nodes * (1 / 13.5 + 9 / setting.first_file_s)


COORDINATOR_REQUESTS_PER_S = 2000.0
"""What one coordinator process answers on one core (`python bench/swarm.py load`, heartbeats and lease cycles mixed, SQLite)."""


def nodes_of_one_coordinator(setting: Setting) -> int:
    return int(COORDINATOR_REQUESTS_PER_S * setting.nodes / requests_per_s(setting))


def nodes_of_the_relays(setting: Setting) -> int:
    """Returns how many nodes get a version at the full speed of their own links."""
    return int(setting.relays * setting.relay_bits_per_s / setting.node_bits_per_s)


def row(name: str, setting: Setting) -> str:
    line = simulate(setting)
    return (
        f"| {name} | {setting.nodes:,} | {line.broadcast_s / 60:.1f} | {line.first_file_s / 60:.0f} | {line.ready_s / 60:.0f} "
        f"| {setting.train_s / 60:.0f} | {line.step_s / 60:.1f} | {line.starved_s / 60:.1f} | {line.lag_mean:.1f} "
        f"| {line.stale_share:.0%} | {requests_per_s(setting):,.0f} |"
    )


HEAD = (
    "| setting | nodes | broadcast min | first file min | batch ready min | training min | step min | trainer waits min "
    "| mean lag | stale | requests/s |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def table() -> None:
    short = fit_nodes(Setting(), 22)
    long = fit_nodes(replace(Setting(), first_file_s=780.0, train_s=21 * 60.0), 29)
    delta_bytes = 62e9 / 150
    print(
        "The report's step (nodes fitted to 22 and 29 minutes; broadcast, checks and training are the report's):\n"
    )
    print(HEAD)
    print(row("short targets", short))
    print(row("long targets", long))
    print("\nWhat deltas (150 times fewer bytes) and lag change:\n")
    print(HEAD)
    for lag in (0, 1, 2, 4):
        print(row(f"whole weights, max_lag {lag}", replace(short, max_lag=lag)))
        print(row(f"deltas, max_lag {lag}", replace(short, max_lag=lag, sent_bytes=delta_bytes)))
    print("\nMore nodes, the batch and the training as they are (12 relays of 10 Gbit/s):\n")
    print(HEAD)
    for nodes in (100, 300, 1_000, 3_000, 10_000):
        validators = max(64, nodes // 8)
        bigger = replace(short, nodes=nodes, validators=validators, steps=8)
        print(row("whole weights", bigger))
        print(row("deltas", replace(bigger, sent_bytes=delta_bytes)))
    layer = replace(short, nodes=10_000, relays=600, validators=1_250, steps=8)
    print(row("whole weights, 600 relays", layer))
    print(
        f"\nOne coordinator process is full at {nodes_of_one_coordinator(short):,} nodes; {short.relays} relays feed "
        f"{nodes_of_the_relays(short):,} nodes at the speed of their own lines, whole weights or deltas."
    )
