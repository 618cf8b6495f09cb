"""Statements that are asked for all the time: written with SQLAlchemy, compiled once, handed straight to the driver.

Building a statement, finding its compiled form and wrapping its rows cost SQLAlchemy some 50 to 200 µs a time; SQLite answers
most of ours in 5. What is asked once a minute may as well go the ordinary way.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Delete,
    Insert,
    Row,
    Select,
    Table,
    TextClause,
    Update,
    bindparam,
    insert,
    text,
)
from sqlalchemy.engine import result_tuple

from shoal.swarm.coordinator.store.schema import metadata

if TYPE_CHECKING:
    from shoal.swarm.coordinator.store.prepared import Prepared

TURN = "shoal.turn"
"""In a connection's `info`: the turn it serves (turn.py), which is told of every statement before it goes out."""

_WORD = re.compile(r"\w+")
_PG_TYPE = {str: "text", int: "bigint", float: "double precision"}

Clause = Select[*tuple[Any, ...]] | Insert | Update | Delete | TextClause


def given(name: str) -> BindParameter[Any]:
    """A value that comes with each call."""
    return bindparam(name, required=False)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """For one kind of database: the words, the values that stand in the statement itself, and how the driver takes them."""

    sql: str
    fixed: dict[str, Any]
    names: tuple[str, ...] | None
    """In their order where the driver takes positions; None where it takes names."""
    tables: frozenset[str]
    """Those that are spoken of."""
    prepared: "Prepared | None" = None
    """PostgreSQL's own."""

    def arguments(self, values: dict[str, Any]) -> Any:
        if self.fixed:
            values = self.fixed | values
        return values if self.names is None else [values[name] for name in self.names]


class Statement:
    """`columns` are what an INSERT or UPDATE sets, each from a value of the same name; other values are `given`.

    `keeps_rows`: of the rows that the turn keeps (sheet.py), it makes none untrue.
    """

    def __init__(self, clause: Clause, *columns: str, keeps_rows: bool = False) -> None:
        self._clause, self._keeps_rows = clause, keeps_rows
        self._columns = list(columns) or None
        self._compiled: dict[str, _Compiled] = {}
        self._row: Callable[[Sequence[Any]], Row[Any]] | None = None
        self._of_many: Statement | None = None
        self._writes = not (isinstance(clause, Select) or str(clause).startswith("SELECT"))

    def run(self, db: Connection, **values: Any) -> int:
        """How many rows it changed."""
        return int(self._execute(db, values).rowcount)

    def run_many(self, db: Connection, rows: Sequence[dict[str, Any]]) -> None:
        """An INSERT of several rows, or an UPDATE of several by their keys, each of them `wanted`."""
        compiled = self._for(db)
        if compiled.prepared is not None:
            self._many().run(db, rows=json.dumps(rows))
            return
        self._tell(db, compiled)
        cursor = _driver(db).cursor()
        cursor.executemany(compiled.sql, [compiled.arguments(row) for row in rows])
        cursor.close()

    def _many(self) -> "Statement":
        """PostgreSQL takes all rows in one piece."""
        if self._of_many is None:
            assert isinstance(self._clause, Insert | Update) and self._columns, "rows are written together"
            words = _all_inserted if isinstance(self._clause, Insert) else _all_updated
            self._of_many = Statement(
                text(words(self._clause.table, self._columns)), keeps_rows=self._keeps_rows
            )
        return self._of_many

    def row(self, db: Connection, **values: Any) -> Row[Any] | None:
        """The first row, or None."""
        cursor = self._execute(db, values)
        found = cursor.fetchone()
        if found is None:
            return None
        made = self._make_row(cursor)(found)
        # SQLite's statement stays open until its end is read, and with it the lock it holds.
        cursor.close()
        return made

    def rows(self, db: Connection, **values: Any) -> list[Row[Any]]:
        cursor = self._execute(db, values)
        found = cursor.fetchall()
        make = self._make_row(cursor)
        return [make(one) for one in found]

    def value(self, db: Connection, **values: Any) -> Any:
        """The first column of the first row, or None."""
        cursor = self._execute(db, values)
        found = cursor.fetchone()
        cursor.close()
        return None if found is None else found[0]

    def _execute(self, db: Connection, values: dict[str, Any]) -> Any:
        compiled = self._compiled.get(db.dialect.name) or self._for(db)
        self._tell(db, compiled)
        arguments = compiled.arguments(values)
        if compiled.prepared is not None:
            return compiled.prepared.execute(_driver(db), db.info, arguments)
        return _driver(db).execute(compiled.sql, arguments)

    def _tell(self, db: Connection, compiled: _Compiled) -> None:
        turn = db.info.get(TURN)
        if turn is not None:
            turn.before(compiled.tables, writes=self._writes, keeps_rows=self._keeps_rows)

    def _for(self, db: Connection) -> _Compiled:
        name = db.dialect.name
        if name not in self._compiled:
            made: Any = self._clause.compile(
                dialect=db.dialect, column_keys=self._columns, compile_kwargs={"render_postcompile": True}
            )
            set_here = self._columns or ()
            fixed = {
                key: value for key, value in made.params.items() if value is not None and key not in set_here
            }
            order = tuple(made.positiontup) if made.positional else None
            prepared = _prepare(str(made)) if name == "postgresql" else None
            tables = frozenset(_WORD.findall(str(made))) & metadata.tables.keys()
            self._compiled[name] = _Compiled(
                sql=str(made), fixed=fixed, names=order, tables=tables, prepared=prepared
            )
        return self._compiled[name]

    def _make_row(self, cursor: Any) -> Callable[[Sequence[Any]], Row[Any]]:
        if self._row is None:
            self._row = result_tuple([column[0] for column in cursor.description])
        return self._row


