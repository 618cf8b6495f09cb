"""Uploads: a node declares size and digest, gets a name of our choosing, and sends exactly those bytes to it."""

import secrets
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, select

from shoal.net.s3_store import StoreDown
from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases.lifecycle import Event, awaited_lease, find_lease, move
from shoal.swarm.coordinator.leases.pending_upload import Expected, expected_of
from shoal.swarm.coordinator.leases.upload_cleanup import remove_leftover
from shoal.swarm.coordinator.rules.lease_states import AWAITED, State
from shoal.swarm.coordinator.store.schema import submissions, uploads
from shoal.swarm.coordinator.store.sheet import UPLOADS
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import Rejected
from shoal.wire.messages import AskUpload, Upload

PATH = "/v1/objects/"
STORE_RETRY_S = 2.0

_UNDER = Statement(select(uploads).where(uploads.c.token == given("name")))


def ask_upload(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: AskUpload) -> Upload:
    """Where to put the bytes. Asking again for the same bytes gives the same place."""
    lease = awaited_lease(tx, lease_id, ask.epoch)
    if lease.state not in AWAITED:
        raise Rejected("request.conflict", f"lease {lease_id} has its submission already")
    if ask.num_bytes > lease.max_bytes:
        raise Rejected("request.too_large", f"{ask.num_bytes} bytes, the lease allows {lease.max_bytes}")
    found = find_upload(tx.db, lease_id)
    if found is not None and (found.sha256, found.num_bytes) == (ask.sha256, ask.num_bytes):
        return _place(coordinator, expected_of(found))
    wanted = Expected(
        token=secrets.token_hex(32),
        sha256=ask.sha256,
        num_bytes=ask.num_bytes,
        asked_at_s=tx.now_s,
        expires_at_s=lease.deadline_s,
        lease_id=lease_id,
    )
    row = {**asdict(wanted), "stored_at_s": None}
    if found is None:
        UPLOADS.insert(tx.db, **row)
    else:
        remove_leftover(tx, coordinator, expected_of(found))
        UPLOADS.change(tx.db, lease_id, **{name: value for name, value in row.items() if name != "lease_id"})
    move(tx, lease, Event.UPLOAD)
    coordinator.database.when_committed(lambda: coordinator.expected.put(wanted.token, wanted))
    return _place(coordinator, wanted)


def _place(coordinator: Coordinator, wanted: Expected) -> Upload:
    url = coordinator.store.upload_url(wanted)
    return Upload(path="" if url else PATH + wanted.token, url=url, expires_at_s=wanted.expires_at_s)


def find_upload(db: Connection, lease_id: str) -> Row[Any] | None:
    return UPLOADS.find(db, lease_id)


def expected_under(db: Connection, token: str, now_s: float) -> Expected:
    row = _UNDER.row(db, name=token)
    if row is None:
        raise Rejected("request.not_found", "no upload is expected under this name")
    if now_s > row.expires_at_s or find_lease(db, row.lease_id).state not in AWAITED:
        raise Rejected("request.lease_closed", "the lease of this upload has ended")
    return expected_of(row)


def find_submitted(db: Connection, sha256: str) -> Expected | None:
    """The upload that somebody submitted as these bytes; the first, if several did."""
    row = db.execute(
        select(uploads)
        .join(submissions, submissions.c.lease_id == uploads.c.lease_id)
        .where(submissions.c.sha256 == sha256)
        .order_by(submissions.c.seq)
        .limit(1)
    ).one_or_none()
    return None if row is None else expected_of(row)


def arrived(coordinator: Coordinator, node: str, lease_id: str) -> Expected | None:
    """What this node has put into the object store for this lease, if we do not know of it yet.

    Asks the store, which takes time: never inside a transaction.
    """
    with coordinator.database.read() as db:
        upload = find_upload(db, lease_id)
        if upload is None or upload.stored_at_s is not None or find_lease(db, lease_id).node != node:
            return None
    wanted = expected_of(upload)
    try:
        return wanted if coordinator.store.holds(wanted) else None
    except StoreDown as error:
        coordinator.log.warning("the object store does not answer", reason=error)
        raise Rejected(
            "request.too_early", "the object store does not answer", retry_after_s=STORE_RETRY_S
        ) from None


def mark_stored(coordinator: Coordinator, expected: Expected) -> None:
    """The bytes are in the store, complete: say so. Rejected if nobody waits for them any more."""
    with coordinator.transaction() as tx:
        upload = find_upload(tx.db, expected.lease_id)
        awaited = upload is not None and upload.token == expected.token
        if awaited and find_lease(tx.db, expected.lease_id).state != State.VOID:
            UPLOADS.change(tx.db, expected.lease_id, stored_at_s=tx.now_s)
            return
        remove_leftover(tx, coordinator, expected)
    raise Rejected("request.lease_closed", "the lease ended, or other bytes were declared, while these came")
