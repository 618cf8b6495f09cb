"""Write groups: each request is undone alone, a group is redone only if it must be, and a failure is never committed."""

import ast
import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_swarm import SmallSwarm
from sqlalchemy import Connection, func, select, text

import shoal.swarm.coordinator
from shoal.swarm.coordinator.leases import issue
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.store.database import Database, WriteGroup
from shoal.swarm.coordinator.store.schema import nonces
from shoal.swarm.coordinator.store.statements import inserting
from shoal.swarm.coordinator.store.writer import Writer
from shoal.wire.codes import Rejected
from shoal.wire.messages import AskLease

INSERT = inserting(nonces)


def count(db: Connection) -> int:
    return int(db.execute(select(func.count()).select_from(nonces)).scalar_one())


def written(database: Database) -> set[str]:
    with database.read() as db:
        return set(db.execute(select(nonces.c.nonce)).scalars())


class Requests:
    """Requests that write, and are refused or fail before or after."""

    def __init__(self, database: Database) -> None:
        self.database, self.executed = database, 0

    def write(self, group: WriteGroup, nonce: str, then: Exception | None = None) -> str:
        self.executed += 1
        with group.request():
            group.has_written = True
            INSERT.run(group.db, key="k", nonce=nonce, seen_at_s=1.0)
            if then is not None:
                raise then
        return nonce

    def refuse(self, group: WriteGroup) -> None:
        self.executed += 1
        with group.request():
            count(group.db)
            raise Rejected("request.conflict", "before anything was written")

    def fail(self, group: WriteGroup) -> None:
        self.executed += 1
        with group.request():
            group.db.execute(text("SELECT * FROM nowhere"))

    def together(self, *acts: Any) -> list[Any]:
        writer = Writer(self.database)

        async def everything() -> list[Any]:
            return await asyncio.gather(*(writer.run(act) for act in acts), return_exceptions=True)

        try:
            return asyncio.run(everything())
        finally:
            writer.close()


def test_a_refusal_before_anything_was_written_costs_nothing(database: Database) -> None:
    requests = Requests(database)
    outcomes = requests.together(
        partial(requests.write, nonce="a"), requests.refuse, partial(requests.write, nonce="b")
    )
    assert [outcomes[0], outcomes[2]] == ["a", "b"] and isinstance(outcomes[1], Rejected)
    assert (written(database), requests.executed) == ({"a", "b"}, 3)


def test_one_that_is_refused_after_it_wrote_is_undone_alone(database: Database) -> None:
    requests = Requests(database)
    late = Rejected("request.conflict", "after all")
    outcomes = requests.together(
        partial(requests.write, nonce="a"),
        partial(requests.write, nonce="b", then=late),
        partial(requests.write, nonce="c"),
    )
    assert outcomes == ["a", late, "c"]
    assert written(database) == {"a", "c"}
    assert requests.executed == 2 + 3  # up to the refusal without savepoints, then all with them


def test_one_that_fails_is_undone_alone(database: Database) -> None:
    requests = Requests(database)
    outcomes = requests.together(
        partial(requests.write, nonce="a"),
        requests.fail,
        partial(requests.write, nonce="b", then=OSError("no disk")),
    )
    assert outcomes[0] == "a"
    assert "nowhere" in str(outcomes[1]) and isinstance(outcomes[2], OSError)
    assert written(database) == {"a"}


def test_a_failed_statement_is_not_committed_in_silence(postgres: Any) -> None:
    """PostgreSQL then rolls back the whole transaction and reports success."""
    database = Database(postgres.fresh())
    with pytest.raises(RuntimeError, match="nothing of it can be committed"), database.group() as group:
        INSERT.run(group.db, key="k", nonce="a", seen_at_s=1.0)
        with pytest.raises(Exception, match="duplicate key"):
            INSERT.run(group.db, key="k", nonce="a", seen_at_s=1.0)
    assert written(database) == set()
    database.close()


def test_prepared_statements_outlast_a_rollback(postgres: Any) -> None:
    database = Database(postgres.fresh())
    for number in range(12):
        with pytest.raises(OSError), database.group() as group:
            INSERT.run(group.db, key="k", nonce=str(number), seen_at_s=1.0)
            for _ in range(3):
                count(group.db)
            raise OSError("planned")
    assert written(database) == set()
    database.close()


def test_heartbeats_of_one_group_get_separate_answers(swarm: SmallSwarm) -> None:
    """Each heartbeat of a group gets its own answer: a valid one, one of an older session, one of an unknown key."""
    swarm.start()
    well, stale = swarm.node(), swarm.node()
    stale.epoch -= 1
    stranger = swarm.stranger()
    assert well.beat().next_in_s > 0
    for node, code in ((stale, "request.stale_epoch"), (stranger, "request.unknown_key")):
        with pytest.raises(Exception, match=code.split(".")[1]) as refused:
            node.beat()
        assert getattr(refused.value, "code", code) == code


def test_a_refusal_is_counted_once_if_its_group_is_redone(swarm: SmallSwarm) -> None:
    """Backpressure lives in memory, so a rollback does not undo it: it must change after the commit."""
    node, coordinator = swarm.node(), swarm.coordinator
    requests = Requests(coordinator.database)
    coordinator.backpressure.others.began_s = (
        coordinator.clock()
    )  # so that this refusal does not end a window

    def ask(group: WriteGroup) -> None:
        with coordinator.transaction(node.id, group=group) as tx:
            tx.node = NODES.find(tx.db, node.id)
            issue.ask_lease(tx, coordinator, AskLease(epoch=node.epoch))

    late = Rejected("request.conflict", "after it has written")
    results = requests.together(ask, partial(requests.write, nonce="b", then=late))
    assert [result.code for result in results] == ["request.too_early", "request.conflict"]
    assert requests.executed == 2  # the group was redone
    assert coordinator.backpressure.others.refusals == 1


def test_domain_code_writes_through_the_transaction() -> None:
    """A write by `tx.db.execute` would not be noted, so a refusal after it would not be undone."""
    for path in Path(shoal.swarm.coordinator.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("db.execute") and node.args:
                statement = ast.unparse(node.args[0])
                assert not statement.startswith(("insert(", "update(", "delete(")), f"{path}: {statement}"


def test_no_submission_is_claimed_twice(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    swarm.work(node)
    swarm.work(node)
    first, second = node.deliver(), node.deliver()
    assert {swarm.claim().lease.lease_id, swarm.claim().lease.lease_id} == {first.lease_id, second.lease_id}
