"""kill -9 at every commit boundary: before the commit, and after it but before anybody is answered. On both databases.

A child process does one errand (publish, enrol, lease, upload, submit, check, batch) and kills itself at the n-th boundary.
Another then does the whole errand again, as clients that retry do. Nothing that was answered may be lost, nothing may count
twice, and the ledger must add up.
"""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_swarm
from small_swarm import CONFIG, LOG, SPEC, manifest
from sqlalchemy import select

from forked import in_child
from ledger_reader import read_ledger
from relay_reports import delegated_report
from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import DATABASE_FILE, Coordinator, Transaction, open_coordinator
from shoal.swarm.coordinator.housekeeping import resume, tick
from shoal.swarm.coordinator.leases import batches, issue, submissions, uploads, verdicts
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership import admission, nodes, relays, versions
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import nodes as node_table
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import (
    Announce,
    AskClaim,
    AskLease,
    AskUpload,
    Enrol,
    OpenSession,
    Submit,
)
from shoal.wire.record import seal
from shoal.wire.run_spec import PROTOCOL

NODE, VALIDATOR = "ab" * 32, "cd" * 32
LEASES = 3
CONFIG_CRASH = CONFIG.model_copy(update={"check_rate": 1.0})


class Errand:
    """One node's work from beginning to end. Every step may be repeated."""

    def __init__(self, dir: Path, config: Any, answered: Path) -> None:
        self.coordinator: Coordinator = open_coordinator(config, SPEC, dir, log=LOG, clock=lambda: 1e9)
        resume(self.coordinator)
        self.dir, self.answered = dir, answered

    def act(self, actor: str | None, effect: Callable[[Transaction], Any]) -> Any:
        with self.coordinator.transaction(actor) as tx:
            tx.node = NODES.find(tx.db, actor) if actor == NODE else None
            return effect(tx)

    def say(self, line: str) -> None:
        """What a client was told: it will hold us to it."""
        with self.answered.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self) -> None:
        coordinator = self.coordinator
        told = Announce(
            manifest=seal(manifest(0), coordinator.run_key), origin_url="http://127.0.0.1:1", report=None
        )
        self.say(f"seq {self.act(None, lambda tx: versions.announce(tx, coordinator, told)).seq}")
        operator, run = Key.load(self.dir / "keys" / "relay.key"), coordinator.run_key.public
        here = delegated_report(operator, "http://127.0.0.1:2", (0,), relay=run, now_s=1e9)
        self.act(None, lambda tx: relays.report(tx, coordinator, here))
        self.act(NODE, lambda tx: admission.enrol(tx, coordinator, Enrol(protocol=PROTOCOL, software="")))
        session = self.act(NODE, lambda tx: nodes.open_session(tx, coordinator, OpenSession(software="")))
        while self.count_accepted() < LEASES:
            self.work(session.epoch)
            self.check()
            tick(coordinator)
        batch = self.act(
            None, lambda tx: batches.find_batch(tx.db, 0) or batches.form_batch(tx, coordinator, 0)
        )
        self.say(f"batch {batch.digest()}")

    def work(self, epoch: int) -> None:
        coordinator = self.coordinator
        lease = self.act(NODE, lambda tx: issue.ask_lease(tx, coordinator, AskLease(epoch=epoch))).body
        self.say(f"lease {lease.lease_id}")
        data = lease.lease_id.encode()
        what = {"epoch": epoch, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        ask = AskUpload.model_validate(what)
        upload = self.act(NODE, lambda tx: uploads.ask_upload(tx, coordinator, lease.lease_id, ask))
        token = upload.path.removeprefix(uploads.UPLOAD_PATH)
        assert isinstance(coordinator.store, LocalStore)
        incoming = coordinator.store.receive(token, ask.sha256, len(data))
        incoming.write(data)
        incoming.finish()
        with coordinator.database.read() as db:
            expected = uploads.find_expected(db, token, 1e9)
        uploads.mark_stored(coordinator, expected)
        submit = Submit.model_validate(what | {"policy_version": 0})
        receipt = self.act(NODE, lambda tx: submissions.submit(tx, coordinator, lease.lease_id, submit))
        self.say(f"seq {receipt.body.seq}")

    def check(self) -> None:
        try:
            claim = self.act(VALIDATOR, lambda tx: verdicts.claim(tx, self.coordinator, AskClaim()))
        except Rejected:
            return
        verdict = Verdict(
            lease_id=claim.lease.lease_id,
            code="accepted",
            detail="",
            rewards=tuple(float(row % 2) for row in range(claim.lease.num_rows)),
            output_tokens=claim.lease.num_rows,
        )
        given = self.act(
            VALIDATOR, lambda tx: verdicts.give_verdict(tx, self.coordinator, claim.lease.lease_id, verdict)
        )
        self.say(f"accepted {given.lease_id}")

    def count_accepted(self) -> int:
        with self.coordinator.database.read() as db:
            rows = db.execute(select(lease_table.c.state)).scalars().all()
        # The dead process's claim would expire later; the clock does not move here, so it is claimed again at once.
        with self.coordinator.transaction() as tx:
            tx.db.exec_driver_sql("UPDATE leases SET state = 'submitted' WHERE state = 'checking'")
        return list(rows).count("accepted")


@contextmanager
def killing(at: int, when: str) -> Iterator[list[int]]:
    """Kill this process at the n-th commit; 0 only counts them."""
    count = [0]
    commit = Database._commit

    def deadly(self: Database, transaction: Any) -> None:
        count[0] += 1
        if count[0] == at and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, transaction)
        if count[0] == at and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    Database._commit = deadly  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Database._commit = commit  # type: ignore[method-assign]