class Among:
    """A query of which only those rows are wanted where a column has one of the values given. JSON carries the list, since both
    databases read it."""

    def __init__(self, query: Select[*tuple[Any, ...]], column: ColumnElement[Any]) -> None:
        typed = _PG_TYPE[column.type.python_type]
        lists = {
            "sqlite": "SELECT value FROM json_each(:among)",
            "postgresql": f"SELECT CAST(json_array_elements_text(CAST(:among AS json)) AS {typed})",
        }
        self._by_kind = {
            kind: Statement(query.where(column.in_(text(words).bindparams(given("among")))))
            for kind, words in lists.items()
        }

    def rows(self, db: Connection, values: Collection[Any]) -> list[Row[Any]]:
        if not values:
            return []
        return self._by_kind[db.dialect.name].rows(db, among=json.dumps(list(values)))


def inserting(table: Table, *, but: Sequence[str] = (), keeps_rows: bool = False) -> Statement:
    """A row with every column, `but` those that begin as NULL."""
    columns = (column.key for column in table.c if column.key not in but)
    return Statement(insert(table), *columns, keeps_rows=keeps_rows)


def _all_inserted(table: Any, columns: list[str]) -> str:
    names = ", ".join(columns)
    return (
        f"INSERT INTO {table.name} ({names}) SELECT {names}"
        f" FROM json_populate_recordset(CAST(NULL AS {table.name}), CAST(:rows AS json))"
    )


def _all_updated(table: Any, columns: list[str]) -> str:
    (key,) = table.primary_key.columns
    assert key.name not in columns, "a key stays as it is"
    types = ", ".join(f"{name} {_PG_TYPE[table.c[name].type.python_type]}" for name in columns)
    changes = ", ".join(f"{name} = given.{name}" for name in columns)
    return (
        f"UPDATE {table.name} SET {changes} FROM json_to_recordset(CAST(:rows AS json))"
        f" AS given(wanted {_PG_TYPE[key.type.python_type]}, {types}) WHERE {table.name}.{key.name} = given.wanted"
    )


def tell_driver(db: Connection, words: str) -> None:
    """SQLAlchemy's own way of saying SAVEPOINT costs four times as much."""
    _driver(db).execute(words)


def _prepare(sql: str) -> "Prepared":
    # Not everybody has psycopg.
    from shoal.swarm.coordinator.store.prepared import Prepared

    return Prepared(sql)


def _driver(db: Connection) -> Any:
    return db.connection.driver_connection
