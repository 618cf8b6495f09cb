"""The life of a lease: a pure table of states and events, and the ways it ends.

    issued -> uploading -> submitted -> checking -> accepted | rejected | void
                              ^------------'            a claim that ran out

Every lease reaches exactly one of the last three, and stays there, but for one thing: what was accepted on trust is
revoked if the node is caught while the credit is held. Which code it ended with says why.
"""

import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases.check_queue import queue
from shoal.swarm.coordinator.leases.epochs import reveal_after
from shoal.swarm.coordinator.leases.in_flight import count_ended
from shoal.swarm.coordinator.leases.upload_cleanup import remove_leftover_of
from shoal.swarm.coordinator.membership.nodes import check_session, count_void, happen
from shoal.swarm.coordinator.rules.lease_states import AWAITED, OPEN, TERMINAL, State
from shoal.swarm.coordinator.rules.trust import Happening
from shoal.swarm.coordinator.store.schema import leases, nodes
from shoal.swarm.coordinator.store.sheet import LEASES
from shoal.swarm.coordinator.store.statements import Among, Statement, given
from shoal.swarm.coordinator.store.turn import Turn
from shoal.wire.codes import Rejected
from shoal.wire.messages import Abandon, LeaseStatus


class Event(StrEnum):
    UPLOAD = "upload"
    SUBMIT = "submit"
    CLAIM = "claim"
    RELEASE = "release"
    """The claim ran out."""
    ACCEPT = "accept"
    REJECT = "reject"
    VOID = "void"
    REVOKE = "revoke"


# A verdict may come in after its claim ran out: work done is work done, and the first verdict counts.
_NEXT: dict[tuple[State, Event], State] = {
    (State.ISSUED, Event.UPLOAD): State.UPLOADING,
    (State.ISSUED, Event.VOID): State.VOID,
    (State.UPLOADING, Event.UPLOAD): State.UPLOADING,
    (State.UPLOADING, Event.SUBMIT): State.SUBMITTED,
    (State.UPLOADING, Event.VOID): State.VOID,
    (State.SUBMITTED, Event.CLAIM): State.CHECKING,
    (State.SUBMITTED, Event.ACCEPT): State.ACCEPTED,
    (State.SUBMITTED, Event.REJECT): State.REJECTED,
    (State.SUBMITTED, Event.VOID): State.VOID,
    (State.CHECKING, Event.RELEASE): State.SUBMITTED,
    (State.CHECKING, Event.ACCEPT): State.ACCEPTED,
    (State.CHECKING, Event.REJECT): State.REJECTED,
    (State.CHECKING, Event.VOID): State.VOID,
}


def next_state(state: State, event: Event) -> State:
    """Where an event leads, or Rejected: a lease that has ended stays as it ended, but for a revocation."""
    if (state, event) == (State.ACCEPTED, Event.REVOKE):
        return State.REVOKED
    if state in TERMINAL:
        raise Rejected("request.lease_closed", f"the lease has ended: {state.value}")
    if (state, event) not in _NEXT:
        raise Rejected("request.conflict", f"a lease that is {state.value} cannot {event.value}")
    return _NEXT[state, event]


LEASE_ID = re.compile(r"[0-9a-f]{32}")
_AWAITED = (
    select(leases)
    .where(leases.c.state.in_(AWAITED))
    .order_by(leases.c.session_epoch, leases.c.issued_at_s, leases.c.lease_id)
)
_AWAITED_OF = Statement(_AWAITED.where(leases.c.node == given("name")))
_AWAITED_OF_EACH = Among(_AWAITED, leases.c.node)
_RUN_OUT = Statement(select(leases).where(leases.c.state.in_(AWAITED), leases.c.deadline_s < given("now_s")))


def find_lease(db: Connection, lease_id: str) -> Row[Any]:
    lease = LEASES.find(db, lease_id)
    if lease is None:
        raise Rejected("request.not_found", f"no lease {lease_id[:80]!r}")
    return lease


def own_lease(tx: Transaction, lease_id: str) -> Row[Any]:
    """The lease, if it was issued to the node that asks."""
    lease = find_lease(tx.db, lease_id)
    if lease.node != tx.actor:
        raise Rejected("request.not_yours", f"lease {lease_id} was issued to another node")
    return lease


def awaited_lease(tx: Transaction, lease_id: str, epoch: int) -> Row[Any]:
    """The node's own lease, if it can still deliver on it."""
    return still_awaited(tx, own_lease(tx, lease_id), epoch)


def still_awaited(tx: Transaction, lease: Row[Any], epoch: int) -> Row[Any]:
    """The same lease, if it can still be delivered on."""
    check_session(tx, epoch)
    lease_id = lease.lease_id
    if lease.state in TERMINAL:
        raise Rejected("request.lease_closed", f"lease {lease_id} has ended: {lease.code}: {lease.detail}")
    if lease.state in AWAITED and tx.now_s > lease.deadline_s:
        raise Rejected(
            "request.lease_closed", f"lease {lease_id} ran out {tx.now_s - lease.deadline_s:.1f} s ago"
        )
    return lease


