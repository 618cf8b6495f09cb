"""Decode replay: the work of another process compared bit for bit, and weights one tiny step old, which no other check finds."""

import random
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from honest_work import make_claim, make_lease, make_policy, make_spec

from shoal.cli.run.replay_engine import WorkerReplay
from shoal.rollout.adversary.lying_engines import AlteredEngine, older
from shoal.rollout.engine import torch_engine
from shoal.rollout.engine.api import Engine, make_requests, make_table
from shoal.rollout.engine.selection import AutoEngine, compute_class, replay_terms
from shoal.swarm.coordinator.rules.cumulative_evidence import scores_of
from shoal.swarm.validator.decode_replay import DecodeReplay
from shoal.swarm.validator.judge import judge_many
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.table_reader import TableReader
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.requirements import ReplayTerms
from shoal.wire.rollouts import RolloutTable, TableLimits, decode, encode
from shoal.wire.run_spec import AdmittedWeights, ProofSpec, RunSpec, Sampling, default_tolerances

pytestmark = pytest.mark.integration

MAX_ROWS = 24
LIMITS = TableLimits(max_rows=64, max_prompt_tokens=99, max_output_tokens=99, max_proof_bytes=9999)


def spec_of(dtype: str) -> RunSpec:
    return make_spec(
        compute_dtype=dtype,
        sampling=Sampling(max_new_tokens=12, samples_per_prompt=8),
        tolerances=default_tolerances(dtype),  # type: ignore[arg-type]
        admitted_weights=AdmittedWeights(int8=0.5),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replayed")
    make_policy(path)
    return path / "tiny-0"


def policy_of(folder: Path, dtype: str) -> LoadedPolicy:
    return replace(make_policy(folder.parent, dtype=getattr(torch, dtype)), folder=folder)


def new_engine(dtype: str) -> AutoEngine:
    return AutoEngine(compute_dtype=dtype, proof=ProofSpec(), max_rows=MAX_ROWS, device="cpu")  # type: ignore[arg-type]


def work(engine: Engine, own: AutoEngine, lease: Lease, dtype: str) -> RolloutTable:
    """Returns what the engine generates, declared as the honest engine `own` would."""
    engine.submit(make_requests(lease, engine.tokenizer))
    rows = []
    while engine.has_work:
        rows += engine.step()
    rows.sort(key=lambda row: (row.request.prompt_index, row.request.sample_index))
    made_by = compute_class(own, device="cpu", compute_dtype=dtype)  # type: ignore[arg-type]
    terms = replay_terms(own, device="cpu", max_rows=MAX_ROWS)
    return make_table(lease, 0, rows, str(made_by), str(terms))


def verdict(table: RolloutTable, lease: Lease, spec: RunSpec, policy: LoadedPolicy, share: float) -> Verdict:
    data = encode(table)
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), share)
    with TableReader() as reader:
        (found,) = judge_many(
            [(data, make_claim(lease, data))], spec, policy, reader=reader, control_seed=7, replay=replay
        )
    assert isinstance(found, Verdict)
    return found


OTHER_PROCESS = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
import test_decode_replay as here
from shoal.wire.rollouts import encode
folder, dtype, out = Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
torch.set_num_threads(int(sys.argv[5]))
engine = here.new_engine(dtype)
engine.load(folder, 0)
for number in (7, 1):  # an earlier lease must leave no trace in the bits of the next
    table = here.work(engine, engine, here.make_lease(here.spec_of(dtype), number=number), dtype)
out.write_bytes(encode(table))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_work_of_another_process_has_the_same_bits(folder: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "rows.parquet"
    here = str(Path(__file__).parent)
    arguments = [here, str(folder), dtype, str(out), str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, *arguments], check=True, timeout=120)
    spec = spec_of(dtype)
    found = verdict(decode(out.read_bytes(), LIMITS), make_lease(spec), spec, policy_of(folder, dtype), 1.0)
    assert found.code == ACCEPTED, found.detail
    assert (found.evidence["replay"], found.evidence["replayed_rows"]) == ("equal", 32)
    assert scores_of(found.code, found.evidence)["replays"] == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_one_tiny_step_old_are_found_by_the_replay_alone(folder: Path, dtype: str) -> None:
    spec, own = spec_of(dtype), new_engine(dtype)
    lease = make_lease(spec)
    stale = AlteredEngine(own, partial(older, rate=1e-6))
    stale.load(folder, 0)
    table, policy = work(stale, own, lease, dtype), policy_of(folder, dtype)
    without = verdict(table, lease, spec, policy, 0.0)
    assert without.code == ACCEPTED and without.evidence["replay"] == "not drawn"
    found = verdict(table, lease, spec, policy, 1.0)
    assert found.code == "void.uncertain"
    assert (
        "decoded again on the same kind of machine" in found.detail and "rows have other bits" in found.detail
    )
    assert "surprise_z" in found.evidence, "the coordinator adds up uncertain work of a node"
    assert scores_of(found.code, found.evidence)["replays"] == 1.0
    assert "replays" not in scores_of(without.code, without.evidence)


def test_rounded_weights_are_replayed_with_rounded_weights(folder: Path) -> None:
    spec, own = spec_of("float32"), new_engine("float32")
    own.weights = "int8"
    own.load(folder, 0)
    lease = make_lease(spec)
    found = verdict(work(own, own, lease, "float32"), lease, spec, policy_of(folder, "float32"), 1.0)
    assert (found.code, found.evidence["replay"]) == (ACCEPTED, "equal")


