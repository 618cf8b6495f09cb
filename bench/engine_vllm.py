"""Compares VllmEngine with plain vLLM and with TorchEngine: the same rows in turns, and a validator's verdict.

    python bench/engine_vllm.py --model smollm2-135m --dtype bfloat16 --rows 32 --new-tokens 64 --threads 2
    python bench/engine_vllm.py --model FOLDER --device cuda --dtype bfloat16 --rows 256 --samples 64 --new-tokens 512

Needs vLLM (docs/engine.md) and therefore an environment of its own. The engines take turns; the first turn of each, in
which they compile and allocate, is not counted. Plain vLLM samples without seeds, log-probs or proofs, and generates as many tokens
for each row as VllmEngine did; `greedy` is the same without random numbers. Prints wall time, and CPU time of this process and its children, which depends less on other load.
`agree` is the share of TorchEngine's tokens before a row's first difference. At the end the validator prefills every row and checks
it with the default tolerances.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.model.builtin import create_model
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.rollout.engine.api import Engine, FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.engine.vllm_engine import VllmEngine, check_installed
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms, recompute
from shoal.wire.codes import Rejected
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import ProofSpec, Sampling, default_tolerances
from shoal.wire.seeded_draw import sample_seed

SEED = "ab" * 32
QUESTIONS = (
    "What is 47 + 38? Reply with the number only.",
    "Name three colours of the rainbow and say why you like them.",
    "Write a short story about a fish that swims up a river.",
    "Explain in two sentences what a swarm is.",
)


def main() -> None:
    options = read_options()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = Path(scratch) / "model"
        create_model(options.model, folder, seed=0)
        compare(folder, options)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", default="plain,vllm,torch", help="which of them, in this order")
    return parser.parse_args()


def compare(folder: Path, options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(folder)
    rows = make_requests(tokenizer, options)
    settings = {
        "compute_dtype": options.dtype,
        "proof": ProofSpec(),
        "max_rows": options.rows,
        "device": options.device,
    }
    kinds: dict[str, Any] = {
        "torch": TorchEngine,
        "vllm": VllmEngine,
        "plain": PlainVllm,
        "greedy": partial(PlainVllm, greedy=True),
    }
    engines: dict[str, Engine] = {name: kinds[name](**settings) for name in options.engines.split(",")}
    for name, engine in engines.items():
        started_s = time.monotonic()
        engine.load(folder, 0)
        print(f"{name}: start {time.monotonic() - started_s:.1f} s", flush=True)
    done: dict[str, list[FinishedRow]] = {}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(1 + options.turns):
        for name, engine in engines.items():
            if name in ("plain", "greedy") and "vllm" in done:
                rows = [replace(row.request, max_new_tokens=len(row.output_tokens)) for row in done["vllm"]]
            done[name], rate = take_turn(name, engine, rows, counted=turn > 0)
            if turn:
                rates[name].append(rate)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    for name in medians.keys() & {"plain", "greedy"}:
        print(
            f"vllm against {name}: {medians['vllm'] / medians[name]:.3f} (medians of tokens per CPU second)"
        )
    done = {name: found for name, found in done.items() if name in ("vllm", "torch")}
    if len(done) == 2:
        print(f"agree {agreement(done['torch'], done['vllm']):.1%}")
    for name in done:
        started_s = time.monotonic()
        engines[name].load(folder, 1)
        print(f"{name}: swap {time.monotonic() - started_s:.3f} s")
    policy = LoadedPolicy(
        0, load_decoder(folder, DTYPES[options.dtype], torch.device(options.device)), tokenizer
    )
    for name, finished in done.items():
        check(name, finished, policy, options)


class PlainVllm:
    """vLLM as it is, with the same options, for as many tokens as a row may have. `greedy`: without its sampler's random numbers."""

    def __init__(
        self, *, compute_dtype: str, proof: ProofSpec, max_rows: int, device: str, greedy: bool = False
    ) -> None:
        self._greedy = greedy
        check_installed(device)
        self.policy_version: int | None = None
        self._dtype, self._max_rows, self._on_cpu = compute_dtype, max_rows, device == "cpu"
        self._running: dict[str, GenerationRequest] = {}
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def load(self, folder: Path, version: int) -> None:
        from vllm import EngineArgs, LLMEngine

        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        memory = {"kv_cache_memory_bytes": 2 << 30, "enforce_eager": True} if self._on_cpu else {}
        arguments = EngineArgs(
            model=str(folder),
            dtype=self._dtype,
            max_num_seqs=self._max_rows,
            skip_tokenizer_init=True,
            trust_remote_code=False,
            load_format="safetensors",
            **memory,
        )
        self._vllm = LLMEngine.from_engine_args(arguments)
        self.policy_version = version

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            self._num_added += 1
            params = SamplingParams(
                temperature=0.0 if self._greedy else request.temperature,
                max_tokens=request.max_new_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._running[str(self._num_added)] = request
            prompt = {"prompt_token_ids": list(request.prompt_tokens)}
            self._vllm.add_request(str(self._num_added), prompt, params)

    def step(self) -> list[FinishedRow]:
        ended = [output for output in self._vllm.step() if output.finished]
        return [
            FinishedRow(
                request=self._running.pop(output.request_id),
                output_tokens=tuple(output.outputs[0].token_ids),
                logprobs=(),
                finish=Finish.LENGTH,
                proof=b"",
            )
            for output in ended
        ]


def make_requests(tokenizer: Tokenizer, options: argparse.Namespace) -> list[GenerationRequest]:
    chat = options.model != "tiny"
    prompts = [
        tuple(tokenizer.encode_prompt(text if chat else text[:20], chat=chat))
        for text in (QUESTIONS[index % 4] for index in range(max(1, options.rows // options.samples)))
    ]
    return [
        GenerationRequest(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=prompt,
            sample_seed=sample_seed(SEED, index, sample),
            max_new_tokens=options.new_tokens,
            temperature=1.0,
        )
        for index, prompt in enumerate(prompts)
        for sample in range(options.samples)
    ]


def take_turn(
    name: str, engine: Engine, rows: list[GenerationRequest], *, counted: bool
) -> tuple[list[FinishedRow], float]:
    """Returns the rows, and tokens per second of CPU time."""
    began_s, began_cpu_s = time.monotonic(), cpu_seconds()
    engine.submit(rows)
    done: list[FinishedRow] = []
    while engine.has_work:
        done += engine.step()
    took_s, cpu_s = time.monotonic() - began_s, cpu_seconds() - began_cpu_s
    tokens = sum(len(row.output_tokens) for row in done)
    if counted:
        print(
            f"{name}: {tokens} tokens in {took_s:.2f} s, {tokens / took_s:.0f} a second; {cpu_s:.2f} s of CPU time, "
            f"{tokens / cpu_s:.0f} a second",
            flush=True,
        )
    return done, tokens / cpu_s


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of all that it started."""
    import psutil  # vLLM brings it

    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def agreement(one: list[FinishedRow], other: list[FinishedRow]) -> float:
    theirs = {(row.request.prompt_index, row.request.sample_index): row.output_tokens for row in other}
    same = total = 0
    for row in one:
        total += len(row.output_tokens)
        for mine, their in zip(
            row.output_tokens, theirs[row.request.prompt_index, row.request.sample_index], strict=False
        ):
            if mine != their:
                break
            same += 1
    return same / total


def check(name: str, finished: list[FinishedRow], policy: LoadedPolicy, options: argparse.Namespace) -> None:
    sampling = Sampling(
        temperature=1.0, max_new_tokens=options.new_tokens, samples_per_prompt=options.samples
    )
    rows, tolerances = [row.to_rollout() for row in finished], default_tolerances(options.dtype)
    facts = recompute(rows, CalibrationTerms(SEED, sampling, ProofSpec()), policy, control_seed=5)
    try:
        fact_checks.check_facts(rows, facts, tolerances)
        verdict = "accepted"
    except Rejected as rejected:
        verdict = f"{rejected.code}: {rejected.detail}"
    numbers = fact_checks.evidence(rows, facts, tolerances)
    print(f"{name}: {verdict}; " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
