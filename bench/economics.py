"""What attacks cost and gain: free keys, spared checks, steering, and attackers that only disturb.

    python bench/economics.py keys        real processes: files made without a model, by as many keys as it takes
    python bench/economics.py spared      the rules of trust alone: invited nodes, check_rate 0.05, liars that lie now and then
    python bench/economics.py steering    `tiny` in bfloat16, real checks: a life of steered submissions, and honest lives
    python bench/economics.py attackers   virtual time: 20 attackers against one honest worker, the run's pace
    python bench/economics.py growth      virtual time: bytes of the database under attack, per delivered submission

Virtual time means the coordinator's own transactions, rules and database with a clock that the bench moves (virtual_run.py). Each
command prints a table and exits with 1 if an aim is missed.
"""

import argparse
import contextlib
import itertools
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from virtual_run import VirtualNode, VirtualRun, spec_of

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.rules.trust import (
    NodeStanding,
    Trust,
    TrustEvent,
    check_rate,
    checks_before_release,
    is_usable,
    next_standing,
)
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease

GENERATE_S, TRAIN_S, CHECK_S, JUNK_S = 10.0, 2.0, 0.4, 0.1
"""Virtual seconds of an honest lease, of a step, and of checking honest work (1/25 of generating it) and junk."""
ROWS, TRUSTED = 16, 3
"""Rows of a lease; accepted submissions that make a node trusted."""
WORKED_S = 300.0
"""The honest worker has worked for so long before the attackers come."""
STEP_S = 0.5
"""Virtual seconds between two looks at everybody."""
QUIET_S = 1e7
"""Heartbeats that nobody has to send."""
MOST_BYTES = 64_000
"""Bytes of the database for each delivered submission, at most, under attack."""
MALFORMED = "reject.malformed_file"

Actor = Iterator[float]
"""A program of one actor: yields the virtual seconds until it acts again."""


@dataclass
class Pace:
    """One simulated stretch of time."""

    versions: int
    honest: int
    """Accepted submissions of the honest worker."""
    codes: Counter[str]
    database_bytes: int
    trained: int
    lost_leases: int


class Scene:
    """One honest worker, a validator, a trainer, and attackers, in virtual time."""

    def __init__(self, run: VirtualRun) -> None:
        self.run, self.began_s = run, run.now_s
        self.honest_leases: set[str] = set()
        self.codes: Counter[str] = Counter()
        self.honest = self.lost_leases = 0
        self._due: list[tuple[float, int, Actor]] = []
        self._numbers = itertools.count()

    def add(self, actor: Actor) -> None:
        self._due.append((self.run.now_s, next(self._numbers), actor))

    def advance(self, seconds: float) -> None:
        """Lets everybody act for so long."""
        until_s, ticked_s, tidied_s = self.run.now_s + seconds, self.run.now_s, self.run.now_s
        while self.run.now_s < until_s:
            self._due.sort()
            while self._due and self._due[0][0] <= self.run.now_s:
                _, number, actor = self._due.pop(0)
                wait_s = next(actor, None)
                if wait_s is not None:
                    self._due.append((self.run.now_s + wait_s, number, actor))
                    self._due.sort()
            if self.run.now_s - ticked_s >= 1:
                tidies = self.run.now_s - tidied_s >= 60
                self.run.tick(tidies=tidies)
                ticked_s, tidied_s = self.run.now_s, self.run.now_s if tidies else tidied_s
            self.run.now_s += STEP_S

    # -- honest roles -----------------------------------------------------------------------------------

    def worker(self, node: VirtualNode) -> Actor:
        """An honest worker: one lease after the other; when refused it asks again as told."""
        while True:
            try:
                lease = self.run.lease(node)
            except Rejected as refused:
                yield min(5.0, refused.retry_after_s or 1.0)
                continue
            self.honest_leases.add(lease.lease_id)
            yield GENERATE_S
            try:
                self.run.submit(node, lease)
            except Rejected:
                with contextlib.suppress(Rejected):
                    self.run.give_back(node, lease)

    def validator(self) -> Actor:
        while True:
            claim = self.run.claim()
            if claim is None:
                yield STEP_S
                continue
            honest = claim.lease.lease_id in self.honest_leases
            yield CHECK_S if honest else JUNK_S
            code = self.run.verdict(claim, ACCEPTED if honest else MALFORMED)
            self.codes[code] += 1
            self.honest += honest and code == ACCEPTED

    def trainer(self) -> Actor:
        while True:
            if self.run.batch() is None:
                yield STEP_S
                continue
            yield TRAIN_S
            self.run.publish()

    # -- attackers --------------------------------------------------------------------------------------

    def attacker(self, kind: str, network: str, *, proven: int) -> Actor:
        """Attacks for ever, with a new key when the old one is ejected. The first `proven` keys count as trusted."""
        for number in itertools.count():
            node = self.run.node(network)
            if number < proven:
                self.run.prove(node, accepted=TRUSTED, rows_per_s=ROWS / GENERATE_S)
            while True:
                try:
                    lease = self.run.lease(node)
                except Rejected as refused:
                    if refused.code == "request.banned":
                        break
                    yield 2.0
                    continue
                yield from self._attack(kind, node, lease)

    def _attack(self, kind: str, node: VirtualNode, lease: Lease) -> Actor:
        self.lost_leases += 1
        left_s = lease.deadline_s - self.run.now_s
        act: Callable[[], None] = partial(self.run.submit, node, lease)
        if kind == "hoarding":
            yield left_s + 1.0
            return
        if kind == "abandoning":
            act = partial(self.run.give_back, node, lease)
        yield max(STEP_S, left_s - 2.0) if kind == "stalling" else STEP_S
        try:
            act()
        except Rejected:
            yield 1.0


