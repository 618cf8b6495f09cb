"""Submissions as a validator gets them, and those that none has claimed yet, in their order. Read ahead for all claims of a turn."""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, select

from shoal.swarm.coordinator.rules.lease_states import State
from shoal.swarm.coordinator.store.schema import leases, submissions
from shoal.swarm.coordinator.store.statements import Among, Statement, given
from shoal.swarm.coordinator.store.turn import Turn

_EARLIER = submissions.alias("earlier")
# The node that first submitted these bytes. Order is that of our receipts: nobody can claim to have been earlier.
_COPY_OF = (
    select(_EARLIER.c.node)
    .where(_EARLIER.c.sha256 == submissions.c.sha256, _EARLIER.c.seq < submissions.c.seq)
    .order_by(_EARLIER.c.seq)
    .limit(1)
    .scalar_subquery()
    .label("copy_of")
)
# Held-out work first: the curve, and the end of the run, wait for it. Then in the order of receipt.
_WITH_LEASE = select(submissions, leases.c.sealed, leases.c.state, _COPY_OF).join(
    leases, leases.c.lease_id == submissions.c.lease_id
)
_NEXT = Statement(
    _WITH_LEASE.where(leases.c.state == State.SUBMITTED.value)
    .order_by(leases.c.purpose, submissions.c.seq)
    .limit(given("most"))
)
_ONE = Statement(_WITH_LEASE.where(submissions.c.lease_id == given("id")))
_BEFORE = (
    select(_EARLIER.c.received_at_s)
    .where(_EARLIER.c.node == submissions.c.node, _EARLIER.c.seq < submissions.c.seq)
    .order_by(_EARLIER.c.seq.desc())
    .limit(1)
    .scalar_subquery()
)
_BEFORE_EACH = Among(select(submissions.c.lease_id, _BEFORE.label("before_s")), submissions.c.lease_id)
_ONE_BEFORE = Statement(select(_BEFORE).where(submissions.c.lease_id == given("id")))


def queue(db: Connection, most: int) -> list[Row[Any]]:
    """Submissions that nobody looks at yet, the next first."""
    return _NEXT.rows(db, most=most)


def take_next(turn: Turn) -> Row[Any] | None:
    """From what the turn has read ahead for its claims, if any of it is left."""
    for (most,) in turn.known(queue):
        waiting = turn.recall(queue, most)
        if waiting:
            turn.learn(waiting[1:], queue, most)
            return waiting[0]
    found = queue(turn.db, 1)
    return found[0] if found else None


def find_submitted(db: Connection, lease_id: str) -> Row[Any] | None:
    return _ONE.row(db, id=lease_id)


def previous_receipt_s(db: Connection, lease_id: str) -> float | None:
    """When the node's submission before the one on this lease came; None if it is its first."""
    found: float | None = _ONE_BEFORE.value(db, id=lease_id)
    return found


def learn_previous_receipts(turn: Turn, lease_ids: Collection[str]) -> None:
    """Of all these at once. It never changes: what comes later has a later number."""
    for row in _BEFORE_EACH.rows(turn.db, lease_ids):
        turn.learn(row.before_s, previous_receipt_s, row.lease_id)
