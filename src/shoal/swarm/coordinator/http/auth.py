"""Who may do what: the signature on a request, the nonce that makes it count once, the role of the key.

Order matters. The body is capped before anything is computed on it; the signature is checked before the database is
asked; a key nobody knows leaves no trace; and the nonce is spent in the transaction of the effect, even if the
effect is then refused, so that no captured request can ever be used again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Row, delete, select

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.membership.nodes import find_node
from shoal.swarm.coordinator.store.door import Caller, caller_of, takes_nonce
from shoal.swarm.coordinator.store.schema import nonces, revoked_keys
from shoal.wire.codes import Rejected
from shoal.wire.request import NONCE_KEPT_S, Signer

SMALL_BODY = 16 << 10
"""What a node has to say."""
LARGE_BODY = 4 << 20
"""Manifests of large models, verdicts on large leases."""
BODY_S = 20.0
"""A body that takes longer is somebody holding the door open."""


@contextmanager
def admitted(coordinator: Coordinator, signer: Signer, allowed: frozenset[Caller]) -> Iterator[Transaction]:
    """The transaction of one signed request. A refusal inside it undoes the effect, but not the spent nonce."""
    refusal: Rejected | None = None
    # Until `one` there is only the nonce, and that stays spent.
    with coordinator.transaction(signer.key, undo=False) as tx:
        caller = caller_of(coordinator, tx.turn, signer.key)
        _check_role(caller, signer, allowed)
        if not takes_nonce(tx.turn, signer, tx.now_s):
            raise Rejected("request.replayed", f"nonce {signer.nonce} of key {signer.key[:16]} is spent")
        tx.node = find_node(tx.db, signer.key) if caller == "node" else None
        try:
            with tx.turn.one():
                _refuse_banned(tx, allowed)
                yield tx
                tx.ledger.flush()
        except Rejected as error:
            tx.ledger.forget()
            refusal = error
    if refusal is not None:
        raise refusal


def prune_nonces(tx: Transaction) -> None:
    tx.db.execute(delete(nonces).where(nonces.c.seen_at_s < tx.now_s - NONCE_KEPT_S))


def _check_role(caller: Caller, signer: Signer, allowed: frozenset[Caller]) -> None:
    if caller in allowed:
        return
    if caller == "newcomer":
        raise Rejected("request.unknown_key", f"key {signer.key[:16]} is not enrolled in this run")
    raise Rejected(
        "request.not_allowed",
        f"key {signer.key[:16]} is a {caller} key; this route is for {' or '.join(sorted(allowed))}",
    )


def _refuse_banned(tx: Transaction, allowed: frozenset[Caller]) -> None:
    node = tx.node
    if node is None:
        return
    if node.trust == "banned" and "banned" not in allowed:
        raise Rejected("request.banned", f"node {node.node[:16]} was ejected: {node.trust_reason}")
    if node.delegated_until_s is not None and "newcomer" not in allowed:
        _check_delegated(tx, node)


def _check_delegated(tx: Transaction, node: Row[Any]) -> None:
    if tx.now_s >= node.delegated_until_s:
        raise Rejected(
            "request.revoked", f"the delegation of {node.node[:16]} by {node.owner[:16]} has ended"
        )
    revoked = tx.db.execute(
        select(revoked_keys.c.reason).where(revoked_keys.c.node == node.node)
    ).scalar_one_or_none()
    if revoked is not None:
        raise Rejected("request.revoked", f"{node.owner[:16]} revoked the key of {node.node[:16]}: {revoked}")
