"""The database: one writer at a time, readers beside it. The only file that knows it is SQLite.

Moving to PostgreSQL means another `_configure` here: an advisory lock where SQLite has BEGIN IMMEDIATE.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from shoal.swarm.coordinator.schema import metadata

BUSY_TIMEOUT_MS = 10_000
# Every thread of the server's pool may read at once; a request must never wait for a connection.
READERS = 48


class Database:
    """A file with the coordinator's tables. An answered request is on disk: WAL with synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._engine = create_engine(
            f"sqlite:///{path}", pool_size=READERS, connect_args={"check_same_thread": False}
        )
        _configure(self._engine)
        self._writing = self._engine.execution_options(shoal_writes=True)
        # SQLite would serialise writers by itself, by polling; a lock hands over at once.
        self._lock = threading.Lock()
        with self.transaction() as db:
            metadata.create_all(db)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """All or nothing: committed when the block ends, rolled back when it raises."""
        with self._lock, self._writing.begin() as db:
            yield db

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view, beside any writer."""
        with self._engine.connect() as db:
            yield db

    def checkpoint(self) -> None:
        """Move the write-ahead log into the file, so that it does not grow without end."""
        with self._lock:
            raw = self._engine.raw_connection()
            try:
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                raw.close()

    def close(self) -> None:
        self._engine.dispose()


@contextmanager
def read_only(path: Path) -> Iterator[Connection]:
    """A look into the database of a coordinator that may be running, or may have been killed."""
    if not path.exists():
        raise FileNotFoundError(f"no database at {path}; a coordinator's folder has shoal.db")
    engine = create_engine(f"sqlite:///file:{path}?mode=ro&uri=true")
    try:
        with engine.connect() as db:
            yield db
    finally:
        engine.dispose()


def _configure(engine: Engine) -> None:
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