KINDS = ("hoarding", "abandoning", "stalling", "junk")


def pace(
    *, attackers: int, proven: int, networks: int, kinds: tuple[str, ...], minutes: float, warm_up_s: float
) -> Pace:
    """Returns what one honest worker achieves in so many virtual minutes."""
    config = CoordinatorConfig(
        groups_per_step=8, prompts_per_lease=4, eval_prompts=0, heartbeat_s=QUIET_S, try_relays=False
    )
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        run = VirtualRun(Path(folder) / "run", config, spec_of())
        scene = Scene(run)
        scene.add(scene.validator())
        scene.add(scene.trainer())
        scene.add(scene.worker(run.node("192.0.2.0/24")))
        scene.advance(WORKED_S)
        for number in range(attackers):
            network = f"10.0.{number % networks}.0/24"
            scene.add(scene.attacker(kinds[number % len(kinds)], network, proven=proven))
        scene.advance(warm_up_s)
        version, honest, size = run.version, scene.honest, run.database_bytes()
        scene.codes.clear()
        scene.lost_leases = 0
        scene.advance(60.0 * minutes)
        found = Pace(
            run.version - version,
            scene.honest - honest,
            scene.codes,
            run.database_bytes() - size,
            len(run.trained),
            scene.lost_leases,
        )
        run.close()
    return found


