"""Submissions: a node says that its upload is the answer to its lease, and gets a receipt signed by the run key."""

import json
from typing import Any

from sqlalchemy import Connection, Row, and_, or_, select

from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.leases import epochs
from shoal.swarm.coordinator.leases.batches import is_stale
from shoal.swarm.coordinator.leases.in_flight import count_submitted
from shoal.swarm.coordinator.leases.lifecycle import Event, find_lease, move, own_lease, still_awaited, void
from shoal.swarm.coordinator.leases.pending_upload import expected_of
from shoal.swarm.coordinator.leases.uploads import find_upload
from shoal.swarm.coordinator.membership.nodes import standing_of
from shoal.swarm.coordinator.rules.check_sampling import checks_all
from shoal.swarm.coordinator.rules.lease_states import State
from shoal.swarm.coordinator.rules.trust import check_rate
from shoal.swarm.coordinator.store.schema import leases, submissions
from shoal.swarm.coordinator.store.sheet import SUBMISSIONS
from shoal.wire.codes import Rejected
from shoal.wire.lease import Receipt
from shoal.wire.messages import Submit
from shoal.wire.record import Sealed, seal


def find_submission(db: Connection, lease_id: str) -> Row[Any] | None:
    return SUBMISSIONS.find(db, lease_id)


def submit(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: Submit) -> Sealed[Receipt]:
    """Idempotent: the same submission again gives the same receipt, whatever became of it since."""
    lease = own_lease(tx, lease_id)
    found = find_submission(tx.db, lease_id)
    if found is not None:
        return _again(found, ask)
    still_awaited(tx, lease, ask.epoch)
    _check_version(lease, ask.policy_version)
    _check_stored(tx, coordinator, ask, lease_id)
    sealed = _receive(tx, coordinator, lease, ask)
    newest = tx.turn.recall(newest_version)
    assert newest is not None, "a lease was issued, so a policy was published"
    if lease.purpose == "train" and is_stale(newest, ask.policy_version, coordinator.spec.max_lag):
        _void_stale(tx, coordinator, find_lease(tx.db, lease_id), ask.policy_version, newest)
    return sealed


def void_stale(tx: Transaction, coordinator: Coordinator, newest: int) -> None:
    """What is too old, and not being checked, need not be checked any more. Held-out work is when its version is gone."""
    made_by = submissions.c.policy_version
    rows = tx.db.execute(
        select(leases, made_by)
        .join(submissions, submissions.c.lease_id == leases.c.lease_id)
        .where(
            leases.c.state == State.SUBMITTED.value,
            or_(
                and_(leases.c.purpose == "train", made_by < newest - coordinator.spec.max_lag),
                and_(leases.c.purpose == "eval", made_by <= newest - coordinator.spec.keep_versions),
            ),
        )
    ).all()
    for row in rows:
        _void_stale(tx, coordinator, row, row.policy_version, newest)


def _void_stale(
    tx: Transaction, coordinator: Coordinator, lease: Row[Any], version: int, newest: int
) -> None:
    if lease.purpose == "train":
        rule = f"at most {coordinator.spec.max_lag} is used"
    else:
        rule = f"the newest {coordinator.spec.keep_versions} are kept"
    void(
        tx,
        coordinator,
        lease,
        "void.stale",
        f"made with version {version}, {newest - version} behind {newest}; {rule}",
    )


def _again(found: Row[Any], ask: Submit) -> Sealed[Receipt]:
    if (found.sha256, found.num_bytes, found.policy_version) != (
        ask.sha256,
        ask.num_bytes,
        ask.policy_version,
    ):
        raise Rejected(
            "request.conflict", f"lease {found.lease_id} has another submission already: {found.sha256}"
        )
    return Sealed[Receipt].parse(found.receipt)


def _check_version(lease: Row[Any], version: int) -> None:
    # Our own words: there is nothing to check about them.
    allowed = [policy["version"] for policy in json.loads(lease.sealed)["body"]["policies"]]
    if version not in allowed:
        raise Rejected(
            "request.conflict", f"version {version} was not leased; lease {lease.lease_id} allows {allowed}"
        )


def _check_stored(tx: Transaction, coordinator: Coordinator, ask: Submit, lease_id: str) -> None:
    # The upload must have come in under this very lease: knowing a digest is not having the file.
    upload = find_upload(tx.db, lease_id)
    if upload is None or (upload.sha256, upload.num_bytes) != (ask.sha256, ask.num_bytes):
        raise Rejected(
            "request.conflict",
            f"no upload of {ask.num_bytes} bytes with digest {ask.sha256} on lease {lease_id}",
        )
    # A store elsewhere was asked before the transaction began (uploads.arrived).
    here = isinstance(coordinator.store, LocalStore)
    if upload.stored_at_s is None or (here and not coordinator.store.holds(expected_of(upload))):
        raise Rejected("request.conflict", f"the upload of {ask.sha256} is not complete; send it again")


def _receive(tx: Transaction, coordinator: Coordinator, lease: Row[Any], ask: Submit) -> Sealed[Receipt]:
    what = {"sha256": ask.sha256, "num_bytes": ask.num_bytes, "policy_version": ask.policy_version}
    seq = tx.record("submission.received", lease_id=lease.lease_id, node=lease.node, **what)
    receipt = Receipt(
        lease_id=lease.lease_id,
        node=lease.node,
        sha256=ask.sha256,
        num_bytes=ask.num_bytes,
        policy_version=ask.policy_version,
        received_at_s=tx.now_s,
        seq=seq,
    )
    sealed = seal(receipt, coordinator.run_key)
    SUBMISSIONS.insert(
        tx.db,
        lease_id=lease.lease_id,
        node=lease.node,
        **what,
        received_at_s=tx.now_s,
        seq=seq,
        receipt=sealed.model_dump_json(),
        **_draw_checks(tx, coordinator, lease, ask.sha256),
    )
    assert tx.node is not None, "only nodes submit"
    count_submitted(tx.turn, tx.node, lease)
    move(tx, lease, Event.SUBMIT)
    return sealed


def _draw_checks(tx: Transaction, coordinator: Coordinator, lease: Row[Any], sha256: str) -> dict[str, Any]:
    """Only now, with the bytes in our hands, is it drawn whether they get every check."""
    assert tx.node is not None, "only nodes submit"
    epoch, secret = epochs.secret_now(tx)
    rate = check_rate(standing_of(tx.node), floor=coordinator.config.check_rate)
    # The held-out curve is published: nothing enters it on trust.
    if lease.purpose == "eval":
        rate = 1.0
    full = checks_all(secret, lease.lease_id, sha256, rate)
    return {"checks": "full" if full else "rewards", "draw_epoch": epoch, "draw_rate": rate}
