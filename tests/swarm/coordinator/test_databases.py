"""What the database itself promises: write groups, several coordinators on one PostgreSQL, and layouts that are refused."""

import asyncio
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_swarm
from small_swarm import CONFIG, Node, SmallSwarm, at_once, refusal
from sqlalchemy import inspect, select, text
from test_random_life import test_invariants_of_a_random_run as random_life

from ledger_reader import read_ledger
from shoal.net.http_client import Unreachable
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.store.database import Database, WriteGroup, database_url, read_only
from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, nonces, run
from shoal.swarm.coordinator.store.writer import Writer
from shoal.swarm.coordinator.views import stats
from shoal.wire.keys import Key
from shoal.wire.lease import Receipt
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import Enrol, Enrolled, Info, RunList, Submit
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL


class Planned(Exception):
    pass


def write(group: WriteGroup, nonce: str, *, fail: bool = False) -> None:
    with group.request():
        group.has_written = True
        group.db.execute(nonces.insert().values(key="k", nonce=nonce, seen_at_s=1.0))
        if fail:
            raise Planned


def write_alone(database: Database, nonce: str, *, fail: bool = False) -> None:
    with database.group() as group:
        write(group, nonce, fail=fail)


def written(database: Database) -> set[str]:
    with database.read() as db:
        return set(db.execute(select(nonces.c.nonce)).scalars())


def many_writers(database: Database) -> None:
    failed: list[str] = []

    def writer(number: int) -> None:
        for turn in range(10):
            try:
                write_alone(database, f"{number}-{turn}", fail=turn % 3 == 2)
                # On disk, and visible to every reader, when the group has ended.
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