def move(tx: Transaction, lease: Row[Any], event: Event) -> State:
    state = next_state(State(lease.state), event)
    LEASES.change(tx.db, lease.lease_id, state=state.value)
    if event is not Event.CLAIM:  # whoever claims has taken it from there
        _forget_lists(tx, lease, state)
    return state


def _forget_lists(tx: Transaction, lease: Row[Any], state: State) -> None:
    """The lease, given as it was, is `state` now: so it is not any more in the list it was in."""
    if lease.state in AWAITED and state not in AWAITED:
        tx.turn.forget(awaited_of, lease.node)
    elif State.SUBMITTED in (lease.state, state):
        tx.turn.forget(queue)


def awaited_of(db: Connection, node: str) -> list[Row[Any]]:
    """Leases that a node may still deliver on, the oldest first; those of a session that is gone before others."""
    return _AWAITED_OF.rows(db, name=node)


def learn_awaited(turn: Turn, nodes: Collection[str]) -> None:
    """The same of all these at once."""
    found: dict[str, list[Row[Any]]] = {node: [] for node in nodes if not turn.knows(awaited_of, node)}
    for lease in _AWAITED_OF_EACH.rows(turn.db, found):
        found[lease.node].append(lease)
    for node, held in found.items():
        turn.learn(held, awaited_of, node)


def end(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    event: Event,
    *,
    code: str,
    detail: str,
    credit: int = 0,
) -> None:
    """The one way into a terminal state."""
    state = next_state(State(lease.state), event)
    LEASES.change(
        tx.db,
        lease.lease_id,
        state=state.value,
        code=code,
        detail=detail,
        credit=credit,
        ended_at_s=tx.now_s,
    )
    _forget_lists(tx, lease, state)
    count_ended(tx.turn, lease)
    run_over = tx.is_finished(coordinator.spec)
    reveal_after(tx, lease.epoch, coordinator.config.leases_per_epoch, run_over=run_over)


def void(tx: Transaction, coordinator: Coordinator, lease: Row[Any], code: str, detail: str) -> None:
    """End a lease without a verdict: nobody's doing, no blame, no credit."""
    tx.record("lease.void", lease_id=lease.lease_id, node=lease.node, code=code, detail=detail)
    count_void(tx, lease.node)
    if lease.state in AWAITED:
        remove_leftover_of(tx, coordinator, lease.lease_id)
    end(tx, coordinator, lease, Event.VOID, code=code, detail=detail)
    if code in LET_GO:
        _owe(tx, coordinator, lease, code)


LET_GO = ("void.expired", "void.abandoned")


def _owe(tx: Transaction, coordinator: Coordinator, lease: Row[Any], code: str) -> None:
    """Walking away from a seed gains nothing: the node's next train lease poses the same, with the same seed."""
    if lease.purpose == "train":
        owed = tx.db.execute(select(nodes.c.owed).where(nodes.c.node == lease.node)).scalar_one()
        more = f"{owed},{lease.unit}" if owed else lease.unit
        tx.db.execute(update(nodes).where(nodes.c.node == lease.node).values(owed=more))
    if code == "void.expired":
        happen(tx, coordinator, lease.node, Happening.LAPSED, f"leases ran out, the last {lease.lease_id}")


def abandon(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: Abandon) -> LeaseStatus:
    lease = own_lease(tx, lease_id)
    check_session(tx, ask.epoch)
    if lease.state == State.VOID:
        return status(lease)
    if lease.state not in AWAITED:
        raise Rejected("request.conflict", f"lease {lease_id} is {lease.state}: too late to give it back")
    void(tx, coordinator, lease, "void.abandoned", ask.reason)
    return status(find_lease(tx.db, lease_id))


def void_all(tx: Transaction, coordinator: Coordinator, node: str, code: str, detail: str) -> None:
    """Every lease of a node that has not ended."""
    rows = tx.db.execute(select(leases).where(leases.c.node == node, leases.c.state.in_(OPEN))).all()
    for lease in rows:
        void(tx, coordinator, lease, code, detail)


def expire(tx: Transaction, coordinator: Coordinator) -> int:
    """Void the leases whose deadline passed before a submission came; how many. Once a turn, which is no time."""
    if tx.turn.knows(expire):
        return 0
    tx.turn.learn(True, expire)
    rows = _RUN_OUT.rows(tx.db, now_s=tx.now_s)
    for lease in rows:
        void(
            tx,
            coordinator,
            lease,
            "void.expired",
            f"no submission within {lease.deadline_s - lease.issued_at_s:.0f} s",
        )
    return len(rows)


def status(lease: Row[Any]) -> LeaseStatus:
    return LeaseStatus(
        lease_id=lease.lease_id,
        state=lease.state,
        code=lease.code,
        detail=lease.detail,
        credit=lease.credit,
    )
