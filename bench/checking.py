"""Checking against generating: seconds to generate rows with their proofs, and seconds to check them, by the same machine.

    python bench/checking.py --model tiny --tokens 128 512 --rows 1 16 64
    python bench/checking.py --model smollm2-135m --device cuda --dtype bfloat16 --tokens 128 1024 4096 --rows 1 64 256

Checking is all that follows the reading of a file: one prefill, every proof, every log-prob, every draw. Rows rarely end before the
cap: the prompts are random tokens.
"""

import argparse
import hashlib
import random
import time

import torch

from shoal.cli.answering import model_folder
from shoal.model.load import DTYPES, load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.engine import Request
from shoal.rollout.submission import to_rollout
from shoal.rollout.torch_engine import TorchEngine
from shoal.swarm.validator.recompute import Policy, Unleased, recompute
from shoal.wire.draw import sample_seed
from shoal.wire.run import ProofSpec, Sampling

PROMPT_TOKENS = 64
SEED = hashlib.sha256(b"checking").hexdigest()
TERMS = Unleased(SEED, Sampling(), ProofSpec())


def requests(num_rows: int, new_tokens: int, vocab_size: int) -> list[Request]:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(num_rows)]
    return [
        Request(
            prompt_index=row,
            sample_index=0,
            prompt_tokens=prompt,
            sample_seed=sample_seed(SEED, row, 0),
            max_new_tokens=new_tokens,
            temperature=1.0,
        )
        for row, prompt in enumerate(prompts)
    ]


def seconds(device: str, started_s: float) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started_s


def measure(options: argparse.Namespace, engine: TorchEngine, policy: Policy, rows: int, tokens: int) -> None:
    work = requests(rows, tokens, policy.tokenizer.vocab_size)
    best_generate = best_check = float("inf")
    for _ in range(options.repeats):
        started_s = time.perf_counter()
        engine.submit(work)
        finished = []
        while engine.has_work:
            finished += engine.step()
        best_generate = min(best_generate, seconds(options.device, started_s))
        table = [to_rollout(row) for row in finished]
        started_s = time.perf_counter()
        recompute(table, TERMS, policy, control_seed=1)
        best_check = min(best_check, seconds(options.device, started_s))
    made = sum(len(row.output_tokens) for row in finished)
    print(
        f"{rows:>6} {tokens:>8} {made:>9,} {best_generate:>10.3f} {best_check:>9.3f} {best_generate / best_check:>7.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 192])
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of one prefill")
    options = parser.parse_args()
    with model_folder(options.model) as folder:
        decoder = load_decoder(folder, DTYPES[options.dtype], options.device)
        policy = Policy(0, decoder, load_tokenizer(folder), options.batch_tokens)
        engine = TorchEngine(
            compute_dtype=options.dtype, proof=ProofSpec(), max_rows=max(options.rows), device=options.device
        )
        engine.load(folder, 0)
        print(f"{options.model}, {options.dtype}, {options.device}, prompts of {PROMPT_TOKENS} tokens")
        print(f"{'rows':>6} {'at most':>8} {'tokens':>9} {'generate s':>10} {'check s':>9} {'ratio':>7}")
        for tokens in options.tokens:
            for rows in options.rows:
                measure(options, engine, policy, rows, tokens)


if __name__ == "__main__":
    main()
