"""How leases end: by a verdict, by expiry, because the node gave them back, or because their version is too old."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, and_, func, or_, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases import epochs
from shoal.swarm.coordinator.leases.lease_rows import (
    LEASES,
    UPLOADS,
    expected_upload,
    find_lease,
    own_lease,
    remove_bytes,
    status,
)
from shoal.swarm.coordinator.membership import accounts
from shoal.swarm.coordinator.membership.nodes import change_standing, check_in_full, count_void, get_node
from shoal.swarm.coordinator.rules.lease_states import AWAITED, OPEN, LeaseEvent, LeaseState, next_state
from shoal.swarm.coordinator.rules.trust import TrustEvent
from shoal.swarm.coordinator.store.schema import appeals, leases, nodes, run, submissions, uploads
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import RECALIBRATING, UNCERTAIN, UNCHECKED, Rejected
from shoal.wire.messages import Abandon, LeaseStatus

EXPIRE_EVERY_S = 1.0
"""How often housekeeping voids the leases that ran out."""

OWED = (
    "void.expired",
    "void.abandoned",
    "void.stale",
    "void.infra",
    UNCERTAIN,
    UNCHECKED,
    RECALIBRATING,
)
"""Codes of ends after which a node owes the work of the lease: everything but a verdict on it and an action of the operator. A node
could otherwise get another seed by choosing how its lease ends."""

UNREADABLE = ("reject.malformed_file", "reject.oversized_table")
"""Codes of rejections whose files are deleted at once: no appeal or audit can learn more from them."""
REJECTED_KEPT_S = 24 * 3600.0
"""How long other rejected files are kept for an appeal or an audit."""
APPEALED_KEPT_S = 30 * 24 * 3600.0
"""How long they are kept while an appeal is not decided."""
REJECTED_BYTES = 2 << 30
"""Most bytes of rejected files that are kept. An appeal costs nothing, so files under appeal count too."""
_DELETED_AT_ONCE = 1000
"""Rejected files that one round of housekeeping deletes: a longer transaction would delay the nodes' requests."""

_EXPIRED = Statement(select(leases).where(leases.c.state.in_(AWAITED), leases.c.deadline_s < given("now_s")))


def end(  # noqa: PLR0913 - everything that the end of a lease changes
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    event: LeaseEvent,
    *,
    code: str,
    detail: str,
    credit: int = 0,
    is_loss: bool = True,
) -> None:
    """Moves a lease to a terminal state. Every lease ends here. `is_loss`: without valid work it counts as lost by its node."""
    state = next_state(LeaseState(lease.state), event)
    tx.update(
        LEASES,
        lease.lease_id,
        state=state.value,
        code=code,
        detail=detail,
        credit=credit,
        ended_at_s=tx.now_s,
    )
    if code in UNREADABLE:
        _delete_file(tx, coordinator, lease.lease_id)
    elif state is LeaseState.VOID and (upload := UPLOADS.find(tx.db, lease.lease_id)) is not None:
        remove_bytes(tx, coordinator, expected_upload(upload))
    if is_loss or state is LeaseState.ACCEPTED:
        accounts.count_end(tx, coordinator, lease, get_node(tx.db, lease.node), code)
    if code in OWED and lease.purpose == "train":
        epochs.add_debt(tx, lease if lease.unit == lease.lease_id else find_lease(tx.db, lease.unit))
    epochs.reveal_after(tx, coordinator, lease.epoch)


def _delete_file(tx: Transaction, coordinator: Coordinator, lease_id: str) -> None:
    """Deletes a rejected file, and notes that the lease no longer needs it: remove_bytes keeps what another lease needs."""
    upload = UPLOADS.find(tx.db, lease_id)
    assert upload is not None, "a rejection is a verdict on an upload"
    tx.update(UPLOADS, lease_id, stored_at_s=None)
    remove_bytes(tx, coordinator, expected_upload(upload))


def delete_rejected(tx: Transaction, coordinator: Coordinator) -> None:
    """Deletes the files of old rejections, and others while all together are too large. Housekeeping calls it once a minute.

    Of those that are too many, files of nodes with the least accepted work are deleted first: new keys are free, and must not
    be able to delete what an honest node appeals with.
    """
    undecided = select(appeals.c.lease_id).where(appeals.c.upheld.is_(None))
    kept = (
        select(leases.c.lease_id, uploads.c.num_bytes)
        .join(uploads, uploads.c.lease_id == leases.c.lease_id)
        .join(nodes, nodes.c.node == leases.c.node)
        .where(leases.c.state == LeaseState.REJECTED.value, uploads.c.stored_at_s.is_not(None))
    )
    is_old = or_(
        leases.c.ended_at_s < tx.now_s - APPEALED_KEPT_S,
        and_(leases.c.ended_at_s < tx.now_s - REJECTED_KEPT_S, leases.c.lease_id.not_in(undecided)),
    )
    for row in tx.db.execute(kept.where(is_old).limit(_DELETED_AT_ONCE)).all():
        _delete_file(tx, coordinator, row.lease_id)
    rest = kept.order_by(nodes.c.accepted, leases.c.ended_at_s, leases.c.lease_id)
    total = select(func.coalesce(func.sum(kept.subquery().c.num_bytes), 0))
    surplus = int(tx.db.execute(total).scalar_one()) - REJECTED_BYTES
    for row in tx.db.execute(rest.limit(_DELETED_AT_ONCE)).all() if surplus > 0 else ():
        if surplus > 0:
            _delete_file(tx, coordinator, row.lease_id)
            surplus -= row.num_bytes