def test_a_failing_write_does_not_affect_others(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        many_writers(database)


def test_a_failing_write_does_not_affect_others_on_postgresql(postgres: Any) -> None:
    with closing(Database(postgres.fresh())) as database:
        many_writers(database)


def test_requests_that_wait_share_a_commit(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        commits, commit = [], database._commit

        def counting(transaction: Any) -> None:
            commits.append(1)
            commit(transaction)

        database._commit = counting  # type: ignore[method-assign]
        writer, gate = Writer(database), threading.Event()

        async def everything() -> list[Any]:
            first = asyncio.ensure_future(writer.run(lambda group: gate.wait(20)))
            requests = [
                asyncio.ensure_future(writer.run(partial(write, nonce=str(number), fail=number % 4 == 3)))
                for number in range(12)
            ]
            await asyncio.sleep(0.05)
            gate.set()
            return await asyncio.gather(first, *requests, return_exceptions=True)

        outcomes = asyncio.run(everything())
        assert [type(outcome) for outcome in outcomes[1:]] == [
            type(None),
            type(None),
            type(None),
            Planned,
        ] * 3
        assert len(written(database)) == 9
        assert len(commits) <= 2  # the request that held up the writer, and all that waited
        writer.close()


def test_callbacks_run_after_the_commit(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:
        called: list[str] = []

        def write_and_tell(group: WriteGroup, nonce: str) -> None:
            write(group, nonce)
            group.after_commit.append(lambda: called.append(f"{nonce} of {len(written(database))}"))

        with database.group() as group:
            write_and_tell(group, "a")
            write_and_tell(group, "b")
            assert called == []
        assert called == ["a of 2", "b of 2"]


def test_a_failing_callback_after_the_commit_does_not_fail_the_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Database(tmp_path / "db")) as database:
        called: list[str] = []

        def fail() -> None:
            raise OSError("the log's disk is full")

        def write_and_fail(group: WriteGroup, nonce: str) -> str:
            write(group, nonce)
            group.after_commit += [fail, lambda: called.append(nonce)]
            return nonce

        writer = Writer(database)

        async def everything() -> list[Any]:
            requests = [writer.run(partial(write_and_fail, nonce=nonce)) for nonce in "ab"]
            return await asyncio.gather(*requests, return_exceptions=True)

        assert asyncio.run(everything()) == ["a", "b"]
        assert written(database) == {"a", "b"} and called == ["a", "b"]
        assert "a callback after a commit failed: OSError: the log's disk is full" in caplog.text
        writer.close()


def test_a_commit_that_fails_fails_all_of_its_group(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "db")) as database:

        def full(transaction: Any) -> None:
            raise OSError("no space left")

        writer, good = Writer(database), database._commit
        database._commit = full  # type: ignore[method-assign]

        async def everything() -> list[Any]:
            requests = [writer.run(partial(write, nonce=str(number))) for number in range(3)]
            return await asyncio.gather(*requests, return_exceptions=True)

        assert {type(outcome) for outcome in asyncio.run(everything())} == {OSError}
        database._commit = good  # type: ignore[method-assign]
        assert written(database) == set()
        writer.close()


@pytest.mark.parametrize("name", ["a?b", "a?mode=ro", "a%41b", "50% of #2"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """`?` and `%` have a meaning in URLs: the tables were made in a file beside the folder, or not found."""
    (tmp_path / name).mkdir()
    path = tmp_path / name / DATABASE_FILE
    with closing(Database(path)) as database:
        write_alone(database, "one")
        with read_only(path) as db:
            assert db.execute(select(nonces.c.nonce)).scalar_one() == "one"
    assert path.exists()
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_urls() -> None:
    assert str(database_url(Path("/x/y"))) == "sqlite:////x/y"
    assert str(database_url("postgresql://me@host/name")) == "postgresql+psycopg://me@host/name"
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


def test_keys_that_only_enrol_hide_no_worker(
    tmp_path: Path, postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the nodes that were seen last. PostgreSQL sorts those that never were before all others, unless told not to."""
    monkeypatch.setattr(stats, "NODES_SHOWN", 2)
    for database in ("", postgres.fresh()):
        swarm = SmallSwarm(tmp_path / str(bool(database)), CONFIG.model_copy(update={"database": database}))
        worker = swarm.node()
        for _ in range(3):
            ask = Enrol(protocol=PROTOCOL, software="test")
            swarm.stranger().client.call("POST", "/v1/enrol", ask, Enrolled)
        assert worker.id in {node.node for node in swarm.stats().nodes}
        swarm.close()


def test_a_malformed_lease_id_does_not_reach_the_database(tmp_path: Path, postgres: Any) -> None:
    """PostgreSQL fails on a NUL character, and a lease's upload is looked up before the request's own transaction."""
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"database": postgres.fresh()}))
    swarm.app._router._has_object_store = True
    ask = Submit(epoch=1, num_bytes=1, sha256="ab" * 32, policy_version=0)
    found = refusal(swarm.node().client.call, "POST", "/v1/leases/a%00b/submit", ask, Sealed[Receipt])
    assert found.code == "request.not_found"
    swarm.close()


def test_a_client_continues_with_another_coordinator(tmp_path: Path, postgres: Any) -> None:
    """Kills one of two coordinators: its nodes continue with the other, in the same session."""
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


@pytest.mark.parametrize(("seed", "in_groups"), [(3, False), (3, True)])
def test_a_random_life_on_postgresql(
    tmp_path: Path, postgres: Any, seed: int, in_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_swarm, "FRESH_DATABASE", postgres.fresh)
    random_life(tmp_path, seed, in_groups)


# -- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_layout_is_refused_and_left_as_it_is(database: Database, layout: int) -> None:
    row = {"name": "r", "run_key": "k", "spec": "{}", "terms": "{}", "paused": 0}
    with database.group() as group:
        group.db.execute(run.insert().values(schema_version=layout, **row))
        group.db.execute(text("DROP TABLE evaluation_chunks"))
    with pytest.raises(ValueError, match=f"has layout {layout}, this software reads layout {SCHEMA_VERSION}"):
        Database(Path(str(database.url.database)) if database.is_sqlite else plain_url(database))
    with database.read() as db:
        assert not inspect(db).has_table("evaluation_chunks")


def plain_url(database: Database) -> str:
    return database.url.set(drivername="postgresql").render_as_string(hide_password=False)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / DATABASE_FILE
    path.write_bytes(b"not a database, however long one looks at it " * 100)
    for opened in (lambda: Database(path), lambda: read_ledger(path)):
        with pytest.raises(ValueError, match=r"shoal\.db: file is not a database; put a backup in its place"):
            opened()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1/x: .*refused.*; check that the server runs"):
        Database("postgresql://somebody:secret@127.0.0.1:1/x")
