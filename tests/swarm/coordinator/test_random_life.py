"""A run driven at random, with crashes and a virtual clock, against what must always hold."""

import copy
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import small_swarm
from small_swarm import CONFIG, LOG, SPEC, manifest, report
from sqlalchemy import Connection, select

from ledger_reader import read_ledger
from relay_reports import delegated_report
from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.context import DATABASE_FILE, Transaction, newest_version, open_coordinator
from shoal.swarm.coordinator.housekeeping import resume, tick
from shoal.swarm.coordinator.leases import batches, issue, lifecycle, submissions, uploads, verdicts
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership import admission, nodes, relays, versions
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.rules import lease_states
from shoal.swarm.coordinator.store.database import RedoGroup, WriteGroup
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import nodes as node_table
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.lease import Checks, Lease, Verdict
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import (
    Abandon,
    Announce,
    AskClaim,
    AskLease,
    AskUpload,
    Enrol,
    Heartbeat,
    OpenSession,
    Submit,
)
from shoal.wire.record import seal
from shoal.wire.run_spec import PROTOCOL

T = TypeVar("T")

SPEC_LONG = SPEC.model_copy(update={"last_version": 12})
CONFIG_EVAL = CONFIG.model_copy(
    update={
        "eval_prompts": 3,
        "eval_every": 3,
        "eval_samples": 2,
        "leases_per_epoch": 5,
        "groups_per_step": 3,
    }
)


