"""Prepared statements of PostgreSQL, straight through libpq: a psycopg cursor costs four times as much.

Values go and come as text, which for the few types our tables have is exact and quick: numbers, words, NULL.
"""

import re
from collections.abc import Callable
from typing import Any

from psycopg import errors
from psycopg.pq import ExecStatus

Reader = Callable[[bytes], Any]
_KEPT = "shoal.prepared"
_VALUE = re.compile(r"%\((\w+)\)s")
_GOOD = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


class Answer:
    """What a cursor would be, as far as statements.py looks at one."""

    def __init__(self, result: Any, readers: list[Reader]) -> None:
        self._result, self._readers = result, readers

    @property
    def rowcount(self) -> int:
        return self._result.command_tuples or 0

    @property
    def description(self) -> list[tuple[str]]:
        return [(self._result.fname(column).decode(),) for column in range(self._result.nfields)]

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._row(0) if self._result.ntuples else None

    def fetchall(self) -> list[tuple[Any, ...]]:
        return [self._row(row) for row in range(self._result.ntuples)]

    def close(self) -> None:
        """Nothing is held on the server's side."""

    def _row(self, row: int) -> tuple[Any, ...]:
        get = self._result.get_value
        values = [get(row, column) for column in range(len(self._readers))]
        return tuple(
            [
                None if value is None else read(value)
                for value, read in zip(values, self._readers, strict=True)
            ]
        )


class Prepared:
    """One statement, prepared on each connection that first meets it. `sql` has %(name)s for its values."""

    def __init__(self, sql: str) -> None:
        names: dict[str, int] = {}
        numbered = _VALUE.sub(lambda found: f"${names.setdefault(found[1], len(names) + 1)}", sql)
        self._sql, self._names = numbered.replace("%%", "%").encode(), tuple(names)
        self._name = f"shoal_{id(self):x}".encode()
        self._readers: list[Reader] | None = None

    def execute(self, connection: Any, info: dict[Any, Any], values: dict[str, Any]) -> Answer:
        """`connection` is psycopg's, inside a transaction; `info` lasts as long as it does."""
        libpq = connection.pgconn
        kept: dict[bytes, Prepared] = info.setdefault(_KEPT, {})
        if self._name not in kept:
            _check(libpq.prepare(self._name, self._sql), connection)
            kept[self._name] = self  # which keeps its name from being another's
        result = libpq.exec_prepared(self._name, [_to_text(values[name]) for name in self._names])
        _check(result, connection)
        if self._readers is None:  # its columns are the same each time
            self._readers = [_READERS.get(result.ftype(column), _words) for column in range(result.nfields)]
        return Answer(result, self._readers)


def _check(result: Any, connection: Any) -> Any:
    if result.status not in _GOOD:
        raise errors.error_from_result(result, encoding=connection.info.encoding)
    return result


def _to_text(value: str | int | float | None) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    assert isinstance(value, int | float) and not isinstance(value, bool), (
        f"{type(value)} is in none of our tables"
    )
    return repr(value).encode()


def _words(value: bytes) -> str:
    return value.decode()


def _number(value: bytes) -> int | float:
    """A sum of whole numbers is whole, but PostgreSQL has it as a decimal."""
    return float(value) if b"." in value else int(value)


_READERS: dict[int, Reader] = {
    20: int,
    21: int,
    23: int,
    700: float,
    701: float,
    1700: _number,
}
"""By the server's number of the type: whole numbers, fractions, decimals."""
