"""Rows that the requests of a turn look at and change by their key: read together, kept as they are now, written together.

A lease from issue to verdict is some thirty statements if each request asks for its rows and writes them one by one, and a server
elsewhere takes a tenth of a millisecond for each. So what requests will ask for is read ahead for all of them (needs.py), and what
they write waits until somebody reads the table in another way, at the latest for the commit (`Turn.write_out`). Nobody is
answered before that.

A turn that is done carefully keeps nothing back: there each request has a savepoint of its own.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, Table, bindparam, select, update
from sqlalchemy.engine import result_tuple

from shoal.swarm.coordinator.store import schema
from shoal.swarm.coordinator.store.statements import TURN, Among, Statement, given, inserting

if TYPE_CHECKING:
    from shoal.swarm.coordinator.store.turn import Turn


class Page:
    """One table's rows in one turn."""

    def __init__(self) -> None:
        self.rows: dict[Any, Row[Any] | None] = {}
        """As they are now, the unwritten changes among them."""
        self.new: dict[Any, dict[str, Any]] = {}
        self.changed: dict[Any, dict[str, Any]] = {}


class Sheet:
    """One table, by its key."""

    def __init__(self, table: Table, rank: int) -> None:
        """`rank`: rows that others point to are written before those."""
        (key,) = table.primary_key.columns
        self.name, self.rank, self._key, self._table = table.name, rank, key.name, table
        self._columns = tuple(column.name for column in table.c)
        self._make = result_tuple(self._columns)
        self._find = Statement(select(table).where(key == given("wanted")))
        self._insert = inserting(table, keeps_rows=True)
        self._updates: dict[tuple[str, ...], Statement] = {}
        self._some = Among(select(table), key)

    def find(self, db: Connection, key: Any) -> Row[Any] | None:
        """The row as it is now."""
        turn = _keeping(db)
        if turn is None:
            return self._find.row(db, wanted=key)
        page = turn.page(self)
        if key not in page.rows:
            page.rows[key] = self._find.row(db, wanted=key)
        return page.rows[key]

    def fetch(self, db: Connection, keys: Collection[Any]) -> None:
        """So that `find` has them, or knows that they are not there."""
        turn = _keeping(db)
        if turn is None:
            return
        missing = set(keys) - turn.page(self).rows.keys()
        if not missing:
            return
        found = self._some.rows(db, missing)
        rows = turn.page(self).rows
        rows.update(dict.fromkeys(missing))
        rows.update((getattr(row, self._key), row) for row in found)

    def insert(self, db: Connection, **values: Any) -> None:
        """A row with these values; the other columns are NULL."""
        row = {name: values.get(name) for name in self._columns}
        turn = _keeping(db)
        if turn is None:
            self._insert.run(db, **row)
            return
        turn.note_write(told=True)
        key, page = row[self._key], turn.page(self)
        assert key not in page.new, f"{self.name} has {key} already"
        page.new[key] = row
        page.rows[key] = self._make(tuple(row.values()))
        turn.unwritten.add(self.name)

    def change(self, db: Connection, key: Any, **values: Any) -> None:
        """Set these columns of the row with this key."""
        turn = _keeping(db)
        if turn is None:
            self._updating(tuple(sorted(values))).run(db, wanted=key, **values)
            return
        turn.note_write(told=True)
        page = turn.page(self)
        if key in page.new:
            page.new[key].update(values)
        else:
            page.changed.setdefault(key, {}).update(values)
        row = page.rows.pop(key, None)
        if row is not None:
            page.rows[key] = self._make(
                tuple(
                    [values.get(name, value) for name, value in zip(self._columns, tuple(row), strict=True)]
                )
            )
        turn.unwritten.add(self.name)

    def write(self, db: Connection, page: Page) -> None:
        """What the page has that the database has not: new rows."""
        if page.new:
            rows, page.new = list(page.new.values()), {}
            self._insert.run_many(db, rows)

    def rewrite(self, db: Connection, page: Page) -> None:
        """The same of rows that were there: those with the same columns changed in one statement."""
        changed, page.changed = page.changed, {}
        alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for key, values in changed.items():
            alike.setdefault(tuple(sorted(values)), []).append({"wanted": key, **values})
        for columns, rows in alike.items():
            self._updating(columns).run_many(db, rows)

    def _updating(self, columns: tuple[str, ...]) -> Statement:
        if columns not in self._updates:
            by_key = self._table.c[self._key] == bindparam("wanted", required=False)
            self._updates[columns] = Statement(update(self._table).where(by_key), *columns, keeps_rows=True)
        return self._updates[columns]


def _keeping(db: Connection) -> "Turn | None":
    """The turn of this connection, if it keeps rows."""
    turn: Turn | None = db.info.get(TURN)
    return turn if turn is not None and turn.keeps else None


NODES = Sheet(schema.nodes, 0)
EPOCHS = Sheet(schema.epochs, 0)
LEASES = Sheet(schema.leases, 1)
UPLOADS = Sheet(schema.uploads, 2)
SUBMISSIONS = Sheet(schema.submissions, 2)
VERDICTS = Sheet(schema.verdicts, 2)
GROUPS = Sheet(schema.groups, 2)