def crash_and_go_on(dir: Path, config: Any, at: int, when: str) -> None:
    answered = dir / "answered"

    def first() -> None:
        with killing(at, when):
            Errand(dir / "run", config, answered).run()

    def second() -> None:
        Errand(dir / "run", config, answered).run()

    assert in_child(first) == signal.SIGKILL
    assert in_child(second) == 0
    check_books(config.database or dir / "run" / DATABASE_FILE, dir, config, answered.read_text().split("\n"))


def check_books(database: Any, dir: Path, config: Any, said: list[str]) -> None:
    events = read_ledger(database)
    verify_chain(events)
    books = replay(events)
    coordinator = open_coordinator(config, SPEC, dir / "run", log=LOG)
    with coordinator.database.read() as db:
        node = db.execute(select(node_table)).one()
        states = {row.lease_id: row for row in db.execute(select(lease_table))}
    coordinator.close()
    # Nothing is credited twice, or not at all.
    accepted = [row for row in states.values() if row.state == "accepted"]
    assert node.credit == sum(row.credit for row in accepted) == books.nodes[NODE].credit
    assert node.credit == sum(row.num_prompts * row.samples_per_prompt for row in accepted)
    assert (node.trust, node.streak) == (books.nodes[NODE].standing.trust.value, len(accepted))
    # Nothing that was answered is lost.
    kinds = {"policy.published", "submission.received"}
    for words in (line.split() for line in said if line):
        if words[0] == "seq":
            assert events[int(words[1]) - 1].type in kinds
        elif words[0] == "lease":
            assert words[1] in states
        elif words[0] == "accepted":
            assert states[words[1]].state == "accepted"
    assert len({line for line in said if line.startswith("batch")}) == 1
    assert len([event for event in events if event.type == "batch.formed"]) == 1


def boundaries(dir: Path, config: Any) -> int:
    def count() -> None:
        with killing(0, "") as commits:
            Errand(dir / "run", config, dir / "answered").run()
        (dir / "commits").write_text(str(commits[0]))

    assert in_child(count) == 0
    return int((dir / "commits").read_text())


def crash_everywhere(tmp_path: Path, make_config: Callable[[], Any], every: int) -> None:
    (tmp_path / "count").mkdir()
    commits = boundaries(tmp_path / "count", make_config())
    assert commits > 25
    for at in range(1, commits + 1, every):
        for when in ("before", "after"):
            folder = tmp_path / f"{at}-{when}"
            folder.mkdir()
            crash_and_go_on(folder, make_config(), at, when)


def sqlite_config() -> Any:
    return CONFIG_CRASH


@pytest.mark.skipif(small_swarm.FRESH_DATABASE is not None, reason="has its own of both")
def test_killed_at_some_commits(tmp_path: Path) -> None:
    crash_everywhere(tmp_path, sqlite_config, every=11)


def test_killed_at_some_commits_on_postgresql(tmp_path: Path, postgres: Any) -> None:
    crash_everywhere(
        tmp_path, lambda: CONFIG_CRASH.model_copy(update={"database": postgres.fresh()}), every=17
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_commit(tmp_path: Path) -> None:
    crash_everywhere(tmp_path, sqlite_config, every=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_every_commit_on_postgresql(tmp_path: Path, postgres: Any) -> None:
    crash_everywhere(
        tmp_path, lambda: CONFIG_CRASH.model_copy(update={"database": postgres.fresh()}), every=1
    )
