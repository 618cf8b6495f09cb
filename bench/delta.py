"""How small a version is as a delta: real GRPO steps of a model on its own answers, each published both ways.

    python bench/delta.py --model smollm2-135m --lr 1e-6 3e-6 1e-5 --steps 4
    python bench/delta.py --model path/to/folder --threads 1
    python bench/delta.py --model tiny --lr 1e-3

For each rate the model starts anew. A step: the engine answers sums, right answers earn 1, groups with signal are
trained on, the weights are rounded to bfloat16 and written, and the delta to the version before is made and applied. Every
file that comes out is compared with the one that went in.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from shoal.model.builtin import create_model
from shoal.model.load import load_decoder
from shoal.model.tokenizer import Tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine import Finished, Request
from shoal.rollout.torch_engine import TorchEngine
from shoal.shardcast import delta
from shoal.shardcast.digest import hash_bytes
from shoal.tasks import Problem, Task, make_task
from shoal.telemetry import Log
from shoal.trainer.advantage import group_advantages
from shoal.trainer.batch import Sample, TrainBatch
from shoal.trainer.config import TrainerConfig
from shoal.trainer.learner import Learner
from shoal.trainer.supervised import warm_up
from shoal.wire.run import ProofSpec, TaskSpec

TASKS = {
    # Random weights know nothing, so the tiny model first learns from answers, as in runs/demo.toml.
    "tiny": (TaskSpec(name="add", options={"digits": 1, "style": "bare"}), 150),
    "any": (TaskSpec(name="add", options={"digits": 2, "style": "shots"}), 0),
}
MAX_NEW_TOKENS = 5
MAX_TRIES = 40


@dataclass(frozen=True, kw_only=True)
class Row:
    """One version; seconds are of this process alone."""

    changed: float
    full_bytes: int
    delta_bytes: int
    ratio: float
    encode_s: float
    apply_s: float
    write_s: float
    rebuild_s: float


HEADS = {
    "changed": ("changed", lambda value: f"{value:.2%}"),
    "full_bytes": ("full", lambda value: f"{value / 1e6:.1f} MB"),
    "delta_bytes": ("delta", lambda value: f"{value / 1e6:.3f} MB"),
    "ratio": ("smaller", lambda value: f"{value:.0f} x"),
    "encode_s": ("encode", lambda value: f"{value:.3f} s"),
    "apply_s": ("apply", lambda value: f"{value:.3f} s"),
    "write_s": ("file to file", lambda value: f"{value:.3f} s"),
    "rebuild_s": ("rebuilt", lambda value: f"{value:.3f} s"),
}


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch) / "model"
        create_model(options.model, folder, 0)
        print(
            f"{options.model}, {options.prompts} prompts x {options.samples} samples a step, {options.steps} steps a rate.\n"
            "encode, apply: in memory, in place. file to file: the delta written from two files, with the old one's digest checked.\n"
            "rebuilt: old file and delta read, the new file hashed and written. Both to the disk.\n"
        )
        print("lr       version " + " ".join(f"{head:>12}" for head, _ in HEADS.values()), flush=True)
        for rate in options.lr:
            report(rate, run(folder, Path(scratch), rate, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="tiny, smollm2-135m, or a model folder")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4, help="groups with signal in each step")
    parser.add_argument("--samples", type=int, default=8, help="answers in a group")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: its own choice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scratch", help="where to write the versions; some GB for a large model")
    return parser.parse_args()


def report(rate: float, rows: Iterator[Row]) -> None:
    seen = []
    for version, row in enumerate(rows, 1):
        seen.append(row)
        print(f"{rate:<8g} {version:>7} " + line(row), flush=True)
    mean = Row(**{field.name: fmean(getattr(row, field.name) for row in seen) for field in fields(Row)})
    print(f"{rate:<8g} {'mean':>7} " + line(mean) + "\n", flush=True)


def line(row: Row) -> str:
    return " ".join(f"{show(getattr(row, name)):>12}" for name, (_, show) in HEADS.items())


def run(model: Path, scratch: Path, rate: float, options: argparse.Namespace) -> Iterator[Row]:
    folder = scratch / "versions"
    shutil.copytree(model, folder, dirs_exist_ok=True)
    spec, supervised_steps = TASKS.get(options.model, TASKS["any"])
    task = make_task(spec)
    # No rate warm-up: every step counted here is one at the rate it is counted under.
    config = TrainerConfig(
        learning_rate=rate,
        warmup_steps=0,
        row_tokens=128,
        rows_per_micro_batch=4,
        supervised_steps=supervised_steps,
    )
    learner = Learner(load_decoder(folder, torch.float32, options.device), config, temperature=1.0)
    engine = TorchEngine(compute_dtype="float32", proof=ProofSpec(), max_rows=64, device=options.device)
    engine.load(folder, 0)
    warm_up(learner, task, engine.tokenizer, log=Log("bench"), stop=threading.Event())
    before, after = scratch / "before.safetensors", folder / WEIGHTS_FILE
    for version in range(options.steps):
        save_weights(learner.decoder, after)
        engine.load(folder, version)
        learner.step(make_batch(engine, task, version, options), threading.Event())
        after.replace(before)
        save_weights(learner.decoder, after)
        yield measure(before, after, scratch)


def make_batch(engine: TorchEngine, task: Task, version: int, options: argparse.Namespace) -> TrainBatch:
    """As many groups with signal as are asked for, all by the version itself."""
    samples: list[Sample] = []
    rewards_seen: list[float] = []
    num_groups = dropped = 0
    for attempt in range(MAX_TRIES):
        problems = [
            task.problem("train", 1000 * version + 10 * attempt + index) for index in range(options.prompts)
        ]
        for problem, rows in answer(engine, task, problems, options.samples, seed=1000 * version + attempt):
            rewards = [
                task.reward(
                    problem, engine.tokenizer.decode(list(row.output_tokens)), len(row.output_tokens)
                ).value
                for row in rows
            ]
            rewards_seen += rewards
            if min(rewards) == max(rewards):
                dropped += 1
            elif num_groups < options.prompts:
                num_groups += 1
                samples += to_samples(rows, group_advantages(rewards, "std"))
        if num_groups == options.prompts:
            break
    if not samples:
        raise SystemExit(
            f"no group of {MAX_TRIES * options.prompts} had both right and wrong answers; raise --samples"
        )
    return TrainBatch(
        version=version,
        samples=tuple(samples),
        num_groups=num_groups,
        dropped_groups=dropped,
        reward_mean=fmean(rewards_seen),
    )


def answer(
    engine: TorchEngine, task: Task, problems: list[Problem], num_samples: int, *, seed: int
) -> Iterator[tuple[Problem, list[Finished]]]:
    engine.submit(
        [
            Request(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=encoded(engine.tokenizer, task, problem),
                sample_seed=seed << 32 | index << 16 | sample,
                max_new_tokens=MAX_NEW_TOKENS,
                temperature=1.0,
            )
            for index, problem in enumerate(problems)
            for sample in range(num_samples)
        ]
    )
    done: list[Finished] = []
    while engine.has_work:
        done += engine.step()
    for index, problem in enumerate(problems):
        yield problem, [row for row in done if row.request.prompt_index == index]


def encoded(tokenizer: Tokenizer, task: Task, problem: Problem) -> tuple[int, ...]:
    return tuple(tokenizer.encode_prompt(problem.prompt, chat=task.chat))


def to_samples(rows: list[Finished], advantages: list[float]) -> list[Sample]:
    return [
        Sample(
            tokens=row.request.prompt_tokens + row.output_tokens,
            prompt_len=len(row.request.prompt_tokens),
            logprobs=row.logprobs,
            advantage=advantage,
            lag=0,
        )
        for row, advantage in zip(rows, advantages, strict=True)
    ]


def measure(before: Path, after: Path, scratch: Path) -> Row:
    old, new = before.read_bytes(), after.read_bytes()
    payload, encode_s = timed(lambda: delta.encode(old, new))
    made = bytearray(old)
    _, apply_s = timed(lambda: delta.apply_in_place(made, payload))
    assert made == new, "the delta is not lossless"
    old_blake3, path, rebuilt = hash_bytes(old), scratch / "delta", scratch / "rebuilt"
    _, write_s = timed(
        lambda: delta.write_delta(before, after, path, old_blake3=old_blake3, max_bytes=len(new))
    )
    digest, rebuild_s = timed(lambda: delta.apply_deltas(before, [path], rebuilt))
    assert digest == hash_bytes(new), "the delta between files is not lossless"
    words = np.frombuffer(old, np.uint16) != np.frombuffer(new, np.uint16)
    return Row(
        changed=float(words.mean()),
        full_bytes=len(new),
        delta_bytes=len(payload),
        ratio=len(new) / len(payload),
        encode_s=encode_s,
        apply_s=apply_s,
        write_s=write_s,
        rebuild_s=rebuild_s,
    )


def timed(call):  # type: ignore[no-untyped-def]
    started_s = time.perf_counter()
    value = call()
    return value, time.perf_counter() - started_s


if __name__ == "__main__":
    main()