def test_other_machines_are_not_compared(folder: Path) -> None:
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    lease, policy = make_lease(spec), policy_of(folder, "float32")
    table = work(own, own, lease, "float32")
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), 1.0)
    terms = ReplayTerms.parse(table.replay)
    assert str(terms) == table.replay and replay.not_comparable(table, lease, policy) is None
    for other in (
        terms._replace(machine="0" * 16),
        terms._replace(threads=terms.threads + 1),
        terms._replace(max_rows=999_999),
    ):
        assert replay.not_comparable(replace(table, replay=str(other)), lease, policy) == "another machine"
    # Another number of rows is a term that this machine can take over.
    fewer = replace(table, replay=str(terms._replace(max_rows=5)))
    assert replay.not_comparable(fewer, lease, policy) is None
    assert replay.not_comparable(replace(table, replay=""), lease, policy) == "not promised"
    elsewhere = replace(table, made_by=table.made_by.replace("/torch/", "/vllm/"))
    assert replay.not_comparable(elsewhere, lease, policy) == "another class"
    stopped = lease.model_copy(update={"task": lease.task.model_copy(update={"stop": ("x",)})})
    assert replay.not_comparable(table, stopped, policy) == "stop strings"
    gone = replace(policy, folder=folder / "gone")
    assert replay.not_comparable(table, lease, gone) == "weights not on disk"
    found = verdict(replace(table, replay=""), lease, spec, policy, 1.0)
    assert (found.code, found.evidence["replay"]) == (ACCEPTED, "not promised")


def test_a_replay_that_fails_leaves_the_other_checks_their_verdict(folder: Path, tmp_path: Path) -> None:
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    lease = make_lease(spec)
    policy = replace(policy_of(folder, "float32"), folder=tmp_path)  # a folder without weights
    found = verdict(work(own, own, lease, "float32"), lease, spec, policy, 1.0)
    assert found.code == ACCEPTED and str(found.evidence["replay"]).startswith("failed: ")


def test_a_replay_ends_when_its_time_is_up(folder: Path) -> None:
    """A worker may declare that it decodes a single row at a time, which takes the validator many times as long."""
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    lease = make_lease(spec)
    table = work(own, own, lease, "float32")
    slow = replace(table, replay=str(ReplayTerms.parse(table.replay)._replace(max_rows=1)))
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), 1.0)
    claim, policy = make_claim(lease, b""), policy_of(folder, "float32")
    late = claim.model_copy(update={"deadline_s": time.time()})
    found = replay.check(slow, late, policy, random.Random(1))
    assert found["replay"] == "failed: 0 of 32 rows within 0 s, 1 at a time"
    again = replay.check(table, claim, policy, random.Random(1))
    assert again["replay"] == "equal", "what was given up must leave no trace"


def test_a_changed_bit_is_named(folder: Path) -> None:
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    lease, policy = make_lease(spec), policy_of(folder, "float32")
    table = work(own, own, lease, "float32")
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), 1.0)
    row = table.rows[3]
    changed = replace(row, logprobs=(row.logprobs[0] - 1e-6, *row.logprobs[1:]))
    rows = (*table.rows[:3], changed, *table.rows[4:])
    with pytest.raises(
        Rejected, match=r"1 of 32 rows have other bits, first row \(0, 3\): log-probs, by up to"
    ):
        replay.check(replace(table, rows=rows), make_claim(lease, b""), policy, random.Random(1))


def test_nothing_is_compared_if_memory_was_short_on_either_side(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is preempted is right, but its prompt is computed once more, beside other prompts, which rounds differently."""
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    lease, policy = make_lease(spec), policy_of(folder, "float32")
    table = work(own, own, lease, "float32")
    assert table.replay == str(replay_terms(own, device="cpu", max_rows=MAX_ROWS))
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(
            torch_engine, "fit_blocks", lambda shape, size, **_: size._replace(blocks=size.blocks * 2 // 3)
        )
        short = new_engine("float32")
        short.load(folder, 0)
        work(short, short, lease, "float32")
        assert replay_terms(short, device="cpu", max_rows=MAX_ROWS) is None
        found = replay.check(table, make_claim(lease, b""), policy, random.Random(1))
        assert found == {"replay": "failed: memory was too short for all rows at once, so bits may differ"}
    with monkeypatch.context() as patch:
        patch.setattr(WorkerReplay, "generate", no_memory)
        found = replay.check(table, make_claim(lease, b""), policy, random.Random(1))
        assert found["replay"] == "failed: DefaultCPUAllocator: can't allocate memory"
    replay = DecodeReplay(WorkerReplay(spec, device="cpu"), 1.0)
    assert replay.check(table, make_claim(lease, b""), policy, random.Random(1))["replay"] == "equal"


def no_memory(*arguments: object, **named: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_malformed_terms_are_refused(folder: Path) -> None:
    spec, own = spec_of("float32"), new_engine("float32")
    own.load(folder, 0)
    table = work(own, own, make_lease(spec), "float32")
    assert decode(encode(table), LIMITS) == table
    for text in ("x", "0" * 16, "0" * 16 + "/1/1/1", "0" * 16 + "/-1/4"):
        with pytest.raises(Rejected, match="replay terms"):
            decode(encode(replace(table, replay=text)), LIMITS)
