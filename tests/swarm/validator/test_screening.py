"""One row of a large submission is computed first: rows that were made up are refused without computing the others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from honest_work import make_claim, make_lease, make_policy, make_spec, make_table, sharpen

from shoal.swarm.validator import path_checks
from shoal.swarm.validator import recompute as recompute_module
from shoal.swarm.validator.judge import judge, judge_many
from shoal.swarm.validator.prefill import LoadedPolicy, Model, prefill
from shoal.swarm.validator.table_reader import TableReader
from shoal.toploc import build_proofs
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Verdict
from shoal.wire.rollouts import Rollout, RolloutTable, encode
from shoal.wire.run_spec import Sampling

SPEC = make_spec(sampling=Sampling(max_new_tokens=12, samples_per_prompt=8))
LEASE = make_lease(SPEC, prompts=8)
"""64 rows: the fewest of which one is computed first."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """A policy with prefills so small that 64 rows need more than four of them."""
    return replace(sharpen(make_policy(tmp_path_factory.mktemp("policy"))), batch_tokens=64)


@pytest.fixture(scope="module")
def honest(policy: LoadedPolicy) -> RolloutTable:
    return make_table(LEASE, policy)


@pytest.fixture(scope="module")
def lie(policy: LoadedPolicy, tmp_path_factory: pytest.TempPathFactory) -> RolloutTable:
    other = sharpen(make_policy(tmp_path_factory.mktemp("other"), seed=1))
    return make_table(LEASE, other)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The rows that were computed."""
    rows_computed: list[Rollout] = []

    def noted(model: Model, rows: Sequence[Rollout], *, plain: bool = False) -> list[torch.Tensor]:
        rows_computed.extend(rows)
        return prefill(model, rows, plain=plain)

    monkeypatch.setattr(recompute_module, "prefill", noted)
    # An answer of one token has no proof, so it refuses nothing.
    monkeypatch.setattr(
        path_checks, "_draw_row", lambda rows: max(rows, key=lambda row: len(row.output_tokens))
    )
    return rows_computed


Judge = Callable[[RolloutTable], Verdict]


@pytest.fixture
def verdict(policy: LoadedPolicy, reader: TableReader) -> Judge:
    def found(table: RolloutTable, policy: LoadedPolicy = policy) -> Verdict:
        data = encode(table)
        return judge(data, make_claim(LEASE, data), SPEC, policy, reader=reader, control_seed=1)

    return found


def test_any_row_may_be_drawn(honest: RolloutTable) -> None:
    drawn = {path_checks._draw_row(honest.rows) for _ in range(5000)}
    assert drawn == set(honest.rows), "rows that are never drawn could be made up"


def test_made_up_rows_are_refused_by_one_of_them(
    verdict: Judge, lie: RolloutTable, computed: list[Rollout]
) -> None:
    refused = verdict(lie)
    assert refused.code == "reject.wrong_computation" and refused.evidence["rows_computed"] == 1
    assert len(computed) == 1


def test_a_made_up_proof_keeps_its_code(
    verdict: Judge, policy: LoadedPolicy, honest: RolloutTable, computed: list[Rollout]
) -> None:
    """The tokens are the model's own draws, and the proofs are of random states."""
    hidden, torch_seed = policy.decoder.shape.hidden_size, torch.Generator().manual_seed(0)
    states = [torch.randn(len(row.output_tokens) - 1, hidden, generator=torch_seed) for row in honest.rows]
    proofs = build_proofs(states, topk=LEASE.proof.topk, segment_tokens=LEASE.proof.segment_tokens)
    rows = tuple(replace(row, proof=proof) for row, proof in zip(honest.rows, proofs, strict=True))
    assert verdict(replace(honest, rows=rows)).code == "reject.forged_proof"
    assert len(computed) == 1


def test_honest_work_is_accepted_with_the_same_evidence(
    verdict: Judge, honest: RolloutTable, computed: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    screened = verdict(honest)
    assert screened.code == ACCEPTED and len(computed) == len(honest.rows) + 1
    computed.clear()
    monkeypatch.setattr(path_checks, "SCREENED_ROWS", len(honest.rows) + 1)
    plain = verdict(honest)
    assert plain.code == ACCEPTED and len(computed) == len(honest.rows), (
        "a submission of few rows is not screened"
    )
    assert {**screened.evidence, "grade_s": 0} == {**plain.evidence, "grade_s": 0}


def test_small_submissions_are_not_screened(
    policy: LoadedPolicy, lie: RolloutTable, computed: list[Rollout], reader: TableReader
) -> None:
    data = encode(lie)
    large = replace(policy, batch_tokens=4096)
    refused = judge(data, make_claim(LEASE, data), SPEC, large, reader=reader, control_seed=1)
    assert refused.code == "reject.wrong_computation" and "rows_computed" not in refused.evidence
    assert len(computed) == len(lie.rows)


def test_a_lie_does_not_end_the_check_of_others(
    policy: LoadedPolicy,
    honest: RolloutTable,
    lie: RolloutTable,
    computed: list[Rollout],
    reader: TableReader,
) -> None:
    files = [encode(table) for table in (lie, honest, lie)]
    submissions = [(data, make_claim(LEASE, data)) for data in files]
    found = list(judge_many(submissions, SPEC, policy, reader=reader, control_seed=1))
    codes = [one.code for one in found if isinstance(one, Verdict)]
    assert codes == ["reject.wrong_computation", ACCEPTED, "reject.wrong_computation"]
    assert len(computed) == 3 + len(honest.rows)
