"""Measures tokens per second of the engine and of transformers, on the same prompts, in one run.

    python bench/engine.py --device cuda --rows 256 --prompts 1024 --samples 16 --cap 512 --parts engine steps alike generate continuous
    python bench/engine.py --device cpu --rows 32 --prompts 4 --samples 8 --cap 64 --parts alike generate continuous llama
    python bench/engine.py apart --device cpu --rows 32 --prompts 8 --samples 8 --cap 64
    python bench/engine.py --device cuda --shape 7b --no-file --proofs-only --rows 512 --prompts 64 --cap 8192 \\
        --samples 16 --parts engine plain

Weights are random (or those of --model FOLDER), prompts are 64 to 512 random tokens, outputs have heavy-tailed lengths
(lognormal, median a sixth of --cap, cut off at --cap). The other programs generate --baseline-tokens for one full batch,
the same for all rows, which spares them the wait for the longest rows; part `alike` has the engine do the same. Prints
one table.

Parts: engine (proofs off and on, in turns), steps (one full decode step by context), swap (full file and delta), alike,
generate (transformers in static batches), continuous (its continuous batching), llama (llama.cpp, if llama-cpp-python is
installed), vllm (last, because it binds threads to cores; needs an environment that has it, docs/engine.md), plain (vLLM's own
`LLM.generate`, with the drawn tokens' log-probs). After part `engine`, `vllm` and `plain` generate all of its rows with the same
numbers of tokens. `apart` is short for `--parts apart`: how far two computations of the same rows are from each other. `--no-file` draws random weights on the device instead of reading a file, for
models that are larger than the disk; vLLM has weights of its own then, so it is for speed only.

The engines can run in commands of their own, so that one that fails costs only its own part: `--save-rows FILE` writes the rows of part
`engine`, and `--rows-from FILE` has parts `vllm` and `plain` of a later command generate them. With the same `--folder`, --cap and prompts
vLLM finds what an earlier command compiled. Without rows, `--parts plain --baseline-tokens 4` only compiles.
"""

import argparse
import bisect
import contextlib
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from unittest import mock

import numpy as np
import rivals
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from shoal import toploc
from shoal.model.builtin import ALPHABET
from shoal.model.decoder import Decoder
from shoal.model.fused import fuse
from shoal.model.load_model import DTYPES, empty_decoder, load_decoder
from shoal.model.shape import Shape, read_shape
from shoal.model.tokenizer import CharTokenizer, load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine import torch_engine
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.prompt_cache import PREFILL_SIZES
from shoal.rollout.engine.scheduler import cache_size_for
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.shardcast.delta import apply_deltas, write_delta
from shoal.wire.run_spec import ProofSpec
from shoal.wire.seeded_draw import sample_seed

T = TypeVar("T")

PARTS = ("engine", "steps", "swap", "apart", "alike", "generate", "continuous", "llama", "vllm", "plain")
RIVALS = ("generate", "continuous", "llama", "vllm", "plain")
"""Parts that may be missing or fail without ending the run."""
SHAPES = {
    # hidden, layers, heads, kv heads, head_dim, ffn, vocabulary
    "135m": (576, 30, 9, 3, 64, 1536, 49152),
    "0.5b": (896, 24, 14, 2, 64, 4864, 151936),
    "1.7b": (2048, 24, 32, 32, 64, 8192, 49152),
    "7b": (3584, 28, 28, 4, 128, 18944, 152064),
    "32b": (5120, 64, 40, 8, 128, 27648, 152064),
    "tiny": (128, 2, 4, 2, 32, 256, 512),
}
COPY_BYTES_PER_S = {"cuda": 4.3e12}
"""Speed of a large device-to-device copy on an H200, bytes read and written."""


def write_model(folder: Path, name: str, seed: int, device: str) -> None:
    write_config(folder, name)
    decoder = empty_decoder(read_shape(folder), torch.bfloat16, device)
    torch.manual_seed(seed)
    fill(decoder)
    save_weights(decoder, folder / WEIGHTS_FILE)


def fill(decoder: Decoder) -> None:
    """Gives every weight a random value of usual size."""
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)


