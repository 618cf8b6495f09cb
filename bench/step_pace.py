"""How long a step takes when training, publication, rebuilding, generation and checks wait for each other, in virtual time.

    python bench/step_pace.py                                the times of the GSM8K run on one H200, then shorter parts
    python bench/step_pace.py --steps 400 --seeds 3
    python bench/step_pace.py --rebuild 1000                 a real file of 1,000 MB, of which a tenth of the words changed

The coordinator is real (virtual_run.py): its planning, leases and batches. Times of the other roles are those of the run of
log/2026-11-19-swarm-gsm8k-h200.md, read from its ledger. Prints for each setting the mean step, the share of time in which workers generate, groups that became
stale for each step, and how often a step waited for rollouts. With --rebuild, the seconds from "the delta is here" to "the new
file is verified", into a new file and over a recycled one.
"""

import argparse
import heapq
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from virtual_run import VirtualNode, VirtualRun, spec_of

from shoal.shardcast.delta import apply_deltas, write_delta
from shoal.shardcast.manifest_files import hash_file
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease

SAMPLES = 16
POLL_S = 0.05
WARM_STEPS = 10
"""Steps that are not counted."""
QUIET_S = 1e7


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Seconds of each part, measured in the GSM8K run, and the coordinator's configuration."""

    name: str = ""
    train_s: float = 1.34
    announce_s: float = 1.2
    """From the end of training to the announcement; the next step may begin meanwhile."""
    rebuild_s: float = 1.2
    """From the announcement until a worker or validator has the version on its disk."""
    notice_s: float = 0.5
    """Until a validator that has no claim begins to fetch."""
    ask_pause_s: float = 5.0
    """Between two questions of a worker for the newest version; it also notices one when a lease names it."""
    load_s: float = 0.3
    """From the disk to the device of a validator."""
    is_loaded_ahead: bool = False
    """Whether idle validators load a version before a claim names it."""
    lease_s: float = 0.45
    row_s: float = 0.0038
    """Generation takes lease_s + rows * row_s."""
    check_s: float = 0.1
    check_row_s: float = 0.002
    signal: float = 0.65
    groups_per_step: int = 24
    prompts_per_lease: int = 16
    max_lag: int = 2
    workers: int = 2
    validators: int = 2


@dataclass
class Result:
    """What one simulation measured."""

    generating_s: float = 0.0
    generated: int = 0
    waited: list[float] = field(default_factory=list)


