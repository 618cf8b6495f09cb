"""Statements that go straight to the driver: they return the same rows as SQLAlchemy, on both databases."""

from typing import Any

import pytest
from sqlalchemy import select, update

from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.schema import relays
from shoal.swarm.coordinator.store.statements import Statement, given, inserting

INSERT = inserting(relays)
SOME = Statement(
    select(relays)
    .where(relays.c.url.in_(("a", "b")), relays.c.last_seen_s >= given("since_s"))
    .order_by(relays.c.url)
)
COUNT = Statement(update(relays).where(relays.c.url == given("name")), "bytes_sent")
BYTES = Statement(select(relays.c.bytes_sent).where(relays.c.url == given("name")))


def row(url: str, **values: Any) -> dict[str, Any]:
    named = {"url": url, "versions": "[]", "bytes_sent": 2**40, "last_seen_s": 1.5}
    others = {"key": "k", "delegated_at_s": 0.0, "problem": "", "tried_at_s": None}
    return named | others | values


def test_rows_values_and_counts(database: Database) -> None:
    with database.group() as group:
        db = group.db
        INSERT.run_many(db, [row("b"), row("a", last_seen_s=0.25), row("c")])
        found = SOME.rows(db, since_s=0.0)
        assert found == list(db.execute(select(relays).where(relays.c.url != "c").order_by(relays.c.url)))
        assert [one.url for one in found] == ["a", "b"]
        first = SOME.row(db, since_s=1)
        assert first is not None and (first.url, first.bytes_sent, first.last_seen_s) == ("b", 2**40, 1.5)
        assert SOME.row(db, since_s=9.0) is None
        assert (COUNT.run(db, name="a", bytes_sent=7), COUNT.run(db, name="z", bytes_sent=7)) == (1, 0)
        assert (BYTES.value(db, name="a"), BYTES.value(db, name="z")) == (7, None)


def test_a_value_that_is_missing_is_an_error(database: Database) -> None:
    with pytest.raises(Exception, match="since_s"), database.group() as group:
        SOME.rows(group.db)


def test_a_read_sees_one_snapshot(database: Database) -> None:
    """Holds even if the first statement goes straight to the driver."""
    with database.group() as group:
        db = group.db
        INSERT.run(db, **row("a"))
    with database.read() as db:
        assert BYTES.value(db, name="a") == 2**40
        with database.group() as other:
            COUNT.run(other.db, name="a", bytes_sent=1)
        assert BYTES.value(db, name="a") == 2**40
