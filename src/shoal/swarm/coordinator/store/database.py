"""The database: one writer at a time, and readers beside it. The only module that knows which database it is.

SQLite is a file beside the keys. PostgreSQL is named by a URL, and any number of coordinators may share it: an advisory lock
allows one writer among all of them, as BEGIN IMMEDIATE does in SQLite.

Requests that arrive together are written in one `WriteGroup` and committed together (writer.py).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError

from shoal.swarm.coordinator.store.schema import open_layout
from shoal.swarm.coordinator.store.statements import execute_raw
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

BUSY_TIMEOUT_MS = 10_000
# A commit waits for the disk: after a power cut every answered request is still there. Tests turn this off.
SQLITE_SYNCHRONOUS = "FULL"
# Every thread of the server's pool may read at once; a request must never wait for a connection.
READERS = 48
# One writer among all coordinators of a run. The schema that the connection works in tells runs apart.
_PG_LOCK = "SELECT pg_advisory_xact_lock(hashtext('shoal'), hashtext(current_schema()))"
_LOG = Log("coordinator")


class RedoGroup(Exception):
    """A request of a group must be undone, but the group has no savepoints: roll all of it back and redo it with savepoints."""


class WriteGroup:
    """Requests that are written in one database transaction and committed together.

    Each request is undone alone if it is refused. Savepoints would cost two statements for each request, although few requests
    are refused after they have written. So a group runs without savepoints at first; if a request is refused after it has
    written, the group raises RedoGroup, and the writer runs it again with savepoints.
    """

    def __init__(self, db: Connection, *, savepoints: bool) -> None:
        self.db = db
        self.has_written = False
        """Whether the current request has written. Transaction.write sets it."""
        self.ledger_head: tuple[int, str] | None = None
        """Number and hash of the last ledger event, once a request of the group has read it."""
        self.after_commit: list[Callable[[], None]] = []
        """Called when the group is on disk; not called for a group that is redone."""
        self._savepoints = savepoints

    @contextmanager
    def request(self) -> Iterator[None]:
        """Undoes what the block wrote if the block raises."""
        self.has_written = False
        if self._savepoints:
            execute_raw(self.db, "SAVEPOINT shoal")
        try:
            yield
        except BaseException as error:
            if self._savepoints:
                execute_raw(self.db, "ROLLBACK TO SAVEPOINT shoal")
                execute_raw(self.db, "RELEASE SAVEPOINT shoal")
            elif self.has_written and isinstance(error, Rejected):
                raise RedoGroup from error
            raise
        if self._savepoints:
            execute_raw(self.db, "RELEASE SAVEPOINT shoal")


class Database:
    """The coordinator's tables. A request is answered only after its changes are on disk."""

    def __init__(self, where: Path | str) -> None:
        """`where` is SQLite's file, or postgresql://..."""
        self.url = database_url(where)
        self._engine = _make_engine(self.url)
        self.is_sqlite = self._engine.dialect.name == "sqlite"
        self.driver_error: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        """The driver's error class. Compiled statements raise it, because they bypass SQLAlchemy."""
        self._writing = self._engine.execution_options(shoal_writes=True)
        # The database would serialise writers by polling; a lock wakes the next writer at once.
        self._lock = threading.Lock()
        try:
            _reach(self._engine, where)
            with self.group() as group:
                open_layout(group.db)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def group(self, *, savepoints: bool = False) -> Iterator[WriteGroup]:
        """Commits what the block wrote when the block ends; rolls all of it back if the block raises."""
        with self._lock, self._writing.connect() as db, db.begin() as transaction:
            group = WriteGroup(db, savepoints=savepoints)
            yield group
            self._check_sound(db)
            self._commit(transaction)
        for act in group.after_commit:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - the group is committed, and its requests must be answered so
                _LOG.error(f"a callback after a commit failed: {type(error).__name__}: {error}")

    def _check_sound(self, db: Connection) -> None:
        """Raises if a statement failed: PostgreSQL answers the commit of such a transaction by a rollback without an error."""
        if not self.is_sqlite and db.connection.driver_connection.info.transaction_status.name == "INERROR":  # type: ignore[union-attr]
            raise RuntimeError("a statement of this transaction failed, so nothing of it can be committed")

    def _commit(self, transaction: RootTransaction) -> None:
        """Commits. Every commit goes through here; tests patch it to simulate crashes."""
        transaction.commit()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Opens a consistent view that does not wait for the writer."""
        with self._engine.connect() as db, db.begin():
            yield db

    def checkpoint(self) -> None:
        """Copies SQLite's write-ahead log into the database file while others read and write.

        Commits never do it (`wal_autocheckpoint=0`), because they would wait for two more flushes of the disk. Once everything
        is copied, SQLite writes the log from its beginning again, so the log does not grow without bound.
        """
        if self.is_sqlite:
            self._checkpoint("PASSIVE")

    def truncate_log(self) -> None:
        """Copies SQLite's write-ahead log and empties its file. Writers wait meanwhile."""
        if self.is_sqlite:
            with self._lock:
                self._checkpoint("TRUNCATE")

    def _checkpoint(self, mode: str) -> None:
        raw = self._engine.raw_connection()
        try:
            raw.cursor().execute(f"PRAGMA wal_checkpoint({mode})")
        finally:
            raw.close()

    def close(self) -> None:
        self._engine.dispose()


