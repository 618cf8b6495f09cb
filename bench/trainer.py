"""Measures tokens per second, MFU and peak memory of one RL step: Shoal, plain transformers, TRL's GRPOTrainer.

    python bench/trainer.py --device cuda                      all shapes, both layouts, all three trainers
    python bench/trainer.py --shapes toy --tokens 512          a quick test on any machine
    python bench/trainer.py --device cuda --shapes 7B --lora 32 --tokens 16384 --layouts packed --against shoal,compiled,trl
    python bench/trainer.py --device cuda --shapes 32B --lora 32 --tokens 32768 --layouts one --against recompute --no-check

A step includes packing or padding, forward, backward, gradient clipping and AdamW. Weights and tokens are random; compute is
bfloat16 on float32 master weights, or with --lora RANK adapters in float32 beside frozen bfloat16 weights. Every trainer gets the
same samples and its own best micro-batch.

Layouts   one      one sample of all tokens, nearly all of them outputs, as in prime-rl's published figures
          packed   samples of 256 prompt and 64 to 2,048 output tokens (log-uniform), up to the number of tokens

MFU = model FLOPs / time / 989 TFLOP/s (dense bfloat16 of an H100 or H200, without sparsity), where a step's model FLOPs are
6 x (matrix parameters of the layers) x tokens + 6 x (vocabulary x hidden) x output tokens + 6 x layers x (heads x head_dim) x
sum of squared sample lengths. The last term counts the causal half of attention, as prime-rl does. Recomputed
work is not counted, and neither are logits of prompts, which are not needed.

Before any timing, loss and gradients of the fast path are compared with a float32 run under the dense mask: on a GPU with four
layers of 0.6B's width and 4,096 tokens, on a CPU with the toy and 512 tokens, where the large one would take minutes.

A line starts before its measurement does. "CPU" is the process's CPU time of a step: on a busy machine compare that.
"""

import argparse
import gc
import json
import math
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.model.load_model import empty_decoder
from shoal.model.shape import Rope, Shape
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample
from shoal.trainer.data.pack import pack
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.loss import grpo_loss
from shoal.trainer.optim.policy import add_adapters

PEAK_FLOPS = 989e12


def llama(
    vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, rope_theta: float = 1e5, **other: Any
) -> Shape:
    plain: dict[str, Any] = {
        "head_dim": hidden // heads,
        "rope": Rope(rope_theta=rope_theta),
        "norm_eps": 1e-5,
        "tied_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "max_positions": 1 << 17,
    }
    return Shape(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        ffn_size=ffn,
        **(plain | other),
    )


SHAPES = {
    "toy": llama(300, 128, 2, 4, 2, 256),
    "135M": llama(49152, 576, 30, 9, 3, 1536),
    "0.5B": llama(151936, 896, 24, 14, 2, 4864, qkv_bias=True, rope_theta=1e6),
    "0.6B": llama(151936, 1024, 28, 16, 8, 3072, head_dim=128, qk_norm=True, rope_theta=1e6),
    "1.7B": llama(49152, 2048, 24, 32, 32, 8192),
    "7B": llama(152064, 3584, 28, 28, 4, 18944, qkv_bias=True, tied_embeddings=False, rope_theta=1e6),
    "32B": llama(152064, 5120, 64, 40, 8, 27648, qkv_bias=True, tied_embeddings=False, rope_theta=1e6),
}


# -- samples ----------------------------------------------------------------------------------------------


