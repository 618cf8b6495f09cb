"""Statements that run on every request: written with SQLAlchemy, compiled once, executed on the driver's own cursor.

Building a statement, looking up its compiled form and wrapping its rows cost SQLAlchemy 50 to 200 µs each time, while SQLite
answers most of ours in 5 µs. Statements that run once a minute use SQLAlchemy directly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Delete,
    Insert,
    Row,
    Select,
    Table,
    Update,
    bindparam,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import result_tuple

Clause = Select[*tuple[Any, ...]] | Insert | Update | Delete


def given(name: str) -> BindParameter[Any]:
    """Returns a parameter whose value comes with each call."""
    return bindparam(name, required=False)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement compiled for one kind of database."""

    sql: str
    constants: dict[str, Any]
    """Values that are part of the statement itself."""
    positions: tuple[str, ...] | None
    """Parameter names in order, for drivers that take positional parameters; None for drivers that take names."""

    def arguments(self, values: dict[str, Any]) -> Any:
        if self.constants:
            values = self.constants | values
        return values if self.positions is None else [values[name] for name in self.positions]


class Statement:
    """A statement that is compiled once for each kind of database.

    `columns` are the columns that an INSERT or UPDATE sets, each from a value of the same name. All other values are `given`.
    """

    def __init__(self, clause: Clause, *columns: str) -> None:
        self._clause = clause
        self._columns = list(columns) or None
        self._compiled: dict[str, _Compiled] = {}
        self._make_row: Callable[[Sequence[Any]], Row[Any]] | None = None

    def run(self, db: Connection, **values: Any) -> int:
        """Executes the statement and returns how many rows it changed."""
        return int(self._execute(db, values).rowcount)

    def run_many(self, db: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """Executes the statement once for each of `rows`."""
        if len(rows) == 1:  # psycopg's executemany costs several times as much
            self.run(db, **rows[0])
            return
        compiled = self._for(db)
        cursor = driver_connection(db).cursor()
        cursor.executemany(compiled.sql, [compiled.arguments(row) for row in rows])
        cursor.close()

    def row(self, db: Connection, **values: Any) -> Row[Any] | None:
        """Returns the first row, or None."""
        cursor = self._execute(db, values)
        found = cursor.fetchone()
        if found is None:
            return None
        row = self._row_maker(cursor)(found)
        # An unfinished cursor keeps SQLite's statement open, and with it the lock that the statement holds.
        cursor.close()
        return row

    def rows(self, db: Connection, **values: Any) -> list[Row[Any]]:
        cursor = self._execute(db, values)
        found = cursor.fetchall()
        make = self._row_maker(cursor)
        return [make(one) for one in found]

    def value(self, db: Connection, **values: Any) -> Any:
        """Returns the first column of the first row, or None."""
        cursor = self._execute(db, values)
        found = cursor.fetchone()
        cursor.close()
        return None if found is None else found[0]

    def _execute(self, db: Connection, values: dict[str, Any]) -> Any:
        compiled = self._compiled.get(db.dialect.name) or self._for(db)
        return driver_connection(db).execute(compiled.sql, compiled.arguments(values))

    def _for(self, db: Connection) -> _Compiled:
        name = db.dialect.name
        if name not in self._compiled:
            compiled: Any = self._clause.compile(
                dialect=db.dialect, column_keys=self._columns, compile_kwargs={"render_postcompile": True}
            )
            columns = self._columns or ()
            constants = {
                key: value
                for key, value in compiled.params.items()
                if value is not None and key not in columns
            }
            positions = tuple(compiled.positiontup) if compiled.positional else None
            self._compiled[name] = _Compiled(str(compiled), constants, positions)
        return self._compiled[name]

    def _row_maker(self, cursor: Any) -> Callable[[Sequence[Any]], Row[Any]]:
        if self._make_row is None:
            self._make_row = result_tuple([column[0] for column in cursor.description])
        return self._make_row


class TableStatements:
    """Compiled statements that find, insert and change one row of a table by its primary key.

    Use `find` directly. Write with `Transaction.insert` and `Transaction.update`, which note that the request has written.
    """

    def __init__(self, table: Table) -> None:
        (self._key,) = table.primary_key.columns
        self._table = table
        self._columns = tuple(column.name for column in table.c)
        self._find = Statement(select(table).where(self._key == given("wanted")))
        self._insert = inserting(table)
        self._updates: dict[tuple[str, ...], Statement] = {}

    def find(self, db: Connection, key: Any) -> Row[Any] | None:
        return self._find.row(db, wanted=key)

    def insert(self, db: Connection, values: dict[str, Any]) -> None:
        """Inserts a row with these values; all other columns are NULL."""
        self._insert.run(db, **{name: values.get(name) for name in self._columns})

    def update(self, db: Connection, key: Any, values: dict[str, Any]) -> None:
        """Sets these columns of the row with this key."""
        columns = tuple(values)
        statement = self._updates.get(columns)
        if statement is None:
            clause = update(self._table).where(self._key == given("wanted"))
            statement = self._updates[columns] = Statement(clause, *columns)
        statement.run(db, wanted=key, **values)


class InsertIfNew:
    """An INSERT that changes nothing if a row with the same primary key exists."""

    def __init__(self, table: Table) -> None:
        columns = [column.key for column in table.c]
        self._by_dialect = {
            "sqlite": Statement(sqlite.insert(table).on_conflict_do_nothing(), *columns),
            "postgresql": Statement(postgresql.insert(table).on_conflict_do_nothing(), *columns),
        }

    def run(self, db: Connection, **values: Any) -> bool:
        """Returns whether the row was new."""
        return self._by_dialect[db.dialect.name].run(db, **values) == 1


def inserting(table: Table) -> Statement:
    """Returns an INSERT that takes a value for every column of `table`."""
    return Statement(insert(table), *(column.key for column in table.c))


def execute_raw(db: Connection, sql: str) -> None:
    """Executes SQL without parameters on the driver: SQLAlchemy's own SAVEPOINT costs four times as much."""
    driver_connection(db).execute(sql)


def driver_connection(db: Connection) -> Any:
    return db.connection.driver_connection