class Life:
    def __init__(self, dir: Path, seed: int) -> None:
        self.dir, self.rng, self.now_s = dir, random.Random(seed), 1e9
        self.held: dict[str, list[Lease]] = {f"{index:064x}": [] for index in range(1, 6)}
        self.claimed: list[Lease] = []
        self.group: WriteGroup | None = None
        """The group that all requests join at the moment; None: each is committed alone."""
        self.checks: dict[str, Checks] = {}
        self.database = small_swarm.FRESH_DATABASE() if small_swarm.FRESH_DATABASE else ""
        self.config = CONFIG_EVAL.model_copy(update={"database": self.database})
        self.open()
        for node in self.held:
            self.act(
                node, lambda tx: admission.enrol(tx, self.coordinator, Enrol(protocol=PROTOCOL, software=""))
            )
            self.act(node, lambda tx: nodes.open_session(tx, self.coordinator, OpenSession(software="")))
        self.announce()
        self.beat_relay()

    def open(self) -> None:
        self.coordinator = open_coordinator(
            self.config, SPEC_LONG, self.dir, log=LOG, clock=lambda: self.now_s
        )
        resume(self.coordinator)

    def act(self, actor: str | None, effect: Callable[[Transaction], T]) -> T | None:
        """Returns the effect, or None if the request is refused."""
        try:
            with self.coordinator.transaction(actor, group=self.group) as tx:
                tx.node = NODES.find(tx.db, actor) if actor else None
                if tx.node is not None and tx.node.trust == "banned":
                    raise Rejected("request.banned", "out")
                return effect(tx)
        except Rejected:
            return None

    @contextmanager
    def look(self) -> Iterator[Connection]:
        """Opens a view that includes what the current group has written."""
        if self.group is not None:
            yield self.group.db
        else:
            with self.coordinator.database.read() as db:
                yield db

    # -- what can happen --------------------------------------------------------------------------------

    def announce(self) -> None:
        with self.look() as db:
            newest = newest_version(db)
        version = 0 if newest is None else newest + 1
        sealed = seal(manifest(version), self.coordinator.run_key)
        told = Announce(
            manifest=sealed, origin_url="http://127.0.0.1:1", report=report(version) if version else None
        )
        self.act(None, lambda tx: versions.announce(tx, self.coordinator, told))

    def beat_relay(self) -> None:
        operator, run = Key.load(self.dir / "keys" / "relay.key"), self.coordinator.run_key.public
        told = delegated_report(operator, "http://127.0.0.1:2", range(13), relay=run, now_s=self.now_s)
        self.act(None, lambda tx: relays.report(tx, self.coordinator, told))

    def ask_lease(self) -> None:
        node = self.rng.choice(list(self.held))
        sealed = self.act(node, lambda tx: issue.ask_lease(tx, self.coordinator, AskLease(epoch=1)))
        if sealed and sealed.body not in self.held[node]:
            self.held[node].append(sealed.body)

    def deliver(self) -> None:
        node = self.rng.choice([node for node, held in self.held.items() if held] or [None])
        if node is None:
            return
        lease = self.held[node].pop(0)
        data = lease.lease_id.encode()
        store, sha256 = self.coordinator.store, hashlib.sha256(data).hexdigest()
        ask = AskUpload(epoch=1, num_bytes=len(data), sha256=sha256)
        upload = self.act(node, lambda tx: uploads.ask_upload(tx, self.coordinator, lease.lease_id, ask))
        if upload is None:
            return
        token = upload.path.removeprefix(uploads.UPLOAD_PATH)
        assert isinstance(store, LocalStore)
        incoming = store.receive(token, sha256, len(data))
        incoming.write(data)
        incoming.finish()
        with self.look() as db:
            expected = uploads.find_expected(db, token, self.now_s)
        uploads.mark_stored(self.coordinator, expected, self.group)
        version = self.rng.choice(lease.policies).version
        submit = Submit(epoch=1, num_bytes=len(data), sha256=sha256, policy_version=version)
        self.act(node, lambda tx: submissions.submit(tx, self.coordinator, lease.lease_id, submit))

    def abandon(self) -> None:
        node = self.rng.choice([node for node, held in self.held.items() if held] or [None])
        if node is not None:
            lease = self.held[node].pop(0)
            ask = Abandon(epoch=1, reason="tired")
            self.act(node, lambda tx: lifecycle.abandon(tx, self.coordinator, lease.lease_id, ask))

    def open_sessions_again(self) -> None:
        """Sends a heartbeat of every node in its old session, as after a network outage."""
        for node in self.held:
            self.act(node, lambda tx: nodes.heartbeat(tx, self.coordinator, Heartbeat(epoch=1, phase="back")))

    def claim(self) -> None:
        if claim := self.act(None, lambda tx: verdicts.claim(tx, self.coordinator, AskClaim())):
            self.claimed.append(claim.lease)
            self.checks[claim.lease.lease_id] = claim.checks

    def judge(self) -> None:
        if not self.claimed:
            return
        lease = self.rng.choice(self.claimed)
        codes = ["accepted"] * 20 + ["reject.copied", "void.infra"]
        code = self.rng.choice(codes)
        good = code == "accepted"
        verdict = Verdict(
            lease_id=lease.lease_id,
            code=code,
            detail="",
            rewards=tuple(float(self.rng.random() < 0.5) for _ in range(lease.num_rows)) if good else (),
            output_tokens=lease.num_rows if good else 0,
            checks=self.checks[lease.lease_id],
        )
        self.act("9" * 64, lambda tx: verdicts.give_verdict(tx, self.coordinator, lease.lease_id, verdict))

    def train(self) -> None:
        with self.look() as db:
            newest = newest_version(db)
        assert newest is not None
        if newest == SPEC_LONG.last_version:
            return

        def take(tx: Transaction) -> Any:
            return batches.find_batch(tx.db, newest) or batches.form_batch(tx, self.coordinator, newest)

        if self.act(None, take) is not None and self.rng.random() < 0.7:
            self.announce()

    def pass_time(self) -> None:
        self.now_s += self.rng.choice([1, 5, 20, 40])
        self.beat_relay()
        tick(self.coordinator)

    def crash(self) -> None:
        self.coordinator.close()
        self.open()

    def live(self, steps: int) -> None:
        happenings = [self.ask_lease] * 6 + [self.deliver] * 6 + [self.claim] * 6 + [self.judge] * 8
        happenings += [self.train] * 4 + [self.pass_time] * 3 + [self.crash]
        for _ in range(steps):
            self.rng.choice(happenings)()

    def live_in_groups(self, groups: int) -> int:
        """Commits several happenings together, as the writer does; returns how many groups were committed."""
        happenings = [self.ask_lease] * 6 + [self.deliver] * 6 + [self.claim] * 6 + [self.judge] * 8
        happenings += [self.train, self.abandon]
        done = 0
        for _ in range(groups):
            done += self.commit_together(self.rng.choices(happenings, k=self.rng.randint(2, 12)))
            if self.rng.random() < 0.3:
                self.pass_time()
            if self.rng.random() < 0.05:
                self.crash()
        return done

    def commit_together(self, happenings: list[Callable[[], None]]) -> bool:
        before = copy.deepcopy((self.held, self.claimed, self.checks))
        try:
            with self.coordinator.database.group() as self.group:
                for happening in happenings:
                    happening()
        except RedoGroup:  # nothing of it was committed
            self.held, self.claimed, self.checks = before
            return False
        finally:
            self.group = None
        return True


