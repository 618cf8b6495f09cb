"""One round: begin, reduce, commit; retry if digests differ or a peer is gone; alone after the deadline.

begin ──▶ reduce ──▶ commit ──▶ all digests equal ──▶ COMMITTED
  ▲         │ RoundFailed │ one differs
  └─────────┴─────────────┘        until deadline_s ──▶ LOCAL (own pseudo-gradient)
begin raises Behind ──▶ fetch the swarm's state ──▶ ADOPTED (this site's work is added to it)
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """The result of a round, over all its attempts."""

    outcome: RoundOutcome
    average_N: Vector
    work: float
    members: tuple[str, ...]
    fetched: FetchedState | None
    attempts: int
    num_bytes: int
    took_s: float
    reasons: tuple[str, ...]
    """Why each failed attempt failed."""


class _RoundAttempts:
    """Counts the attempts at one round."""

    def __init__(self, on_offer: Callable[[int], None]) -> None:
        self.on_offer = on_offer
        self.started_s = time.monotonic()
        self.reasons: list[str] = []
        self.num = 0
        self.num_bytes = 0

    def result(
        self,
        outcome: RoundOutcome,
        average_N: Vector,
        *,
        work: float,
        members: tuple[str, ...],
        fetched: FetchedState | None = None,
    ) -> RoundResult:
        return RoundResult(
            outcome=outcome,
            average_N=average_N,
            work=work,
            members=members,
            fetched=fetched,
            attempts=self.num,
            num_bytes=self.num_bytes,
            took_s=time.monotonic() - self.started_s,
            reasons=tuple(self.reasons),
        )


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
    attempts = _RoundAttempts(on_offer)
    pause_s = 0.05
    while (left_s := deadline_s - (time.monotonic() - attempts.started_s)) > 0:
        attempts.num += 1
        tried_s = time.monotonic()
        try:
            return _attempt(averager, ready, delta_N, left_s=left_s, attempts=attempts)
        except Behind as behind:
            try:
                fetched = averager.fetch(deadline_s=max(1.0, left_s - (time.monotonic() - tried_s)))
            except RoundFailed as failed:
                attempts.reasons.append(f"{behind}; {failed}")
            else:
                return attempts.result(
                    RoundOutcome.ADOPTED,
                    delta_N,
                    work=ready.weight,
                    members=(averager.peer,),
                    fetched=fetched,
                )
        except RoundFailed as failed:
            attempts.reasons.append(str(failed))
            log.warning("round failed, retrying", round=ready.round, reason=failed)
        if stop.wait(min(pause_s, max(0.0, left_s))):
            raise Stopped(f"stopped in round {ready.round}")
        pause_s = min(2 * pause_s, 1.0)
    log.warning("round taken alone", round=ready.round, deadline_s=deadline_s, reasons=len(attempts.reasons))
    return attempts.result(RoundOutcome.LOCAL, delta_N, work=ready.weight, members=(averager.peer,))


def _attempt(
    averager: Averager, ready: Ready, delta_N: Vector, *, left_s: float, attempts: _RoundAttempts
) -> RoundResult:
    started_s = time.monotonic()

    def left() -> float:
        return max(0.01, left_s - (time.monotonic() - started_s))

    group = averager.begin(ready, deadline_s=left())
    attempts.on_offer(ready.round)
    try:
        reduced: Reduced = averager.reduce(group, delta_N, deadline_s=left())
        if not is_finite(reduced.average_N):
            raise RoundFailed("the average is not finite: a member's pseudo-gradient is not")
    except RoundFailed:
        averager.commit(group, "", deadline_s=min(2.0, left()))
        raise
    attempts.num_bytes += reduced.num_bytes
    if not averager.commit(group, reduced.digest, deadline_s=left()):
        raise RoundFailed(f"group {group.id[:8]} of {len(group.members)}: the members' digests differ")
    return attempts.result(RoundOutcome.COMMITTED, reduced.average_N, work=group.work, members=group.members)
