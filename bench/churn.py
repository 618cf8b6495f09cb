"""Simulates a thousand nodes in virtual time (honest, slow, crashing, cloned, lying) under the coordinator's own rules.

Trust, checks, lease sizes, speed, back-off and credit are the coordinator's own functions (shoal.swarm.coordinator.rules);
time, machines and lies are simulated from one seed. See `python bench/swarm.py churn`.
"""

import heapq
import random
from dataclasses import dataclass, field

from shoal.swarm.coordinator.rules.credit import Earning, to_revoke
from shoal.swarm.coordinator.rules.node_status import averaged_speed
from shoal.swarm.coordinator.rules.planning import LEASE_SHARE
from shoal.swarm.coordinator.rules.trust import (
    NodeStanding,
    Trust,
    TrustEvent,
    check_rate,
    lease_prompts,
    next_lease_s,
    next_standing,
)

HOLD_S = 24 * 3600.0
LEASE_S = 1200.0
PROMPTS, SAMPLES, TOKENS = 8, 16, 2500.0
TRUSTED_AFTER = 3
CHECK_S = 60.0
DETECTION = 0.999
"""Probability that a full check detects a lie; a cheap check never does."""


@dataclass
class Machine:
    kind: str
    tokens_per_s: float
    crash_every_s: float
    lie_share: float = 0.0
    """Share of its submissions that are lies, once it is trusted and has made `patience` submissions."""
    patience: int = 0
    """Honest submissions before its first lie."""
    standing: NodeStanding = field(default_factory=lambda: NodeStanding(trust=Trust.PROBATION))
    rows_per_s: float = 0.0
    earnings: list[Earning] = field(default_factory=list)
    lies_accepted: int = 0
    first_lie_s: float | None = None
    caught_s: float | None = None
    banned: bool = False


@dataclass
class ChurnResult:
    accepted_rows: int = 0
    wasted_rows: float = 0.0
    full_checks: int = 0
    submissions: int = 0
    lies_accepted: int = 0
    catch_s: list[float] = field(default_factory=list)
    lies_before: list[int] = field(default_factory=list)
    liars_free: int = 0
    kept_credit_share: float = 0.0
    honest_banned: int = 0


def population(rng: random.Random, size: int) -> list[Machine]:
    """Returns, per thousand: 700 honest, 100 slow, 100 that crash often, 50 clones, 50 that lie once they are trusted."""
    machines = []
    for index in range(size):
        place = index * 1000 // size
        speed = rng.lognormvariate(6.5, 0.5)  # median 665 tokens/s
        if place < 700:
            machines.append(Machine("honest", speed, 24 * 3600.0))
        elif place < 800:
            machines.append(Machine("slow", speed / 10, 24 * 3600.0))
        elif place < 900:
            machines.append(Machine("vanishing", speed, 1200.0))
        elif place < 950:
            machines.append(Machine("cloned", speed, 24 * 3600.0))
        else:
            machines.append(
                Machine(
                    "lying",
                    speed,
                    24 * 3600.0,
                    lie_share=rng.choice((0.1, 0.5, 1.0)),
                    patience=rng.choice((0, 100)),
                )
            )
    return machines


def simulate(*, nodes: int, hours: float, floor: float, seed: int) -> ChurnResult:
    rng, outcome = random.Random(seed), ChurnResult()
    machines = population(rng, nodes)
    queue = [(rng.uniform(0, 600), index) for index in range(nodes)]
    heapq.heapify(queue)
    end_s = hours * 3600
    while queue and queue[0][0] < end_s:
        now_s, index = heapq.heappop(queue)
        machine = machines[index]
        if machine.banned:
            continue
        wait_s = next_lease_s(machine.standing, lease_s=LEASE_S) - now_s
        if wait_s > 0:
            heapq.heappush(queue, (now_s + wait_s, index))
            continue
        heapq.heappush(queue, (_one_lease(machine, now_s, rng, floor, outcome), index))
    return _sum_up(machines, outcome, end_s)


def _one_lease(
    machine: Machine, now_s: float, rng: random.Random, floor: float, outcome: ChurnResult
) -> float:
    """Simulates one lease and returns when the machine asks for the next."""
    prompts = PROMPTS
    if machine.rows_per_s:
        prompts = max(1, min(PROMPTS, int(machine.rows_per_s * LEASE_S * LEASE_SHARE / SAMPLES)))
    rows = lease_prompts(machine.standing, most=prompts) * SAMPLES
    work_s = rows * TOKENS / machine.tokens_per_s
    crash_s = rng.expovariate(1 / machine.crash_every_s)
    # Each clone's session ends the other's: half of the leases are lost half-way.
    fenced = machine.kind == "cloned" and rng.random() < 0.5
    if min(crash_s, LEASE_S) < work_s or fenced:
        lost_s = min(crash_s, LEASE_S, work_s * (0.5 if fenced else 1.0))
        outcome.wasted_rows += rows * lost_s / work_s
        if crash_s < work_s and not fenced:
            # The lease is returned only when the machine restarts, which may be too late.
            back_s = now_s + lost_s + rng.expovariate(1 / 600.0)
            if back_s < now_s + LEASE_S:
                return back_s
        machine.standing = next_standing(
            machine.standing, TrustEvent.LAPSED, now_s + LEASE_S, trusted_after=TRUSTED_AFTER
        )
        return now_s + LEASE_S + 1
    _deliver(machine, now_s + work_s, rows, rng, floor, outcome)
    machine.rows_per_s = averaged_speed(machine.rows_per_s, rows / work_s)
    return now_s + work_s + 1


