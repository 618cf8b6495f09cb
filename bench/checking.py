"""Compares the time to generate rows with their proofs and the time to check them, on the same machine.

    python bench/checking.py --model tiny --tokens 128 512 --rows 1 16 64
    python bench/checking.py --model 135m --device cuda --dtype bfloat16 --tokens 4096 1024 128 --rows 256 64 16 1 \
        --batch-tokens 70000 --repeats 1 --proofs-only --seconds 140

`--model` is a folder, a built-in model, or a shape of bench/engine.py with random weights. Sizes are measured in the given order; with
the largest first, the engine allocates memory and captures its graphs once, before the measurement. A size that does not fit in
memory, or that would start after --seconds, is skipped with a message.

A check is everything after reading the file: one prefill, every proof, every log-prob and every draw, all rows at once. With
`--submissions N` that many are generated one after another and checked together, as a validator does with its queue; the seconds are
those of one. `prefill`, `proofs` and `tokens` are the parts of a check, measured separately: in a check the device works on one batch
while the host reads the results of the one before. `floor` is the time of the check's matrix products and attention at the device's
full speed (--peak, FLOP/s). `no proofs` is generation without proofs: the difference is the cost of building them. Rows rarely end
before the length limit, because the prompts are random tokens. `--no-file` draws the weights of a shape on the device, once for
engine and check, for models that are larger than the disk.
"""

import argparse
import contextlib
import hashlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from shoal.cli.commands.sample_answers import model_folder
from shoal.files import free_memory_bytes
from shoal.model import packed_prefill
from shoal.model.decoder import Decoder
from shoal.model.load_model import DTYPES, load_decoder
from shoal.model.shape import Shape
from shoal.model.tokenizer import load_tokenizer
from shoal.rollout.engine import torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.kv_slots import cache_dtype
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES
from shoal.rollout.engine.proofs import fold_size
from shoal.rollout.engine.scheduler import cache_size_for, fit_blocks
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.swarm.validator import recompute as recomputing
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.swarm.validator.recompute import CalibrationTerms, RowsToCheck, recompute_many
from shoal.wire.codes import Rejected
from shoal.wire.run_spec import ProofSpec, Sampling
from shoal.wire.seeded_draw import sample_seed

PROMPT_TOKENS = 64
MEMORY_SHARE = 0.6
"""Share of the device's memory for the rows of all engines; the rest is for weights and checking."""


def terms(submission: int) -> CalibrationTerms:
    """Returns requests; each submission has its own prompts and draws."""
    return CalibrationTerms(hashlib.sha256(b"checking %d" % submission).hexdigest(), Sampling(), ProofSpec())