def random_decoder(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Takes the place of `load_decoder`: draws the same weights each time, on the device."""
    decoder = empty_decoder(read_shape(folder), dtype, device)
    torch.manual_seed(0)
    fill(decoder)
    return decoder


def write_config(folder: Path, name: str) -> None:
    hidden, layers, heads, kv_heads, head_dim, ffn, vocab = SHAPES[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": CharTokenizer.PAD,
        "bos_token_id": CharTokenizer.BOS,
        "eos_token_id": CharTokenizer.EOS,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    CharTokenizer(ALPHABET).save(folder)


def real_prompts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Returns the first questions of a file, as the model's chat template asks them."""
    tokenizer = load_tokenizer(options.model)
    with options.questions.open() as lines:
        questions = [
            json.loads(line)["question"] for line, _ in zip(lines, range(options.prompts), strict=False)
        ]
    return [tuple(tokenizer.encode_prompt(question, chat=True)) for question in questions]


def make_requests(options: argparse.Namespace, vocab: int, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(
        rng.lognormal(np.log(options.cap / 6), 0.8, (options.prompts, options.samples)), 1, options.cap
    )
    if options.questions:
        prompts, lengths = real_prompts(options), np.full(lengths.shape, options.cap)
    else:
        prompts = [
            tuple(rng.integers(3, vocab, rng.integers(options.prompt_min, options.prompt_max + 1)).tolist())
            for _ in range(options.prompts)
        ]
    return [
        GenerationRequest(
            prompt_index=index,
            sample_index=sample,
            prompt_tokens=prompt,
            sample_seed=sample_seed(f"{seed:064x}", index, sample),
            max_new_tokens=int(lengths[index, sample]),
            temperature=1.0,
        )
        for index, prompt in enumerate(prompts)
        for sample in range(options.samples)
    ]


def make_engine(
    options: argparse.Namespace, folder: Path, *, rows: int = 0, proofs: bool = True, graphs: bool = True
) -> TorchEngine:
    engine = TorchEngine(
        compute_dtype=options.dtype,
        proof=ProofSpec() if proofs else None,
        max_rows=rows or options.rows,
        device=options.device,
        graphs=graphs,
    )
    engine.load(folder, 0)
    return engine


class StepTimes:
    """Counts steps and their seconds by the number of rows that run."""

    ROWS = (8, 16, 32, 64, 128, 256, 512)

    def __init__(self) -> None:
        self._num, self._seconds = [0] * (1 + len(self.ROWS)), [0.0] * (1 + len(self.ROWS))

    def add(self, num_running: int, seconds: float) -> None:
        place = bisect.bisect_left(self.ROWS, num_running)
        self._num[place] += 1
        self._seconds[place] += seconds

    def __str__(self) -> str:
        names = [f"to {rows}" for rows in self.ROWS] + ["more"]
        return "; ".join(
            f"{name}: {num:,} x {spent_s / num * 1e3:.2f} ms"
            for name, num, spent_s in zip(names, self._num, self._seconds, strict=True)
            if num
        )


def drain(
    engine: TorchEngine, requests: Sequence[GenerationRequest], times: StepTimes | None = None
) -> tuple[list[FinishedRow], int]:
    engine.submit(requests)
    finished: list[FinishedRow] = []
    steps = 0
    began_s = time.perf_counter()
    while engine.has_work:
        finished += engine.step()
        steps += 1
        if times is not None:
            now_s = time.perf_counter()
            times.add(engine._scheduler.num_running, now_s - began_s)
            began_s = now_s
    return finished, steps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, work: Callable[[], T]) -> tuple[float, T]:
    synchronize(device)
    started_s = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - started_s, result


def bytes_moved(shape: Shape, finished: Sequence[FinishedRow], steps: int, value_bytes: int) -> float:
    """Returns the fewest bytes that decoding must read: the weights once a step, a row's keys and values once a token."""
    head_and_layers = shape.vocab_size * shape.hidden_size + shape.num_layers * (
        shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
        + 3 * shape.hidden_size * shape.ffn_size
    )
    position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * value_bytes
    contexts = sum(
        len(row.output_tokens) * (len(row.request.prompt_tokens) + len(row.output_tokens) / 2)
        for row in finished
    )
    return steps * head_and_layers * value_bytes + position * contexts


class Pass(NamedTuple):
    finished: list[FinishedRow]
    tokens: int
    steps: int
    seconds: float
    cpu_seconds: float
    moved_bytes: float
    times: str


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        where = (
            torch.cuda.get_device_name()
            if options.device == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        print(
            f"{where}, torch {torch.__version__}, {options.model.name if options.model else options.shape} {options.dtype}, {options.rows} rows at once, "
            f"{options.prompts} prompts x {options.samples} samples, cap {options.cap}"
        )
        print(f"{'what':<52} {'tok/s':>9}  notes", flush=True)
        self.ours: Pass | None = None
        """The engine's own result on the rivals' rows, once measured."""
        self.rows: list[GenerationRequest] = []
        """The rows of part `engine`, each with as many tokens as it got there; for parts `vllm` and `plain`."""
        self.longest = 0
        """Tokens of the longest prompt and --cap; the same for all rows made by these options."""

    def rival(self, what: str, tokens: int, spent: rivals.Spent, notes: str) -> None:
        if self.ours is not None:
            share = (
                tokens / self.ours.tokens
            )  # a rival may end a row sooner, and is then compared by the tokens it generated
            notes += (
                f"; TorchEngine {spent.seconds / self.ours.seconds / share:.1f} times as fast, "
                f"{spent.cpu_seconds / self.ours.cpu_seconds / share:.1f} by CPU time"
            )
        self.line(what, tokens / spent.seconds, notes)

    def line(self, what: str, tokens_per_s: float | None, notes: str = "") -> None:
        shown = "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
        print(f"{what:<52} {shown:>9}  {notes}", flush=True)


def one_pass(
    options: argparse.Namespace, engine: TorchEngine, requests: Sequence[GenerationRequest], shape: Shape
) -> Pass:
    cpu_s = time.process_time()
    times = StepTimes()
    seconds, result = timed(options.device, lambda: drain(engine, requests, times))
    finished, steps = result
    assert len(finished) == len(requests)
    moved = bytes_moved(shape, finished, steps, DTYPES[options.dtype].itemsize)
    tokens = sum(len(row.output_tokens) for row in finished)
    return Pass(finished, tokens, steps, seconds, time.process_time() - cpu_s, moved, str(times))


def bench_engine(options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Generates all rows to their end, with and without proofs in turns, so that other load affects both alike."""
    shape = read_shape(folder)
    requests = make_requests(options, shape.vocab_size)
    few = [replace(request, max_new_tokens=4) for request in requests[: options.rows]]
    kinds = (True,) if options.proofs_only else (False, True)
    engines = {proofs: make_engine(options, folder, proofs=proofs) for proofs in kinds}
    prefill = PREFILL_SIZES[options.device]
    size = cache_size_for(
        requests, min(options.rows, len(requests)), computed_prompts=prefill.batches * prefill.prompts
    )
    for engine in engines.values():
        engine._cache_size = size  # allocates slots for the longest row, without generating it
        drain(engine, few)  # compiles kernels, captures graphs
        if options.device == "cuda":
            short = [replace(row, max_new_tokens=min(row.max_new_tokens, 128)) for row in requests[:2048]]
            drain(engine, short)  # the caching allocators have seen every size
    passes: dict[bool, list[Pass]] = {proofs: [] for proofs in kinds}
    for turn in range(options.repeats):
        for proofs in kinds if turn % 2 == 0 else kinds[::-1]:
            passes[proofs].append(one_pass(options, engines[proofs], requests, shape))
    for proofs in kinds:
        name = "on" if proofs else "off"
        rates = [run.tokens / run.seconds for run in passes[proofs]]
        table.line(
            f"TorchEngine, proofs {name}",
            statistics.median(rates),
            f"of {', '.join(f'{r:,.0f}' for r in rates)}",
        )
    table.ours = run = min(passes[True], key=lambda run: run.seconds)
    counts = {row.request: len(row.output_tokens) for row in run.finished}
    table.rows = [replace(request, max_new_tokens=counts[request]) for request in requests]
    notes = f"{len(requests):,} rows, {run.tokens:,} tokens, {run.steps:,} steps: {run.tokens / run.steps:.0f} rows on average"
    if options.device in COPY_BYTES_PER_S:
        limit_s = run.moved_bytes / COPY_BYTES_PER_S[options.device]
        notes += f"; {limit_s / run.seconds:.0%} of the memory-bandwidth limit"
    if options.device == "cuda":
        notes += f"; {torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most"
    table.line("  the fastest with proofs", run.tokens / run.seconds, notes)
    table.line("  its steps by running rows", None, run.times)
    if options.save_rows:
        save_rows(options, run, table.rows)
    if options.proofs_only:
        return
    pairs = list(zip(passes[False], passes[True], strict=True))
    wall = [on.seconds / off.seconds - 1 for off, on in pairs]
    cpu = [on.cpu_seconds / off.cpu_seconds - 1 for off, on in pairs]
    table.line(
        "  what proofs cost, pair by pair",
        None,
        f"time {', '.join(f'{cost:+.1%}' for cost in wall)}: median {statistics.median(wall):+.1%}; "
        f"CPU time {', '.join(f'{cost:+.1%}' for cost in cpu)}: median {statistics.median(cpu):+.1%}",
    )


ROW_OPTIONS = ("shape", "model", "questions", "prompts", "samples", "prompt_min", "prompt_max", "cap")
"""Options that rows follow from."""


def row_options(options: argparse.Namespace) -> dict[str, str]:
    return {name: str(getattr(options, name)) for name in ROW_OPTIONS}


def save_rows(options: argparse.Namespace, run: Pass, rows: Sequence[GenerationRequest]) -> None:
    """Writes how many tokens each row got, and what the run took."""
    spent = {"tokens": run.tokens, "seconds": run.seconds, "cpu_seconds": run.cpu_seconds}
    counts = [row.max_new_tokens for row in rows]
    options.save_rows.write_text(
        json.dumps({"options": row_options(options), "run": spent, "counts": counts})
    )


def read_rows(options: argparse.Namespace, vocab: int, table: Table) -> None:
    """Reads the rows that another command saved. Raises SystemExit if it made other rows."""
    saved = json.loads(options.rows_from.read_text())
    if saved["options"] != row_options(options):
        raise SystemExit(f"{options.rows_from} has rows of {saved['options']}, not {row_options(options)}")
    table.rows = [
        replace(request, max_new_tokens=count)
        for request, count in zip(make_requests(options, vocab), saved["counts"], strict=True)
    ]
    run = saved["run"]
    table.ours = Pass([], run["tokens"], 0, run["seconds"], run["cpu_seconds"], 0.0, "")


def bench_alike(options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Generates the rivals' rows: one full batch with the same number of tokens each."""
    requests = make_requests(options, read_shape(folder).vocab_size)[: options.rows]
    alike = [replace(request, max_new_tokens=options.baseline_tokens) for request in requests]
    engine = make_engine(options, folder)
    # Allocates slots for the longest row once; random weights hardly ever end a row sooner.
    drain(engine, [replace(request, max_new_tokens=options.baseline_tokens) for request in requests[:2]])
    drain(engine, [replace(request, max_new_tokens=2) for request in requests])
    runs = [one_pass(options, engine, alike, read_shape(folder)) for _ in range(options.repeats)]
    table.ours = best = min(runs, key=lambda run: run.seconds)
    table.line(
        f"TorchEngine, {len(alike)} rows alike, proofs on",
        best.tokens / best.seconds,
        f"{options.baseline_tokens} tokens a row, prefill included; best of {len(runs)}",
    )


def bench_steps(options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Measures one step with all slots full, at a fixed context."""
    vocab = read_shape(folder).vocab_size
    num_steps = 48 if options.device == "cuda" else 4
    for context in options.contexts:
        engine = make_engine(options, folder, proofs=False)
        request = replace(
            make_requests(options, vocab)[0], prompt_tokens=tuple(range(3, 3 + context)), max_new_tokens=80
        )
        engine.submit(
            [replace(request, sample_index=index, sample_seed=index) for index in range(options.rows)]
        )
        for _ in range(16):
            engine.step()
        seconds, _ = timed(options.device, partial(run_steps, engine, num_steps))
        table.line(
            f"one step at context {context}",
            options.rows * num_steps / seconds,
            f"{seconds / num_steps * 1e3:.3f} ms",
        )


def run_steps(engine: TorchEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def bench_swap(options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Swaps to a version that differs in 1 % of its weights: as a file, and as a delta made into a file beside generation."""
    newer, made = folder.with_name("newer"), folder.with_name("made")
    for path in (newer, made):
        shutil.copytree(folder, path, dirs_exist_ok=True)
    change_some(newer / WEIGHTS_FILE, share=0.01)
    old, new, payload = folder / WEIGHTS_FILE, newer / WEIGHTS_FILE, folder.with_name("payload")
    engine = make_engine(options, folder)
    rows = make_requests(options, read_shape(folder).vocab_size)[: options.rows]
    drain(engine, rows)
    before = allocated_bytes(options.device)
    full = [timed(options.device, partial(engine.load, path, v))[0] for v, path in ((1, newer), (2, folder))]
    size = old.stat().st_size
    table.line(
        "swap to a new version, full file",
        None,
        f"{min(full):.3f} s for {size / 1e6:,.0f} MB: all the generation lost",
    )
    digest = blake3(old.read_bytes()).hexdigest()
    assert write_delta(old, new, payload, old_blake3=digest, max_bytes=size)
    made_s, made_digest = timed(options.device, lambda: apply_deltas(old, [payload], made / WEIGHTS_FILE))
    swap_s, _ = timed(options.device, lambda: engine.load(made, 3))
    grown = allocated_bytes(options.device) - before
    swapped, fresh = drain(engine, rows)[0], drain(make_engine(options, newer), rows)[0]
    same = {row.request: row for row in swapped} == {row.request: row for row in fresh}
    whole = "the same file" if made_digest == blake3(new.read_bytes()).hexdigest() else "ANOTHER FILE"
    table.line(
        "swap to a new version, by delta",
        None,
        f"{swap_s:.3f} s of generation lost; before that, beside generation, {payload.stat().st_size / 1e6:.1f} MB made {whole} in {made_s:.3f} s",
    )
    table.line(
        "  after both swaps",
        None,
        f"rows {'equal' if same else 'DIFFER FROM'} a fresh load's to the bit; {grown / 1e6:+.1f} MB allocated on the device",
    )


def change_some(path: Path, share: float) -> None:
    """Flips the last bit of some weights of a file."""
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        words = tensor.view(torch.int16)
        words ^= (torch.rand(words.shape, generator=generator) < share).to(torch.int16)
    save_file(tensors, path, metadata={"format": "pt"})


def allocated_bytes(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


@torch.inference_mode()
def prefill_states(decoder: Decoder, row: FinishedRow) -> torch.Tensor:
    prompt = row.request.prompt_tokens
    tokens = torch.tensor([[*prompt, *row.output_tokens]], device=decoder.model.norm.weight.device)
    hidden: torch.Tensor = decoder(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
    return hidden[0, len(prompt) : -1]


def agreement(ours: Sequence[FinishedRow], theirs: Sequence[FinishedRow]) -> str:
    """Compares tokens of the same rows up to the first that differs, and log-probs up to there."""
    others = {row.request: row for row in theirs}
    same = total = proofs = 0
    gaps: list[float] = []
    for row in ours:
        other = others[row.request]
        pairs = list(zip(row.output_tokens, other.output_tokens, strict=False))
        agree = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total, proofs = same + agree, total + len(pairs), proofs + (row.proof == other.proof)
        gaps += [abs(a - b) for a, b in zip(row.logprobs[:agree], other.logprobs[:agree], strict=True)]
    gap = f"log-prob gap mean {np.mean(gaps):.1e}, max {max(gaps):.1e}" if gaps else "no log-prob to compare"
    return f"{same / total:.2%} of tokens before the first difference; {gap}; proofs equal {proofs} of {len(ours)}"


def against(rows: Sequence[FinishedRow], states: Sequence[torch.Tensor]) -> str:
    """Checks the rows' proofs against states that were computed in another way."""
    checks = toploc.verify_proofs([row.proof for row in rows], states, control_seed=1)
    segments = [check for row in checks for check in row]
    equal = sum(ours == row.proof for ours, row in zip(toploc.build_proofs(list(states)), rows, strict=True))
    return (
        f"{len(segments)} segments: exponents that differ mean {np.mean([s.exponent_mismatches for s in segments]):.2f}, "
        f"max {max(s.exponent_mismatches for s in segments)}; mantissa mean {np.mean([s.mantissa_mean for s in segments]):.3f}, "
        f"max {max(s.mantissa_mean for s in segments):.3f}; proofs equal {equal} of {len(rows)}"
    )


def prefilled(folder: Path, rows: Sequence[FinishedRow], options: argparse.Namespace) -> list[torch.Tensor]:
    decoder = load_decoder(folder, DTYPES[options.dtype], options.device)
    return [prefill_states(decoder, row) for row in rows]


def bench_apart(options: argparse.Namespace, folder: Path, table: Table) -> None:
    requests = [
        replace(request, max_new_tokens=min(max(request.max_new_tokens, 2), 64))
        for request in make_requests(options, read_shape(folder).vocab_size, seed=1)[: options.rows]
    ]
    few = requests[:: max(1, len(requests) // 8)]
    together, _ = drain(make_engine(options, folder), requests)
    some = [row for row in together if row.request in set(few)]
    again, _ = drain(make_engine(options, folder), requests)
    table.line("apart: the same again", None, agreement(together, again))
    alone, _ = drain(make_engine(options, folder, rows=1), few)
    table.line(f"apart: batch 1 and {len(requests)}", None, agreement(alone, together))
    table.line("apart: decode and prefill", None, against(some, prefilled(folder, some, options)))
    if options.device == "cuda":
        apart_on_cuda(options, folder, table, requests, together, some)


def apart_on_cuda(
    options: argparse.Namespace,
    folder: Path,
    table: Table,
    requests: Sequence[GenerationRequest],
    together: Sequence[FinishedRow],
    some: Sequence[FinishedRow],
) -> None:
    from cuda_replay import replay  # needs Triton

    eager, _ = drain(make_engine(options, folder, graphs=False), requests)
    table.line("apart: eager and graph", None, agreement(eager, together))
    weights = fuse(load_decoder(folder, DTYPES[options.dtype], options.device))
    rows = [(row.request.prompt_tokens, row.output_tokens) for row in together]
    replay(weights, rows)
    seconds, states = timed("cuda", lambda: replay(weights, rows))
    num_tokens = sum(len(tokens) for _, tokens in rows)
    table.line("apart: decode and replay in decode's order", num_tokens / seconds, against(together, states))
    on_cpu = argparse.Namespace(**vars(options) | {"device": "cpu"})
    table.line("apart: decode here, prefill on the CPU", None, against(some, prefilled(folder, some, on_cpu)))
    cpu_rows, _ = drain(make_engine(on_cpu, folder), [row.request for row in some])
    table.line("apart: CPU and this GPU", None, agreement(cpu_rows, some))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="?", choices=["apart"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, help="a model folder instead of random weights")
    parser.add_argument(
        "--questions",
        type=Path,
        help="with --model: a JSONL file with a column `question`; answers end by themselves",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-min", type=int, default=64)
    parser.add_argument("--prompt-max", type=int, default=512)
    parser.add_argument("--cap", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="*", default=[256])
    parser.add_argument("--baseline-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--proofs-only", action="store_true", help="one engine, with proofs")
    parser.add_argument(
        "--no-file", action="store_true", help="draw random weights on the device; nothing is written"
    )
    parser.add_argument(
        "--vllm-memory", type=float, default=0.9, help="share of the device's memory for parts vllm and plain"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the model is written, instead of a temporary folder"
    )
    parser.add_argument("--save-rows", type=Path, metavar="FILE", help="written by part engine")
    parser.add_argument(
        "--rows-from", type=Path, metavar="FILE", help="rows for parts vllm and plain, of another command"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["engine", "generate"])
    options = parser.parse_args()
    if options.only:
        options.parts = [options.only]
    return options


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(options)
    benches: dict[str, Callable[..., None]] = {
        "engine": bench_engine,
        "steps": bench_steps,
        "swap": bench_swap,
        "apart": bench_apart,
        "alike": bench_alike,
        "generate": rivals.bench_generate,
        "continuous": rivals.bench_continuous,
        "llama": rivals.bench_llama,
        "vllm": rivals.bench_vllm,
        "plain": rivals.bench_plain,
    }
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        if options.model:
            shutil.copytree(options.model, folder, dirs_exist_ok=True)
        elif options.no_file:
            write_config(folder, options.shape)
            stack.enter_context(mock.patch.object(torch_engine, "load_decoder", random_decoder))
        else:
            write_model(folder, options.shape, 0, options.device)
        vocab = read_shape(folder).vocab_size
        requests = make_requests(options, vocab)
        table.longest = max(len(request.prompt_tokens) for request in requests) + options.cap
        requests = requests[: options.rows]
        if options.rows_from:
            read_rows(options, vocab, table)
        for part in options.parts:
            if part not in RIVALS:
                benches[part](options, folder, table)
                continue
            gc.collect()  # a rival may need the memory of the engines before it
            torch.cuda.empty_cache()
            try:
                benches[part](options, folder, requests, table)
            except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                table.line(f"part {part}", None, f"failed: {type(error).__name__}: {str(error)[:120]}")


if __name__ == "__main__":
    main()
