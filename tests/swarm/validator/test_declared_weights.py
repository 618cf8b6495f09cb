"""Weights rounded to 8 bits, made by the real engine: admitted if declared, else refused, and lies about them too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from honest_work import make_claim, make_lease, make_policy, make_spec

from shoal.rollout.adversary.lying_engines import AlteredEngine, quantised_by_channel
from shoal.rollout.engine.api import Engine, make_requests, make_table
from shoal.rollout.engine.selection import AutoEngine, compute_class
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.swarm.validator.format_checks import check_weights
from shoal.swarm.validator.judge import judge, judge_many
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.requirements import WeightFormat, declared_weights
from shoal.wire.rollouts import RolloutTable, encode
from shoal.wire.run_spec import AdmittedWeights, ProofSpec, RunSpec

pytestmark = pytest.mark.integration

SPEC = make_spec(admitted_weights=AdmittedWeights(int8=0.5, fp8=0.25))
LEASE = make_lease(SPEC)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_policy(path)
    return path / "tiny-0"


def work(
    folder: Path, weights: WeightFormat | None, change: Callable[[Engine], Engine] | None = None
) -> RolloutTable:
    """Returns what an engine with these weights generates and declares for the lease."""
    own = AutoEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=64, device="cpu")
    own.weights = weights
    engine = own if change is None else change(own)
    engine.load(folder, 0)
    engine.submit(make_requests(LEASE, engine.tokenizer))
    rows = []
    while engine.has_work:
        rows += engine.step()
    rows.sort(key=lambda row: (row.request.prompt_index, row.request.sample_index))
    made_by = compute_class(own, device="cpu", compute_dtype="float32")
    return make_table(LEASE, 0, rows, str(made_by))


def verdict(table: RolloutTable, spec: RunSpec, policy: LoadedPolicy, lease: Lease = LEASE) -> Verdict:
    data = encode(table)
    with TableReader() as reader:
        return judge(data, make_claim(lease, data), spec, policy, reader=reader, control_seed=7)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_declared_and_admitted_weights_are_checked_with_weights_rounded_alike(
    folder: Path, policy: LoadedPolicy, weights: WeightFormat
) -> None:
    table = work(folder, weights)
    assert declared_weights(table.made_by) == weights
    found = verdict(table, SPEC, policy)
    assert found.code == ACCEPTED, found.detail
    assert found.evidence["weights"] == weights
    assert str(found.evidence["checked_by"]).endswith(f"/float32-{weights}")
    # As exactly as the published weights are checked: hardly a point of a proof differs.
    assert float(found.evidence["exponent_mismatches_mean"]) < 1


def test_declared_weights_that_are_not_admitted_are_refused_by_name(
    folder: Path, policy: LoadedPolicy
) -> None:
    found = verdict(work(folder, "int8"), make_spec(admitted_weights=AdmittedWeights(fp8=0.5)), policy)
    assert found.code == "reject.weights_not_admitted"
    assert "'int8'" in found.detail and found.detail.endswith("admits fp8")
    none = verdict(work(folder, "int8"), make_spec(), policy)
    assert none.code == "reject.weights_not_admitted" and "no other weights" in none.detail


def test_undeclared_rounded_weights_stay_a_lie(folder: Path, policy: LoadedPolicy) -> None:
    table = work(folder, "int8")
    silent = replace(table, made_by=table.made_by.removesuffix("-int8"))
    assert verdict(silent, SPEC, policy).code == "reject.wrong_computation"


def test_other_weights_than_the_declared_ones_are_refused(folder: Path, policy: LoadedPolicy) -> None:
    int4 = work(folder, None, lambda own: AlteredEngine(own, lambda w: quantised_by_channel(w, bits=4)))
    int8 = f"{int4.made_by}-int8"
    assert verdict(replace(int4, made_by=int8), SPEC, policy).code == "reject.wrong_computation"
    exact = work(folder, None)
    assert verdict(exact, SPEC, policy).code == ACCEPTED
    assert verdict(replace(exact, made_by=int8), SPEC, policy).code == "reject.wrong_computation"
    fp8 = work(folder, "fp8")
    assert verdict(replace(fp8, made_by=int8), SPEC, policy).code == "reject.wrong_computation"
    unheard_of = replace(exact, made_by=f"{exact.made_by}-int4")
    assert verdict(unheard_of, SPEC, policy).code == "reject.weights_not_admitted"


def test_held_out_work_needs_the_published_weights(folder: Path) -> None:
    table = work(folder, "int8")
    held_out = LEASE.model_copy(update={"purpose": "eval"})
    with pytest.raises(Rejected, match="held-out work; the run admits int8, fp8, for training only"):
        check_weights(table, held_out, SPEC.admitted_weights)
    assert check_weights(table, LEASE, SPEC.admitted_weights) == "int8"


def test_submissions_with_different_weights_are_judged_together(folder: Path, policy: LoadedPolicy) -> None:
    tables = [work(folder, None), work(folder, "int8"), work(folder, "fp8"), work(folder, "int8")]
    files = [encode(table) for table in tables]
    with TableReader() as reader:
        claimed = [(data, make_claim(LEASE, data)) for data in files]
        found = list(judge_many(claimed, SPEC, policy, reader=reader, control_seed=7))
    assert [one.code if isinstance(one, Verdict) else one for one in found] == [ACCEPTED] * 4
    assert [one.evidence.get("weights") for one in found if isinstance(one, Verdict)] == [
        None,
        "int8",
        "fp8",
        "int8",
    ]


def test_the_engine_of_transformers_rounds_alike(folder: Path, policy: LoadedPolicy) -> None:
    engine = TransformersEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=64, device="cpu")
    engine.weights = "int8"
    engine.load(folder, 0)
    engine.submit(make_requests(LEASE, engine.tokenizer))
    rows = []
    while engine.has_work:
        rows += engine.step()
    rows.sort(key=lambda row: (row.request.prompt_index, row.request.sample_index))
    table = make_table(LEASE, 0, rows, "x86_64/transformers/torch-2.13/float32-int8")
    assert verdict(table, SPEC, policy).code == ACCEPTED
