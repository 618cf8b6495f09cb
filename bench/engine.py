"""Tokens a second of the engine, beside transformers, on the same prompts, in one run.

    python bench/engine.py --device cuda --shape 135m --dtype bfloat16 --rows 256 --prompts 128 --samples 16
    python bench/engine.py --device cpu --shape 135m --dtype float32 --rows 32 --prompts 8 --samples 8 --cap 64

Weights are random, prompts are random tokens of 64 to 512, outputs have heavy-tailed lengths (lognormal, median a sixth
of --cap, cut off at --cap). transformers makes --baseline-tokens for one full batch, all rows alike, which spares it the
tail that it would otherwise wait for. Prints one table.

Parts: engine (proofs off and on), steps (one decode step by rows and context), swap, determinism, generate (transformers
in static batches), continuous (its continuous batching).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shoal import toploc
from shoal.model.builtin import ALPHABET
from shoal.model.decoder import Decoder
from shoal.model.load import DTYPES, empty_decoder, load_decoder
from shoal.model.shape import Shape, read_shape
from shoal.model.tokenizer import CharTokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine import Finished, Request
from shoal.rollout.torch_engine import TorchEngine
from shoal.wire.draw import sample_seed
from shoal.wire.run import ProofSpec

PARTS = ("engine", "steps", "swap", "determinism", "generate", "continuous")
SHAPES = {
    # hidden, layers, heads, kv heads, head_dim, ffn, vocabulary
    "135m": (576, 30, 9, 3, 64, 1536, 49152),
    "1.7b": (2048, 24, 32, 32, 64, 8192, 49152),
    "tiny": (128, 2, 4, 2, 32, 256, 512),
}
COPY_BYTES_PER_S = {"cuda": 4.3e12}
"""What a large device-to-device copy reaches on an H200, bytes read and written."""


def write_model(folder: Path, name: str, seed: int, device: str) -> None:
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
        "max_position_embeddings": 8192,
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
    decoder = empty_decoder(read_shape(folder), torch.bfloat16, device)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    save_weights(decoder, folder / WEIGHTS_FILE)


def make_requests(options: argparse.Namespace, vocab: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(
        rng.lognormal(np.log(options.cap / 6), 0.8, (options.prompts, options.samples)), 1, options.cap
    )
    prompts = [
        tuple(rng.integers(3, vocab, rng.integers(options.prompt_min, options.prompt_max + 1)).tolist())
        for _ in range(options.prompts)
    ]
    return [
        Request(
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


def drain(engine: TorchEngine, requests: Sequence[Request]) -> tuple[list[Finished], int]:
    engine.submit(requests)
    finished: list[Finished] = []
    steps = 0
    while engine.has_work:
        finished += engine.step()
        steps += 1
    return finished, steps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, work: Callable[[], object]) -> tuple[float, object]:
    synchronize(device)
    started_s = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - started_s, result


def bytes_moved(shape: Shape, finished: Sequence[Finished], steps: int, value_bytes: int) -> float:
    """The fewest bytes that decoding these rows must read: the weights once a step, each row's keys and values once a token."""
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


class Table:
    def __init__(self, options: argparse.Namespace) -> None:
        where = (
            torch.cuda.get_device_name()
            if options.device == "cuda"
            else f"{torch.get_num_threads()} CPU threads"
        )
        print(
            f"{where}, torch {torch.__version__}, {options.shape} {options.dtype}, {options.rows} rows at once, "
            f"{options.prompts} prompts x {options.samples} samples, cap {options.cap}"
        )
        print(f"{'what':<52} {'tok/s':>9}  notes", flush=True)

    def line(self, what: str, tokens_per_s: float | None, notes: str = "") -> None:
        shown = "" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
        print(f"{what:<52} {shown:>9}  {notes}", flush=True)


