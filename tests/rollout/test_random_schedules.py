"""Random schedules: preemption, drafts, stop strings, temperatures, late submissions and failing memory change no row."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from test_drafts import write_scaled

from shoal import toploc
from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.rollout.engine import block_pool, draft_model, kv_slots, scheduler, torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.scheduler import CacheSize
from shoal.rollout.engine.step_cpu import CpuStep
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator.prefill import prefill
from shoal.wire.run_spec import ProofSpec

Rows = dict[GenerationRequest, FinishedRow]

LENGTHS = (1, 1, 2, 8, 9, 17, 33, 64, 65, 90)
TEMPERATURES = (0.02, 0.1, 0.6, 1.0, 1.2)
STOPS: tuple[tuple[str, ...], ...] = ((), (), ("ab",), ("1",), ("a", "7"))
MOST_STEPS = 5000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a model whose rows end now and then, and a draft model that often draws the same."""
    folder, small = (tmp_path_factory.mktemp("models") / name for name in ("large", "small"))
    for path in (folder, small):
        create_model("tiny", path, seed=11)
    write_scaled(folder, folder, ends=4.0, others=0.6)
    write_scaled(folder, small, ends=1.0, others=1.3)
    return folder, small


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: with more, most of the time goes into waiting for each other, since the rows are few."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Schedule:
    """What an engine has to do, and under which conditions."""

    rows: list[GenerationRequest]
    proof: ProofSpec
    max_rows: int
    block: int
    spare_blocks: int
    draft: str | None
    draft_rows: int
    failures: float
    """Share of the decode steps for which memory is short."""


def draw_schedule(rng: random.Random) -> Schedule:
    prompts = [
        tuple(rng.randrange(3, 60) for _ in range(rng.randint(1, 50))) for _ in range(rng.randint(1, 5))
    ]
    rows = [
        GenerationRequest(
            prompt_index=(prompt := rng.randrange(len(prompts))),
            sample_index=index,
            prompt_tokens=prompts[prompt],
            sample_seed=rng.randrange(1 << 60),
            max_new_tokens=rng.choice(LENGTHS),
            temperature=rng.choice(TEMPERATURES),
            stop=rng.choice(STOPS),
        )
        for index in range(rng.randint(2, 14))
    ]
    return Schedule(
        rows,
        ProofSpec(segment_tokens=rng.choice([1, 4, 8, 32])),
        max_rows=rng.randint(2, 9),
        block=rng.choice([8, 16]),
        spare_blocks=rng.choice([0, 1, 2, 4]),
        draft=rng.choice([None, "lookup", "model"]),
        draft_rows=rng.randint(1, 8),
        failures=rng.choice([0.0, 0.0, 0.01]),
    )


def run_schedule(engine: TorchEngine, rows: list[GenerationRequest], rng: random.Random) -> Rows:
    """Submits the rows in several calls while others run."""
    left, found = list(rows), dict[GenerationRequest, FinishedRow]()
    for _ in range(MOST_STEPS):
        if not left and not engine.has_work:
            return found
        if left and (not engine.has_work or rng.random() < 0.1):
            num = rng.randint(1, len(left))
            engine.submit(left[:num])
            left = left[num:]
        for row in engine.step():
            assert row.request not in found
            found[row.request] = row
    raise AssertionError(f"{len(found)} of {len(rows)} rows after {MOST_STEPS} steps")


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_of_one_row_at_a_time(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, (folder, small) = random.Random(seed), folders
    schedule = draw_schedule(rng)
    alone = TorchEngine(compute_dtype="float32", proof=schedule.proof, max_rows=1)
    alone.load(folder, 0)
    expected = run_schedule(alone, schedule.rows, random.Random(0))

    for module in (block_pool, draft_model, kv_slots, scheduler):
        monkeypatch.setattr(module, "BLOCK", schedule.block)
    for module in (scheduler, torch_engine):
        monkeypatch.setattr(module, "GROW_STEPS", 8)

    def fit(shape: object, size: CacheSize, **_: object) -> CacheSize:
        return size._replace(blocks=size.least_blocks + schedule.spare_blocks)

    monkeypatch.setattr(torch_engine, "fit_blocks", fit)
    draft = None
    if schedule.draft is not None:
        source = str(small) if schedule.draft == "model" else schedule.draft
        draft = DraftSettings(source=source, rows=schedule.draft_rows)
    engine = TorchEngine(
        compute_dtype="float32", proof=schedule.proof, max_rows=schedule.max_rows, draft=draft
    )
    engine.load(folder, 0)
    decode = CpuStep.decode

    def failing(step: CpuStep, num_rows: int) -> None:
        # Half of the blocks must be enough for the longest row, or the engine gives up.
        spare = (
            engine._scheduler.pool.num_blocks
            >= 2 * scheduler.cache_size_for(schedule.rows, 1, computed_prompts=1).least_blocks
        )
        if step is engine._step and spare and rng.random() < schedule.failures:
            raise torch.OutOfMemoryError("another process took it")
        decode(step, num_rows)

    monkeypatch.setattr(CpuStep, "decode", failing)
    found = run_schedule(engine, schedule.rows, rng)
    assert found.keys() == expected.keys() == set(schedule.rows)
    for request, row in found.items():
        assert (row.output_tokens, row.finish) == (expected[request].output_tokens, expected[request].finish)
        gap = 2e-5 / min(
            1.0, request.temperature
        )  # prompts are computed beside others, which rounds differently
        np.testing.assert_allclose(row.logprobs, expected[request].logprobs, atol=gap)
    check_proofs(folder, list(found.values()), schedule.proof)


def check_proofs(folder: Path, rows: list[FinishedRow], proof: ProofSpec) -> None:
    """Compares proofs with the states of a prefill: a state of another row or token would differ in most exponents."""
    with torch.inference_mode():
        states = prefill(load_decoder(folder), [row.to_rollout() for row in rows])
        checks = toploc.verify_proofs(
            [row.proof for row in rows],
            [states_TH[1:] for states_TH in states],
            topk=proof.topk,
            segment_tokens=proof.segment_tokens,
            control_seed=1,
        )
    for row, of_row in zip(rows, checks, strict=True):
        for number, segment in enumerate(of_row):
            assert segment.exponent_mismatches <= 4, (row.request, number, segment)
