"""Rows of leases, uploads and submissions: how they are found, moved to the next state, and what an upload's bytes are."""

import re
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from shoal.net.object_store import Declared
from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.lease_states import AWAITED, TERMINAL, LeaseEvent, LeaseState, next_state
from shoal.swarm.coordinator.store.schema import leases, submissions, uploads
from shoal.swarm.coordinator.store.statements import Statement, TableStatements, given
from shoal.wire.codes import Rejected
from shoal.wire.messages import LeaseStatus

LEASE_ID = re.compile(r"[0-9a-f]{32}")
LEASES = TableStatements(leases)
UPLOADS = TableStatements(uploads)
SUBMISSIONS = TableStatements(submissions)

_AWAITED_OF = Statement(
    select(leases)
    .where(leases.c.state.in_(AWAITED), leases.c.node == given("name"))
    .order_by(leases.c.session_epoch, leases.c.issued_at_s, leases.c.lease_id)
)


def find_lease(db: Connection, lease_id: str) -> Row[Any]:
    """Returns the lease, or raises Rejected if there is none with this id."""
    lease = LEASES.find(db, lease_id)
    if lease is None:
        raise Rejected("request.not_found", f"no lease {lease_id[:80]!r}")
    return lease


def own_lease(tx: Transaction, lease_id: str) -> Row[Any]:
    """Returns the lease if it was issued to the calling node; raises Rejected otherwise."""
    lease = find_lease(tx.db, lease_id)
    if lease.node != tx.actor:
        raise Rejected("request.not_yours", f"lease {lease_id} was issued to another node")
    return lease


def awaited_of(db: Connection, node: str) -> list[Row[Any]]:
    """Returns the leases that a node has not submitted yet, oldest first; leases of earlier sessions come before others."""
    return _AWAITED_OF.rows(db, name=node)


def check_deliverable(tx: Transaction, lease: Row[Any], epoch: int) -> None:
    """Raises Rejected if the node can no longer upload to or submit this lease of its own."""
    tx.check_session(epoch)
    lease_id = lease.lease_id
    if lease.state in TERMINAL:
        raise Rejected("request.lease_closed", f"lease {lease_id} has ended: {lease.code}: {lease.detail}")
    if lease.state in AWAITED and tx.now_s > lease.deadline_s:
        raise Rejected(
            "request.lease_closed", f"lease {lease_id} expired {tx.now_s - lease.deadline_s:.1f} s ago"
        )


def move(tx: Transaction, lease: Row[Any], event: LeaseEvent) -> None:
    """Moves a lease to a state that does not end it, or from accepted to revoked. lifecycle.end has the other ends."""
    state = next_state(LeaseState(lease.state), event)
    tx.update(LEASES, lease.lease_id, state=state.value)


def status(lease: Row[Any]) -> LeaseStatus:
    return LeaseStatus.copied_from(lease)


def get_status(tx: Transaction, coordinator: Coordinator, lease_id: str) -> LeaseStatus:
    return status(own_lease(tx, lease_id))


# -- uploads ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedUpload(Declared):
    """The bytes that must arrive under a token. Knowing the token is the permission to send them."""

    lease_id: str


def expected_upload(upload: Row[Any]) -> ExpectedUpload:
    return ExpectedUpload(
        token=upload.token,
        sha256=upload.sha256,
        num_bytes=upload.num_bytes,
        asked_at_s=upload.asked_at_s,
        expires_at_s=upload.expires_at_s,
        lease_id=upload.lease_id,
    )


def remove_bytes(tx: Transaction, coordinator: Coordinator, upload: Declared) -> None:
    """Deletes an upload after the commit, unless a lease that is not void has the same bytes.

    Without this a node that only uploads, or whose submissions are never accepted, could fill the disk. Two kinds of
    uploads of the same bytes do not count: one that has not arrived yet, whose node will send the bytes, and one that
    lifecycle.py has deleted.
    """
    used = (
        select(uploads.c.lease_id)
        .join(leases, leases.c.lease_id == uploads.c.lease_id)
        .where(
            uploads.c.sha256 == upload.sha256,
            uploads.c.token != upload.token,
            uploads.c.stored_at_s.is_not(None),
            leases.c.state != LeaseState.VOID.value,
        )
    )
    if tx.db.execute(used.limit(1)).one_or_none() is None:
        tx.after_commit(lambda: coordinator.store.remove(upload))
