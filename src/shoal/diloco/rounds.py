"""One round: begin, reduce, commit; retry if digests differ or a peer is gone; alone after the deadline.

begin ──▶ reduce ──▶ commit ──▶ all digests equal ──▶ COMMITTED
  ▲         │ RoundFailed │ one differs
  └─────────┴─────────────┘        until deadline_s ──▶ LOCAL (own pseudo-gradient)
begin raises Behind ──▶ fetch the swarm's state ──▶ ADOPTED (this site's work is added to it)
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from shoal.diloco.averaging.averager import Averager, Behind, FetchedState, Ready, Reduced, RoundFailed
from shoal.diloco.outer import Vector, is_finite
from shoal.diloco.robust import declared_norm
from shoal.net.waiting import Stopped
from shoal.telemetry import Log


class RoundOutcome(Enum):
    """How a round ended."""

    COMMITTED = "every member of the group has the same average"
    LOCAL = "no agreement before the deadline: an outer step on this site's own pseudo-gradient"
    ADOPTED = "the swarm's state was newer: it is adopted, and this site's work is kept for the next round"


@dataclass(slots=True, kw_only=True)
class RoundResult:
    """The result of a round, over all its attempts. Until one succeeds, the average is this site's own pseudo-gradient."""

    outcome: RoundOutcome = RoundOutcome.LOCAL
    average_N: Vector
    work: float
    members: tuple[str, ...]
    fetched: FetchedState | None = None
    attempts: int = 0
    num_bytes: int = 0
    took_s: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Why each failed attempt failed."""


def take_round(
    averager: Averager,
    ready: Ready,
    delta_N: Vector,
    *,
    deadline_s: float,
    log: Log,
    stop: threading.Event,
    on_offer: Callable[[int], None] = lambda round: None,
) -> RoundResult:
    """Averages `delta_N` with the peers that are ready. Returns within about a second of `deadline_s`.

    Calls `on_offer` with the round's number once there is a group, before any value is sent.
    """
    ready = replace(ready, norm=declared_norm(delta_N))
    result = RoundResult(average_N=delta_N, work=ready.weight, members=(averager.peer,))
    started_s, pause_s = time.monotonic(), 0.05
    until_s = started_s + deadline_s
    try:
        while time.monotonic() < until_s:
            result.attempts += 1
            try:
                _attempt(averager, ready, delta_N, result, until_s=until_s, on_offer=on_offer)
                return result
            except Behind as behind:
                try:
                    result.fetched = averager.fetch(deadline_s=max(1.0, until_s - time.monotonic()))
                    result.outcome = RoundOutcome.ADOPTED
                    return result
                except RoundFailed as failed:
                    result.reasons.append(f"{behind}; {failed}")
            except RoundFailed as failed:
                result.reasons.append(str(failed))
                log.warning("round failed, retrying", round=ready.round, reason=failed)
            if stop.wait(min(pause_s, max(0.0, until_s - time.monotonic()))):
                raise Stopped(f"stopped in round {ready.round}")
            pause_s = min(2 * pause_s, 1.0)
        log.warning(
            "round taken alone", round=ready.round, deadline_s=deadline_s, reasons=len(result.reasons)
        )
        return result
    finally:
        result.took_s = time.monotonic() - started_s


def _attempt(
    averager: Averager,
    ready: Ready,
    delta_N: Vector,
    result: RoundResult,
    *,
    until_s: float,
    on_offer: Callable[[int], None],
) -> None:
    """Makes one attempt and writes the group's average into `result`. Raises Behind or RoundFailed."""

    def left() -> float:
        return max(0.01, until_s - time.monotonic())

    group = averager.begin(ready, deadline_s=left())
    on_offer(ready.round)
    try:
        reduced: Reduced = averager.reduce(group, delta_N, deadline_s=left())
        if not is_finite(reduced.average_N):
            raise RoundFailed("the average is not finite: a member's pseudo-gradient is not")
    except RoundFailed:
        averager.commit(group, "", deadline_s=min(2.0, left()))
        raise
    result.num_bytes += reduced.num_bytes
    if not averager.commit(group, reduced.digest, deadline_s=left()):
        raise RoundFailed(f"group {group.id[:8]} of {len(group.members)}: the members' digests differ")
    result.outcome, result.average_N = RoundOutcome.COMMITTED, reduced.average_N
    result.work, result.members = group.work, group.members