def requests(
    num_rows: int, new_tokens: int, vocab_size: int, samples: int, submission: int = 0
) -> list[GenerationRequest]:
    rng = random.Random(submission)
    seed = terms(submission).seed
    num_prompts = -(-num_rows // samples)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)) for _ in range(num_prompts)]
    return [
        GenerationRequest(
            prompt_index=row // samples,
            sample_index=row % samples,
            prompt_tokens=prompts[row // samples],
            sample_seed=sample_seed(seed, row // samples, row % samples),
            max_new_tokens=new_tokens,
            temperature=1.0,
        )
        for row in range(num_rows)
    ]


def now_s(options: argparse.Namespace) -> float:
    if torch.device(options.device).type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if options.cpu_time else time.perf_counter()


def generate(
    options: argparse.Namespace, engine: TorchEngine, work: list[GenerationRequest]
) -> tuple[float, list[FinishedRow]]:
    started_s = now_s(options)
    engine.submit(work)
    finished = []
    while engine.has_work:
        finished += engine.step()
    return now_s(options) - started_s, finished


def check(options: argparse.Namespace, policy: LoadedPolicy, submissions: list[list[FinishedRow]]) -> float:
    """Returns the seconds for one submission."""
    given = [
        RowsToCheck([row.to_rollout() for row in finished], terms(number))
        for number, finished in enumerate(submissions)
    ]
    started_s = now_s(options)
    for found in recompute_many(given, policy, control_seed=1):
        assert not isinstance(found, Rejected), found
    return (now_s(options) - started_s) / len(submissions)


def parts(
    options: argparse.Namespace, policy: LoadedPolicy, submissions: list[list[FinishedRow]]
) -> dict[str, float]:
    """Returns the seconds of each part of a check."""
    found: dict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started_s = now_s(options)
            result = work(*arguments, **named)
            found[name] += now_s(options) - started_s
            return result

        return run

    steps = {
        "prefill": "prefill",
        "_start_proofs": "proofs",
        "_verify_proofs": "proofs",
        "_token_columns": "tokens",
        "_per_token": "tokens",
    }
    wrapped: dict[str, Any] = {step: timed(name, getattr(recomputing, step)) for step, name in steps.items()}
    with mock.patch.multiple(recomputing, **wrapped):
        check(options, policy, submissions)
    return {name: spent_s / len(submissions) for name, spent_s in found.items()}


def shape_of(policy: LoadedPolicy) -> Shape:
    shape = policy.decoder.shape
    assert isinstance(shape, Shape), "this bench measures Shoal's own decoder"
    return shape


def flops(policy: LoadedPolicy, finished: list[FinishedRow]) -> float:
    """Returns the FLOPs of one check: every matrix once per token, each prompt once, and causal attention."""
    shape = shape_of(policy)
    matrices = sum(parameter.numel() for parameter in policy.decoder.parameters() if parameter.dim() == 2)
    if not shape.tied_embeddings:
        matrices -= shape.vocab_size * shape.hidden_size  # the embedding is a lookup, not a product
    outputs = [len(row.output_tokens) for row in finished]
    prompts = len({row.request.prompt_index for row in finished}) * PROMPT_TOKENS
    looks = prompts * PROMPT_TOKENS / 2 + sum(n * (PROMPT_TOKENS + n / 2) for n in outputs)
    return (
        2.0 * matrices * (prompts + sum(outputs))
        + 4 * shape.num_layers * shape.num_heads * shape.head_dim * looks
    )


def fits(options: argparse.Namespace, policy: LoadedPolicy, rows: int, tokens: int) -> bool:
    """Returns whether every engine can run this many rows at once."""
    device, shape = torch.device(options.device), shape_of(policy)
    is_cuda = device.type == "cuda"
    memory_bytes = torch.cuda.mem_get_info(device)[1] if is_cuda else free_memory_bytes()
    size = PREFILL_SIZES[device.type]
    work = requests(rows, tokens, shape.vocab_size, options.samples)
    cache = cache_size_for(work, rows, computed_prompts=size.batches * size.prompts)
    value_bytes = cache_dtype(DTYPES[options.dtype], device).itemsize
    budget_bytes = int(MEMORY_SHARE * memory_bytes / (1 if options.proofs_only else 2))
    try:
        fitting = fit_blocks(
            shape,
            cache,
            value_bytes=value_bytes,
            state_tokens=fold_size(None).kept,
            budget_bytes=budget_bytes,
        )
        return (fitting.rows, fitting.blocks) == (rows, cache.blocks)
    except ValueError:  # not even one row
        return False


def warm_up(
    options: argparse.Namespace, engines: list[TorchEngine], policy: LoadedPolicy, rows: int, tokens: int
) -> None:
    """Allocates memory for this many rows of this length, captures graphs and compiles kernels, by running one whole row."""
    short = requests(rows, 16, policy.decoder.shape.vocab_size, options.samples)
    for place, engine in enumerate(engines):
        _, finished = generate(options, engine, [replace(short[0], max_new_tokens=tokens), *short[1:]])
        if place == 0:  # the other engines make no proofs
            check(options, policy, [finished])


def measure(
    options: argparse.Namespace, engines: list[TorchEngine], policy: LoadedPolicy, rows: int, tokens: int
) -> None:
    vocab_size, count = policy.decoder.shape.vocab_size, options.submissions
    work = [requests(rows, tokens, vocab_size, options.samples, number) for number in range(count)]
    best = [float("inf"), float("nan") if len(engines) == 1 else float("inf"), float("inf")]
    submissions: list[list[FinishedRow]] = []
    for _ in range(options.repeats):
        for place, engine in enumerate(engines):
            made = [generate(options, engine, one) for one in work]
            best[place] = min(best[place], sum(spent_s for spent_s, _ in made) / count)
            submissions = [finished for _, finished in made] if place == 0 else submissions
        check(options, policy, submissions)  # warm-up: a validator sees new shapes only once
        best[2] = min(best[2], check(options, policy, submissions))
    steps = parts(options, policy, submissions)
    finished = submissions[0]
    num_tokens = sum(len(row.output_tokens) for row in finished)
    floor_s = flops(policy, finished) / options.peak
    print(
        f"{rows:>6} {tokens:>8} {num_tokens:>9,} {best[0]:>10.3f} {best[1]:>10.3f} {best[2]:>9.3f} {best[0] / best[2]:>7.1f} "
        f"{floor_s:>8.4f} {steps['prefill']:>9.3f} {steps['proofs']:>9.3f} {steps['tokens']:>9.3f}",
        flush=True,
    )


def measure_all(options: argparse.Namespace, engines: list[TorchEngine], policy: LoadedPolicy) -> None:
    started_s = time.perf_counter()
    warmed = (0, 0)
    for tokens in options.tokens:
        for rows in options.rows:
            left_out = f"{rows:>6} {tokens:>8} skipped:"
            if not fits(options, policy, rows, tokens):
                print(left_out, "this many rows of that length do not fit in memory", flush=True)
                continue
            if (spent_s := time.perf_counter() - started_s) > options.seconds:
                print(left_out, f"{spent_s:.0f} s have passed", flush=True)
                continue
            if rows > warmed[0] or tokens > warmed[1]:
                warmed = (max(rows, warmed[0]), max(tokens, warmed[1]))
                warm_up(options, engines, policy, *warmed)
            try:
                measure(options, engines, policy, rows, tokens)
            except torch.OutOfMemoryError:
                print(left_out, "out of memory", flush=True)


@contextlib.contextmanager
def folder_of(model: str, device: str, *, no_file: bool) -> Iterator[Path]:
    from engine import SHAPES, random_decoder, write_config, write_model  # bench/engine.py

    if no_file:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(torch_engine, "load_decoder", random_decoder),
        ):
            write_config(Path(folder), model)
            yield Path(folder)
        return
    if model not in SHAPES or Path(model).is_dir():
        with model_folder(model) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", model, 0, device)
        yield Path(folder) / "model"


def decoder_of(options: argparse.Namespace, engine: TorchEngine, folder: Path) -> Decoder:
    if not options.no_file:
        return load_decoder(folder, DTYPES[options.dtype], options.device)
    model = engine._loaded()
    packed_prefill._FUSED[model.decoder] = model.weights  # fusing them again would copy them
    return model.decoder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 192])
    parser.add_argument("--samples", type=int, default=16, help="rows per prompt, as in a group")
    parser.add_argument(
        "--submissions", type=int, default=1, help="submissions to generate one by one and check together"
    )
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument(
        "--peak",
        type=float,
        default=989e12,
        help="FLOP/s of the device in this dtype; the default is an H200's",
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure processor time, on a machine with other load"
    )
    parser.add_argument("--proofs-only", action="store_true", help="skip the generation without proofs")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of one prefill")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="skip sizes that would start later than this"
    )
    parser.add_argument("--no-file", action="store_true", help="draw a shape's weights on the device")
    options = parser.parse_args()
    with folder_of(options.model, options.device, no_file=options.no_file) as folder:
        engines = [
            TorchEngine(
                compute_dtype=options.dtype, proof=proof, max_rows=max(options.rows), device=options.device
            )
            for proof in ((ProofSpec(),) if options.proofs_only else (ProofSpec(), None))
        ]
        for engine in engines:
            engine.load(folder, 0)
        decoder = decoder_of(options, engines[0], folder)
        policy = LoadedPolicy(0, decoder, load_tokenizer(folder), options.batch_tokens)
        print(
            f"{options.model}, {options.dtype}, {options.device}, prompts of {PROMPT_TOKENS} tokens, "
            f"{options.samples} rows of each"
        )
        print(
            f"{'rows':>6} {'at most':>8} {'tokens':>9} {'generate s':>10} {'no proofs':>10} {'check s':>9} {'ratio':>7} "
            f"{'floor':>8} {'prefill':>9} {'proofs':>9} {'tokens':>9}"
        )
        measure_all(options, engines, policy)


if __name__ == "__main__":
    main()
