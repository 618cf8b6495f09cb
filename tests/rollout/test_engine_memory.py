"""Memory of the engine: blocks run out and rows are preempted, memory runs out, and states are bounded by one segment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.model.builtin import create_model
from shoal.model.fused import fuse
from shoal.model.load_model import load_decoder
from shoal.rollout.engine import block_pool, kv_slots, scheduler, torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.kv_slots import PagedRows
from shoal.rollout.engine.proofs import FOLD_STEPS
from shoal.rollout.engine.scheduler import CacheSize
from shoal.rollout.engine.step_cpu import CpuStep
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.wire.run_spec import ProofSpec

Rows = dict[GenerationRequest, FinishedRow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "v0"
    create_model("tiny", folder, seed=11)
    return folder


def requests(num: int = 6, new_tokens: int = 60) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_index=index // 2,
            sample_index=index % 2,
            prompt_tokens=tuple(range(3, 20 + index // 2)),
            sample_seed=index,
            max_new_tokens=new_tokens - index,
            temperature=1.0,
        )
        for index in range(num)
    ]


def make_engine(folder: Path, *, max_rows: int = 6) -> TorchEngine:
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=max_rows)
    engine.load(folder, 0)
    return engine


def drain(engine: TorchEngine, rows: list[GenerationRequest]) -> Rows:
    engine.submit(rows)
    found: Rows = {}
    while engine.has_work:
        found |= {row.request: row for row in engine.step()}
    assert found.keys() == set(rows)
    return found


def assert_same_rows(found: Rows, expected: Rows) -> None:
    for request, row in found.items():
        other = expected[request]
        assert (row.output_tokens, row.finish, row.proof) == (other.output_tokens, other.finish, other.proof)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)


def allow_blocks(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    def fit(shape: Any, size: CacheSize, **_: Any) -> CacheSize:
        return size._replace(blocks=size.least_blocks + spare)

    monkeypatch.setattr(torch_engine, "fit_blocks", fit)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks of 8 positions that are given every 4 steps, so that short rows fill many."""
    for module in (block_pool, kv_slots, scheduler):
        monkeypatch.setattr(module, "BLOCK", 8)
    for module in (scheduler, torch_engine):
        monkeypatch.setattr(module, "GROW_STEPS", 4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("spare", [0, 4, 12])
def test_preempted_rows_have_the_same_tokens_logprobs_and_proofs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    expected = drain(make_engine(folder), requests())
    allow_blocks(monkeypatch, spare)
    engine = make_engine(folder)
    assert_same_rows(drain(engine, requests()), expected)
    assert engine._scheduler.num_preempted > 0
    engine._scheduler.places.evict()
    assert engine._scheduler.pool.num_free == engine._scheduler.pool.num_blocks


def test_rows_start_again_after_the_device_ran_out_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drain(make_engine(folder), requests())
    decode, failures = CpuStep.decode, iter([20, 45])
    next_failure = next(failures)
    calls = 0

    def failing(step: CpuStep, num_rows: int) -> None:
        nonlocal calls, next_failure
        calls += 1
        if calls == next_failure:
            next_failure = next(failures, 0)
            raise torch.OutOfMemoryError("another process took it")
        decode(step, num_rows)

    monkeypatch.setattr(CpuStep, "decode", failing)
    engine = make_engine(folder)
    assert_same_rows(drain(engine, requests()), expected)
    blocks = engine._scheduler.pool.num_blocks
    assert 0 < blocks <= scheduler.cache_size_for(requests(), 6, computed_prompts=16).blocks // 4


def test_no_row_is_lost_when_memory_is_short_for_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CpuStep.decode

    def failing(step: CpuStep, num_rows: int) -> None:
        raise torch.OutOfMemoryError("another process took it")

    monkeypatch.setattr(CpuStep, "decode", failing)
    engine = make_engine(folder)
    rows = requests(2, 20)
    engine.submit(rows)
    with pytest.raises(ValueError, match="free memory on cpu, or lower max_new_tokens"):
        for _ in range(50):
            engine.step()
    assert engine.has_work
    monkeypatch.setattr(CpuStep, "decode", decode)
    found = []
    engine._max_blocks = None
    while engine.has_work:
        found += engine.step()
    assert {row.request for row in found} == set(rows)


def test_a_row_that_outgrows_all_memory_is_refused_and_blocks_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "free_bytes", lambda _: 3_000_000)
    engine = make_engine(folder)
    rows = requests(2, 20)
    with pytest.raises(ValueError, match="the longest row and its prompt need"):
        engine.submit([*rows, replace(rows[0], max_new_tokens=2000)])
    assert not engine.has_work
    assert len(drain(engine, rows)) == 2


def test_states_of_a_row_are_bounded_by_one_segment(folder: Path) -> None:
    """Rows of 300 tokens keep as many bytes of states as rows of 40, in the slots and in the prover."""
    kept: dict[int, set[int]] = {}
    for new_tokens in (40, 300):
        engine = make_engine(folder, max_rows=4)
        engine.submit(requests(4, new_tokens))
        seen = kept.setdefault(new_tokens, set())
        while engine.has_work:
            engine.step()
            if engine._step is not None:
                seen.add(engine._step.slots.states_SAH.nbytes // engine._step.slots.size.rows)
    segment, hidden, bfloat16_bytes = 32, 128, 2
    assert kept[40] == kept[300] == {(segment + FOLD_STEPS) * hidden * bfloat16_bytes}


def test_pages_of_a_slot_are_given_back_and_read_as_zeros(folder: Path) -> None:
    shape = fuse(load_decoder(folder)).shape
    size = CacheSize(3, 1024, 1024, 1, 128, blocks=9, least_blocks=9)
    cache = PagedRows(shape, size)
    for side in (cache.keys_LSCKD, cache.values_LSCKD):
        side[:, 1:] = 1.0
    cache.release([1])
    assert (cache.keys_LSCKD[:, 1] == 0).all() and (cache.values_LSCKD[:, 1] == 0).all()
    assert (cache.keys_LSCKD[:, 2] == 1).all() and (cache.values_LSCKD[:, 2] == 1).all()