def void(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    code: str,
    detail: str,
    *,
    is_loss: bool = True,
) -> None:
    """Ends a lease without a verdict, without blame and without credit."""
    tx.record("lease.void", lease_id=lease.lease_id, node=lease.node, code=code, detail=detail)
    count_void(tx, lease.node)
    end(tx, coordinator, lease, LeaseEvent.VOID, code=code, detail=detail, is_loss=is_loss)
    if code == "void.expired":
        change_standing(
            tx, coordinator, lease.node, TrustEvent.LAPSED, f"leases expired, the last {lease.lease_id}"
        )
    elif code == UNCHECKED:
        change_standing(tx, coordinator, lease.node, TrustEvent.UNCERTAIN, "")
        check_in_full(tx, lease.node)


def abandon(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: Abandon) -> LeaseStatus:
    """Voids a lease that its node gives back."""
    lease = own_lease(tx, lease_id)
    tx.check_session(ask.epoch)
    if lease.state == LeaseState.VOID:
        return status(lease)
    if lease.state not in AWAITED:
        raise Rejected("request.conflict", f"lease {lease_id} is {lease.state}: too late to give it back")
    void(tx, coordinator, lease, "void.abandoned", ask.reason)
    return status(find_lease(tx.db, lease_id))


def void_all(
    tx: Transaction,
    coordinator: Coordinator,
    node: str,
    code: str,
    detail: str,
    *,
    states: Sequence[LeaseState] = OPEN,
) -> None:
    """Voids every lease in one of `states` of a node that gets no more leases, and ends its debts."""
    rows = tx.db.execute(select(leases).where(leases.c.node == node, leases.c.state.in_(states))).all()
    for lease in rows:
        void(tx, coordinator, lease, code, detail)
    epochs.end_debts_of(tx, coordinator, node)


def expire_overdue(tx: Transaction, coordinator: Coordinator) -> None:
    """Voids all leases whose deadline passed before a submission came. Housekeeping calls it once a second."""
    for lease in _EXPIRED.rows(tx.db, now_s=tx.now_s):
        limit_s = lease.deadline_s - lease.issued_at_s
        void(tx, coordinator, lease, "void.expired", f"no submission within {limit_s:.0f} s")


def void_stale(tx: Transaction, coordinator: Coordinator, newest: int) -> None:
    """Voids unclaimed submissions that are too old to be used. Held-out work is too old when relays dropped its version."""
    made_by = submissions.c.policy_version
    rows = tx.db.execute(
        select(leases, made_by, nodes.c.accepted)
        .join(submissions, submissions.c.lease_id == leases.c.lease_id)
        .join(nodes, nodes.c.node == leases.c.node)
        .where(
            leases.c.state == LeaseState.SUBMITTED.value,
            or_(
                and_(leases.c.purpose == "train", made_by < newest - coordinator.spec.max_lag),
                and_(leases.c.purpose == "eval", made_by <= newest - coordinator.spec.keep_versions),
            ),
        )
    ).all()
    for row in rows:
        # The node submitted in time and no validator came: an overloaded validator must not stop honest nodes. New keys are
        # free, so for them it is a loss: they could otherwise fill the queue with junk that goes stale in it, at no cost.
        is_loss = row.accepted == 0
        void_as_stale(tx, coordinator, row, row.policy_version, newest, is_loss=is_loss)


def void_as_stale(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    version: int,
    newest: int,
    *,
    is_loss: bool = True,
) -> None:
    """Voids a submission of a version that is too old. `is_loss`: it counts as lost by its node."""
    if lease.purpose == "train":
        rule = f"at most {coordinator.spec.max_lag} is used"
    else:
        rule = f"the newest {coordinator.spec.keep_versions} are kept"
    detail = f"made with version {version}, {newest - version} behind {newest}; {rule}"
    void(tx, coordinator, lease, "void.stale", detail, is_loss=is_loss)


def finish_run(tx: Transaction, coordinator: Coordinator) -> None:
    """Ends the run: its last version is published and evaluated, and every secret can be revealed."""
    version = coordinator.spec.last_version
    tx.write(update(run).values(finished_version=version))
    tx.record("run.finished", version=version)
    epochs.reveal_ended(tx, coordinator)
