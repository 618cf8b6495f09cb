"""Compares VllmEngine with TorchEngine: the same rows in turns, and a validator's verdict on both.

    python bench/engine_vllm.py --model smollm2-135m --dtype bfloat16 --rows 32 --new-tokens 64 --threads 2
    python bench/engine_vllm.py --model FOLDER --device cuda --dtype bfloat16 --rows 256 --samples 64 --new-tokens 512

Needs vLLM (docs/engine.md) and therefore an environment of its own. The engines take turns; the first turn of each, in
which they compile and allocate, is not counted. Prints wall time and CPU time of this process, which depends less on
other load. `agree` is the share of TorchEngine's tokens before a row's first difference. At the end the validator
prefills every row and checks it with the default tolerances.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from shoal.model.builtin import create_model
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import Tokenizer, load_tokenizer
from shoal.rollout.engine.api import Engine, FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.engine.vllm_engine import VllmEngine
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.recompute import CalibrationTerms, LoadedPolicy, recompute
from shoal.wire.codes import Rejected
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
    engines: dict[str, Engine] = {"torch": TorchEngine(**settings), "vllm": VllmEngine(**settings)}
    for name, engine in engines.items():
        started_s = time.monotonic()
        engine.load(folder, 0)
        print(f"{name}: start {time.monotonic() - started_s:.1f} s", flush=True)
    done: dict[str, list[FinishedRow]] = {}
    for turn in range(1 + options.turns):
        for name, engine in engines.items():
            done[name] = take_turn(name, engine, rows, counted=turn > 0)
    print(f"agree {agreement(done['torch'], done['vllm']):.1%}")
    for name, engine in engines.items():
        started_s = time.monotonic()
        engine.load(folder, 1)
        print(f"{name}: swap {time.monotonic() - started_s:.3f} s")
    policy = LoadedPolicy(
        0, load_decoder(folder, DTYPES[options.dtype], torch.device(options.device)), tokenizer
    )
    for name, finished in done.items():
        check(name, finished, policy, options)


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
) -> list[FinishedRow]:
    began_s, cpu_s = time.monotonic(), time.process_time()
    engine.submit(rows)
    done: list[FinishedRow] = []
    while engine.has_work:
        done += engine.step()
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    tokens = sum(len(row.output_tokens) for row in done)
    if counted:
        print(
            f"{name}: {tokens} tokens in {took_s:.2f} s, {tokens / took_s:.0f} a second; {cpu_s:.2f} s of CPU time, "
            f"{tokens / cpu_s:.0f} a second",
            flush=True,
        )
    return done


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
