"""The CUDA step: graphs against single launches, and both against the CPU. Needs a GPU."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import toploc
from shoal.model.builtin import create_model
from shoal.model.fused import fuse
from shoal.model.load_model import DTYPES, load_decoder
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES, PrefillSize
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.toploc import build
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import sample_seed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "v0"
    create_model("tiny", folder, seed=11)
    return folder


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 80, length).tolist()) for length in (3, 40, 65, 150, 7, 90)]
    return [
        GenerationRequest(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=prompt,
            sample_seed=sample_seed("ab" * 32, index, sample),
            max_new_tokens=int(rng.integers(1, 90)),
            temperature=1.0,
        )
        for index, prompt in enumerate(prompts)
        for sample in range(8)
    ]


def run(
    folder: Path, dtype: str, *, device: str = "cuda", graphs: bool = True
) -> dict[GenerationRequest, FinishedRow]:
    engine = TorchEngine(
        compute_dtype=dtype,  # type: ignore[arg-type]
        proof=ProofSpec(),
        max_rows=20,
        device=device,
        graphs=graphs,
    )
    engine.load(folder, 0)
    engine.submit(requests())
    engine.step()
    engine.submit([replace(requests()[0], prompt_index=9, max_new_tokens=300)])  # needs larger slots
    finished: list[FinishedRow] = []
    while engine.has_work:
        finished += engine.step()
    return {row.request: row for row in finished}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_equals_its_single_launches(folder: Path, dtype: str) -> None:
    assert run(folder, dtype) == run(folder, dtype, graphs=False)


def test_a_graph_that_becomes_garbage_does_not_end_a_capture(folder: Path) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
    cycle: list[object] = [graph]
    cycle.append(cycle)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        del graph, cycle
        assert len(run(folder, "bfloat16")) == 49
    finally:
        gc.set_threshold(*before)


def test_tokens_equal_those_of_the_cpu(folder: Path) -> None:
    on_gpu, on_cpu = run(folder, "float32"), run(folder, "float32", device="cpu")
    assert len(on_gpu) == 49
    for request, row in on_gpu.items():
        assert row.output_tokens == on_cpu[request].output_tokens
        np.testing.assert_allclose(row.logprobs, on_cpu[request].logprobs, atol=2e-5)


def test_prompts_computed_ahead_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(folder, "float32")
    monkeypatch.setitem(PREFILL_SIZES, "cuda", PrefillSize(100, 2, batches=2))
    ahead = run(folder, "float32")
    assert {request: row.output_tokens for request, row in ahead.items()} == {
        request: row.output_tokens for request, row in together.items()
    }


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1), ("bfloat16", 20)])
def test_proofs_verify_against_prefills(folder: Path, dtype: str, limit: int) -> None:
    rows = list(run(folder, dtype).values())
    decoder = load_decoder(folder, DTYPES[dtype], "cuda")
    states = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([[*row.request.prompt_tokens, *row.output_tokens]], device="cuda")
            hidden = decoder(tokens, torch.arange(tokens.shape[1], device="cuda")[None])
            states.append(hidden[0, len(row.request.prompt_tokens) : -1])
    checks = toploc.verify_proofs([row.proof for row in rows], states, control_seed=1)
    assert max(check.exponent_mismatches for row in checks for check in row) <= limit


def test_a_replay_equals_the_states_of_decoding_bit_for_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from cuda_replay import replay  # needs Triton

    rows = [row for row in run(folder, "bfloat16").values() if row.proof]
    weights = fuse(load_decoder(folder, torch.bfloat16, "cuda"))
    states = replay(weights, [(row.request.prompt_tokens, row.output_tokens) for row in rows])
    assert toploc.build_proofs(states) == [row.proof for row in rows]
    monkeypatch.setattr(
        build, "has_kernels", lambda _: False
    )  # the host computes the polynomials, from the same points
    assert toploc.build_proofs(states) == [row.proof for row in rows]
