"""Measures when decoding again gives the same bits, and which old weights that finds.

    python bench/decode_replay.py
    python bench/decode_replay.py --model FOLDER --device cuda --dtypes bfloat16

First: the same rows once more, with other numbers of rows and threads, and parts of the rows alone. Then:
rows by weights that are one step old, which are compared with rows by the right weights, and judged by a validator's tolerances.
"""

import argparse
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from shoal.cli.commands.sample_answers import model_folder
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.adversary.lying_engines import AlteredEngine, older
from shoal.rollout.engine.api import ComputeDtype, Engine, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms, recompute
from shoal.tasks import make_task
from shoal.wire.codes import ACCEPTED, Rejected
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec, default_tolerances
from shoal.wire.seeded_draw import sample_seed

SEED = hashlib.sha256(b"bench/decode_replay").hexdigest()
PROMPTS, SAMPLES, NEW_TOKENS = 6, 12, 24
RATES = (1e-4, 1e-5, 1e-6, 1e-7)
Rows = dict[tuple[int, int], Rollout]


def requests_of(folder: Path) -> list[GenerationRequest]:
    task, tokenizer = make_task(TaskSpec(name="sort")), load_tokenizer(folder)
    prompts = [
        tuple(tokenizer.encode_prompt(task.problem("train", seed).prompt, chat=task.chat))
        for seed in range(PROMPTS)
    ]
    return [
        GenerationRequest(
            prompt_index=prompt,
            sample_index=sample,
            prompt_tokens=prompts[prompt],
            sample_seed=sample_seed(SEED, prompt, sample),
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
        )
        for prompt in range(PROMPTS)
        for sample in range(SAMPLES)
    ]


def generate(engine: Engine, folder: Path, requests: Sequence[GenerationRequest]) -> Rows:
    engine.load(folder, 0)
    engine.submit(requests)
    found: Rows = {}
    while engine.has_work:
        for row in engine.step():
            found[row.request.prompt_index, row.request.sample_index] = row.to_rollout()
    return found


def make(dtype: ComputeDtype, device: str, *, threads: int = 1, max_rows: int = 64) -> TorchEngine:
    torch.set_num_threads(threads)
    return TorchEngine(compute_dtype=dtype, proof=ProofSpec(), max_rows=max_rows, device=device)


def equal(rows: Rows, first: Rows) -> str:
    return f"{sum(first[place] == row for place, row in rows.items())} of {len(rows)}"


def verdict(rows: Rows, policy: LoadedPolicy, dtype: ComputeDtype) -> str:
    """Returns the code that a validator without a calibration gives."""
    ordered = [rows[place] for place in sorted(rows)]
    terms = CalibrationTerms(
        SEED, Sampling(max_new_tokens=NEW_TOKENS, samples_per_prompt=SAMPLES), ProofSpec()
    )
    facts = recompute(ordered, terms, policy, control_seed=1)
    try:
        fact_checks.check_facts(ordered, facts, default_tolerances(dtype))
    except Rejected as rejected:
        return rejected.code
    return ACCEPTED


def measure(folder: Path, dtype: ComputeDtype, device: str) -> None:
    requests, new = requests_of(folder), partial(make, dtype, device)
    first = generate(new(), folder, requests)
    again = {
        "all rows again": (new(), requests),
        "16 rows at once": (new(max_rows=16), requests),
        "1 row at once": (new(max_rows=1), requests[:SAMPLES]),
        "one prompt's rows": (new(), requests[:SAMPLES]),
        "8 scattered rows": (new(), requests[::9]),
    }
    for name, (engine, some) in again.items():
        print(
            f"{dtype:9} {name:18} same bits in {equal(generate(engine, folder, some), first)} rows",
            flush=True,
        )
    two = generate(new(threads=2), folder, requests)
    print(f"{dtype:9} {'2 threads':18} same bits in {equal(two, first)} rows", flush=True)
    policy = LoadedPolicy(0, load_decoder(folder, DTYPES[dtype], device), load_tokenizer(folder))
    for rate in RATES:
        stale = generate(AlteredEngine(new(), partial(older, rate=rate)), folder, requests)
        code = verdict(stale, policy, dtype)
        print(
            f"{dtype:9} one step of {rate:<6g} same bits in {equal(stale, first)} rows; by tolerances {code}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", choices=tuple(DTYPES), nargs="+", default=list(DTYPES))
    options = parser.parse_args()
    with model_folder(options.model) as folder:
        for dtype in options.dtypes:
            measure(folder, dtype, options.device)


if __name__ == "__main__":
    main()
