"""Uploads: a node declares size and digest, gets a token, and sends exactly those bytes under it.

In a folder the bytes come through the coordinator (http/upload_receiver.py). In an object store they come by a signed URL, and
`sweep` removes what was uploaded there but never submitted.
"""

import secrets
import threading
from dataclasses import asdict

from sqlalchemy import Connection, case, select
from sqlalchemy.exc import DBAPIError

from shoal.net.object_store import LocalStore
from shoal.net.s3_store import S3Store, StoreDown
from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases.lease_rows import (
    UPLOADS,
    ExpectedUpload,
    check_deliverable,
    expected_upload,
    find_lease,
    move,
    own_lease,
    remove_bytes,
)
from shoal.swarm.coordinator.rules.lease_states import AWAITED, LeaseEvent, LeaseState
from shoal.swarm.coordinator.store.database import WriteGroup
from shoal.swarm.coordinator.store.schema import leases, submissions, uploads
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import Rejected
from shoal.wire.messages import AskUpload, Upload

UPLOAD_PATH = "/v1/objects/"
STORE_RETRY_S = 2.0
MOST_DECLARED = 20
"""How often a node may declare other bytes during `lease_s`, if they go to an object store."""
SWEEP_S = 3600.0
SWEEP_SLACK_S = 900.0
"""Allows for the difference between the store's clock and ours, and for a submission that is being received."""

_BY_TOKEN = Statement(
    select(uploads, leases.c.state)
    .join(leases, leases.c.lease_id == uploads.c.lease_id)
    .where(uploads.c.token == given("name"))
)
# Submitted files that must not be deleted. lifecycle.py sets `stored_at_s` to NULL when it deletes a rejected one.
_KEPT = (leases.c.state != LeaseState.VOID.value) & uploads.c.stored_at_s.is_not(None)


def ask_upload(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: AskUpload) -> Upload:
    """Returns where to send the bytes. Asking again for the same bytes gives the same place."""
    lease = own_lease(tx, lease_id)
    check_deliverable(tx, lease, ask.epoch)
    if lease.state not in AWAITED:
        raise Rejected("request.conflict", f"lease {lease_id} has its submission already")
    if ask.num_bytes > lease.max_bytes:
        raise Rejected("request.too_large", f"{ask.num_bytes} bytes, the lease allows {lease.max_bytes}")
    found = UPLOADS.find(tx.db, lease_id)
    if found is not None and (found.sha256, found.num_bytes) == (ask.sha256, ask.num_bytes):
        return _place(coordinator, expected_upload(found))
    if found is not None:
        _check_redeclared(tx, coordinator, lease_id, found.asked_at_s)
    wanted = ExpectedUpload(
        token=secrets.token_hex(32),
        sha256=ask.sha256,
        num_bytes=ask.num_bytes,
        asked_at_s=tx.now_s,
        expires_at_s=lease.deadline_s,
        lease_id=lease_id,
    )
    row = {**asdict(wanted), "stored_at_s": None}
    if found is None:
        tx.insert(UPLOADS, **row)
    else:
        remove_bytes(tx, coordinator, expected_upload(found))
        del row["lease_id"]
        tx.update(UPLOADS, lease_id, **row)
    move(tx, lease, LeaseEvent.UPLOAD)
    return _place(coordinator, wanted)


def _check_redeclared(tx: Transaction, coordinator: Coordinator, lease_id: str, asked_at_s: float) -> None:
    """Raises Rejected if other bytes were declared a moment ago and the upload goes to an object store.

    Its objects are deleted only after their URLs have ended, so a node could otherwise fill it under one lease.
    """
    wait_s = asked_at_s + coordinator.config.lease_s / MOST_DECLARED - tx.now_s
    if wait_s > 0 and not isinstance(coordinator.store, LocalStore):
        raise Rejected(
            "request.too_early",
            f"other bytes were declared for lease {lease_id} a moment ago; each upload stays in the object store for a while",
            retry_after_s=wait_s,
        )


def _place(coordinator: Coordinator, wanted: ExpectedUpload) -> Upload:
    url = coordinator.store.upload_url(wanted)
    return Upload(path="" if url else UPLOAD_PATH + wanted.token, url=url, expires_at_s=wanted.expires_at_s)


