"""A writer's turn: each request stands or falls alone, what is known is true, and what failed is not committed in silence."""

import asyncio
from functools import partial
from typing import Any

import pytest
from small_swarm import SmallSwarm
from sqlalchemy import Connection, delete, func, insert, select, text

from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.schema import nonces
from shoal.swarm.coordinator.store.statements import inserting
from shoal.swarm.coordinator.store.writer import Desk
from shoal.wire.codes import Rejected

INSERT = inserting(nonces)


def count(db: Connection) -> int:
    return int(db.execute(select(func.count()).select_from(nonces)).scalar_one())


def written(database: Database) -> set[str]:
    with database.read() as db:
        return set(db.execute(select(nonces.c.nonce)).scalars())


class Errands:
    """Requests that write, and are refused or fail before or after."""

    def __init__(self, database: Database) -> None:
        self.database, self.done = database, 0

    def write(self, nonce: str, then: Exception | None = None) -> str:
        self.done += 1
        with self.database.transaction() as db:
            INSERT.run(db, key="k", nonce=nonce, seen_at_s=1.0)
            if then is not None:
                raise then
        return nonce

    def refuse(self) -> None:
        self.done += 1
        with self.database.transaction() as db:
            count(db)
            raise Rejected("request.conflict", "before anything was written")

    def break_off(self) -> None:
        self.done += 1
        with self.database.transaction() as db:
            db.execute(text("SELECT * FROM nowhere"))

    def together(self, *acts: Any) -> list[Any]:
        desk = Desk(self.database)

        async def everything() -> list[Any]:
            return await asyncio.gather(*(desk.do(act) for act in acts), return_exceptions=True)

        try:
            return asyncio.run(everything())
        finally:
            desk.close()


def test_a_refusal_before_anything_was_written_costs_nothing(database: Database) -> None:
    errands = Errands(database)
    outcomes = errands.together(partial(errands.write, "a"), errands.refuse, partial(errands.write, "b"))
    assert [outcomes[0], outcomes[2]] == ["a", "b"] and isinstance(outcomes[1], Rejected)
    assert (written(database), errands.done) == ({"a", "b"}, 3)


def test_one_that_is_refused_after_it_wrote_is_undone_alone(database: Database) -> None:
    errands = Errands(database)
    late = Rejected("request.conflict", "after all")
    outcomes = errands.together(
        partial(errands.write, "a"), partial(errands.write, "b", late), partial(errands.write, "c")
    )
    assert outcomes == ["a", late, "c"]
    assert written(database) == {"a", "c"}
    assert errands.done == 2 + 3  # once as ever, once carefully


def test_one_that_fails_is_undone_alone(database: Database) -> None:
    errands = Errands(database)
    outcomes = errands.together(
        partial(errands.write, "a"), errands.break_off, partial(errands.write, "b", OSError("no disk"))
    )
    assert outcomes[0] == "a"
    assert "nowhere" in str(outcomes[1]) and isinstance(outcomes[2], OSError)
    assert written(database) == {"a"}


def test_what_is_known_is_read_once_and_forgotten_when_it_changes(database: Database) -> None:
    with database.group() as turn:
        assert turn.recall(count) == 0
        INSERT.run(turn.db, key="k", nonce="a", seen_at_s=1.0)
        assert turn.recall(count) == 0  # whoever writes so must say what it changed
        turn.forget(count)
        assert turn.recall(count) == 1
        turn.db.execute(insert(nonces).values(key="k", nonce="b", seen_at_s=1.0))
        assert turn.recall(count) == 2  # and whatever is written otherwise may have changed anything
        turn.db.execute(delete(nonces))
        assert turn.recall(count) == 0
    with database.group() as turn:
        assert not turn.knows(count)


def test_what_was_undone_is_not_known(database: Database) -> None:
    with database.group(careful=True) as turn:
        with pytest.raises(Rejected), turn.one():
            INSERT.run(turn.db, key="k", nonce="a", seen_at_s=1.0)
            assert turn.recall(count) == 1
            raise Rejected("request.conflict", "after all")
        assert turn.recall(count) == 0


def test_a_failure_that_nobody_minded_is_not_committed_in_silence(postgres: Any) -> None:
    """PostgreSQL undoes the whole transaction then, and calls that a success."""
    database = Database(postgres.fresh())
    with pytest.raises(RuntimeError, match="nothing of it can be committed"), database.transaction() as db:
        INSERT.run(db, key="k", nonce="a", seen_at_s=1.0)
        with pytest.raises(Exception, match="duplicate key"):
            INSERT.run(db, key="k", nonce="a", seen_at_s=1.0)
    assert written(database) == set()
    database.close()


def test_prepared_statements_outlast_a_rollback(postgres: Any) -> None:
    database = Database(postgres.fresh())
    for number in range(12):
        with pytest.raises(OSError), database.transaction() as db:
            INSERT.run(db, key="k", nonce=str(number), seen_at_s=1.0)
            for _ in range(3):
                count(db)
            raise OSError("planned")
    assert written(database) == set()
    database.close()


def test_heartbeats_of_one_turn_are_told_apart(swarm: SmallSwarm) -> None:
    """One is well, one is of an older session, one of nobody: each gets its own answer."""
    swarm.start()
    well, stale = swarm.node(), swarm.node()
    stale.epoch -= 1
    stranger = swarm.stranger()
    assert well.beat().next_in_s > 0
    for node, code in ((stale, "request.stale_epoch"), (stranger, "request.unknown_key")):
        with pytest.raises(Exception, match=code.split(".")[1]) as refused:
            node.beat()
        assert getattr(refused.value, "code", code) == code
