"""Compute classes: rows that two real engines made, noise by pair of classes, and the second path for unknown ones."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from honest_work import make_claim, make_lease, make_policy, make_spec

from shoal import toploc
from shoal.rollout.adversary.lying_engines import AlteredEngine, quantised_by_channel
from shoal.rollout.engine.api import Engine, make_requests, make_table
from shoal.rollout.engine.selection import AutoEngine, compute_class
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.swarm.validator.fact_checks import units_of
from shoal.swarm.validator.judge import judge
from shoal.swarm.validator.path_checks import RefusedWithEvidence, check_by_paths
from shoal.swarm.validator.prefill import LoadedPolicy, Model
from shoal.swarm.validator.prefill import prefill as real_prefill
from shoal.swarm.validator.recompute import recompute
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED
from shoal.wire.lease import Lease, Verdict
from shoal.wire.proof_noise import Noise, PairNoise
from shoal.wire.rollouts import Rollout, RolloutTable, encode
from shoal.wire.run_spec import ProofSpec, RunSpec, Sampling, default_tolerances

pytestmark = pytest.mark.integration

SAMPLING = Sampling(max_new_tokens=12, samples_per_prompt=4)
SPEC = make_spec(compute_dtype="bfloat16", sampling=SAMPLING, tolerances=default_tolerances("bfloat16"))
LEASES = range(100, 113)
"""13 leases of 16 rows: a calibration needs 200."""


def engine_of(kind: str) -> Engine:
    if kind == "transformers":
        return TransformersEngine(compute_dtype="bfloat16", proof=ProofSpec(), max_rows=64, device="cpu")
    return AutoEngine(compute_dtype="bfloat16", proof=ProofSpec(), max_rows=64, device="cpu")


def work(engine: Engine, leases: Sequence[Lease], made_by: str) -> list[RolloutTable]:
    tables = []
    for lease in leases:
        engine.submit(make_requests(lease, engine.tokenizer))
        rows = []
        while engine.has_work:
            rows += engine.step()
        rows.sort(key=lambda row: (row.request.prompt_index, row.request.sample_index))
        tables.append(make_table(lease, 0, rows, made_by))
    return tables


class World:
    """A model with the engines of two classes and a calibration of both, checked by both paths."""

    def __init__(self, folder: Path) -> None:
        self.policy = make_policy(folder, dtype=torch.bfloat16)
        self.folder = folder / "tiny-0"
        self.engines = {kind: engine_of(kind) for kind in ("torch", "transformers")}
        self.classes = {}
        pairs = {}
        leases = [make_lease(SPEC, number=number) for number in LEASES]
        for kind, engine in self.engines.items():
            engine.load(self.folder, 0)
            own = compute_class(self.engines["torch"], device="cpu", compute_dtype="bfloat16")
            self.classes[kind] = str(own._replace(engine=kind))
            tables = work(engine, leases, self.classes[kind])
            for path in (self.policy, replace(self.policy, plain=True)):
                units = [
                    units_of(row, fact)
                    for table, lease in zip(tables, leases, strict=True)
                    for row, fact in zip(
                        table.rows, recompute(table.rows, lease, path, control_seed=1), strict=True
                    )
                ]
                pairs[self.classes[kind], str(path.compute_class())] = units
        self.noise = toploc.measure_noise(
            {f"{a} to {b}": units for (a, b), units in pairs.items()}, model="tiny", compute_dtype="bfloat16"
        )
        each = tuple(
            PairNoise(
                made_by=a,
                checked_by=b,
                noise=toploc.measure_noise({"pair": units}, model="tiny", compute_dtype="bfloat16"),
            )
            for (a, b), units in pairs.items()
        )
        self.noise = self.noise.model_copy(update={"pairs": each})

    def spec(self, *made_by: str) -> RunSpec:
        """Returns the terms of a run whose calibration has the pairs of these classes."""
        pairs = tuple(pair for pair in self.noise.pairs if pair.made_by in made_by)
        return SPEC.model_copy(update={"noise": self.noise.model_copy(update={"pairs": pairs})})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("classes"))


def verdict(table: RolloutTable, lease: Lease, spec: RunSpec, policy: LoadedPolicy) -> Verdict:
    data = encode(table)
    with TableReader() as reader:
        return judge(data, make_claim(lease, data), spec, policy, reader=reader, control_seed=7)


def test_the_text_of_a_class_has_four_parts(world: World) -> None:
    made_by, checked_by = world.noise.pairs[0].made_by, world.noise.pairs[0].checked_by
    assert [len(text.split("/")) for text in (made_by, checked_by)] == [4, 4]
    assert made_by.split("/")[1] == "torch" and checked_by.split("/")[1] == "prefill"
    assert (
        made_by.endswith("/bfloat16") and Noise.parse(world.noise.model_dump_json().encode()) == world.noise
    )


@pytest.mark.parametrize("kind", ["torch", "transformers"])
@pytest.mark.parametrize("plain", [False, True])
def test_honest_work_of_a_class_is_judged_by_the_noise_of_its_pair(
    world: World, kind: str, plain: bool
) -> None:
    lease = make_lease(SPEC, number=1)
    (table,) = work(world.engines[kind], [lease], world.classes[kind])
    policy = replace(world.policy, plain=plain)
    found = verdict(table, lease, world.spec(*world.classes.values()), policy)
    assert found.code == ACCEPTED, found.detail
    assert found.evidence["made_by"] == world.classes[kind] and found.evidence["pair_measured"] == 1
    assert found.evidence["checked_by"] == str(policy.compute_class())


def test_weights_of_8_bits_that_are_not_declared_are_not_accepted(world: World) -> None:
    lease = make_lease(SPEC, number=2, prompts=16)
    liar = AlteredEngine(engine_of("torch"), lambda weight: quantised_by_channel(weight, bits=8))
    liar.load(world.folder, 0)
    (table,) = work(liar, [lease], world.classes["torch"])
    assert verdict(table, lease, world.spec(*world.classes.values()), world.policy).code != ACCEPTED


def test_work_of_an_unknown_class_is_refused_only_if_two_paths_refuse_it(world: World) -> None:
    lease, other = make_lease(SPEC, number=3), make_lease(SPEC, number=4)
    (table,) = work(world.engines["torch"], [lease], world.classes["torch"])
    (wrong,) = work(world.engines["torch"], [other], world.classes["torch"])
    unknown, known = world.spec(world.classes["transformers"]), world.spec(*world.classes.values())
    accepted = verdict(table, lease, unknown, world.policy)
    assert accepted.code == ACCEPTED and accepted.evidence["pair_measured"] == 0
    # The first path fails for a reason of its own: it has the draws of another lease.
    facts = recompute(table.rows, other, world.policy, control_seed=5)
    claim = make_claim(lease, encode(table))
    evidence = check_by_paths(table, claim, facts, unknown, world.policy, threading.Event())
    assert str(evidence["refused_by_first_path"]).startswith(("reject.", "void."))
    assert str(evidence["checked_by"]).split("/")[1] == "plain"
    with pytest.raises(RefusedWithEvidence):
        check_by_paths(table, claim, facts, known, world.policy, threading.Event())
    # A lie about the lease: both paths refuse it.
    facts = recompute(wrong.rows, lease, world.policy, control_seed=5)
    with pytest.raises(RefusedWithEvidence):
        check_by_paths(wrong, claim, facts, unknown, world.policy, threading.Event())


@pytest.mark.parametrize(("seed", "code"), [(1, "reject.wrong_computation"), (0, "void.uncertain")])
def test_a_lie_of_an_unknown_class_is_not_void_infra_if_the_second_path_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, seed: int, code: str
) -> None:
    """Declaring a class that nobody knows must not turn a refusal into a fault of the validator, which has no consequence."""
    lease, other = make_lease(SPEC, number=7), make_lease(SPEC, number=8)
    make_policy(world.folder.parent, seed=seed, dtype=torch.bfloat16)
    engine = engine_of("torch")
    engine.load(world.folder.parent / f"tiny-{seed}", 0)
    (table,) = work(engine, [lease], "gpu9000/torch/1/bfloat16")
    # The first path has the draws of another lease, so it refuses honest states as well.
    facts = recompute(table.rows, other, world.policy, control_seed=5)

    def prefill(model: Model, rows: Sequence[Rollout], *, plain: bool = False) -> list[torch.Tensor]:
        assert plain, "only the second path is computed here"
        raise torch.OutOfMemoryError("plain attention needs all scores at once")

    monkeypatch.setattr("shoal.swarm.validator.recompute.prefill", prefill)
    known = world.spec(*world.classes.values())
    with pytest.raises(RefusedWithEvidence) as refused:
        check_by_paths(table, make_claim(lease, encode(table)), facts, known, world.policy, threading.Event())
    assert refused.value.code == code
    assert seed or "the second path could not check it: out of memory" in refused.value.detail


@pytest.mark.parametrize("wrong_path", [False, True])
def test_one_row_of_an_unknown_class_refuses_only_by_two_paths(
    world: World, monkeypatch: pytest.MonkeyPatch, wrong_path: bool
) -> None:
    """A first path that computes something else refuses honest work of an unknown class no earlier than it did without screening."""
    lease = make_lease(SPEC, number=9, prompts=16)
    other = make_policy(world.folder.parent, seed=1, dtype=torch.bfloat16)
    engine = engine_of("torch")
    engine.load(world.folder if wrong_path else world.folder.parent / "tiny-1", 0)
    (table,) = work(engine, [lease], "gpu9000/torch/1/bfloat16")
    computed: list[tuple[bool, int]] = []

    def prefill(model: Model, rows: Sequence[Rollout], *, plain: bool = False) -> list[torch.Tensor]:
        computed.append((plain, len(rows)))
        return real_prefill(other.decoder if wrong_path and not plain else model, rows, plain=plain)

    monkeypatch.setattr("shoal.swarm.validator.recompute.prefill", prefill)
    longest = max(table.rows, key=lambda row: len(row.output_tokens))  # one token has no proof
    monkeypatch.setattr("shoal.swarm.validator.path_checks._draw_row", lambda rows: longest)
    policy = replace(world.policy, batch_tokens=64)  # so that 64 rows are a large submission
    found = verdict(table, lease, world.spec(*world.classes.values()), policy)
    assert computed[:2] == [(False, 1), (True, 1)]
    if wrong_path:
        assert found.code == ACCEPTED and "refused_by_first_path" in found.evidence
    else:
        assert found.code == "reject.wrong_computation" and len(computed) == 2
