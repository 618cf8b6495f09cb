"""Submissions: a node declares that its upload is the answer to its lease, and gets a receipt signed by the run key."""

import json
from typing import Any

from sqlalchemy import Row, select

from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.leases import epochs
from shoal.swarm.coordinator.leases.batches import is_stale
from shoal.swarm.coordinator.leases.lease_rows import (
    SUBMISSIONS,
    UPLOADS,
    check_deliverable,
    expected_upload,
    find_lease,
    move,
    own_lease,
)
from shoal.swarm.coordinator.leases.lifecycle import void_as_stale
from shoal.swarm.coordinator.membership.nodes import standing_of
from shoal.swarm.coordinator.rules.lease_states import LeaseEvent
from shoal.swarm.coordinator.rules.trust import check_rate, gets_every_check
from shoal.swarm.coordinator.store.schema import nodes
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import Rejected
from shoal.wire.lease import Receipt
from shoal.wire.messages import Submit
from shoal.wire.record import Sealed, seal

_CAUGHT = Statement(select(nodes.c.node).where(nodes.c.owner == given("name"), nodes.c.rejected > 0).limit(1))


def submit(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: Submit) -> Sealed[Receipt]:
    """Returns the receipt. Idempotent: the same submission again gives the same receipt, whatever became of it since."""
    lease = own_lease(tx, lease_id)
    found = SUBMISSIONS.find(tx.db, lease_id)
    if found is not None:
        same = {name: getattr(found, name) for name in ("sha256", "num_bytes", "policy_version")}
        if same != ask.model_dump(include=set(same)):
            raise Rejected(
                "request.conflict", f"lease {lease_id} has another submission already: {found.sha256}"
            )
        return Sealed[Receipt].parse(found.receipt)
    check_deliverable(tx, lease, ask.epoch)
    newest = newest_version(tx.db)
    assert newest is not None, "a lease was issued, so a policy was published"
    stale = _check_version(lease, ask.policy_version, newest, coordinator.spec.max_lag)
    _check_stored(tx, coordinator, ask, lease_id)
    receipt = _receive(tx, coordinator, lease, ask)
    if stale:
        void_as_stale(tx, coordinator, find_lease(tx.db, lease_id), ask.policy_version, newest)
    return receipt


def _check_version(lease: Row[Any], version: int, newest: int, max_lag: int) -> bool:
    """Returns whether a submission made with this version is stale. Raises Rejected for a version that was not leased, or that is
    stale while a newer leased one could still be used: the lease stays open, because a node could otherwise let go of a seed by its
    choice of the version.
    """
    # Plain JSON: the coordinator sealed this lease itself, so parsing and verifying it again would only cost time.
    leased = [policy["version"] for policy in json.loads(lease.sealed)["body"]["policies"]]
    if version not in leased:
        raise Rejected(
            "request.conflict", f"version {version} was not leased; lease {lease.lease_id} allows {leased}"
        )
    stale = lease.purpose == "train" and is_stale(newest, version, max_lag)
    if stale and not is_stale(newest, leased[-1], max_lag):
        raise Rejected(
            "request.conflict",
            f"version {version} is stale, {newest - version} behind {newest}; generate the rollouts of lease {lease.lease_id} "
            f"with version {leased[-1]} and submit them, or give the lease back",
        )
    return stale


def _check_stored(tx: Transaction, coordinator: Coordinator, ask: Submit, lease_id: str) -> None:
    # The bytes must have been uploaded for this lease: knowing a digest does not prove having the file.
    upload = UPLOADS.find(tx.db, lease_id)
    if upload is None or (upload.sha256, upload.num_bytes) != (ask.sha256, ask.num_bytes):
        raise Rejected(
            "request.conflict",
            f"no upload of {ask.num_bytes} bytes with digest {ask.sha256} on lease {lease_id}",
        )
    # The router has asked an object store before this transaction began (uploads.find_arrived).
    local = isinstance(coordinator.store, LocalStore)
    if upload.stored_at_s is None or (local and not coordinator.store.holds(expected_upload(upload))):
        raise Rejected("request.conflict", f"the upload of {ask.sha256} is not complete; send it again")


def _receive(tx: Transaction, coordinator: Coordinator, lease: Row[Any], ask: Submit) -> Sealed[Receipt]:
    # Before the receipt: an operator that committed to the secret of the draw after it could choose the draw.
    drawn = _draw_checks(tx, coordinator, lease, ask.sha256)
    what: dict[str, Any] = {
        "lease_id": lease.lease_id,
        "node": lease.node,
        "sha256": ask.sha256,
        "num_bytes": ask.num_bytes,
        "policy_version": ask.policy_version,
    }
    seq = tx.record("submission.received", **what)
    received = {**what, "received_at_s": tx.now_s, "seq": seq}
    sealed = seal(Receipt(**received), coordinator.run_key)
    tx.insert(SUBMISSIONS, **received, receipt=sealed.model_dump_json(), lapsed_claims=0, **drawn)
    move(tx, lease, LeaseEvent.SUBMIT)
    return sealed


def _draw_checks(tx: Transaction, coordinator: Coordinator, lease: Row[Any], sha256: str) -> dict[str, Any]:
    """Draws whether the submission gets every check. Drawn after receipt, so that a node cannot know it beforehand."""
    epoch, secret = epochs.secret_for_sampling(tx)
    node = tx.caller()
    rate = check_rate(standing_of(node), floor=coordinator.config.check_rate)
    # The held-out curve is published, so nothing enters it unchecked. An owner that is admitted may enrol any number of keys: after
    # one of them was caught, the others are not spared either.
    if lease.purpose == "eval" or (rate < 1.0 and node.owner and _CAUGHT.row(tx.db, name=node.owner)):
        rate = 1.0
    full = gets_every_check(secret, lease.lease_id, sha256, rate)
    return {"checks": "full" if full else "rewards", "draw_epoch": epoch, "draw_rate": rate}
