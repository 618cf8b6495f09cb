"""Uploads: a node declares size and digest, gets a name of our choosing, and sends exactly those bytes to it."""

import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from shoal.swarm.coordinator.coordinator import Coordinator, Transaction
from shoal.swarm.coordinator.leases import AWAITED, Event, State, awaited_lease, find_lease, move
from shoal.swarm.coordinator.leftovers import remove_leftover
from shoal.swarm.coordinator.schema import uploads
from shoal.swarm.coordinator.statements import Statement, given, inserting
from shoal.wire.codes import Rejected
from shoal.wire.messages import AskUpload, Upload

PATH = "/v1/objects/"

_FIND = Statement(select(uploads).where(uploads.c.lease_id == given("id")))
_UNDER = Statement(select(uploads).where(uploads.c.token == given("name")))
_STORED = Statement(update(uploads).where(uploads.c.token == given("name")), "stored_at_s")
_INSERT = inserting(uploads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What must come in under a token. The token is the permission."""

    token: str
    lease_id: str
    sha256: str
    num_bytes: int
    expires_at_s: float


def ask_upload(tx: Transaction, coordinator: Coordinator, lease_id: str, ask: AskUpload) -> Upload:
    """Where to put the bytes. Asking again for the same bytes gives the same place."""
    lease = awaited_lease(tx, lease_id, ask.epoch)
    if lease.state not in AWAITED:
        raise Rejected("request.conflict", f"lease {lease_id} has its submission already")
    if ask.num_bytes > lease.max_bytes:
        raise Rejected("request.too_large", f"{ask.num_bytes} bytes, the lease allows {lease.max_bytes}")
    found = find_upload(tx.db, lease_id)
    if found is not None and (found.sha256, found.num_bytes) == (ask.sha256, ask.num_bytes):
        return Upload(path=PATH + found.token, expires_at_s=found.expires_at_s)
    row = {
        "token": secrets.token_hex(32),
        "sha256": ask.sha256,
        "num_bytes": ask.num_bytes,
        "asked_at_s": tx.now_s,
        "expires_at_s": lease.deadline_s,
        "stored_at_s": None,
    }
    if found is None:
        _INSERT.run(tx.db, lease_id=lease_id, **row)
    else:
        remove_leftover(tx, coordinator, token=found.token, sha256=found.sha256)
        tx.db.execute(update(uploads).where(uploads.c.lease_id == lease_id).values(**row))
    move(tx, lease, Event.UPLOAD)
    return Upload(path=f"{PATH}{row['token']}", expires_at_s=lease.deadline_s)


def find_upload(db: Connection, lease_id: str) -> Row[Any] | None:
    return _FIND.row(db, id=lease_id)


def expected_under(db: Connection, token: str, now_s: float) -> Expected:
    row = _UNDER.row(db, name=token)
    if row is None:
        raise Rejected("request.not_found", "no upload is expected under this name")
    if now_s > row.expires_at_s or find_lease(db, row.lease_id).state not in AWAITED:
        raise Rejected("request.lease_closed", "the lease of this upload has ended")
    return Expected(
        token=token,
        lease_id=row.lease_id,
        sha256=row.sha256,
        num_bytes=row.num_bytes,
        expires_at_s=row.expires_at_s,
    )


def mark_stored(coordinator: Coordinator, expected: Expected) -> None:
    """The bytes are in the store, complete: say so. Rejected if nobody waits for them any more."""
    with coordinator.transaction() as tx:
        lease = find_lease(tx.db, expected.lease_id)
        upload = find_upload(tx.db, expected.lease_id)
        if upload is not None and upload.token == expected.token and lease.state != State.VOID:
            _STORED.run(tx.db, name=expected.token, stored_at_s=tx.now_s)
            return
        remove_leftover(tx, coordinator, token=expected.token, sha256=expected.sha256)
    raise Rejected("request.lease_closed", "the lease ended, or other bytes were declared, while these came")
