"""Authorisation of signed requests: the role of the key, and the nonce that lets each request count once.

The order matters. The router caps the body before it computes anything on it, and checks the signature before the database is
asked. A request of an unknown key writes nothing. The nonce is spent in the transaction of the effect, even if the effect is refused,
so that a captured request can never be used again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sqlalchemy import Row, delete, select

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.membership.relays import is_relay_key
from shoal.swarm.coordinator.store.database import WriteGroup
from shoal.swarm.coordinator.store.schema import nonces, revoked_keys
from shoal.swarm.coordinator.store.statements import InsertIfNew
from shoal.wire.codes import Rejected
from shoal.wire.keys import Role
from shoal.wire.request import NONCE_KEPT_S, Signer

Caller = Literal["newcomer", "node", "banned"] | Role
"""Who may call a route. `newcomer` admits any key; `banned` also admits ejected nodes, so that they can appeal."""

_SPEND_NONCE = InsertIfNew(nonces)


@contextmanager
def admitted(
    coordinator: Coordinator,
    group: WriteGroup,
    signer: Signer,
    allowed: frozenset[Caller],
    *,
    network: str,
) -> Iterator[Transaction]:
    """Opens the transaction of one signed request. If the request is refused inside it, only the nonce stays spent.

    `network` is the network prefix that the request came from; empty if it is not known.
    """
    # A role's key is never a node's, even if the same key is enrolled.
    role = coordinator.roles.get(signer.key)
    node = NODES.find(group.db, signer.key) if role is None else None
    if role is None and node is None and is_relay_key(group.db, signer.key):
        role = "relay"
    caller: Caller = role or ("newcomer" if node is None else "node")
    if caller not in allowed:
        if caller == "newcomer":
            raise Rejected("request.unknown_key", f"key {signer.key[:16]} is not enrolled in this run")
        raise Rejected(
            "request.not_allowed",
            f"key {signer.key[:16]} is a {caller} key; this route is for {' or '.join(sorted(allowed))}",
        )
    if not _SPEND_NONCE.run(group.db, key=signer.key, nonce=signer.nonce, seen_at_s=coordinator.clock()):
        raise Rejected("request.replayed", f"nonce {signer.nonce} of key {signer.key[:16]} is spent")
    with coordinator.transaction(signer.key, group=group) as tx:
        tx.node, tx.network = node, network
        if node is not None:
            _check_node(tx, node, allowed)
        yield tx


def prune_nonces(tx: Transaction) -> None:
    """Deletes nonces of signatures that are too old to be accepted again."""
    tx.write(delete(nonces).where(nonces.c.seen_at_s < tx.now_s - NONCE_KEPT_S))


def _check_node(tx: Transaction, node: Row[Any], allowed: frozenset[Caller]) -> None:
    """Raises Rejected for a banned node and for a delegated key that has expired or was revoked."""
    if node.trust == "banned" and "banned" not in allowed:
        raise Rejected("request.banned", f"node {node.node[:16]} was ejected: {node.trust_reason}")
    if node.delegated_until_s is None or "newcomer" in allowed:
        return
    if tx.now_s >= node.delegated_until_s:
        raise Rejected(
            "request.revoked", f"the delegation of {node.node[:16]} by {node.owner[:16]} has ended"
        )
    revoked = tx.db.execute(
        select(revoked_keys.c.reason).where(revoked_keys.c.node == node.node)
    ).scalar_one_or_none()
    if revoked is not None:
        raise Rejected("request.revoked", f"{node.owner[:16]} revoked the key of {node.node[:16]}: {revoked}")
