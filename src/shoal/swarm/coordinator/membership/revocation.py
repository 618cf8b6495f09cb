"""Revocation of held credit after a rejection, and appeals against rejections."""

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases import batches
from shoal.swarm.coordinator.leases.lease_rows import find_lease, move, own_lease
from shoal.swarm.coordinator.membership.nodes import change_standing, get_node
from shoal.swarm.coordinator.rules.credit import Earning, held_since_s, to_revoke
from shoal.swarm.coordinator.rules.lease_states import LeaseEvent, LeaseState
from shoal.swarm.coordinator.rules.trust import Trust, TrustEvent
from shoal.swarm.coordinator.store.schema import appeals, leases, nodes, verdicts
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.messages import AdminOrder, Appeal, Recorded


def earnings(db: Connection, node: str, since_s: float) -> list[Earning]:
    """Returns the credit that a node was given after `since_s`, oldest first."""
    rows = db.execute(
        select(  # not the bodies, which are large
            verdicts.c.lease_id,
            verdicts.c.credit,
            verdicts.c.given_at_s,
            verdicts.c.checks,
            verdicts.c.revoked_for,
        )
        .where(verdicts.c.node == node, verdicts.c.code == ACCEPTED, verdicts.c.given_at_s > since_s)
        .order_by(verdicts.c.given_at_s, verdicts.c.lease_id)
    )
    return [
        Earning(
            lease_id=row.lease_id,
            amount=row.credit,
            given_at_s=row.given_at_s,
            checked=row.checks == "full",
            revoked=row.revoked_for is not None,
        )
        for row in rows
    ]


def revoke_unchecked(tx: Transaction, coordinator: Coordinator, node: Row[Any], *, because: str) -> None:
    """Revokes the held credit that a rejected node got without every check, and withdraws its groups that were not trained on yet."""
    since_s = held_since_s(Trust(node.trust), node.trust_since_s, tx.now_s, coordinator.config.hold_s)
    taken = to_revoke(earnings(tx.db, node.node, since_s), since_s)
    if not taken:
        return
    ids, amount = [earning.lease_id for earning in taken], sum(earning.amount for earning in taken)
    for lease_id in ids:
        move(tx, find_lease(tx.db, lease_id), LeaseEvent.REVOKE)
    tx.write(update(leases).where(leases.c.lease_id.in_(ids)).values(credit=0))
    tx.write(update(verdicts).where(verdicts.c.lease_id.in_(ids)).values(revoked_for=because))
    tx.write(update(nodes).where(nodes.c.node == node.node).values(credit=nodes.c.credit - amount))
    withdrawn = batches.withdraw(tx, ids)
    tx.record(
        "credit.revoked", node=node.node, lease_ids=ids, amount=amount, because=because, group_ids=withdrawn
    )


def appeal(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: Appeal) -> Recorded:
    """Files an appeal against the rejection of one of the calling node's leases."""
    lease = own_lease(tx, lease_id)
    if lease.state != LeaseState.REJECTED:
        raise Rejected(
            "request.conflict", f"lease {lease_id} is {lease.state}; only a rejection can be appealed"
        )
    if tx.db.execute(select(appeals).where(appeals.c.lease_id == lease_id)).one_or_none() is not None:
        raise Rejected("request.conflict", f"the rejection of lease {lease_id} was appealed before")
    tx.write(insert(appeals).values(lease_id=lease_id, node=lease.node, text=ask.text, filed_at_s=tx.now_s))
    return Recorded(seq=tx.record("appeal.filed", lease_id=lease_id, node=lease.node, text=ask.text))


def decide(tx: Transaction, coordinator: Coordinator, order: AdminOrder, *, upheld: bool) -> int:
    """Records the operator's decision on an appeal. If upheld, the rejection no longer counts and the revoked credit is returned.

    The leases stay revoked, because a lease ends only once.
    """
    lease_id, reason = order.subject, order.reason
    found = tx.db.execute(select(appeals).where(appeals.c.lease_id == lease_id)).one_or_none()
    if found is None or found.upheld is not None:
        state = "was not appealed" if found is None else "has a decided appeal already"
        raise Rejected("request.conflict", f"the rejection of lease {lease_id[:80]!r} {state}")
    tx.write(update(appeals).where(appeals.c.lease_id == lease_id).values(upheld=int(upheld), reason=reason))
    revoked = select(verdicts.c.credit).where(verdicts.c.revoked_for == lease_id)
    returned = sum(tx.db.execute(revoked).scalars()) if upheld else 0
    seq = tx.record(
        "appeal.decided", lease_id=lease_id, node=found.node, upheld=upheld, returned=returned, reason=reason
    )
    if upheld:
        node = get_node(tx.db, found.node)
        tx.write(update(nodes).where(nodes.c.node == node.node).values(credit=node.credit + returned))
        change_standing(tx, coordinator, node.node, TrustEvent.UPHELD, f"an appeal was upheld: {reason}")
    return seq
