"""One round: begin, reduce, commit; drop and retry if digests differ or a peer is gone; alone after the deadline.

begin ──▶ reduce ──▶ commit ──▶ all digests equal ──▶ COMMITTED
  ▲         │ RoundFailed │ one differs
  └─────────┴─────────────┘        until deadline_s ──▶ LOCAL (own pseudo-gradient)
begin raises Behind ──▶ fetch the swarm's state ──▶ ADOPTED (own work is carried over, not lost)
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from shoal.diloco.averaging.averager import Averager, Behind, Fetched, Ready, Reduced, RoundFailed
from shoal.diloco.outer import Vector, is_finite
from shoal.net.waiting import Stopped
from shoal.telemetry import Log


class Outcome(Enum):
    COMMITTED = "every member of the group has the same average"
    LOCAL = "nobody to agree with before the deadline: an outer step on the own pseudo-gradient"
    ADOPTED = "the swarm was further: its state is taken over, own work carried into the next round"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    outcome: Outcome
    average_N: Vector
    work: float
    members: tuple[str, ...]
    fetched: Fetched | None
    attempts: int
    num_bytes: int
    took_s: float
    reasons: tuple[str, ...]
    """Why each attempt that came to nothing did."""


class _Progress:
    """What is counted while a round is tried."""

    def __init__(self, on_offer: Callable[[int], None]) -> None:
        self.on_offer = on_offer
        self.started_s = time.monotonic()
        self.reasons: list[str] = []
        self.attempts = 0
        self.num_bytes = 0

    def result(
        self,
        outcome: Outcome,
        average_N: Vector,
        *,
        work: float,
        members: tuple[str, ...],
        fetched: Fetched | None = None,
    ) -> RoundResult:
        return RoundResult(
            outcome=outcome,
            average_N=average_N,
            work=work,
            members=members,
            fetched=fetched,
            attempts=self.attempts,
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
    """Average `delta_N` with whoever is ready. Returns by `deadline_s`, give or take a second.

    `on_offer` is told the round's number when there is a group, before anybody is given a value.
    """
    progress = _Progress(on_offer)
    pause_s = 0.05
    while (left_s := deadline_s - (time.monotonic() - progress.started_s)) > 0:
        progress.attempts += 1
        tried_s = time.monotonic()
        try:
            return _attempt(averager, ready, delta_N, left_s=left_s, progress=progress)
        except Behind as behind:
            try:
                fetched = averager.fetch(deadline_s=max(1.0, left_s - (time.monotonic() - tried_s)))
            except RoundFailed as failed:
                progress.reasons.append(f"{behind}; {failed}")
            else:
                return progress.result(
                    Outcome.ADOPTED,
                    delta_N,
                    work=ready.weight,
                    members=(averager.peer,),
                    fetched=fetched,
                )
        except RoundFailed as failed:
            progress.reasons.append(str(failed))
            log.warning("round dropped, retrying", round=ready.round, reason=failed)
        if stop.wait(min(pause_s, max(0.0, left_s))):
            raise Stopped(f"stopped in round {ready.round}")
        pause_s = min(2 * pause_s, 1.0)
    log.warning("round taken alone", round=ready.round, deadline_s=deadline_s, reasons=len(progress.reasons))
    return progress.result(Outcome.LOCAL, delta_N, work=ready.weight, members=(averager.peer,))


def _attempt(
    averager: Averager, ready: Ready, delta_N: Vector, *, left_s: float, progress: _Progress
) -> RoundResult:
    started_s = time.monotonic()

    def left() -> float:
        return max(0.01, left_s - (time.monotonic() - started_s))

    group = averager.begin(ready, deadline_s=left())
    progress.on_offer(ready.round)
    try:
        reduced: Reduced = averager.reduce(group, delta_N, deadline_s=left())
        if not is_finite(reduced.average_N):
            raise RoundFailed("the average is not finite: some member's share is not")
    except RoundFailed:
        averager.commit(group, "", deadline_s=min(2.0, left()))
        raise
    progress.num_bytes += reduced.num_bytes
    if not averager.commit(group, reduced.digest, deadline_s=left()):
        raise RoundFailed(f"group {group.id[:8]} of {len(group.members)}: not every digest was the same")
    return progress.result(Outcome.COMMITTED, reduced.average_N, work=group.work, members=group.members)