def _deliver(
    machine: Machine, at_s: float, rows: int, rng: random.Random, floor: float, outcome: ChurnResult
) -> None:
    lies = (
        machine.kind == "lying"
        and len(machine.earnings) >= machine.patience
        and machine.standing.trust in (Trust.TRUSTED, Trust.QUARANTINED)
        and rng.random() < machine.lie_share
    )
    if lies and machine.first_lie_s is None:
        machine.first_lie_s = at_s
    full = rng.random() < check_rate(machine.standing, floor=floor)
    outcome.submissions += 1
    outcome.full_checks += full
    verdict_s = at_s + CHECK_S
    if lies and full and rng.random() < DETECTION:
        _catch(machine, verdict_s, outcome)
        outcome.wasted_rows += rows
        return
    if lies:
        machine.lies_accepted += 1
        outcome.lies_accepted += 1
    else:
        outcome.accepted_rows += rows
    machine.earnings.append(
        Earning(lease_id=str(len(machine.earnings)), amount=rows, given_at_s=verdict_s, checked=full)
    )
    event = TrustEvent.ACCEPTED if full else TrustEvent.TAKEN_ON_TRUST
    machine.standing = next_standing(machine.standing, event, verdict_s, trusted_after=TRUSTED_AFTER)


def _catch(machine: Machine, now_s: float, outcome: ChurnResult) -> None:
    if machine.caught_s is None and machine.first_lie_s is not None:
        machine.caught_s = now_s
        outcome.catch_s.append(now_s - machine.first_lie_s)
        outcome.lies_before.append(machine.lies_accepted)
    taken = {earning.lease_id for earning in to_revoke(machine.earnings, now_s - HOLD_S)}
    machine.earnings = [earning for earning in machine.earnings if earning.lease_id not in taken]
    machine.standing = next_standing(
        machine.standing, TrustEvent.REJECTED, now_s, trusted_after=TRUSTED_AFTER
    )
    machine.banned = machine.standing.trust is Trust.BANNED


def _sum_up(machines: list[Machine], outcome: ChurnResult, end_s: float) -> ChurnResult:
    liars = [machine for machine in machines if machine.kind == "lying"]
    outcome.liars_free = sum(not machine.banned and machine.first_lie_s is not None for machine in liars)
    outcome.honest_banned = sum(machine.banned for machine in machines if machine.kind != "lying")
    unchecked = sum(
        earning.amount for machine in liars for earning in machine.earnings if not earning.checked
    )
    earned = sum(earning.amount for machine in machines for earning in machine.earnings)
    outcome.kept_credit_share = unchecked / max(1, earned)
    return outcome


def table(*, nodes: int, hours: float, seed: int) -> None:
    print(
        f"{nodes} nodes, {hours:g} virtual hours, seed {seed}: 70 % honest, 10 % slow (a tenth of the speed), 10 % that crash"
    )
    print(
        "every 20 minutes, 5 % clones, 5 % that lie in 10, 50 or 100 % of submissions, half of them as soon as they are\ntrusted, half after 100 honest ones.\n"
    )
    print(
        "| least check rate | full checks | accepted rows/h | wasted work | lies accepted | lies before the first catch: "
        "mean, most | time to the first catch: median, most | liars still in | honest ejected | liars' unchecked credit |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for floor in (1.0, 0.25, 0.1, 0.05, 0.02):
        outcome = simulate(nodes=nodes, hours=hours, floor=floor, seed=seed)
        total = outcome.accepted_rows + outcome.wasted_rows
        catches = sorted(outcome.catch_s) or [float("nan")]
        before = outcome.lies_before or [0]
        print(
            f"| {floor:.0%} | {outcome.full_checks / outcome.submissions:.0%} | {outcome.accepted_rows / hours:,.0f} "
            f"| {outcome.wasted_rows / total:.1%} | {outcome.lies_accepted} of {outcome.submissions} "
            f"| {sum(before) / len(before):.1f}, {max(before)} "
            f"| {catches[len(catches) // 2] / 60:.0f} min, {catches[-1] / 60:.0f} min "
            f"| {outcome.liars_free} | {outcome.honest_banned} | {outcome.kept_credit_share:.2%} |"
        )