def fast_folder() -> str | None:
    """Returns a folder in memory where there is one: the disk is not what is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def attackers(options: argparse.Namespace) -> bool:
    """Compares the pace of a run with and without 20 attackers."""
    same = {"minutes": options.minutes, "warm_up_s": options.warm_up_s}
    alone = pace(attackers=0, proven=0, networks=1, kinds=KINDS, **same)
    print(f"no attackers: {alone.versions} versions in {options.minutes:g} virtual minutes", flush=True)
    print("| 20 attackers | trusted keys of each | networks | leases taken | versions | pace | verdicts |")
    print("|---|---|---|---|---|---|---|")
    held = True
    for proven, networks, kinds in (
        (0, 1, KINDS),
        (0, 20, KINDS),
        (2, 1, KINDS),
        (2, 20, KINDS),
        *((2, 20, (kind,)) for kind in KINDS),
    ):
        if options.only and options.only not in kinds:
            continue
        found = pace(attackers=20, proven=proven, networks=networks, kinds=kinds, **same)
        share = found.versions / alone.versions
        held &= share >= 0.8
        print(
            f"| {', '.join(kinds)} | {proven} | {networks} | {found.lost_leases} | {found.versions} | {share:.0%} | "
            f"{dict(found.codes)} |",
            flush=True,
        )
    return held


def growth(options: argparse.Namespace) -> bool:
    """Measures how much the database grows for each delivered submission, without attackers and with 20."""
    print("| attackers | delivered | bytes for each | leases that attackers took |\n|---|---|---|---|")
    for number, proven in ((0, 0), (20, 0), (20, 2)):
        found = pace(
            attackers=number,
            proven=proven,
            networks=20,
            kinds=KINDS,
            minutes=options.minutes,
            warm_up_s=options.warm_up_s,
        )
        each = found.database_bytes / max(1, found.honest)
        print(
            f"| {number} ({proven} trusted keys each) | {found.honest} | {each:,.0f} | {found.lost_leases} |",
            flush=True,
        )
        if each > MOST_BYTES:
            return False
    return True


# -- spared checks ------------------------------------------------------------------------------------------


CHECK_RATE, UNCHECKED_SHARE = 0.05, 0.25
AFTER_CHECK = 0.0
"""Stands for the strategy of liars that lie once right after each check that they see, when nothing else is held."""


@dataclass
class SparedNode:
    """An invited node and its groups that wait for its next full check."""

    lies: bool
    standing: NodeStanding
    held: list[tuple[int, bool]] = field(default_factory=list)
    """Version of each held group that may be used, and whether it is fabricated."""
    was_checked: bool = False


class SparedRun:
    """Invited nodes that deliver in turn, by the coordinator's own rules of trust. One group a submission; every group has signal."""

    GROUPS, MAX_LAG, TURN_S, TRUSTED_AFTER = 8, 2, 10.0, 3

    def __init__(self, *, nodes: int, liars: int, share: float, streak: int, seed: int) -> None:
        self.draw, self.share = random.Random(seed), share
        # The liars did honest work until now. What was checked of it was trained on.
        trusted = NodeStanding(trust=Trust.TRUSTED, streak=streak)
        self.nodes = [SparedNode(number < liars, trusted) for number in range(nodes)]
        self.needed = checks_before_release(CHECK_RATE, UNCHECKED_SHARE)
        self.version, self.now_s = 0, 0.0
        self.ready: dict[bool, list[tuple[int, bool]]] = {True: [], False: []}
        """Groups for the next batch, by whether they were checked."""
        self.trained, self.sent, self.fabricated = nodes * streak, 0, 0

    def turn(self) -> None:
        """Every node that is not ejected delivers once."""
        self.now_s += self.TURN_S
        for node in self.nodes:
            if node.standing.trust is Trust.BANNED:
                continue
            lie = node.lies and (
                node.was_checked if self.share == AFTER_CHECK else self.draw.random() < self.share
            )
            self.sent += lie
            rate, draw = check_rate(node.standing, floor=CHECK_RATE), self.draw.random()
            node.was_checked = draw < rate
            if draw >= rate:
                if is_usable(draw, rate, UNCHECKED_SHARE):
                    node.held.append((self.version, lie))
                event = TrustEvent.TAKEN_ON_TRUST
            elif lie:
                node.held.clear()
                event = TrustEvent.REJECTED
            else:
                self.ready[True].append((self.version, False))
                if rate < 1 and node.standing.streak + 1 >= self.needed:
                    self.ready[False] += node.held
                    node.held.clear()
                event = TrustEvent.ACCEPTED
            node.standing = next_standing(node.standing, event, self.now_s, trusted_after=self.TRUSTED_AFTER)
            self._form_batch()

    def _form_batch(self) -> None:
        unchecked = self.ready[False][: int(self.GROUPS * UNCHECKED_SHARE)]
        checked = self.ready[True][: self.GROUPS - len(unchecked)]
        if len(checked) + len(unchecked) < self.GROUPS:
            return
        self.ready[True] = self.ready[True][len(checked) :]
        self.ready[False] = self.ready[False][len(unchecked) :]
        self.trained += self.GROUPS
        self.fabricated += sum(lie for _, lie in unchecked)
        self.version += 1
        oldest = self.version - self.MAX_LAG
        for checks in (True, False):
            self.ready[checks] = [group for group in self.ready[checks] if group[0] >= oldest]
        for node in self.nodes:
            node.held = [group for group in node.held if group[0] >= oldest]


