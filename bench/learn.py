"""Trains a model with the trainer's own step and the engine in one process, without a swarm.

    python bench/learn.py --model tiny --task sort --groups 16 --samples 16 --new-tokens 8 --lag 2 --rate 3e-4 --steps 40
    python bench/learn.py --model smollm2-135m --task add --groups 64 --rounds 4 --samples 16 --new-tokens 24 --rate 5e-5 \
        --steps 150 --dtype bfloat16 --device cuda --seeds 0 1 2 --plot docs/img/learn-add.png

Prints the held-out reward and the mean length of an answer every `--eval-every` steps. Groups without signal are dropped and
replaced by more prompts, up to `--rounds` times as many. `--lag` trains on batches that are that many steps old, as a swarm does.
`--minutes` ends a seed early. Held-out problems are never trained on; rewards are those of sampled answers.
"""

import argparse
import json
import tempfile
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.tasks import Split, make_task
from shoal.tasks.task import Outcome, Problem
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample, group_advantages
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.supervised import warm_up
from shoal.wire.run_spec import ProofSpec, TaskSpec
from shoal.wire.seeded_draw import sample_seed


@dataclass(frozen=True, slots=True)
class Answer:
    row: FinishedRow
    problem: Problem
    reward: float
    right: bool


@dataclass(frozen=True, slots=True)
class Point:
    """Results on the held-out set after some steps."""

    step: int
    seconds: float
    right: float
    reward: float
    tokens: float
    """Mean length of an answer."""
    off_target: float | None
    """Mean |target - length|, if the task asks for a length."""


Group = list[Answer]


class Loop:
    def __init__(self, options: argparse.Namespace, seed: int, folder: Path) -> None:
        self.options, self.seed = options, seed
        spec = TaskSpec(name=options.task, options=dict(options.option))
        if options.budgets:
            spec = spec.model_copy(update={"budgets": tuple(options.budgets), "budget_alpha": options.alpha})
        self.task = make_task(spec)
        self.model, self.current = folder / "model", folder / "current"
        create_model(options.model, self.model, seed)
        self.current.mkdir()
        copy_all_but_weights(self.model, self.current)
        config = TrainerConfig(
            learning_rate=options.rate,
            warmup_steps=options.warmup,
            loss=options.loss,
            advantage=options.advantage,
            supervised_steps=options.supervised_steps,
            row_tokens=options.row_tokens,
            rows_per_micro_batch=options.micro_rows,
            compute_dtype=options.dtype,
            compile=options.compile,
            seed=seed,
        )
        decoder = load_decoder(self.model, torch.float32, options.device)
        self.learner = Learner(decoder, config, temperature=1.0, max_new_tokens=options.new_tokens)
        self.stop = threading.Event()
        warm_up(self.learner, [self.task], load_tokenizer(self.model), log=Log("bench"), stop=self.stop)
        self.engine = TorchEngine(
            compute_dtype=options.dtype, proof=ProofSpec(), max_rows=options.max_rows, device=options.device
        )
        self.posed = 0
        self.loads = 0

    def load(self) -> None:
        """Loads the learner's weights into the engine as a worker would: rounded to bfloat16, from a file."""
        save_weights(self.learner.decoder, self.current / WEIGHTS_FILE)
        self.engine.load(self.current, self.loads)
        self.loads += 1

    def answer(self, split: Split, first: int, num_prompts: int, num_samples: int) -> list[Group]:
        problems = [self.task.problem(split, first + index) for index in range(num_prompts)]
        seed = f"{self.seed:032x}{self.loads:016x}{first:016x}"
        encode = self.engine.tokenizer.encode_prompt
        prompts = [tuple(encode(problem.prompt, chat=self.task.chat)) for problem in problems]
        self.engine.submit(
            [
                GenerationRequest(
                    prompt_index=prompt,
                    sample_index=sample,
                    prompt_tokens=prompts[prompt],
                    sample_seed=sample_seed(seed, prompt, sample),
                    max_new_tokens=self.options.new_tokens,
                    temperature=1.0,
                )
                for prompt in range(num_prompts)
                for sample in range(num_samples)
            ]
        )
        groups: list[Group] = [[] for _ in problems]
        while self.engine.has_work:
            for row in self.engine.step():
                groups[row.request.prompt_index].append(self._graded(row, problems[row.request.prompt_index]))
        return groups

    def _graded(self, row: FinishedRow, problem: Problem) -> Answer:
        text = self.engine.tokenizer.decode(row.output_tokens)
        reward = self.task.reward(problem, text, len(row.output_tokens))
        return Answer(row, problem, reward.value, reward.outcome is Outcome.RIGHT)

    def groups_with_signal(self) -> tuple[list[Group], int]:
        """Returns up to `groups` groups with signal, and how many were generated in all."""
        found: list[Group] = []
        generated = 0
        for _ in range(self.options.rounds):
            groups = self.answer("train", self.posed, self.options.groups, self.options.samples)
            self.posed += len(groups)
            generated += len(groups)
            found += [group for group in groups if len({answer.reward for answer in group}) > 1]
            if len(found) >= self.options.groups:
                break
        return found[: self.options.groups], generated

    def train(self, groups: list[Group]) -> None:
        samples: list[TrainSample] = []
        for index, group in enumerate(groups):
            rewards = [answer.reward for answer in group]
            advantages = group_advantages(rewards, self.learner.config.recipe.advantage)
            samples += [
                to_sample(answer.row, value, index) for answer, value in zip(group, advantages, strict=True)
            ]
        if samples:
            batch = TrainBatch(
                version=self.learner.version,
                samples=tuple(samples),
                num_groups=len(groups),
                dropped_groups=0,
                reward_mean=0.0,
            )
            self.learner.step(batch, self.stop)

    def evaluate(self, step: int, seconds: float) -> Point:
        groups = self.answer("eval", 0, self.options.eval_prompts, self.options.eval_samples)
        answers = [answer for group in groups for answer in group]
        lengths = [len(answer.row.output_tokens) for answer in answers]
        off = [
            abs(answer.problem.budget - length)
            for answer, length in zip(answers, lengths, strict=True)
            if answer.problem.budget is not None
        ]
        return Point(
            step=step,
            seconds=seconds,
            right=sum(answer.right for answer in answers) / len(answers),
            reward=sum(answer.reward for answer in answers) / len(answers),
            tokens=sum(lengths) / len(lengths),
            off_target=sum(off) / len(off) if off else None,
        )