class Swarm:
    """The roles of one run, each a generator that yields the seconds until it acts again."""

    def __init__(self, run: VirtualRun, setting: Setting, rng: random.Random) -> None:
        self.run, self.setting, self.rng = run, setting, rng
        self.result = Result()
        self.announced_s = {0: run.now_s}
        self._begun_s: dict[tuple[str, int], float] = {}
        """When a worker began to fetch a version."""
        self._due: list[tuple[float, int, Iterator[float]]] = []
        self._order = itertools.count()

    def add(self, role: Iterator[float]) -> None:
        heapq.heappush(self._due, (self.run.now_s, next(self._order), role))

    def simulate(self, steps: int) -> None:
        while self.run.version < steps:
            self.run.now_s, _, role = heapq.heappop(self._due)
            if (wait_s := next(role, None)) is not None:
                heapq.heappush(self._due, (self.run.now_s + wait_s, next(self._order), role))

    def about(self, seconds: float) -> float:
        return seconds * self.rng.lognormvariate(0.0, 0.15)

    def trainer(self) -> Iterator[float]:
        free_s = 0.0
        for version in itertools.count():
            asked_s = self.run.now_s
            while self.run.batch(version) is None:
                yield POLL_S
            self.result.waited.append(self.run.now_s - asked_s)
            yield self.about(self.setting.train_s)
            yield max(0.0, free_s - self.run.now_s)  # one version is published at a time
            free_s = self.run.now_s + self.setting.announce_s
            self.add(self.announce())

    def announce(self) -> Iterator[float]:
        yield self.setting.announce_s
        self.run.publish()
        self.announced_s[self.run.version] = self.run.now_s

    def housekeeping(self) -> Iterator[float]:
        while True:
            self.run.tick()
            yield 1.0

    def here_s(self, version: int, notice_s: float) -> float:
        return self.announced_s[version] + notice_s + self.setting.rebuild_s

    def fetched_s(self, node: VirtualNode, version: int, *, named: bool) -> float:
        """Returns when a worker has a version: it begins to fetch when it asks for the newest one, or when a lease names it."""
        key = (node.key.public, version)
        if key not in self._begun_s:
            self._begun_s[key] = self.announced_s[version] + self.rng.uniform(0.0, self.setting.ask_pause_s)
        if named:
            self._begun_s[key] = min(self._begun_s[key], self.run.now_s)
        return self._begun_s[key] + self.setting.rebuild_s

    def worker(self, node: VirtualNode) -> Iterator[float]:
        """One lease is ordered when half of the work on the last one is done, as Worker._is_time_to_order does."""
        found: list[Lease] = []
        self.add(self.search(node, found))
        while True:
            while not found:
                yield POLL_S / 5
            lease = found.pop()
            versions = [one.version for one in lease.policies]
            here = [
                one for one in versions if self.fetched_s(node, one, named=False) <= self.run.now_s + 1e-9
            ]
            took_s = self.about(self.setting.lease_s + self.setting.row_s * lease.num_rows)
            self.result.generating_s += took_s
            self.result.generated += len(lease.prompts)
            yield took_s / 2
            self.add(self.search(node, found))
            yield took_s / 2
            self.add(self.submit(node, lease, max(here)))

    def search(self, node: VirtualNode, found: list[Lease]) -> Iterator[float]:
        while True:
            try:
                lease = self.run.lease(node)
            except Rejected as refused:
                yield refused.retry_after_s or POLL_S
                continue
            if lease.lease_id not in {one.lease_id for one in node.leases}:
                break
            yield POLL_S
        node.leases.append(lease)
        versions = sorted(one.version for one in lease.policies)
        good = [one for one in versions if one == versions[-1] or one > versions[-1] - self.setting.max_lag]
        here_s = [self.fetched_s(node, one, named=one == versions[-1]) for one in good]
        yield max(0.0, min(here_s) - self.run.now_s)
        found.append(lease)

    def submit(self, node: VirtualNode, lease: Lease, version: int) -> Iterator[float]:
        yield 0.1
        try:
            self.run.submit(node, lease, version)
        except Rejected:
            self.run.give_back(node, lease)
        node.leases.remove(lease)

    def validator(self) -> Iterator[float]:
        loaded: set[int] = set()
        while True:
            claims = []
            while (claim := self.run.claim()) is not None:
                claims.append(claim)
            for claim in claims:
                version, rows = claim.policy_version, claim.lease.num_rows
                yield max(0.0, self.here_s(version, self.setting.notice_s) - self.run.now_s)
                if version not in loaded and not self.setting.is_loaded_ahead:
                    yield self.setting.load_s
                loaded.add(version)
                yield self.about(self.setting.check_s + self.setting.check_row_s * rows)
                self.run.verdict(claim, "accepted", rewards=self.rewards(len(claim.lease.prompts)))
            if not claims:
                yield POLL_S

    def rewards(self, num_prompts: int) -> tuple[float, ...]:
        with_signal = (self.rng.random() < self.setting.signal for _ in range(num_prompts))
        return tuple(float(row % 2) if signal else 0.0 for signal in with_signal for row in range(SAMPLES))


