"""Which engine generates: our own, or vLLM behind the same interface."""

from typing import Literal

from shoal.rollout.engine.api import Engine
from shoal.wire.run_spec import ProofSpec

EngineName = Literal["torch", "vllm"]


def check_engine(name: EngineName, *, device: str, tensor_parallel: int) -> None:
    """ValueError, with what to do, if it cannot be had here. Worth asking before anybody is joined."""
    if name == "vllm":
        from shoal.rollout.engine.vllm_engine import check_installed

        check_installed(device)
    elif tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel {tensor_parallel} needs --engine vllm; the engine torch uses one GPU, start a worker on each"
        )


def make_engine(
    name: EngineName,
    *,
    compute_dtype: Literal["float32", "bfloat16"],
    proof: ProofSpec,
    max_rows: int,
    device: str,
    tensor_parallel: int = 1,
) -> Engine:
    """As check_engine has it, then made; it loads nothing yet."""
    check_engine(name, device=device, tensor_parallel=tensor_parallel)
    if name == "vllm":
        from shoal.rollout.engine.vllm_engine import VllmEngine

        return VllmEngine(
            compute_dtype=compute_dtype,
            proof=proof,
            max_rows=max_rows,
            device=device,
            tensor_parallel=tensor_parallel,
        )
    from shoal.rollout.engine.torch_engine import TorchEngine

    return TorchEngine(compute_dtype=compute_dtype, proof=proof, max_rows=max_rows, device=device)
