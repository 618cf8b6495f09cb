"""Actions of the operator: signed by admin.key, with a reason, recorded in the ledger. docs/guides/operator.md lists them."""

import re
from collections.abc import Callable
from functools import partial

from sqlalchemy import insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases import batches, lifecycle
from shoal.swarm.coordinator.leases.lease_rows import find_lease
from shoal.swarm.coordinator.membership import admission, revocation
from shoal.swarm.coordinator.membership.nodes import change_standing, get_node
from shoal.swarm.coordinator.rules.lease_states import AWAITED, TERMINAL
from shoal.swarm.coordinator.rules.trust import TrustEvent
from shoal.swarm.coordinator.store.schema import nodes, revoked_keys, run
from shoal.wire.codes import Rejected
from shoal.wire.keys import PUBLIC_KEY
from shoal.wire.messages import AdminOrder, Recorded, RevokeKey

_DIGEST = re.compile(r"[0-9a-f]{64}")
INVITE_S = 30 * 24 * 3600.0

Action = Callable[[Transaction, Coordinator, AdminOrder], int]
"""Does what the operator ordered and returns the number of its event in the ledger."""


def give_order(tx: Transaction, coordinator: Coordinator, action: str, order: AdminOrder) -> Recorded:
    if action not in _ACTIONS:
        raise Rejected("request.not_found", f"no action {action[:40]!r}; there are {', '.join(_ACTIONS)}")
    return Recorded(seq=_ACTIONS[action](tx, coordinator, order))


def _change_node(tx: Transaction, coordinator: Coordinator, order: AdminOrder, *, event: TrustEvent) -> int:
    node = get_node(tx.db, order.subject)
    seq = tx.record(f"admin.{event.value}", node=node.node, reason=order.reason)
    change_standing(tx, coordinator, node.node, event, f"action of the operator: {order.reason}")
    if event is TrustEvent.BAN:
        lifecycle.void_all(tx, coordinator, node.node, "void.operator", "the operator ejected the node")
        batches.withdraw_held(tx, node.node, "")
    return seq


def _pause(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    tx.write(update(run).values(paused=1))
    return tx.record("admin.pause", reason=order.reason)


def _resume(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    tx.write(update(run).values(paused=0))
    return tx.record("admin.resume", reason=order.reason)


def _void_lease(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    lease = find_lease(tx.db, order.subject)
    if lease.state in TERMINAL:
        raise Rejected("request.lease_closed", f"lease {lease.lease_id} has ended: {lease.state}")
    seq = tx.record("admin.void", lease_id=lease.lease_id, reason=order.reason)
    lifecycle.void(tx, coordinator, lease, "void.operator", order.reason)
    return seq


def _invite(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    """Adds an invitation. `subject` is the digest of its code, so that the coordinator first sees the code when it is used."""
    if not _DIGEST.fullmatch(order.subject):
        raise Rejected("request.malformed", f"{order.subject[:80]!r} is not the digest of an invitation")
    uses = max(1, order.amount)
    admission.change_amount(tx, "invite", order.subject, uses, expires_at_s=tx.now_s + INVITE_S)
    return tx.record("admin.invite", invite=order.subject, uses=uses, reason=order.reason)


def _allow(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    admission.change_amount(tx, "allow", _key(order), 1)
    return tx.record("admin.allow", key=order.subject, reason=order.reason)


def _disallow(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    admission.remove(tx, "allow", _key(order))
    return tx.record("admin.disallow", key=order.subject, reason=order.reason)


def _stake(tx: Transaction, coordinator: Coordinator, order: AdminOrder) -> int:
    left = admission.change_amount(tx, "stake", _key(order), order.amount)
    return tx.record(
        "admin.stake", account=order.subject, amount=order.amount, left=left, reason=order.reason
    )


_ACTIONS: dict[str, Action] = {
    "quarantine": partial(_change_node, event=TrustEvent.QUARANTINE),
    "ban": partial(_change_node, event=TrustEvent.BAN),
    "restore": partial(_change_node, event=TrustEvent.RESTORE),
    "pause": _pause,
    "resume": _resume,
    "void": _void_lease,
    "invite": _invite,
    "allow": _allow,
    "disallow": _disallow,
    "stake": _stake,
    "uphold": partial(revocation.decide, upheld=True),
    "dismiss": partial(revocation.decide, upheld=False),
}
ACTIONS = tuple(_ACTIONS)


def _key(order: AdminOrder) -> str:
    if not PUBLIC_KEY.fullmatch(order.subject):
        raise Rejected("request.malformed", f"{order.subject[:80]!r} is not a key: 64 hex digits")
    return order.subject


def revoke_key(tx: Transaction, coordinator: Coordinator, ask: RevokeKey) -> Recorded:
    """Revokes a node's key for its owner, for example after a theft. The owner keeps the credit.

    Leases without a submission become void. Submissions are judged as always: an owner could otherwise revoke the key when a false
    one is being checked, and keep its stake and all credit that was given on trust.
    """
    owner = tx.db.execute(select(nodes.c.owner).where(nodes.c.node == ask.node)).scalar_one_or_none()
    if owner != tx.actor:
        raise Rejected("request.not_yours", f"key {ask.node[:16]} was not delegated by {tx.actor[:16]}")
    if tx.db.execute(select(revoked_keys).where(revoked_keys.c.node == ask.node)).one_or_none() is not None:
        raise Rejected("request.conflict", f"key {ask.node[:16]} is revoked already")
    tx.write(insert(revoked_keys).values(node=ask.node, reason=ask.reason, revoked_at_s=tx.now_s))
    seq = tx.record("key.revoked", node=ask.node, owner=tx.actor, reason=ask.reason)
    detail = "its owner revoked the node's key"
    lifecycle.void_all(tx, coordinator, ask.node, "void.abandoned", detail, states=AWAITED)
    return Recorded(seq=seq)