def make_batch(shape: Shape, layout: str, num_tokens: int) -> TrainBatch:
    rng = random.Random(num_tokens)
    lengths = [(1, num_tokens)] if layout == "one" else []
    left = num_tokens
    while layout == "packed" and left > 16:
        prompt, outputs = min(256, num_tokens // 8), int(math.exp(rng.uniform(math.log(64), math.log(2048))))
        outputs = min(outputs, num_tokens // 4)
        if prompt + outputs > left + 1:
            prompt, outputs = (left + 1) // 4, left + 1 - (left + 1) // 4
        lengths.append((prompt, outputs))
        left -= prompt + outputs - 1
    words = torch.Generator().manual_seed(num_tokens)
    samples = []
    for prompt, outputs in lengths:
        tokens = torch.randint(0, shape.vocab_size, (prompt + outputs,), generator=words).tolist()
        samples.append(
            TrainSample(
                tokens=tuple(tokens),
                prompt_len=prompt,
                logprobs=(-math.log(shape.vocab_size),) * outputs,
                advantage=rng.choice([-1.0, 1.0]),
                lag=0,
            )
        )
    return TrainBatch(version=0, samples=tuple(samples), num_groups=1)


def flops(shape: Shape, batch: TrainBatch) -> float:
    """Returns the model FLOPs of one step, by the formula at the top of this file."""
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    layer = attention + 3 * shape.hidden_size * shape.ffn_size
    widths = [len(sample.tokens) - 1 for sample in batch.samples]
    squares = sum(width * width for width in widths)
    return (
        6.0 * shape.num_layers * layer * sum(widths)
        + 6.0 * shape.vocab_size * shape.hidden_size * batch.num_outputs
        + 6.0 * shape.num_layers * shape.num_heads * shape.head_dim * squares
    )


# -- the three trainers --------------------------------------------------------------------------------------------


def draw(model: torch.nn.Module) -> None:
    """Fills a model with random weights of usual size, on its device."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)


def shoal_step(
    shape: Shape, batch: TrainBatch, device: str, *, lora: int = 0, **keys: Any
) -> Callable[[], float]:
    decoder = empty_decoder(shape, torch.bfloat16 if lora else torch.float32, device)
    draw(decoder)
    width = sum(len(sample.tokens) for sample in batch.samples)
    config = TrainerConfig(
        learning_rate=1e-6,
        row_tokens=width,
        rows_per_micro_batch=1,
        lora_rank=lora,
        **({"compute_dtype": "bfloat16"} | keys),
    )
    if lora:
        add_adapters(decoder, config)
    learner = Learner(decoder, config)

    def step() -> float:
        return learner.step(replace(batch, version=learner.version), threading.Event()).loss

    return step


def transformers_model(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    own_head_dim: dict[str, Any] = (
        {} if shape.qkv_bias else {"head_dim": shape.head_dim}
    )  # Qwen2's follows from its width
    kind = Qwen3Config if shape.qk_norm else Qwen2Config if shape.qkv_bias else LlamaConfig
    config = kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.ffn_size,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied_embeddings,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
        **own_head_dim,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    draw(model)
    return model


def padded(samples: list[TrainSample], device: str) -> dict[str, Tensor]:
    """Pads prompts on the left and outputs on the right, as TRL does."""
    most_prompt = max(sample.prompt_len for sample in samples)
    most_output = max(sample.num_outputs for sample in samples)
    rows = {name: [] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}  # type: ignore[var-annotated]
    for sample in samples:
        before, after = most_prompt - sample.prompt_len, most_output - sample.num_outputs
        rows["prompt_ids"].append([0] * before + list(sample.tokens[: sample.prompt_len]))
        rows["prompt_mask"].append([0] * before + [1] * sample.prompt_len)
        rows["completion_ids"].append(list(sample.tokens[sample.prompt_len :]) + [0] * after)
        rows["completion_mask"].append([1] * sample.num_outputs + [0] * after)
    inputs = {name: torch.tensor(value, device=device) for name, value in rows.items()}
    inputs["advantages"] = torch.tensor([sample.advantage for sample in samples], device=device)
    old = torch.full(inputs["completion_ids"].shape, float(samples[0].logprobs[0]), device=device)
    return inputs | {"old_per_token_logps": old}


def micro_batches(batch: TrainBatch, max_tokens: int, device: str) -> list[dict[str, Tensor]]:
    """Groups samples of similar length, up to `max_tokens` including padding."""
    parts: list[list[TrainSample]] = [[]]
    for sample in sorted(batch.samples, key=lambda one: len(one.tokens)):
        if parts[-1] and (len(parts[-1]) + 1) * len(sample.tokens) > max_tokens:
            parts.append([])
        parts[-1].append(sample)
    return [padded(part, device) for part in parts]


def transformers_step(shape: Shape, batch: TrainBatch, device: str, max_tokens: int) -> Callable[[], float]:
    model = transformers_model(shape, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> float:
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for inputs in micro_batches(batch, max_tokens, device):
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            keep = inputs["completion_ids"].shape[1]
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                logits = model(tokens, attention_mask=mask, logits_to_keep=keep + 1, use_cache=False).logits
            logprobs = (
                logits[:, :-1].float().log_softmax(-1).gather(2, inputs["completion_ids"][..., None])[..., 0]
            )
            real = inputs["completion_mask"].bool()
            loss_N = grpo_loss(
                logprobs[real],
                inputs["old_per_token_logps"][real],
                inputs["advantages"][:, None].expand_as(logprobs)[real],
                eps=0.2,
                eps_high=0.2,
                delta=4.0,
            ).loss_N
            loss = loss_N.sum() / batch.num_outputs
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def trl_step(
    shape: Shape, batch: TrainBatch, device: str, max_tokens: int, lora: int = 0
) -> Callable[[], float]:
    """Runs GRPOTrainer's own training_step on given samples, without generation, rewards or recomputation."""
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    micros = micro_batches(batch, max_tokens, device)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        bf16=True,
        use_cpu=device == "cpu",
        gradient_checkpointing=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=len(micros),
        num_generations=2,
        loss_type="bnpo",
        delta=4.0,
        beta=0.0,
        temperature=1.0,
        max_completion_length=4096,
        learning_rate=1e-6,
        report_to=[],
    )
    adapters: dict[str, Any] = {}
    if lora:
        from peft import LoraConfig

        adapters["peft_config"] = LoraConfig(r=lora, lora_alpha=32, target_modules="all-linear")
    trainer = GRPOTrainer(
        model=transformers_model(shape, device, torch.bfloat16 if lora else torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=tokenizer,
        **adapters,
    )
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = len(micros)
    trainer.model_wrapped = trainer.model
    model = trainer.accelerator.prepare_model(trainer.model).train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for inputs in micro_batches(batch, max_tokens, device):
            total += float(trainer.training_step(model, inputs, None))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return total

    return step


# -- checking ---------------------------------------------------------------------------------------------


def check(device: str, *, compiled: bool) -> None:
    """Compares the fast path's log-probs and gradients on packed rows with float32 and a dense mask; prints each difference."""
    on_cpu = torch.device(device).type == "cpu"
    shape = SHAPES["toy"] if on_cpu else replace(SHAPES["0.6B"], num_layers=4, vocab_size=5003)
    batch = make_batch(shape, "packed", 512 if on_cpu else 4096)
    exact = empty_decoder(shape, torch.float32, device)
    torch.manual_seed(1)
    draw(exact)
    samples = [replace(sample, temperature=0.9) for sample in batch.samples]
    (micro,) = pack(samples, row_tokens=5000, rows_per_micro_batch=1)
    micro = micro.to(torch.device(device))
    exact_logprobs_N, exact_gradient = torch.empty(0), torch.empty(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, keys in (
        ("float32", {}),
        ("bfloat16", {"compute_dtype": "bfloat16"}),
        ("recompute", {"compute_dtype": "bfloat16", "activation_checkpointing": True}),
        ("compiled", {"compute_dtype": "bfloat16", "compile": True}),
    ):
        if name == "compiled" and not compiled:
            continue
        print(f"check: {name} ...", end=" ", flush=True)
        decoder = empty_decoder(shape, torch.float32, device)
        decoder.load_state_dict(exact.state_dict())
        learner = Learner(decoder, TrainerConfig(row_tokens=5000, **keys))
        logprobs_N = learner.policy.scores(micro).logprobs_N
        loss_N = grpo_loss(
            logprobs_N, logprobs_N.detach() + 0.01, micro.advantages_N, eps=0.2, eps_high=0.2, delta=4.0
        ).loss_N
        loss = loss_N.sum() / batch.num_outputs
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])
        if name == "float32":
            exact_logprobs_N, exact_gradient = logprobs_N.detach(), gradient
            print("done")
            continue
        gap = (logprobs_N.detach() - exact_logprobs_N).abs().mean()
        off = float((gradient - exact_gradient).norm() / exact_gradient.norm())
        print(f"mean |log-prob gap| {gap:.2e}, relative gradient error {off:.2e}", flush=True)
        assert off < 0.05, f"{name}: the gradient differs by {off:.2e} of its norm"


# -- timing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    shape: str
    layout: str
    tokens: int
    what: str
    step_ms: float
    cpu_ms: float
    tokens_per_s: float
    mfu: float
    peak_gb: float
    first_s: float
    loss: float


def measure(
    make: Callable[[], Callable[[], float]], device: str, repeats: int
) -> tuple[float, float, float, float, float]:
    """Returns median seconds and CPU seconds of a step, the seconds of the first, the peak bytes and the first loss."""
    cuda = torch.device(device).type == "cuda"
    step = make()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, cpu_times = [], []
    for index in range(repeats + 2):
        started_s, cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
        cpu_times.append(time.process_time() - cpu_s)
        if index == 0:
            first_loss = loss
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return statistics.median(times[2:]), statistics.median(cpu_times[2:]), times[0], peak, first_loss


def variants(
    name: str, layout: str, num_tokens: int, options: argparse.Namespace
) -> dict[str, Callable[..., Any]]:
    against, device = set(options.against.split(",")), options.device
    shape, batch = SHAPES[name], make_batch(SHAPES[name], layout, num_tokens)
    long = num_tokens > 20_000
    found: dict[str, Callable[..., Any]] = {}
    ours = partial(shoal_step, shape, batch, device, lora=options.lora)
    if "shoal" in against and not long:
        found["shoal"] = ours
    if "recompute" in against or ("shoal" in against and long):
        found["shoal, recompute"] = partial(ours, activation_checkpointing=True)
    if "compiled" in against:
        found["shoal, compiled"] = partial(ours, compile=True)
    if "transformers" in against and not options.lora:
        found["transformers"] = partial(transformers_step, shape, batch, device, 8192)
    if "trl" in against:
        for most in map(int, options.padded.split(",")):
            found[f"TRL, micro-batches of {most}"] = partial(
                trl_step, shape, batch, device, most, options.lora
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default="135M,0.6B,1.7B")
    parser.add_argument("--tokens", default="16384,65536")
    parser.add_argument("--layouts", default="one,packed")
    parser.add_argument(
        "--against",
        default="",
        help="without it shoal,recompute,compiled,transformers,trl; on a CPU without compiled, which takes a compiler minutes",
    )
    parser.add_argument(
        "--padded", default="8192,16384", help="tokens per micro-batch of TRL, including padding"
    )
    parser.add_argument(
        "--lora", type=int, default=0, help="train adapters of this rank, without transformers"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--limit-s", type=float, default=1e9, help="start no new measurement after this many seconds"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if not options.against:
        compiled = "" if options.device == "cpu" else "compiled,"
        options.against = f"shoal,recompute,{compiled}transformers,trl"
    if not options.no_check:
        check(options.device, compiled="compiled" in options.against)
    started_s, rows = time.monotonic(), []
    print(
        f"{'shape':<6} {'layout':<7} {'tokens':>6}  {'what':<30} {'step':>9} {'CPU':>9} {'tok/s':>8} {'MFU':>6} {'peak':>8} {'first':>7}",
        flush=True,
    )
    for num_tokens in map(int, options.tokens.split(",")):
        for name in options.shapes.split(","):
            for layout in options.layouts.split(","):
                for what, make in variants(name, layout, num_tokens, options).items():
                    if time.monotonic() - started_s > options.limit_s:
                        continue
                    row = one_row((name, layout, num_tokens, what), make, options)
                    if row is not None:
                        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def one_row(
    of: tuple[str, str, int, str], make: Callable[..., Any], options: argparse.Namespace
) -> Row | None:
    name, layout, num_tokens, what = of
    label = f"{name:<6} {layout:<7} {num_tokens:>6}  {what:<30}"
    batch = make_batch(SHAPES[name], layout, num_tokens)
    print(label, end=" ", flush=True)
    try:
        seconds, cpu_s, first_s, peak, loss = measure(make, options.device, options.repeats)
    except torch.OutOfMemoryError:
        print("out of memory", flush=True)
        return None
    except ModuleNotFoundError as missing:
        print(f"left out: {missing.name} is not installed", flush=True)
        return None
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        print(
            f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True
        )  # the other rows are still measured
        return None
    finally:
        torch._dynamo.reset()  # otherwise the shapes of earlier rows count towards the limit of recompilations
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    width = sum(len(sample.tokens) - 1 for sample in batch.samples)
    mfu = flops(SHAPES[name], batch) / seconds / PEAK_FLOPS
    row = Row(
        name,
        layout,
        num_tokens,
        what,
        seconds * 1e3,
        cpu_s * 1e3,
        width / seconds,
        mfu,
        peak / 1e9,
        first_s,
        loss,
    )
    print(
        f"{row.step_ms:>6.1f} ms {row.cpu_ms:>6.1f} ms {row.tokens_per_s:>8.0f} {100 * mfu:>5.1f}% {row.peak_gb:>5.1f} GB {first_s:>5.1f} s",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
