"""When the validator grades: after the proofs, and under a clock before them."""

import time

import pytest
from honest_work import make_claim, make_lease, make_policy, make_spec, make_table, sharpen

from shoal.swarm.validator import judge as judge_module
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.tasks.grading import pool
from shoal.tasks.procedural import Sort
from shoal.tasks.task import WRONG, Problem, Reward
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Verdict
from shoal.wire.rollouts import RolloutTable, encode

SPEC = make_spec()
LEASE = make_lease(SPEC)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return sharpen(make_policy(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def honest(policy: LoadedPolicy) -> RolloutTable:
    return make_table(LEASE, policy)


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory, policy: LoadedPolicy) -> RolloutTable:
    """Returns answers and proofs of another model."""
    return make_table(LEASE, sharpen(make_policy(tmp_path_factory.mktemp("others"), seed=1)))


class SlowGrading:
    """Counts the answers that are graded, and takes a while for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.count = 0

        def reward(task: Sort, problem: Problem, text: str, num_tokens: int) -> Reward:
            self.count += 1
            time.sleep(seconds)
            return WRONG

        monkeypatch.setattr(Sort, "reward", reward)


def verdict(table: RolloutTable, policy: LoadedPolicy, reader: TableReader, *, checks: str) -> Verdict:
    data = encode(table)
    claim = make_claim(LEASE, data).model_copy(update={"checks": checks})
    return judge(data, claim, SPEC, policy, reader=reader, control_seed=5)


def test_nothing_is_graded_before_the_proofs_passed(
    monkeypatch: pytest.MonkeyPatch, policy: LoadedPolicy, reader: TableReader, forged: RolloutTable
) -> None:
    grading = SlowGrading(monkeypatch, 0.0)
    assert verdict(forged, policy, reader, checks="full").code.startswith("reject.")
    assert grading.count == 0


def test_a_spared_submission_that_is_slow_to_grade_gets_every_check(
    monkeypatch: pytest.MonkeyPatch,
    policy: LoadedPolicy,
    reader: TableReader,
    honest: RolloutTable,
    forged: RolloutTable,
) -> None:
    """Sleeping programs in a file made without the model are refused; honest work that is slow to grade is accepted."""
    fast = SlowGrading(monkeypatch, 0.0)
    assert verdict(honest, policy, reader, checks="rewards").checks == "rewards"
    assert fast.count == len(honest.rows)
    SlowGrading(monkeypatch, 0.4)
    monkeypatch.setattr(judge_module, "SPARED_S", 0.2)
    started_s = time.monotonic()
    assert verdict(forged, policy, reader, checks="rewards").code.startswith("reject.")
    assert time.monotonic() - started_s < 10
    found = verdict(honest, policy, reader, checks="rewards")
    assert (found.code, found.checks) == (ACCEPTED, "full")


def test_a_slow_grader_is_not_the_nodes_fault(
    monkeypatch: pytest.MonkeyPatch, policy: LoadedPolicy, reader: TableReader, honest: RolloutTable
) -> None:
    SlowGrading(monkeypatch, 0.4)
    monkeypatch.setattr(pool, "ROW_S", 0.01)
    with pytest.raises(CannotCheck, match="were not graded within"):
        verdict(honest, policy, reader, checks="full")