@pytest.mark.parametrize(("seed", "in_groups"), [(1, False), (2, False), (3, True), (4, True)])
def test_invariants_of_a_random_run(tmp_path: Path, seed: int, in_groups: bool) -> None:
    life = Life(tmp_path, seed)
    if in_groups:
        assert life.live_in_groups(100) > 80
    else:
        life.live(350)
    events = read_ledger(life.database or tmp_path / DATABASE_FILE)
    verify_chain(events)
    books = replay(events)
    with life.coordinator.database.read() as db:
        lease_rows = db.execute(select(lease_table)).all()
        node_rows = {row.node: row for row in db.execute(select(node_table))}
    life.coordinator.close()
    by_type = {
        type: [event.body for event in events if event.type == type]
        for type in {event.type for event in events}
    }
    verdicts = by_type["verdict.given"]

    # One end per lease, and every end is in the ledger.
    ends = Counter(body["lease_id"] for body in verdicts + by_type.get("lease.void", []))
    assert set(ends.values()) == {1}
    assert set(ends) == {row.lease_id for row in lease_rows if row.state in lease_states.TERMINAL}

    # Credit is the tokens of accepted work; trust is what the verdicts add up to.
    for node, row in node_rows.items():
        own = [body for body in verdicts if body["node"] == node]
        revoked = {id for body in by_type.get("credit.revoked", []) for id in body["lease_ids"]}
        assert row.credit == sum(
            body["output_tokens"]
            for body in own
            if body["code"] == "accepted" and body["lease_id"] not in revoked
        )
        book = books.nodes[node]
        assert (row.trust, row.rejected, row.streak, row.lapses, row.trust_since_s) == (
            book.standing.trust.value,
            book.standing.rejected,
            book.standing.streak,
            book.standing.lapses,
            book.standing.since_s,
        )
        assert (row.credit, row.accepted, row.void) == (book.credit, book.accepted, book.void)

    # Nothing is leased to a node after its ejection.
    banned_at = {event.body["node"]: event.seq for event in events if event.type == "node.banned"}
    for event in events:
        if event.type == "lease.issued":
            assert event.seq < banned_at.get(event.body["node"], event.seq + 1)

    # A group is trained on once, and only if its lease was accepted for training, with a version fresh enough.
    trained = [group for body in by_type.get("batch.formed", []) for group in body["group_ids"]]
    assert len(trained) == len(set(trained)) > 0
    accepted = {body["lease_id"] for body in verdicts if body["code"] == "accepted"}
    purposes = {row.lease_id: row.purpose for row in lease_rows}
    assert all(group[:32] in accepted and purposes[group[:32]] == "train" for group in trained)
    versions = {body["lease_id"]: body["policy_version"] for body in by_type["submission.received"]}
    for body in by_type["batch.formed"]:
        assert all(
            0 <= body["version"] - versions[group[:32]] <= SPEC_LONG.max_lag for group in body["group_ids"]
        )

    # A secret is out only when every lease it seeded has ended. A debt that is leased again has the seed its node knows already.
    open_epochs = {
        row.epoch for row in lease_rows if row.state in lease_states.OPEN and row.unit == row.lease_id
    }
    revealed = {body["epoch"] for body in by_type.get("epoch.revealed", [])}
    assert not revealed & open_epochs and revealed