def bench_engine(options: argparse.Namespace, folder: Path, table: Table) -> None:
    shape = read_shape(folder)
    requests = make_requests(options, shape.vocab_size)
    few = [replace(request, max_new_tokens=4) for request in requests[: options.rows]]
    rates: dict[bool, list[float]] = {False: [], True: []}
    engines = {}
    for proofs in (False, True):
        engines[proofs] = make_engine(options, folder, proofs=proofs)
        drain(
            engines[proofs], [*few, replace(requests[0], max_new_tokens=options.cap)]
        )  # compile, capture, grow
        if options.device == "cuda":
            drain(engines[proofs], requests)  # the caching allocators have met every size
    for _ in range(options.repeats):  # alternating, so that a machine's mood hits both alike
        for proofs in (False, True):
            seconds, result = timed(options.device, lambda proofs=proofs: drain(engines[proofs], requests))
            finished, steps = result
            tokens = sum(len(row.output_tokens) for row in finished)
            assert len(finished) == len(requests)
            rates[proofs].append(tokens / seconds)
    off, on = (statistics.median(rates[proofs]) for proofs in (False, True))
    notes = f"{tokens:,} tokens, {steps:,} steps, mean {tokens / len(finished):.0f} a row"
    if options.device in COPY_BYTES_PER_S:
        moved = bytes_moved(shape, finished, steps, DTYPES[options.dtype].itemsize)
        notes += (
            f"; {moved / COPY_BYTES_PER_S[options.device] / (tokens / on):.0%} of the memory-bandwidth limit"
        )
    table.line("TorchEngine, proofs off", off, f"of {', '.join(f'{rate:,.0f}' for rate in rates[False])}")
    table.line(
        "TorchEngine, proofs on",
        on,
        f"of {', '.join(f'{rate:,.0f}' for rate in rates[True])}; {notes}; proofs cost {off / on - 1:+.1%}",
    )


def bench_steps(options: argparse.Namespace, folder: Path, table: Table) -> None:
    """Full slots at a fixed context: what one step can do."""
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
        seconds, _ = timed(options.device, lambda engine=engine: [engine.step() for _ in range(num_steps)])
        table.line(
            f"one step at context {context}",
            options.rows * num_steps / seconds,
            f"{seconds / num_steps * 1e3:.3f} ms",
        )


def bench_swap(options: argparse.Namespace, folder: Path, table: Table) -> None:
    engine = make_engine(options, folder)
    times = [timed(options.device, lambda: engine.load(folder, 1))[0] for _ in range(3)]
    size = (folder / WEIGHTS_FILE).stat().st_size
    table.line("swap to a new version, full file", None, f"{min(times):.3f} s for {size / 1e6:,.0f} MB")


@torch.inference_mode()
def prefill_states(decoder: Decoder, row: Finished) -> torch.Tensor:
    prompt = row.request.prompt_tokens
    tokens = torch.tensor([[*prompt, *row.output_tokens]], device=decoder.model.norm.weight.device)
    hidden = decoder(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None])
    return hidden[0, len(prompt) : -1]


def agreement(ours: Sequence[Finished], theirs: Sequence[Finished]) -> str:
    """Tokens of the same rows, up to the first that differs, and log-probs up to there."""
    others = {row.request: row for row in theirs}
    same = total = 0
    gaps: list[float] = []
    for row in ours:
        other = others[row.request]
        pairs = list(zip(row.output_tokens, other.output_tokens, strict=False))
        agree = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        same, total = same + agree, total + len(pairs)
        gaps += [abs(a - b) for a, b in zip(row.logprobs[:agree], other.logprobs[:agree], strict=True)]
    return f"{same / total:.2%} of tokens before the first difference; log-prob gap mean {np.mean(gaps):.1e}, max {max(gaps):.1e}"


def against_prefill(folder: Path, rows: Sequence[Finished], options: argparse.Namespace) -> str:
    decoder = load_decoder(folder, DTYPES[options.dtype], options.device)
    checks = toploc.verify_proofs(
        [row.proof for row in rows], [prefill_states(decoder, row) for row in rows], control_seed=1
    )
    segments = [check for row in checks for check in row]
    return (
        f"{len(segments)} segments: exponents that differ mean {np.mean([s.exponent_mismatches for s in segments]):.2f}, "
        f"max {max(s.exponent_mismatches for s in segments)}; mantissa mean {np.mean([s.mantissa_mean for s in segments]):.3f}, "
        f"max {max(s.mantissa_mean for s in segments):.3f}"
    )


