"""Lies about tokens from the engine to the conviction: the validator's scores, added up by the coordinator's rule."""

import threading
from functools import partial

import pytest
import torch

from shoal.cli.arena.contest import Arena, ArenaSettings, Way, sent_states
from shoal.cli.arena.own_decision import row_facts
from shoal.cli.arena.schemes import PublishedToploc, verify
from shoal.model.builtin import create_model
from shoal.rollout.adversary.adaptive import Adapted, EdgeEngine, PlainEngine
from shoal.rollout.engine.api import Behaviour
from shoal.swarm.coordinator.rules.cumulative_evidence import (
    Sums,
    convicting,
    next_sums,
    scores_of,
)
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.recompute import RowsToCheck
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.proof_noise import Noise

pytestmark = pytest.mark.integration
LIFE = 80
"""Submissions of 16 answers with up to 12 tokens."""


class OneClass(Arena):
    """A run in which all work is of one compute class, the plain decoder."""

    noise: Noise

    def ways(self) -> list[Way]:
        return [Way("plain engine", make=partial(Adapted, PlainEngine))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OneClass:
    folder = tmp_path_factory.mktemp("tokens") / "tiny"
    create_model("tiny", folder, 0)
    run = OneClass(ArenaSettings(model="tiny", new_tokens=12, calibrate_rows=512), folder, threading.Event())
    with torch.inference_mode():
        run.noise = run.calibrate()
    return run


@torch.inference_mode()
def life(run: OneClass, behaviour: Behaviour) -> tuple[list[str], str | None]:
    """Returns the validator's codes for LIFE submissions of a node, and the statistic that convicts it, if one does.

    The baseline is 0: in a run of honest nodes one liar does not move the median.
    """
    noise = run.noise
    leases = run.leases(LIFE)
    tables = run.work(behaviour, run.engine(behaviour), leases)
    codes: list[str] = []
    sums: Sums = {}
    for table, lease in zip(tables, leases, strict=True):
        rows = run.check([RowsToCheck(table.rows, lease)])
        width = rows[0].states_TH.shape[1]
        proofs = PublishedToploc().commit([sent_states(row, width) for row in rows])
        checks = verify(rows, proofs, PublishedToploc.proof)
        facts = [row_facts(row, segments) for row, segments in zip(rows, checks, strict=True)]
        scores = fact_checks.score_facts(table.rows, facts, noise)
        evidence = fact_checks.evidence(table.rows, facts, run.tolerances, scores)
        try:
            fact_checks.check_facts(table.rows, facts, run.tolerances, noise, scores)
            codes.append(ACCEPTED)
        except Rejected as rejected:
            codes.append(rejected.code)
        found = scores_of(codes[-1], evidence)
        sums = next_sums(sums, found, {})
        if (why := convicting(sums)) is not None:
            return codes, why
    return codes, None


def test_honest_draws_are_never_convicted(run: OneClass) -> None:
    codes, why = life(run, Adapted(PlainEngine))
    assert why is None and codes == [ACCEPTED] * LIFE


def test_draws_steered_within_the_tolerance_pass_one_by_one_and_are_convicted_together(run: OneClass) -> None:
    codes, why = life(run, Adapted(partial(EdgeEngine, distance=0.001)))
    assert ACCEPTED in codes and not any(code.startswith("reject.") for code in codes)
    assert why in ("draws", "uncertain") and len(codes) < LIFE


def test_draws_steered_further_are_refused_at_once(run: OneClass) -> None:
    codes, _ = life(run, Adapted(partial(EdgeEngine, distance=0.015)))
    assert codes[0] == "reject.wrong_sampling"