def database_url(where: Path | str) -> URL:
    if isinstance(where, Path):
        # Not parsed from text: "?" and "%" in the name of a folder would be read as parts of the URL, and name another file.
        return URL.create("sqlite", database=str(where))
    try:
        url = make_url(where)
    except ArgumentError:
        raise ValueError(f"{where!r} is not a database URL such as postgresql://USER@HOST/NAME") from None
    if url.get_backend_name() != "postgresql":
        raise ValueError(
            f"{url.get_backend_name()!r} is not a supported database; leave --database out for SQLite, or give postgresql://..."
        )
    return url.set(drivername="postgresql+psycopg")


def _reach(engine: Engine, where: Path | str) -> None:
    try:
        with engine.connect():
            pass
    except DBAPIError as error:
        raise not_a_database(where, error) from None


def not_a_database(where: Path | str, error: DBAPIError) -> ValueError:
    """Returns an error that says which database cannot be opened, why, and what to do."""
    words = str(error.orig).strip().replace("\n", " ")
    if isinstance(where, Path):
        return ValueError(
            f"{where}: {words}; put a backup in its place, or begin a new run in another folder"
        )
    place = make_url(where).render_as_string(hide_password=True)
    return ValueError(f"{place}: {words}; check that the server runs and lets you in")


@contextmanager
def read_only(where: Path | str) -> Iterator[Connection]:
    """Opens the database of a coordinator that may be running or may have been killed, for reading only."""
    if isinstance(where, Path):
        if not where.exists():
            raise FileNotFoundError(f"no database at {where}; a coordinator's folder has shoal.db")
        # SQLite reads this name as a URI of its own.
        query = {"mode": "ro", "uri": "true"}
        engine = create_engine(URL.create("sqlite", database=f"file:{quote(str(where))}", query=query))
    else:
        engine = _make_engine(database_url(where))
    try:
        with engine.connect() as db, db.begin():
            yield db
    except DatabaseError as error:
        raise not_a_database(where, error) from None
    finally:
        engine.dispose()


def _make_engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(
            url, pool_size=READERS, connect_args={"check_same_thread": False, "cached_statements": 256}
        )
        _configure_sqlite(engine)
        return engine
    # Without the ping the first request after a restart of the server would fail.
    engine = create_engine(url, pool_size=READERS, pool_pre_ping=True)
    _configure_postgresql(engine)
    return engine


def _configure_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, record: Any) -> None:
        # With None the driver never begins a transaction by itself.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            f"synchronous={SQLITE_SYNCHRONOUS}",
            "foreign_keys=ON",
            "wal_autocheckpoint=0",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # A writer takes the write lock at once: upgrading a read lock later could fail half-way through.
        writes = db.get_execution_options().get("shoal_writes", False)
        db.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _configure_postgresql(engine: Engine) -> None:
    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # A writer waits for the lock before its first read; a reader keeps one view for the whole transaction.
        if db.get_execution_options().get("shoal_writes", False):
            db.exec_driver_sql(_PG_LOCK)
        else:
            db.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