def bench_determinism(options: argparse.Namespace, folder: Path, table: Table) -> None:
    requests = [
        replace(request, max_new_tokens=min(request.max_new_tokens, 64))
        for request in make_requests(options, read_shape(folder).vocab_size, seed=1)[: options.rows]
    ]
    together, _ = drain(make_engine(options, folder), requests)
    again, _ = drain(make_engine(options, folder), requests)
    table.line("determinism: the same again", None, agreement(together, again))
    few = requests[:: max(1, len(requests) // 8)]
    alone, _ = drain(make_engine(options, folder, rows=1), few)
    table.line(f"determinism: batch 1 against {len(requests)}", None, agreement(alone, together))
    table.line("determinism: decode against prefill", None, against_prefill(folder, together[:64], options))
    if options.device == "cuda":
        eager, _ = drain(make_engine(options, folder, graphs=False), requests)
        table.line("determinism: launched one by one against graph", None, agreement(eager, together))
        on_cpu = argparse.Namespace(**vars(options) | {"device": "cpu"})
        table.line(
            "determinism: CPU against this GPU",
            None,
            agreement(drain(make_engine(on_cpu, folder), few)[0], together),
        )
        table.line(
            "determinism: decode here, prefill on the CPU",
            None,
            against_prefill(folder, together[:8], on_cpu),
        )


def load_reference(options: argparse.Namespace, folder: Path, **more: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[options.dtype], **more)
        .to(options.device)
        .eval()
    )


def bench_generate(options: argparse.Namespace, folder: Path, table: Table) -> None:
    model = load_reference(options, folder)
    requests = make_requests(options, read_shape(folder).vocab_size)[: options.rows]
    width = max(len(request.prompt_tokens) for request in requests)
    padding = [width - len(request.prompt_tokens) for request in requests]
    tokens = torch.tensor(
        [[0] * pad + list(request.prompt_tokens) for pad, request in zip(padding, requests, strict=True)]
    ).to(options.device)
    mask = (torch.arange(width)[None] >= torch.tensor(padding)[:, None]).long().to(options.device)

    def generate(num_new: int) -> None:
        model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )

    generate(2)
    seconds, _ = timed(options.device, lambda: generate(options.baseline_tokens))
    table.line(
        f"transformers generate, {len(requests)} rows",
        len(requests) * options.baseline_tokens / seconds,
        f"{options.baseline_tokens} tokens a row, prefill included",
    )


def bench_continuous(options: argparse.Namespace, folder: Path, table: Table) -> None:
    from transformers import GenerationConfig

    model = load_reference(options, folder, attn_implementation="paged|sdpa")
    requests = make_requests(options, read_shape(folder).vocab_size)[: options.rows]
    config = GenerationConfig(
        max_new_tokens=options.baseline_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    inputs = [list(request.prompt_tokens) for request in requests]
    model.generate_batch(inputs=inputs[:4], generation_config=config)
    seconds, results = timed(
        options.device, lambda: model.generate_batch(inputs=inputs, generation_config=config)
    )
    tokens = sum(len(result.generated_tokens) for result in results.values())
    table.line(
        f"transformers continuous batching, {len(inputs)} rows",
        tokens / seconds,
        f"{tokens:,} tokens, paged SDPA",
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["engine", "generate"])
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(options)
    benches = {
        "engine": bench_engine,
        "steps": bench_steps,
        "swap": bench_swap,
        "determinism": bench_determinism,
        "generate": bench_generate,
        "continuous": bench_continuous,
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", options.shape, 0, options.device)
        for part in options.parts:
            try:
                benches[part](options, Path(folder) / "model", table)
            except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
                if part not in ("generate", "continuous"):
                    raise
                table.line(
                    f"transformers, part {part}", None, f"failed: {type(error).__name__}: {str(error)[:120]}"
                )


if __name__ == "__main__":
    main()
