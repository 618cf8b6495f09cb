"""What the database itself promises: groups of writers, several coordinators on one PostgreSQL, layouts that are brought up
to date."""

import asyncio
import re
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_swarm
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from small_swarm import CONFIG, LOG, SPEC, Node, SmallSwarm, at_once
from sqlalchemy import create_engine, select
from sqlalchemy.exc import OperationalError
from test_random_life import test_what_must_always_hold as random_life

from shoal.net.http_client import Unreachable
from shoal.swarm.coordinator.context import DATABASE_FILE, open_coordinator
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.store.database import Database, database_url
from shoal.swarm.coordinator.store.ledger_chain import read_ledger
from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, metadata, nodes, nonces, run
from shoal.swarm.coordinator.store.writer import Desk
from shoal.wire.keys import Key
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import Info, RunList


class Planned(Exception):
    pass


def write(database: Database, nonce: str, *, fail: bool = False) -> None:
    with database.transaction() as db:
        db.execute(nonces.insert().values(key="k", nonce=nonce, seen_at_s=1.0))
        if fail:
            raise Planned


def written(database: Database) -> set[str]:
    with database.read() as db:
        return set(db.execute(select(nonces.c.nonce)).scalars())


def many_writers(database: Database) -> None:
    failed: list[str] = []

    def writer(number: int) -> None:
        for turn in range(10):
            try:
                write(database, f"{number}-{turn}", fail=turn % 3 == 2)
                # On disk, and in everybody's view, when the block has ended.
                assert f"{number}-{turn}" in written(database)
            except Planned:
                failed.append(f"{number}-{turn}")

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = {f"{number}-{turn}" for number in range(8) for turn in range(10) if turn % 3 != 2}
    assert (written(database), len(failed)) == (expected, 24)


