"""Rows that a turn keeps: whoever looks sees them as they are now, in whatever way, and they are written together."""

from typing import Any

import pytest
from small_swarm import SmallSwarm
from sqlalchemy import func, select, update

from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.needs import Needs, read_ahead
from shoal.swarm.coordinator.store.schema import epochs
from shoal.swarm.coordinator.store.sheet import EPOCHS, LEASES
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.swarm.coordinator.store.turn import Spoiled
from shoal.wire.codes import Rejected

NUM_LEASES = Statement(select(epochs.c.num_leases).where(epochs.c.epoch == given("number")))
TOTAL = select(func.coalesce(func.sum(epochs.c.num_leases), 0))


def row(epoch: int, **values: Any) -> dict[str, Any]:
    return {"epoch": epoch, "secret": "s", "commitment": "c", "num_leases": 0} | values


def kept(database: Database) -> dict[int, int]:
    with database.read() as db:
        return {one.epoch: one.num_leases for one in db.execute(select(epochs))}


def test_every_look_sees_what_is_not_written_yet(database: Database) -> None:
    with database.group() as turn:
        EPOCHS.insert(turn.db, **row(1))
        EPOCHS.change(turn.db, 1, num_leases=2)
        found = EPOCHS.find(turn.db, 1)
        assert found is not None and (found.num_leases, found.revealed_at_s) == (2, None)
        assert turn.unwritten == {"epochs"} and EPOCHS.find(turn.db, 2) is None
        assert NUM_LEASES.value(turn.db, number=1) == 2 and not turn.unwritten
        EPOCHS.change(turn.db, 1, num_leases=3)
        EPOCHS.change(turn.db, 1, revealed_at_s=0.5)
        assert turn.db.execute(TOTAL).scalar_one() == 3
        turn.db.execute(update(epochs).values(num_leases=4))
        found = EPOCHS.find(turn.db, 1)
        assert found is not None and (found.num_leases, found.revealed_at_s) == (4, 0.5)
        EPOCHS.change(turn.db, 1, num_leases=found.num_leases + 1)
    assert kept(database) == {1: 5}


def test_rows_are_read_and_written_together(database: Database) -> None:
    with database.group() as turn:
        for epoch in (1, 2, 3):
            EPOCHS.insert(turn.db, **row(epoch))
    with database.group() as turn:
        EPOCHS.fetch(turn.db, [1, 2, 9])
        assert [EPOCHS.find(turn.db, epoch) is None for epoch in (1, 2, 9)] == [False, False, True]
        for epoch in (1, 2, 3):  # the last of them nobody has looked at
            EPOCHS.change(turn.db, epoch, num_leases=epoch)
        found = EPOCHS.find(turn.db, 3)
        assert found is not None and found.num_leases == 3
    assert kept(database) == {1: 1, 2: 2, 3: 3}


def test_what_the_database_does_not_take_spoils_the_turn(database: Database) -> None:
    with database.group() as turn:
        EPOCHS.insert(turn.db, **row(1))
    with pytest.raises(Spoiled), database.group() as turn:
        EPOCHS.insert(turn.db, **row(2))
        EPOCHS.insert(turn.db, **row(1))
    assert kept(database) == {1: 0}


def test_a_look_is_not_taken_for_a_write(database: Database) -> None:
    with database.group() as turn:
        with turn.one():
            EPOCHS.insert(turn.db, **row(1))
        with pytest.raises(Rejected), turn.one():
            assert NUM_LEASES.value(turn.db, number=1) == 0  # so that the row is written
            raise Rejected("request.too_early", "nothing yet")
        with pytest.raises(Spoiled), turn.one():
            EPOCHS.change(turn.db, 1, num_leases=1)
            raise Rejected("request.conflict", "after all")


def test_a_careful_turn_keeps_nothing_back(database: Database) -> None:
    with database.group(careful=True) as turn:
        with turn.one():
            EPOCHS.insert(turn.db, **row(1))
        with pytest.raises(Rejected), turn.one():
            EPOCHS.change(turn.db, 1, num_leases=1)
            raise Rejected("request.conflict", "after all")
        found = EPOCHS.find(turn.db, 1)
        assert found is not None and found.num_leases == 0 and not turn.unwritten
    assert kept(database) == {1: 0}


@pytest.mark.parametrize("name", ["\0", "\ud800", "f" * 31, "../x"])
def test_a_name_that_is_none_does_not_fail_the_others(swarm: SmallSwarm, name: str) -> None:
    swarm.start()
    lease = swarm.node().deliver()
    judged = [Needs(lease_id=one, submission=True, judged=True) for one in (name, lease.lease_id)]
    with swarm.coordinator.database.group() as turn:
        read_ahead(swarm.coordinator, turn, [*judged, Needs(lease_id="0" * 32, upload=True)])
        found = LEASES.find(turn.db, lease.lease_id)
        assert found is not None and found.state == "submitted"


def test_a_claim_gets_what_was_not_read_ahead(swarm: SmallSwarm) -> None:
    """Two submissions, and claims of one after the other: none is given twice."""
    swarm.start()
    node = swarm.node()
    swarm.work(node)
    swarm.work(node)
    first, second = node.deliver(), node.deliver()
    assert {swarm.claim().lease.lease_id, swarm.claim().lease.lease_id} == {first.lease_id, second.lease_id}
