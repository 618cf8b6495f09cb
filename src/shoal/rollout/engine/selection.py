"""Chooses the engine: vLLM if asked for, else TorchEngine, or transformers for the families that TorchEngine does not have."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from shoal.model.load_model import decoder_refuses, device_name, kernel_release, machine_digest
from shoal.model.shape import FAMILIES
from shoal.model.tokenizer import Tokenizer
from shoal.rollout.engine.api import ComputeDtype, Engine, EngineName, FinishedRow, GenerationRequest
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.telemetry import Log
from shoal.wire.requirements import Capabilities, ComputeClass, ReplayTerms, WeightFormat, precision_of
from shoal.wire.run_spec import ProofSpec

if TYPE_CHECKING:
    from shoal.rollout.engine.transformers_engine import TransformersEngine

_LOG = Log("worker")


def check_engine(
    name: EngineName,
    *,
    device: str,
    tensor_parallel: int,
    weights: WeightFormat | None = None,
    draft: DraftSettings | None = None,
) -> None:
    """Raises ValueError, with what to do, if this machine cannot run the engine. Call it before joining a run."""
    if name == "vllm":
        if weights is not None:
            raise ValueError(
                f"--weights {weights} needs --engine torch: vLLM rounds weights in other ways, which a validator would refuse"
            )
        if draft is not None:
            raise ValueError(f"--draft {draft.source} needs --engine torch; leave --draft out")
        from shoal.rollout.engine.vllm_engine import check_installed

        check_installed(device)
    elif tensor_parallel > 1:
        raise ValueError(
            f"--tensor-parallel {tensor_parallel} needs --engine vllm; the torch engine uses one GPU, start one worker per GPU"
        )


def make_engine(
    name: EngineName,
    *,
    compute_dtype: ComputeDtype,
    proof: ProofSpec,
    max_rows: int,
    device: str,
    tensor_parallel: int = 1,
    draft: DraftSettings | None = None,
) -> Engine:
    """Returns an engine that holds no weights yet. Raises ValueError as `check_engine` does."""
    check_engine(name, device=device, tensor_parallel=tensor_parallel, draft=draft)
    if name == "vllm":
        from shoal.rollout.engine.vllm_engine import VllmEngine

        return VllmEngine(
            compute_dtype=compute_dtype,
            proof=proof,
            max_rows=max_rows,
            device=device,
            tensor_parallel=tensor_parallel,
        )
    return AutoEngine(compute_dtype=compute_dtype, proof=proof, max_rows=max_rows, device=device, draft=draft)


class AutoEngine:
    """A TorchEngine, or a TransformersEngine if the first folder that is loaded holds a family that Decoder does not support."""

    def __init__(
        self,
        *,
        compute_dtype: ComputeDtype,
        proof: ProofSpec,
        max_rows: int,
        device: str,
        draft: DraftSettings | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {
            "compute_dtype": compute_dtype, "proof": proof, "max_rows": max_rows, "device": device
        }  # fmt: skip
        self._draft = draft
        self._chosen: TorchEngine | TransformersEngine | None = None
        self.weights: WeightFormat | None = None
        """The format that `load` rounds the layers' weights to; None: they are not rounded."""

    @property
    def kind(self) -> str:
        """Returns which engine computes, once a folder was loaded."""
        return "torch" if self._chosen is None or isinstance(self._chosen, TorchEngine) else "transformers"

    @property
    def memory_was_short(self) -> bool:
        """Returns whether memory changed the order of the work, on which the last bits of rows depend."""
        return isinstance(self._chosen, TorchEngine) and self._chosen.memory_was_short

    @property
    def policy_version(self) -> int | None:
        return None if self._chosen is None else self._chosen.policy_version

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine().tokenizer

    @property
    def has_work(self) -> bool:
        return self._chosen is not None and self._chosen.has_work

    def load(self, folder: Path, version: int) -> None:
        if self._chosen is None:
            self._chosen = self._choose(folder)
        self._chosen.weights = self.weights
        self._chosen.load(folder, version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._engine().submit(requests)

    def step(self) -> list[FinishedRow]:
        return self._engine().step()

    def _engine(self) -> "TorchEngine | TransformersEngine":
        if self._chosen is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._chosen

    def _choose(self, folder: Path) -> "TorchEngine | TransformersEngine":
        """Returns an engine for the model in the folder, without weights."""
        refusal = decoder_refuses(folder)
        if torch.device(self._settings["device"]).type == "mps":
            # TorchEngine has steps for CPUs and for CUDA (AMD's ROCm included); both use what Apple's GPUs lack.
            refusal = refusal or "TorchEngine does not run on Apple silicon (mps)"
        if refusal is None:
            return TorchEngine(**self._settings, draft=self._draft)
        from shoal.rollout.engine.transformers_engine import TransformersEngine

        if self._draft is not None:
            _LOG.warning(f"--draft {self._draft.source} is not used: only TorchEngine verifies drafts")
        _LOG.warning(f"generating through transformers, which is slow: {refusal}; --engine vllm is faster")
        return TransformersEngine(**self._settings)


def compute_class(engine: Engine, *, device: str, compute_dtype: ComputeDtype) -> ComputeClass:
    """Returns what this engine computes with, to be declared in the file of each submission."""
    return ComputeClass(
        device=device_name(device),
        engine=engine.kind if isinstance(engine, AutoEngine) else "vllm",
        kernels=kernel_release(),
        precision=precision_of(compute_dtype, engine.weights if isinstance(engine, AutoEngine) else None),
    )


def replay_terms(engine: Engine, *, device: str, max_rows: int) -> ReplayTerms | None:
    """Returns the terms under which this engine generates the same bits again, or None if that is not known of it.

    Measured for TorchEngine on CPUs: all rows of a lease together, if memory was enough for that, and not of rows with stop
    strings, which end at the next fold.
    """
    if not isinstance(engine, AutoEngine) or engine.kind != "torch" or torch.device(device).type != "cpu":
        return None
    if engine.memory_was_short:
        return None
    return ReplayTerms(machine_digest(), torch.get_num_threads(), max_rows)


def machine_capabilities(device: str, *, memory_gb: float | None = None) -> Capabilities:
    """Returns what this machine offers to a run with `device`: cpu, mps, or cuda with or without a number.

    `memory_gb` is the owner's limit of it. Apple silicon (mps) counts as a CPU: its GPU uses the machine's memory.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if torch.device(device).type == "cuda" else "cpu"
    if kind == "cuda":
        num_bytes = torch.cuda.get_device_properties(torch.device(device)).total_memory
    else:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Capabilities(
        device=kind,
        memory_gb=min(num_bytes / 1e9, memory_gb or num_bytes / 1e9),
        dtypes=("float32", "bfloat16"),
        families=(*FAMILIES, "any"),
    )
