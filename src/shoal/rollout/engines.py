"""Which engine generates: our own, or vLLM behind the same interface."""

from typing import Literal

from shoal.rollout.engine import Engine
from shoal.wire.run import ProofSpec

EngineName = Literal["torch", "vllm"]


def make_engine(
    name: EngineName,
    *,
    compute_dtype: Literal["float32", "bfloat16"],
    proof: ProofSpec,
    max_rows: int,
    device: str,
    tensor_parallel: int = 1,
) -> Engine:
    """ValueError, with what to install, if it cannot be had here."""
    if name == "vllm":
        from shoal.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            compute_dtype=compute_dtype,
            proof=proof,
            max_rows=max_rows,
            device=device,
            tensor_parallel=tensor_parallel,
        )
    if tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel {tensor_parallel} needs --engine vllm; the engine torch uses one GPU, start a worker on each"
        )
    from shoal.rollout.torch_engine import TorchEngine

    return TorchEngine(compute_dtype=compute_dtype, proof=proof, max_rows=max_rows, device=device)
