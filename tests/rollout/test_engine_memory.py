"""Memory of the engine: blocks run out and rows are preempted, memory runs out, and states are bounded by one segment."""

import errno
import os
import subprocess
import sys
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
from shoal.rollout.engine.proofs import FOLD_STEPS, Prover
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


SHORT = [
    torch.OutOfMemoryError("another process took it"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:113] DefaultCPUAllocator: can't allocate memory: you tried"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
"""What torch says on a GPU, what it says on a CPU, and what mmap says."""


@pytest.mark.parametrize("error", SHORT, ids=["cuda", "torch", "mmap"])
def test_rows_start_again_after_the_device_ran_out_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
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
            raise error
        decode(step, num_rows)

    monkeypatch.setattr(CpuStep, "decode", failing)
    engine = make_engine(folder)
    assert_same_rows(drain(engine, requests()), expected)
    blocks = engine._scheduler.pool.num_blocks
    assert 0 < blocks <= scheduler.cache_size_for(requests(), 6, computed_prompts=16).blocks // 4
    assert_same_rows(drain(engine, requests()), expected)
    assert engine._scheduler.pool.num_blocks > blocks  # memory was free again


def test_a_longer_row_is_taken_while_rows_run_with_fewer_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = requests(2, 20), [replace(requests(1, 20)[0], sample_index=7, max_new_tokens=700)]
    expected = drain(make_engine(folder), [*short, *long])
    engine, decode, calls = make_engine(folder), CpuStep.decode, 0

    def failing(step: CpuStep, num_rows: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("another process took it")
        decode(step, num_rows)

    monkeypatch.setattr(CpuStep, "decode", failing)
    engine.submit(short)
    found = [row for _ in range(4) for row in engine.step()]
    assert engine._max_blocks is not None and engine.has_work
    engine.submit(long)
    while engine.has_work:
        found += engine.step()
    assert_same_rows({row.request: row for row in found}, expected)
    assert len(found) == 3


@pytest.mark.parametrize("failing_calls", [{1}, {2}])
def test_rows_whose_proofs_ran_out_of_memory_start_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing_calls: set[int]
) -> None:
    """Proofs are built in another thread, some while their row runs and some after it has ended."""
    expected = drain(make_engine(folder), requests(4, 40))
    build, calls = Prover._build, 0

    def failing(prover: Prover, states: list[torch.Tensor]) -> list[bytes]:
        nonlocal calls
        calls += 1
        if calls in failing_calls:
            raise torch.OutOfMemoryError("another process took it")
        return build(prover, states)

    monkeypatch.setattr(Prover, "_build", failing)
    assert_same_rows(drain(make_engine(folder), requests(4, 40)), expected)
    assert calls > max(failing_calls)


def test_other_errors_while_proving_are_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(prover: Prover, states: list[torch.Tensor]) -> list[bytes]:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Prover, "_build", failing)
    with pytest.raises(RuntimeError, match="shapes differ"):
        drain(make_engine(folder), requests())


UNDER_A_LIMIT = """
import sys
from pathlib import Path
from shoal.rollout.engine.api import GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.worker.limits import limit_memory

engine = TorchEngine(compute_dtype="float32", proof=None, max_rows=512)
engine.load(Path(sys.argv[1]), 0)
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData:"))
limit_memory(used / 1e9 + float(sys.argv[2]), "cpu")
row = dict(prompt_index=0, prompt_tokens=(3, 4, 5), max_new_tokens=2000, temperature=1.0)
engine.submit([GenerationRequest(sample_index=at, sample_seed=at, **row) for at in range(512)])
for _ in range(3):
    engine.step()
print(engine._step.slots.size.rows)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("more_gb", "all_fit"), [(0.6, False), (20.0, True)])
def test_a_process_with_a_limit_of_memory_runs_as_many_rows_as_fit(
    folder: Path, more_gb: float, all_fit: bool
) -> None:
    """512 rows of 2,000 tokens take addresses of 1 GB, all of which count for the limit."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT, str(folder), str(more_gb)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) == 512) is all_fit


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