def to_sample(row: FinishedRow, advantage: float, group: int) -> TrainSample:
    prompt = row.request.prompt_tokens
    return TrainSample(
        tokens=(*prompt, *row.output_tokens),
        prompt_len=len(prompt),
        logprobs=tuple(row.logprobs),
        advantage=advantage,
        lag=0,
        group=group,
    )


def run_seed(options: argparse.Namespace, seed: int) -> list[Point]:
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(options, seed, Path(folder))
        waiting: deque[list[Group]] = deque()
        generating_s = training_s = 0.0
        generated = used = 0
        started_s = time.monotonic()
        for step in range(options.steps + 1):
            loop.load()
            over = time.monotonic() - started_s > options.minutes * 60
            if step % options.eval_every == 0 or step == options.steps or over:
                points.append(loop.evaluate(step, time.monotonic() - started_s))
                print(as_lost_rank(seed, points[-1], generating_s, training_s), flush=True)
            if over or step == options.steps:
                break
            began_s = time.monotonic()
            groups, count = loop.groups_with_signal()
            generated, used = generated + count, used + len(groups)
            generating_s += time.monotonic() - began_s
            waiting.append(groups)
            if len(waiting) > options.lag:
                began_s = time.monotonic()
                loop.train(waiting.popleft())
                training_s += time.monotonic() - began_s
    print(f"seed {seed}: {used:,} of {generated:,} groups had signal and were used", flush=True)
    return points


def as_lost_rank(seed: int, point: Point, generating_s: float, training_s: float) -> str:
    length = f"{point.tokens:.1f} tokens" + (
        "" if point.off_target is None else f", off by {point.off_target:.1f}"
    )
    return (
        f"seed {seed}  step {point.step:>4}  {point.seconds:>5.0f} s (generating {generating_s:.0f}, training "
        f"{training_s:.0f})  right {point.right:.3f}  reward {point.reward:.3f}  {length}"
    )


def plot(curves: dict[int, list[Point]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets = any(point.off_target is not None for points in curves.values() for point in points)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for seed, points in curves.items():
        axes.plot([p.step for p in points], [p.right for p in points], label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="held-out answers right", ylim=(0, 1), title=title)
    if budgets:
        off = axes.twinx()
        for points in curves.values():
            shown = [(p.step, p.off_target) for p in points if p.off_target is not None]
            off.plot([step for step, _ in shown], [value for _, value in shown], linestyle="--", color="grey")
        off.set(ylabel="tokens off the target (dashed)", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def key_value(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="sort")
    parser.add_argument("--option", action="append", default=[], type=key_value, metavar="KEY=VALUE")
    parser.add_argument("--budgets", type=int, nargs="*", help="target lengths in tokens")
    parser.add_argument("--alpha", type=float, default=0.01, help="penalty per token off the target")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--loss", default="grpo")
    parser.add_argument("--advantage", choices=("std", "mean"))
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit per seed")
    parser.add_argument("--supervised-steps", type=int, default=0)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--micro-rows", type=int, default=64)
    parser.add_argument("--max-rows", type=int, default=1024, help="rows generated at once")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-prompts", type=int, default=64)
    parser.add_argument("--eval-samples", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path, help="write the points to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    curves = {seed: run_seed(options, seed) for seed in options.seeds}
    for seed, points in curves.items():
        print(
            f"seed {seed}: held-out right {points[0].right:.3f} -> {points[-1].right:.3f}, reward "
            f"{points[0].reward:.3f} -> {points[-1].reward:.3f} in {points[-1].seconds:.0f} s"
        )
    if options.json:
        options.json.write_text(
            json.dumps({seed: [asdict(p) for p in points] for seed, points in curves.items()})
        )
    if options.plot:
        plot(curves, f"{Path(options.model).name} on {options.task}", options.plot)


if __name__ == "__main__":
    main()
