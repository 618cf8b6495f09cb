"""The database: one writer at a time, readers beside it. The only file that knows which database it is.

SQLite is a file beside the keys. PostgreSQL is named by a URL, and any number of coordinators may share it: an advisory lock
makes one writer of all of them, as BEGIN IMMEDIATE does in SQLite.

Requests that wait together are committed together (`group`, used by desk.py). turn.py has what they share.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, RootTransaction, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError

from shoal.swarm.coordinator.migrations import migrate
from shoal.swarm.coordinator.store.statements import TURN
from shoal.swarm.coordinator.store.turn import Turn

BUSY_TIMEOUT_MS = 10_000
# Every thread of the server's pool may read at once; a request must never wait for a connection.
READERS = 48
# One writer among all coordinators of a run: the schema the connection works in tells runs apart.
_PG_LOCK = "SELECT pg_advisory_xact_lock(hashtext('shoal'), hashtext(current_schema()))"


class Database:
    """The coordinator's tables. An answered request is on disk."""

    def __init__(self, where: Path | str) -> None:
        """`where` is SQLite's file, or postgresql://..."""
        self.url = database_url(where)
        self._engine = _make_engine(self.url)
        self.is_sqlite = self._engine.dialect.name == "sqlite"
        self.driver_error: type[Exception] = self._engine.dialect.loaded_dbapi.Error
        """What statements that go straight to the driver raise."""
        self._writing = self._engine.execution_options(shoal_writes=True)
        # The database would serialise writers by itself, by polling; a lock hands over at once.
        self._lock = threading.Lock()
        self._turn: tuple[int, Turn] | None = None
        try:
            _reach(self._engine, where)
            with self.transaction() as db:
                migrate(db)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def transaction(self, *, undo: bool = True) -> Iterator[Connection]:
        """All or nothing: as if it had never begun when the block raises. On disk when it has ended, or inside a `group`
        of this thread when that has. There `undo=False` leaves it to the block to undo what must be (`Turn.one`)."""
        turn = self.turn()
        if turn is None:
            with self.group(careful=True) as alone:
                yield alone.db
        elif undo:
            with turn.one():
                yield turn.db
        else:
            yield turn.db

    @contextmanager
    def group(self, *, careful: bool = False) -> Iterator[Turn]:
        """The transactions of this thread until the block ends are committed together, so that a disk that takes a millisecond
        for a commit takes it once. Each still stands or falls alone, but none counts before the block has ended."""
        with self._lock, self._writing.connect() as db, db.begin() as transaction:
            turn = Turn(db, careful=careful)
            self._turn = (threading.get_ident(), turn)
            try:
                yield turn
                turn.end()
                self._check_sound(db)
            finally:
                self._turn = None
                turn.close()
            self._commit(transaction)
        for act in turn.afterwards:
            act()

    def when_committed(self, act: Callable[[], None]) -> None:
        """At once after a transaction that stood alone; inside a group, when that is on disk, or never if it fails."""
        turn = self.turn()
        if turn is None:
            act()
        else:
            turn.afterwards.append(act)

    def turn(self) -> Turn | None:
        """This thread's; None outside of a transaction."""
        mine = self._turn
        return mine[1] if mine is not None and mine[0] == threading.get_ident() else None

    def _check_sound(self, db: Connection) -> None:
        """PostgreSQL answers the commit of a transaction in which something failed by undoing it, without an error."""
        if not self.is_sqlite and db.connection.driver_connection.info.transaction_status.name == "INERROR":  # type: ignore[union-attr]
            raise RuntimeError("something failed in this transaction, so nothing of it can be committed")

    def _commit(self, transaction: RootTransaction) -> None:
        """The one place where anything becomes true."""
        transaction.commit()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view, beside any writer."""
        with self._engine.connect() as db, db.begin():
            yield db

    def checkpoint(self) -> None:
        """Move SQLite's write-ahead log into the file, so that it does not grow without end."""
        if not self.is_sqlite:
            return
        with self._lock:
            raw = self._engine.raw_connection()
            try:
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                raw.close()

    def close(self) -> None:
        self._engine.dispose()


def database_url(where: Path | str) -> str:
    if isinstance(where, Path):
        return f"sqlite:///{where}"
    try:
        url = make_url(where)
    except ArgumentError:
        raise ValueError(f"{where!r} is not a database URL such as postgresql://USER@HOST/NAME") from None
    if url.get_backend_name() != "postgresql":
        raise ValueError(
            f"{url.get_backend_name()!r} is no database we know; leave --database out for SQLite, or give postgresql://..."
        )
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _reach(engine: Engine, where: Path | str) -> None:
    try:
        with engine.connect():
            pass
    except DBAPIError as error:
        raise not_a_database(where, error) from None


def not_a_database(where: Path | str, error: DBAPIError) -> ValueError:
    """What a person can do about a database that cannot be opened."""
    words = str(error.orig).strip().replace("\n", " ")
    if isinstance(where, Path):
        return ValueError(
            f"{where}: {words}; put a backup in its place, or begin a new run in another folder"
        )
    place = make_url(where).render_as_string(hide_password=True)
    return ValueError(f"{place}: {words}; check that the server runs and lets you in")


@contextmanager
def read_only(where: Path | str) -> Iterator[Connection]:
    """A look into the database of a coordinator that may be running, or may have been killed."""
    if isinstance(where, Path):
        if not where.exists():
            raise FileNotFoundError(f"no database at {where}; a coordinator's folder has shoal.db")
        engine = create_engine(f"sqlite:///file:{where}?mode=ro&uri=true")
    else:
        engine = _make_engine(database_url(where))
    try:
        with engine.connect() as db, db.begin():
            yield db
    except DatabaseError as error:
        raise not_a_database(where, error) from None
    finally:
        engine.dispose()


def _make_engine(url: str) -> Engine:
    engine = _engine_for(url)

    @event.listens_for(engine, "before_cursor_execute")
    def note(db: Connection, cursor: Any, statement: str, *rest: Any) -> None:
        if (turn := db.info.get(TURN)) is not None:
            turn.before_any(writes=not statement.lstrip().startswith("SELECT"))

    return engine


def _engine_for(url: str) -> Engine:
    if url.startswith("sqlite"):
        engine = create_engine(
            url, pool_size=READERS, connect_args={"check_same_thread": False, "cached_statements": 256}
        )
        _configure_sqlite(engine)
        return engine
    # Asked before use: a server that was restarted must not cost the first request after it.
    # What is worth preparing prepared.py prepares; of psycopg's own a rollback would throw away everybody's.
    engine = create_engine(
        url, pool_size=READERS, pool_pre_ping=True, connect_args={"prepare_threshold": None}
    )
    _configure_postgresql(engine)
    return engine


def _configure_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, record: Any) -> None:
        # None: the driver begins nothing on its own, so that a transaction starts where we say.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # A writer takes the write lock at once: upgrading later could fail half-way through.
        writes = db.get_execution_options().get("shoal_writes", False)
        db.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _configure_postgresql(engine: Engine) -> None:
    @event.listens_for(engine, "begin")
    def begin(db: Connection) -> None:
        # The driver has begun. A writer waits for its turn before its first look; a reader keeps its first view.
        if db.get_execution_options().get("shoal_writes", False):
            db.exec_driver_sql(_PG_LOCK)
        else:
            db.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
