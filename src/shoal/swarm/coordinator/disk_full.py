"""A full disk: requests are refused with a reason, the log says so now and then, and work continues when there is space again.

Nothing is lost, because a change is acknowledged only after it is written. So the coordinator waits instead of ending.
"""

import secrets
import sqlite3
import time
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from shoal.files import DISK_FULL_REMEDY, is_disk_full
from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.store.schema import nonces
from shoal.swarm.coordinator.store.statements import Statement, given, inserting

RETRY_S = 5.0
LOG_EVERY_S = 30.0
PROBE_BYTES = 1 << 20
"""Work continues when this much can be written again."""

_PG_DISK_FULL = "53100"
_PROBE = "disk-probe"
_INSERT = inserting(nonces)
_REMOVE = Statement(nonces.delete().where(nonces.c.key == given("whose")))


def report(coordinator: Coordinator, error: BaseException) -> str | None:
    """Notes a full disk and returns where it is full and what to do; returns None for any other error.

    The log gets a line every LOG_EVERY_S, not one for each request.
    """
    words = _explain(error, coordinator.data.parent)
    if words is None:
        return None
    health, now_s = coordinator.health, time.monotonic()
    health.no_space = words
    if now_s >= health.tell_again_s:
        health.tell_again_s = now_s + LOG_EVERY_S
        coordinator.log.error(f"nothing can be written: {words}")
    return words


def probe(coordinator: Coordinator) -> None:
    """Tries to write where requests write, if the disk was full. Raises if it still is. Housekeeping calls it once a second."""
    if not coordinator.health.no_space:
        return
    with coordinator.database.group() as group:
        for _ in range(64):
            _INSERT.run(group.db, key=_PROBE, nonce=secrets.token_hex(512), seen_at_s=0.0)
        _REMOVE.run(group.db, whose=_PROBE)
    if isinstance(coordinator.store, LocalStore):
        # In this folder the next start removes what a crash leaves behind.
        path = coordinator.data.parent / "objects" / "incoming" / f"{_PROBE}.{secrets.token_hex(8)}"
        try:
            path.write_bytes(bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)
    coordinator.health.no_space = ""
    coordinator.health.tell_again_s = 0.0
    coordinator.log.info("there is space again", folder=coordinator.data.parent)


def _explain(error: BaseException, folder: Path) -> str | None:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    if is_disk_full(cause):
        assert isinstance(cause, OSError)
        return f"no space left in {folder} ({cause.strerror}); {DISK_FULL_REMEDY}"
    if isinstance(cause, sqlite3.OperationalError):
        kind = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if kind == sqlite3.SQLITE_FULL:
            return f"no space left in {folder} for the database ({cause}); {DISK_FULL_REMEDY}"
        # SQLite also reports an I/O error if there is no space for the files beside the database.
        if kind == sqlite3.SQLITE_IOERR:
            return (
                f"no space left in {folder} for the database, or its disk fails ({cause}); {DISK_FULL_REMEDY}"
            )
    if getattr(cause, "sqlstate", None) == _PG_DISK_FULL:
        return f"no space left for PostgreSQL's files ({str(cause).strip()}); {DISK_FULL_REMEDY}"
    return None
