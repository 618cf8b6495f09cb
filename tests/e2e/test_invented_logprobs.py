"""Made-up log-probs in a run with `loss = "gspo"` that spares checks: what was not checked is not trained on, and a check finds the lie.

In gspo one answer whose log-probs are far too low could be the whole gradient; tests/trainer/test_loss.py bounds its share.
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from liar_client import Liar
from sqlalchemy import select
from swarm_processes import Swarm

from shoal.rollout.engine.api import Behaviour
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.swarm.coordinator.store.database import read_only
from shoal.swarm.coordinator.store.schema import groups
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HONEST = 6
"""Submissions before the first lie, after which no more than CHECK_RATE are checked."""
CHECK_RATE = 0.25
SPARED = 2
"""Lies that must be spared their check before the test ends."""
TRIES = 12
"""Keys of the liar. Each tells four lies on average, of which the last one is checked."""


class InventedLogprobs(Behaviour):
    """Works honestly at first. Then it reports the tokens of one answer as far less likely than they were."""

    def __init__(self) -> None:
        self.num_honest = 0
        self.lies: list[str] = []
        """The leases of the lies."""

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        if self.num_honest < HONEST:
            self.num_honest += 1
            return table
        self.lies.append(lease.lease_id)
        first, *others = table.rows
        logprobs = tuple(logprob - 19.9 for logprob in first.logprobs)
        return dataclasses.replace(table, rows=(dataclasses.replace(first, logprobs=logprobs), *others))


def lie_until_caught(swarm: Swarm, folder: Path) -> list[str]:
    """Earns trust with an invited key and lies until it is refused. Returns the leases of the lies that were not checked."""
    behaviour = InventedLogprobs()
    liar = Liar(swarm.url, folder, invite=swarm.invite(), behaviour=behaviour)
    try:
        while (code := liar.deliver(liar.made).code) in (ACCEPTED, "void.stale"):
            pass
    finally:
        liar.close()
    assert code == "reject.wrong_logprobs"
    verdicts = [one for one in swarm.verdicts(liar.node) if one["lease_id"] in behaviour.lies]
    return [one["lease_id"] for one in verdicts if one["code"] == ACCEPTED]


def test_invented_logprobs_are_not_trained_on(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    swarm = Swarm(tmp_path, last_version=100_000, relays=1, workers=1, deadline_s=300.0)  # ends with the test
    settings = ("trainer.loss=gspo", "coordinator.admission=invite", f"coordinator.check_rate={CHECK_RATE}")
    with contextlib.ExitStack() as running:
        running.push(swarm.start(*(word for setting in settings for word in ("--set", setting))))
        swarm.wait_for_version(1)
        spared: list[str] = []
        for number in range(TRIES):
            spared += lie_until_caught(swarm, tmp_path / f"liar-{number}")
            if len(spared) >= SPARED:
                break
        assert len(spared) >= SPARED
        swarm.wait_for_versions(1)
        swarm.assert_only_accepted_work_is_trained_on()
        assert swarm.trained_leases().isdisjoint(spared)
        revoked = [event.body for event in swarm.ledger() if event.type == "credit.revoked"]
        assert set(spared) <= {lease_id for body in revoked for lease_id in body["lease_ids"]}
        with read_only(swarm.folder / "coordinator" / DATABASE_FILE) as db:
            states = db.execute(select(groups.c.lease_id, groups.c.state)).all()
        assert {row.state for row in states if row.lease_id in spared} <= {"withdrawn", "stale", "dropped"}
