"""The coordinator's tables driven by hypothesis under a virtual clock: after every step, what must always hold."""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import func, select
from test_random_life import Life

from ledger_reader import read_ledger
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.rules import lease_states
from shoal.swarm.coordinator.store.schema import groups, leases, nodes, verdicts
from shoal.wire.ledger import verify_chain


class Swarm(RuleBasedStateMachine):
    @initialize(randoms=st.randoms(use_true_random=False))
    def begin(self, randoms: object) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.life = Life(Path(self.folder.name), seed=0)
        self.life.rng = randoms  # type: ignore[assignment]
        self.ends: dict[str, str] = {}

    @rule()
    def ask_lease(self) -> None:
        self.life.ask_lease()

    @rule()
    def deliver(self) -> None:
        self.life.deliver()

    @rule()
    def abandon(self) -> None:
        self.life.abandon()

    @rule()
    def check(self) -> None:
        self.life.claim()
        self.life.judge()

    @rule()
    def train(self) -> None:
        self.life.train()

    @rule()
    def pass_time(self) -> None:
        self.life.pass_time()

    @rule()
    def fall_silent_and_come_back(self) -> None:
        """Going offline and coming back does not change trust."""
        self.life.pass_time()
        before = self.trusts()
        self.life.open_sessions_again()
        assert before == self.trusts()

    @rule()
    def crash(self) -> None:
        self.life.crash()

    def trusts(self) -> dict[str, str]:
        with self.life.coordinator.database.read() as db:
            return {row.node: row.trust for row in db.execute(select(nodes.c.node, nodes.c.trust))}

    @invariant()
    def ends_are_ends(self) -> None:
        with self.life.coordinator.database.read() as db:
            rows = db.execute(select(leases.c.lease_id, leases.c.state)).all()
            per_node = db.execute(
                select(nodes.c.trust, func.count())
                .join(leases, leases.c.node == nodes.c.node)
                .where(leases.c.state.in_(lease_states.AWAITED))
                .group_by(nodes.c.node, nodes.c.trust)
            ).all()
        for row in rows:
            before = self.ends.get(row.lease_id)
            if before is not None and before != row.state:
                assert (before, row.state) == ("accepted", "revoked")
            if row.state in lease_states.TERMINAL:
                self.ends[row.lease_id] = row.state
        # No node holds more leases than allowed, and banned nodes hold none.
        for trust, count in per_node:
            assert trust != "banned" and count <= 2

    @invariant()
    def credit_is_what_was_accepted(self) -> None:
        with self.life.coordinator.database.read() as db:
            earned = db.execute(
                select(func.coalesce(func.sum(verdicts.c.credit), 0)).where(verdicts.c.revoked_for.is_(None))
            ).scalar_one()
            shown = db.execute(select(func.coalesce(func.sum(nodes.c.credit), 0))).scalar_one()
            unfit = db.execute(
                select(func.count())
                .select_from(groups)
                .join(leases, leases.c.lease_id == groups.c.lease_id)
                .where(groups.c.state == "ready", leases.c.state != "accepted")
            ).scalar_one()
        assert earned == shown
        assert unfit == 0

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        events = read_ledger(self.life.database or Path(self.folder.name) / DATABASE_FILE)
        verify_chain(events)
        books = replay(events)
        with self.life.coordinator.database.read() as db:
            for row in db.execute(select(nodes)).all():
                book = books.nodes[row.node]
                assert (row.trust, row.credit, row.streak, row.lapses) == (
                    book.standing.trust.value,
                    book.credit,
                    book.standing.streak,
                    book.standing.lapses,
                )
        self.life.coordinator.close()
        self.folder.cleanup()


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