def spared(options: argparse.Namespace) -> bool:
    """Counts fabricated groups among those trained on where invited nodes are spared checks and some of them lie."""
    print(
        f"check_rate {CHECK_RATE}, max_unchecked_share {UNCHECKED_SHARE}, max_lag {SparedRun.MAX_LAG}, {options.runs} runs of each row; "
        "share of lies 0: one right after each check"
    )
    print(
        "| nodes | liars | checks passed before | submissions of each | share of lies | lies sent | liars ejected | "
        "groups trained on | fabricated | share |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    record = math.ceil(checks_before_release(CHECK_RATE, UNCHECKED_SHARE))
    worst = 0.0
    for nodes, liars, streak, turns in (
        (10, 1, 20, 20),
        (10, 10, 20, 200),
        (4, 1, record, options.turns),
        (4, 4, record, options.turns),
        (20, 1, record, options.turns),
        (20, 20, record, options.turns),
    ):
        for share in (AFTER_CHECK, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0):
            runs = [
                SparedRun(nodes=nodes, liars=liars, share=share, streak=streak, seed=seed)
                for seed in range(options.runs)
            ]
            for run in runs:
                for _ in range(turns):
                    run.turn()
            trained, fabricated = sum(run.trained for run in runs), sum(run.fabricated for run in runs)
            ejected = sum(node.standing.trust is Trust.BANNED for run in runs for node in run.nodes)
            worst = max(worst, fabricated / trained)
            print(
                f"| {nodes} | {liars} | {streak} | {turns} | {share:g} | {sum(run.sent for run in runs)} | "
                f"{ejected} of {liars * options.runs} | {trained} | {fabricated} | {fabricated / trained:.3%} |",
                flush=True,
            )
    return worst < 0.001


# -- steering -----------------------------------------------------------------------------------------------


def steering(options: argparse.Namespace) -> bool:
    from steering import report  # torch is used there only

    return report(options)


# -- free keys ----------------------------------------------------------------------------------------------


def keys(options: argparse.Namespace) -> bool:
    """Sends files made without a model to a real swarm, each from a new key, and looks for them in batches."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "e2e"))  # the swarm and the client of the tests
    from throwaway_keys import attack

    return attack(options.attempts, patient=options.patient)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    free = commands.add_parser("keys")
    free.add_argument("--attempts", type=int, default=1000)
    free.add_argument(
        "--patient", type=int, default=5, help="keys that do three honest leases before they lie"
    )
    free.set_defaults(act=keys)
    sparing = commands.add_parser("spared")
    sparing.add_argument("--turns", type=int, default=2000, help="submissions of each node")
    sparing.add_argument("--runs", type=int, default=20)
    sparing.set_defaults(act=spared)
    steered = commands.add_parser("steering")
    steered.add_argument("--steps", type=int, default=60, help="training steps of `tiny` before")
    steered.add_argument("--seed", type=int, default=0)
    steered.add_argument("--honest", type=int, default=200, help="honest submissions that are measured")
    steered.add_argument("--submissions", type=int, default=60, help="measured submissions of each strategy")
    steered.add_argument("--lives", type=int, default=10_000)
    steered.set_defaults(act=steering)
    for name, act in (("attackers", attackers), ("growth", growth)):
        disturbing = commands.add_parser(name)
        disturbing.add_argument("--minutes", type=float, default=10.0)
        disturbing.add_argument("--warm-up-s", type=float, default=10.0)
        disturbing.add_argument("--only", default="", help="one kind of attackers")
        disturbing.set_defaults(act=act)
    options = parser.parse_args()
    sys.exit(0 if options.act(options) else 1)


if __name__ == "__main__":
    main()