def simulate(setting: Setting, steps: int, seed: int) -> tuple[float, float, float, float]:
    """Returns mean step, busy share of workers, groups generated for each step, and share of steps that waited."""
    config = CoordinatorConfig(
        groups_per_step=setting.groups_per_step,
        prompts_per_lease=setting.prompts_per_lease,
        heartbeat_s=QUIET_S,
        eval_prompts=0,
        retry_s=POLL_S,
        requests_per_s=1e6,
        rollouts_mb=0,
        try_relays=False,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as scratch:
        run = VirtualRun(Path(scratch), config, spec_of(samples=SAMPLES, max_lag=setting.max_lag))
        try:
            swarm = Swarm(run, setting, random.Random(seed))
            for _ in range(setting.workers):
                node = run.node()
                run.prove(node, accepted=50, rows_per_s=100.0)
                swarm.add(swarm.worker(node))
            for _ in range(setting.validators):
                swarm.add(swarm.validator())
            swarm.add(swarm.trainer())
            swarm.add(swarm.housekeeping())
            swarm.simulate(WARM_STEPS)
            began_s, busy_s, made = run.now_s, swarm.result.generating_s, swarm.result.generated
            waits = len(swarm.result.waited)
            swarm.simulate(WARM_STEPS + steps)
            spent_s = run.now_s - began_s
            waited = swarm.result.waited[waits:]
            return (
                spent_s / steps,
                (swarm.result.generating_s - busy_s) / spent_s / setting.workers,
                (swarm.result.generated - made) / steps,
                fmean(wait > 0.2 for wait in waited),
            )
        finally:
            run.close()


MEASURED = Setting(name="as measured")
REBUILT = replace(MEASURED, name="rebuilt in 0.62 of the time", rebuild_s=0.62 * MEASURED.rebuild_s)
NOTICED = replace(REBUILT, name="and noticed at once", notice_s=0.12, ask_pause_s=0.1)
LOADED = replace(NOTICED, name="and loaded ahead", is_loaded_ahead=True)
ANNOUNCED = replace(LOADED, name="and announced in 0.5 s", announce_s=0.5)
SETTINGS = (
    MEASURED,
    REBUILT,
    NOTICED,
    LOADED,
    ANNOUNCED,
    replace(ANNOUNCED, name="and rebuilt in 0.3 s", rebuild_s=0.3),
    replace(ANNOUNCED, name="leases of 24", prompts_per_lease=24),
    replace(ANNOUNCED, name="three workers", workers=3),
)


def rebuild(megabytes: int, times: int = 7) -> None:
    """Prints the median time and CPU time of building a file from a delta, into a new file and over a recycled one."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as scratch:
        old, new, payload, made, recycled = (
            Path(scratch, name) for name in ("old", "new", "delta", "made", "recycled")
        )
        rng = np.random.default_rng(0)
        words = rng.integers(0, 1 << 16, megabytes * 500_000, dtype=np.uint16)
        words.tofile(old)
        words += (rng.random(words.size, dtype=np.float32) < 0.1).astype(np.uint16)
        words.tofile(new)
        del words
        digest = hash_file(new)
        write_delta(old, new, payload, old_blake3=hash_file(old), max_bytes=1 << 40)
        new.unlink()
        spent: dict[str, list[tuple[float, float]]] = {"new file": [], "recycled": []}
        for _ in range(times):
            for kind, found in spent.items():
                if kind == "new file":
                    made.unlink(missing_ok=True)
                else:
                    made.replace(recycled)
                began_s, cpu_s = time.perf_counter(), time.process_time()
                assert apply_deltas(old, [payload], made, reuse=recycled) == digest
                found.append((time.perf_counter() - began_s, time.process_time() - cpu_s))
    medians = {kind: tuple(map(median, zip(*found, strict=True))) for kind, found in spent.items()}
    for kind, (wall_s, cpu_s) in medians.items():
        print(f"{kind:10} {wall_s:5.2f} s, {cpu_s:5.2f} s of CPU")
    (wall_new, cpu_new), (wall_over, cpu_over) = medians.values()
    print(f"ratio      {wall_over / wall_new:5.2f}    {cpu_over / cpu_new:5.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rebuild", type=int, metavar="MB")
    options = parser.parse_args()
    if options.rebuild:
        rebuild(options.rebuild)
        return
    print(f"{'':38} {'step':>6} {'busy':>6} {'groups made':>12} {'waited':>7}")
    for setting in SETTINGS:
        rows = [simulate(setting, options.steps, seed) for seed in range(options.seeds)]
        step_s, busy, made, waited = (fmean(column) for column in zip(*rows, strict=True))
        print(f"{setting.name:38} {step_s:5.2f}s {busy:6.1%} {made:12.1f} {waited:7.1%}", flush=True)


if __name__ == "__main__":
    main()
