"""The step of CUDA devices with its pool of blocks: rows against those of the CPU step, with and without preemptions.

Needs a GPU, or Triton's interpreter on a CPU: TRITON_INTERPRET=1 pytest -m gpu tests/rollout/test_block_cache.py
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.model.builtin import create_model
from shoal.rollout.engine import block_pool, draft_model, kv_slots, scheduler, torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES, PrefillSize
from shoal.rollout.engine.scheduler import cache_size_for
from shoal.rollout.engine.torch_engine import LoadedModel, TorchEngine
from shoal.wire.run_spec import ProofSpec

pytestmark = pytest.mark.gpu

PROMPTS = [tuple(range(3, 9)), tuple(range(3, 40)), (5, 6)]
PROOF = ProofSpec(segment_tokens=8)


def rows_to_generate(new_tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=prompt,
            sample_seed=10 * index + sample,
            max_new_tokens=new_tokens - 7 * sample,
            temperature=1.0,
        )
        for index, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]


def run(
    engine: TorchEngine, folder: Path, rows: Sequence[GenerationRequest]
) -> dict[GenerationRequest, FinishedRow]:
    engine.load(folder, 0)
    engine.submit(rows)
    finished: dict[GenerationRequest, FinishedRow] = {}
    while engine.has_work:
        finished |= {row.request: row for row in engine.step()}
    return finished


def cuda_engine(
    device: str, monkeypatch: pytest.MonkeyPatch, max_rows: int = 6, draft: DraftSettings | None = None
) -> TorchEngine:
    """Returns an engine with CudaStep, on a CPU too."""
    if device == "cpu":

        def without_threads(model: LoadedModel, *arguments: object) -> None:
            whole(model, *arguments)  # type: ignore[arg-type]
            model.threads = None

        whole = LoadedModel.__init__
        monkeypatch.setattr(LoadedModel, "__init__", without_threads)
    # Larger batches of prompts would take so many blocks that fewer rows start, and none is preempted.
    monkeypatch.setitem(PREFILL_SIZES, device, PrefillSize(160, 2, batches=2))
    return TorchEngine(
        compute_dtype="float32",
        proof=PROOF,
        max_rows=max_rows,
        device=device,
        draft=draft,
        graphs=device == "cuda",
    )


@pytest.fixture
def small_blocks(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes blocks of 16 positions, so that short rows fill several."""
    from shoal.model.kernels import decode_attention  # needs Triton
    from shoal.rollout.engine import step_cuda

    for module in (block_pool, draft_model, scheduler, kv_slots, step_cuda):
        monkeypatch.setattr(module, "BLOCK", 16)
    for name in ("PROMPT_SPLIT", "PROMPT_BLOCK", "OWN_BLOCK"):
        monkeypatch.setattr(decode_attention, name, 16)
    monkeypatch.setattr(decode_attention, "ITEM_QUERIES", 16)
    monkeypatch.setattr(decode_attention, "PROMPT_PROGRAMS", 32)  # the interpreter runs idle programs too


@pytest.mark.usefixtures("small_blocks")
def test_preempted_rows_come_out_bit_for_bit(
    tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_model("tiny", tmp_path / "v0", seed=11)
    on_cpu = run(
        TorchEngine(compute_dtype="float32", proof=PROOF, max_rows=6), tmp_path / "v0", rows_to_generate(36)
    )
    expected = run(cuda_engine(kernel_device, monkeypatch), tmp_path / "v0", rows_to_generate(36))
    assert {row: done.output_tokens for row, done in expected.items()} == {
        row: done.output_tokens for row, done in on_cpu.items()
    }
    for row, done in expected.items():
        np.testing.assert_allclose(done.logprobs, on_cpu[row].logprobs, atol=2e-5)
    allowed = cache_size_for(rows_to_generate(36), 6, computed_prompts=4).least_blocks + 3
    monkeypatch.setattr(torch_engine, "fit_blocks", lambda shape, size, **_: size._replace(blocks=allowed))
    engine = cuda_engine(kernel_device, monkeypatch)
    found = run(engine, tmp_path / "v0", rows_to_generate(36))
    assert engine._scheduler.num_preempted > 0
    if kernel_device == "cuda":
        assert found == expected
        return
    # In the interpreter the products are NumPy's and torch's for CPUs, whose order of sums depends on the number of rows.
    for row, done in found.items():
        assert done.output_tokens == expected[row].output_tokens
        np.testing.assert_allclose(done.logprobs, expected[row].logprobs, atol=2e-5)


@pytest.mark.usefixtures("small_blocks")
def test_the_last_rows_move_to_a_smaller_graph(
    tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.rollout.engine import step_cuda  # needs Triton

    create_model("tiny", tmp_path / "v0", seed=11)
    rows = [replace(row, max_new_tokens=40 - 6 * at) for at, row in enumerate(reversed(rows_to_generate(40)))]
    monkeypatch.setattr(step_cuda, "BUCKETS", ())
    expected = run(cuda_engine(kernel_device, monkeypatch), tmp_path / "v0", rows)
    monkeypatch.setattr(step_cuda, "BUCKETS", (2, 4))
    moved: list[tuple[int, int]] = []
    move_rows = step_cuda.CudaStep.move_rows

    def note(step: step_cuda.CudaStep, moves: Sequence[tuple[int, int]]) -> None:
        moved.extend(moves)
        move_rows(step, moves)

    monkeypatch.setattr(step_cuda.CudaStep, "move_rows", note)
    found = run(cuda_engine(kernel_device, monkeypatch), tmp_path / "v0", rows[::-1])
    assert moved, "rows in the last slots outlive those in the first"
    for row, done in found.items():
        assert done.output_tokens == expected[row].output_tokens
        np.testing.assert_allclose(done.logprobs, expected[row].logprobs, atol=2e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("source", ["lookup", "model"])
def test_drafts_change_no_bit(
    tmp_path: Path, kernel_device: str, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    from shoal.rollout.engine import step_cuda  # needs Triton

    create_model("tiny", tmp_path / "v0", seed=11)
    monkeypatch.setattr(step_cuda, "BUCKETS", (8, 16))
    rows = [replace(row, temperature=0.02) for row in rows_to_generate(14)[:2]]
    expected = run(cuda_engine(kernel_device, monkeypatch), tmp_path / "v0", rows)
    settings = DraftSettings(source="lookup" if source == "lookup" else str(tmp_path / "v0"), rows=2)
    engine = cuda_engine(kernel_device, monkeypatch, draft=settings)
    assert run(engine, tmp_path / "v0", rows) == expected
    assert engine._drafting is not None and engine._drafting.counts.accepted > 0
