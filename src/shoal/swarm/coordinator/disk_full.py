"""A full disk: whoever asks is told so and may ask again, the log says it now and then, and work goes on when there is room again.

Nothing is lost by it: what cannot be written was not answered. So it is no reason to end, only to wait; and nobody needs a
traceback for each request to know what to do.
"""

import errno
import secrets
import sqlite3
import time
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.store.schema import nonces
from shoal.swarm.coordinator.store.statements import Statement, given, inserting

RETRY_S = 5.0
TELL_EVERY_S = 30.0
ENOUGH_BYTES = 1 << 20
"""With so much room again, work goes on."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PG_DISK_FULL = "53100"
_TRIAL = "room"
_INSERT = inserting(nonces)
_REMOVE = Statement(nonces.delete().where(nonces.c.key == given("whose")))


def missing(coordinator: Coordinator, error: BaseException) -> str | None:
    """Where there is no room and what to do, if that is what the error says. The log is told, but not each time."""
    words = _in_words(error, coordinator.data.parent)
    if words is None:
        return None
    vitals, now_s = coordinator.vitals, time.monotonic()
    vitals.no_space = words
    if now_s >= vitals.tell_again_s:
        vitals.tell_again_s = now_s + TELL_EVERY_S
        coordinator.log.error(f"nothing can be written: {words}")
    return words


def look_again(coordinator: Coordinator) -> None:
    """Once a second while there is no room: by writing, where requests write. Raises if there is still none."""
    if not coordinator.vitals.no_space:
        return
    with coordinator.database.transaction() as db:
        for _ in range(64):
            _INSERT.run(db, key=_TRIAL, nonce=secrets.token_hex(512), seen_at_s=0.0)
        _REMOVE.run(db, whose=_TRIAL)
    if isinstance(coordinator.store, LocalStore):
        # Where what a crash leaves behind is removed at the next start.
        _try_folder(coordinator.data.parent / "objects" / "incoming")
    coordinator.vitals.no_space = ""
    coordinator.vitals.tell_again_s = 0.0
    coordinator.log.info("there is room again", folder=coordinator.data.parent)


def _try_folder(folder: Path) -> None:
    trial = folder / f"{_TRIAL}.{secrets.token_hex(8)}"
    try:
        with trial.open("wb") as file:
            file.write(bytes(ENOUGH_BYTES))
    finally:
        trial.unlink(missing_ok=True)


def _in_words(error: BaseException, folder: Path) -> str | None:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    remedy = "make room there, or move it to a larger disk; the run goes on by itself"
    if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
        return f"no room in {folder} ({cause.strerror}); {remedy}"
    if isinstance(cause, sqlite3.OperationalError):
        kind = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if kind == sqlite3.SQLITE_FULL:
            return f"no room in {folder} for the database ({cause}); {remedy}"
        # SQLite reports as an error of the disk what it could not make room for beside its file, too.
        if kind == sqlite3.SQLITE_IOERR:
            return f"no room in {folder} for the database, or its disk fails ({cause}); {remedy}"
    if getattr(cause, "sqlstate", None) == _PG_DISK_FULL:
        return f"no room for PostgreSQL's files ({str(cause).strip()}); {remedy}"
    return None