def test_one_writers_failure_is_its_own(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        many_writers(database)


def test_one_writers_failure_is_its_own_on_postgresql(postgres: Any) -> None:
    with closing(Database(postgres.fresh())) as database:
        many_writers(database)


def test_requests_that_wait_share_a_commit(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        commits, commit = [], database._commit

        def counting(transaction: Any) -> None:
            commits.append(1)
            commit(transaction)

        database._commit = counting  # type: ignore[method-assign]
        desk, gate = Desk(database), threading.Event()

        async def everything() -> list[Any]:
            first = asyncio.ensure_future(desk.do(lambda: gate.wait(20)))
            errands = [
                asyncio.ensure_future(desk.do(partial(write, database, str(number), fail=number % 4 == 3)))
                for number in range(12)
            ]
            await asyncio.sleep(0.05)
            gate.set()
            return await asyncio.gather(first, *errands, return_exceptions=True)

        outcomes = asyncio.run(everything())
        assert [type(outcome) for outcome in outcomes[1:]] == [
            type(None),
            type(None),
            type(None),
            Planned,
        ] * 3
        assert len(written(database)) == 9
        assert len(commits) <= 2  # the one that held the desk up, and all that waited
        desk.close()


def test_nothing_is_told_before_it_is_true(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        told: list[str] = []

        def telling(nonce: str) -> None:
            write(database, nonce)
            database.when_committed(lambda: told.append(f"{nonce} of {len(written(database))}"))

        with database.group():
            telling("a")
            telling("b")
            assert told == []
        assert told == ["a of 2", "b of 2"]
        telling("c")
        assert told[-1] == "c of 3"


def test_a_commit_that_fails_fails_all_of_its_group(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:

        def full(transaction: Any) -> None:
            raise OSError("no space left")

        desk, good = Desk(database), database._commit
        database._commit = full  # type: ignore[method-assign]

        async def everything() -> list[Any]:
            errands = [desk.do(partial(write, database, str(number))) for number in range(3)]
            return await asyncio.gather(*errands, return_exceptions=True)

        assert {type(outcome) for outcome in asyncio.run(everything())} == {OSError}
        database._commit = good  # type: ignore[method-assign]
        assert written(database) == set()
        desk.close()


def test_urls() -> None:
    assert database_url(Path("/x/y")) == "sqlite:////x/y"
    assert database_url("postgresql://me@host/name") == "postgresql+psycopg://me@host/name"
    for bad in ("mysql://me@host/name", "no url at all"):
        with pytest.raises(ValueError, match="postgresql://"):
            database_url(bad)


# -- several coordinators ---------------------------------------------------------------------------------


def test_two_coordinators_serve_one_run(tmp_path: Path, postgres: Any) -> None:
    """No shared memory: a session opened at one counts at the other, a nonce spent at one is spent at both."""
    config = CONFIG.model_copy(update={"database": postgres.fresh()})
    left, right = (SmallSwarm(tmp_path, config, on_socket=True) for _ in range(2))
    left.start()
    assert right.stats().newest_version == 0
    keys = [Key.generate() for _ in range(4)]
    here, there = ([Node(swarm.url, key) for key in keys] for swarm in (left, right))
    for one, other in zip(here, there, strict=True):
        one.join()
        other.epoch = one.epoch
        lease = other.lease()
        assert one.lease() == lease  # it holds one already
        one.upload(lease, lease.lease_id.encode())
        other.submit(lease, lease.lease_id.encode())
    turn = iter((left, right) * 10)
    outcomes = at_once(lambda: next(turn).claim(), 4)
    claimed = {claim.lease.lease_id: claim.lease for claim in outcomes}
    assert len(claimed) == 4  # each was given to one validator
    for lease in claimed.values():
        assert right.verdict(lease).state == left.verdict(lease).state == "accepted"
    batches = at_once(lambda: next(turn).batch(0), 6)
    assert batches == [batches[0]] * 6
    events = left.ledger()
    verify_chain(events)
    replay(events)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for node in here + there:
        node.client.close()
    left.close()
    right.close()


def test_a_client_goes_on_with_another_entry_point(tmp_path: Path, postgres: Any) -> None:
    """One of two coordinators is killed; who worked by it works by the other, in the same session."""
    config = CONFIG.model_copy(update={"database": postgres.fresh()})
    right = SmallSwarm(tmp_path, config, on_socket=True)
    left = SmallSwarm(tmp_path, config.model_copy(update={"entry_points": (right.url,)}), on_socket=True)
    right.start()
    info = Info.parse(left.public.get("/v1/info").content)
    [run] = RunList.parse(left.public.get("/v1/runs").content).runs
    assert info.entry_points == run.entry_points == (right.url,)
    assert (run.run, run.weights_bytes, run.relays) == ("small", 1000, (small_swarm.RELAY_URL,))
    node = Node(left.url, Key.generate()).join()
    node.client.add_urls(info.entry_points)
    lease = node.lease()
    left.close()
    with pytest.raises(Unreachable):
        node.beat()
    node.beat()
    node.deliver(lease)
    assert right.stats().queued_checks == 1
    node.client.close()
    right.close()


@pytest.mark.parametrize(("seed", "in_turns"), [(3, False), (3, True)])
def test_a_random_life_on_postgresql(
    tmp_path: Path, postgres: Any, seed: int, in_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_swarm, "FRESH_DATABASE", postgres.fresh)
    random_life(tmp_path, seed, in_turns)


# -- layouts ----------------------------------------------------------------------------------------------


def differences(db: Any) -> list[Any]:
    """Of the tables there are to those the code asks for; foreign keys of columns added later aside."""
    # SQLite's BIGINT is its INTEGER.
    options = {"compare_type": db.dialect.name != "sqlite"}
    found = compare_metadata(MigrationContext.configure(db, opts=options), metadata)
    return [one for one in found if not str(one[0]).endswith("_fk")]


def test_the_first_layout_is_brought_up_to_date_on_postgresql(tmp_path: Path, postgres: Any) -> None:
    """The same steps, in the words of the other database; and what comes out is what a new one has."""
    url = postgres.fresh()
    script = (Path(__file__).parent / "layout_1.sql").read_text()
    # It is SQLite's: in alphabetical order, so without what one table says of another.
    script = re.sub(r",\s*FOREIGN KEY\([a-z_]+\) REFERENCES [a-z_]+ \([a-z_]+\)", "", script)
    script = script.replace("INTEGER", "BIGINT").replace("WITHOUT ROWID", "").replace("-- The", "\n-- The")
    engine = create_engine(database_url(url))
    with engine.begin() as db:
        for statement in script.split(";"):
            if "CREATE" in statement:
                db.exec_driver_sql(statement)
        db.exec_driver_sql("INSERT INTO run (name, run_key, schema_version, spec) VALUES ('r', 'k', 1, '{}')")
    Database(url).close()
    with engine.connect() as db:
        assert differences(db) == []
        assert db.execute(select(run.c.schema_version)).scalar_one() == SCHEMA_VERSION
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '99'")
        db.commit()
    engine.dispose()
    with pytest.raises(ValueError, match="layout 99"):
        Database(url)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    script = (Path(__file__).parent / "layout_1.sql").read_text()
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as db, db:
        db.executescript(script)
        db.execute("INSERT INTO run (name, run_key, schema_version, spec) VALUES ('r', 'k', 1, '{}')")
        db.execute(
            "ALTER TABLE uploads ADD COLUMN asked_at_s DOUBLE PRECISION"
        )  # so that the last step fails
        before = list(db.iterdump())
    with pytest.raises(OperationalError, match="asked_at_s"):
        Database(tmp_path / DATABASE_FILE)
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as db:
        assert list(db.iterdump()) == before


def test_a_database_of_the_first_layout_is_brought_up_to_date(tmp_path: Path) -> None:
    keys = open_coordinator(CONFIG, SPEC, tmp_path, log=LOG)
    run_key = keys.run_key.public
    keys.close()
    for file in tmp_path.glob(DATABASE_FILE + "*"):
        file.unlink()
    script = (Path(__file__).parent / "layout_1.sql").read_text()
    with closing(sqlite3.connect(tmp_path / DATABASE_FILE)) as db, db:
        db.executescript(script)
        db.execute(
            "INSERT INTO run (name, run_key, schema_version, spec) VALUES (?, ?, 1, '{}')", ("small", run_key)
        )
        db.execute(
            "INSERT INTO nodes (node, enrolled_at_s, software, trust, trust_reason, accepted_in_a_row, session_epoch,"
            " phase, tokens_per_s, accepted, rejected, void, credit) VALUES (?, 5, '', 'trusted', '', 7, 1, '', 0, 7, 0, 0, 99)",
            ("ab" * 32,),
        )
    for _ in range(2):  # the second time there is nothing to do
        coordinator = open_coordinator(CONFIG, SPEC, tmp_path, log=LOG)
        with coordinator.database.read() as db:
            assert differences(db) == []
            node = db.execute(select(nodes)).one()
        assert (node.streak, node.credit, node.trust_since_s, node.owed) == (7, 99, 5.0, "")
        coordinator.close()
    assert [event.type for event in read_ledger(tmp_path / DATABASE_FILE)] == ["run.opened"]
    swarm = SmallSwarm(tmp_path)
    swarm.start()
    swarm.work(swarm.node())
    swarm.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    path.write_bytes(b"not a database, however long one looks at it " * 100)
    for opened in (lambda: Database(path), lambda: read_ledger(path)):
        with pytest.raises(ValueError, match=r"shoal\.db: file is not a database; put a backup in its place"):
            opened()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1/x: .*refused.*; check that the server runs"):
        Database("postgresql://somebody:secret@127.0.0.1:1/x")