def find_expected(db: Connection, token: str, now_s: float) -> ExpectedUpload:
    """Returns the upload that is expected under `token`; raises Rejected if there is none or its lease has ended."""
    row = _BY_TOKEN.row(db, name=token)
    if row is None:
        raise Rejected("request.not_found", "no upload is expected under this name")
    if now_s > row.expires_at_s or row.state not in AWAITED:
        raise Rejected("request.lease_closed", "the lease of this upload has ended")
    return expected_upload(row)


def find_submitted(db: Connection, sha256: str) -> ExpectedUpload | None:
    """Returns the upload that was submitted with this digest. Of several, the first that `sweep` does not delete: each upload to an
    object store has a name of its own."""
    row = db.execute(
        select(uploads)
        .join(submissions, submissions.c.lease_id == uploads.c.lease_id)
        .join(leases, leases.c.lease_id == uploads.c.lease_id)
        .where(submissions.c.sha256 == sha256)
        .order_by(case((_KEPT, 0), else_=1), submissions.c.seq)
        .limit(1)
    ).one_or_none()
    return None if row is None else expected_upload(row)


def find_arrived(coordinator: Coordinator, node: str, lease_id: str) -> ExpectedUpload | None:
    """Returns what this node has put into the object store for this lease, if that is not noted yet.

    Asks the object store, which takes time, so it must not run inside a transaction.
    """
    with coordinator.database.read() as db:
        upload = UPLOADS.find(db, lease_id)
        if upload is None or upload.stored_at_s is not None:
            return None
        lease = find_lease(db, lease_id)
        if lease.node != node or lease.state not in AWAITED:
            return None
    wanted = expected_upload(upload)
    try:
        return wanted if coordinator.store.holds(wanted) else None
    except StoreDown as error:
        coordinator.log.warning("the object store does not answer", reason=error)
        raise Rejected(
            "request.too_early", "the object store does not answer", retry_after_s=STORE_RETRY_S
        ) from None


def mark_stored(coordinator: Coordinator, expected: ExpectedUpload, group: WriteGroup | None = None) -> None:
    """Notes that all bytes of an upload are in the store. Raises Rejected if its lease ended meanwhile."""
    with coordinator.transaction(group=group) as tx:
        upload = UPLOADS.find(tx.db, expected.lease_id)
        awaited = upload is not None and upload.token == expected.token
        if awaited and find_lease(tx.db, expected.lease_id).state != LeaseState.VOID:
            tx.update(UPLOADS, expected.lease_id, stored_at_s=tx.now_s)
            return
        remove_bytes(tx, coordinator, expected)
    raise Rejected(
        "request.lease_closed",
        "the lease ended, or other bytes were declared, before the upload was complete",
    )


# -- object stores ----------------------------------------------------------------------------------------


def sweep(coordinator: Coordinator, store: S3Store) -> int:
    """Removes objects that were never submitted, or whose submission is void or was rejected and deleted, and returns how many.

    A signed URL is valid until its lease has ended, whatever became of the upload. So only objects that are older than any
    valid URL are looked at. A local store needs no sweep: lifecycle.void removes the bytes.
    """
    removed = 0
    oldest_s = coordinator.clock() - coordinator.config.lease_s - SWEEP_SLACK_S
    for tokens in store.tokens(older_than_s=oldest_s):
        submitted = (
            select(uploads.c.token)
            .join(submissions, submissions.c.lease_id == uploads.c.lease_id)
            .join(leases, leases.c.lease_id == uploads.c.lease_id)
            .where(uploads.c.token.in_(tokens), _KEPT)
        )
        with coordinator.database.read() as db:
            kept = set(db.execute(submitted).scalars())
        for token in tokens:
            if token not in kept:
                store.delete(token)
                removed += 1
    return removed


def keep_sweeping(coordinator: Coordinator, store: S3Store, stop: threading.Event) -> None:
    """Sweeps once an hour until `stop`. If store or database do not answer, it is an hour later: leftovers only cost space."""
    while True:
        try:
            if removed := sweep(coordinator, store):
                coordinator.log.info("swept the object store", removed=removed)
        except (StoreDown, DBAPIError, coordinator.database.driver_error) as error:
            coordinator.log.warning("objects that were never submitted could not be deleted", reason=error)
        if stop.wait(SWEEP_S):
            return
