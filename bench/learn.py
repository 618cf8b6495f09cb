"""Trains a model with the trainer's own step and the engine in one process, without a swarm.

    python bench/learn.py --model tiny --task sort --groups 16 --samples 16 --new-tokens 8 --lag 2 --rate 3e-4 --steps 40
    python bench/learn.py --model smollm2-135m --task add --groups 64 --rounds 4 --samples 16 --new-tokens 24 --rate 5e-5 \
        --steps 150 --dtype bfloat16 --device cuda --seeds 0 1 2 --plot docs/img/learn-add.png

Prints the held-out reward and the mean length of an answer every `--eval-every` steps. Groups without signal are dropped and
replaced by more prompts, up to `--rounds` times as many. `--lag` trains on batches that are that many steps old, as a swarm does.
`--minutes` ends a seed early. Held-out problems are never trained on; rewards are those of sampled answers.

    python bench/learn.py --mix length 2 4 9 --pool 384 --band 0.125 0.5 --json FILE.json --name filtered ...

`--mix` poses problems of several sizes in turn. `--pool` trains on the first problems only, over and over; `--band` keeps those of
them that the start model solves in this share of 8 samples (the report's offline filter). `--json` keeps every finished seed, and
a command that is repeated continues with the seeds that are missing.
"""

import argparse
import json
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine.api import FinishedRow, GenerationRequest
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.tasks import Split, make_task
from shoal.tasks.task import Outcome, Problem, Task
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
    off_by_target: dict[int, float]
    """The same for each target."""
    right_by_task: list[float]
    """Share of right answers for each value of `--mix`."""


Group = list[Answer]

PASS_SAMPLES = 8
"""Samples per problem of the offline filter."""


class Loop:
    def __init__(self, options: argparse.Namespace, seed: int, folder: Path) -> None:
        self.options, self.seed = options, seed
        spec = TaskSpec(name=options.task, options=dict(options.option))
        if options.budgets:
            spec = spec.model_copy(update={"budgets": tuple(options.budgets), "budget_alpha": options.alpha})
        name, *values = options.mix or [""]
        mixed = [spec.options | {name: json.loads(value)} for value in values] or [spec.options]
        self.tasks = [make_task(spec.model_copy(update={"options": one})) for one in mixed]
        """Problem i is one of task i modulo their number."""
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
        self.learner = Learner(decoder, config, max_new_tokens=options.new_tokens)
        self.stop = threading.Event()
        warm_up(self.learner, self.tasks, load_tokenizer(self.model), log=Log("bench"), stop=self.stop)
        self.engine = TorchEngine(
            compute_dtype=options.dtype, proof=ProofSpec(), max_rows=options.max_rows, device=options.device
        )
        self.pool: list[int] | None = None
        """Problems that are trained on, over and over; None: always new ones."""
        self.posed = 0
        self.loads = 0

    def load(self) -> None:
        """Loads the learner's weights into the engine as a worker would: rounded to bfloat16, from a file."""
        save_weights(self.learner.decoder, self.current / WEIGHTS_FILE)
        self.engine.load(self.current, self.loads)
        self.loads += 1

    def task(self, index: int) -> Task:
        return self.tasks[index % len(self.tasks)]

    def answer(self, split: Split, indices: Sequence[int], num_samples: int, *, draw: int = 0) -> list[Group]:
        """Returns a group for each problem. `draw` gives the samples of other steps other seeds."""
        problems = [self.task(index).problem(split, index) for index in indices]
        seed = f"{self.seed:032x}{self.loads:016x}{draw:016x}"
        encode = self.engine.tokenizer.encode_prompt
        prompts = [tuple(encode(problem.prompt, chat=self.tasks[0].chat)) for problem in problems]
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
                for prompt in range(len(problems))
                for sample in range(num_samples)
            ]
        )
        groups: list[Group] = [[] for _ in problems]
        while self.engine.has_work:
            for row in self.engine.step():
                place = row.request.prompt_index
                groups[place].append(self._graded(row, self.task(indices[place]), problems[place]))
        return groups

    def _graded(self, row: FinishedRow, task: Task, problem: Problem) -> Answer:
        text = self.engine.tokenizer.decode(row.output_tokens)
        reward = task.reward(problem, text, len(row.output_tokens))
        return Answer(row, problem, reward.value, reward.outcome is Outcome.RIGHT)

    def choose_pool(self) -> None:
        """Fills the pool; with `--band` only with problems of which the start model solves that share."""
        indices = list(range(self.options.pool))
        if self.options.band:
            low, high = self.options.band
            groups = self.answer("train", indices, PASS_SAMPLES)
            shares = [sum(answer.right for answer in group) / PASS_SAMPLES for group in groups]
            indices = [index for index, share in zip(indices, shares, strict=True) if low <= share <= high]
            if not indices:
                raise ValueError(f"--band {low} {high}: no problem of the pool is within it")
        self.pool = indices

    def groups_with_signal(self) -> tuple[list[Group], int]:
        """Returns up to `groups` groups with signal, and how many were generated in all."""
        found: list[Group] = []
        generated = 0
        for _ in range(self.options.rounds):
            indices = list(range(self.posed, self.posed + self.options.groups))
            if self.pool is not None:
                indices = [self.pool[index % len(self.pool)] for index in indices]
            groups = self.answer("train", indices, self.options.samples, draw=self.posed)
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
            )
            self.learner.step(batch, self.stop)

    def evaluate(self, step: int, seconds: float) -> Point:
        groups = self.answer("eval", range(self.options.eval_prompts), self.options.eval_samples)
        answers = [answer for group in groups for answer in group]
        lengths = [len(answer.row.output_tokens) for answer in answers]
        off_by_target: dict[int, list[int]] = defaultdict(list)
        for answer, length in zip(answers, lengths, strict=True):
            if (target := answer.problem.budget) is not None:
                off_by_target[target].append(abs(target - length))
        off = [one for errors in off_by_target.values() for one in errors]
        by_task = [
            [answer.right for group in groups[place :: len(self.tasks)] for answer in group]
            for place in range(len(self.tasks))
        ]
        return Point(
            step=step,
            seconds=seconds,
            right=sum(answer.right for answer in answers) / len(answers),
            reward=sum(answer.reward for answer in answers) / len(answers),
            tokens=sum(lengths) / len(lengths),
            off_target=fmean(off) if off else None,
            off_by_target={target: fmean(errors) for target, errors in sorted(off_by_target.items())},
            right_by_task=[fmean(right) for right in by_task],
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


@dataclass(frozen=True, slots=True)
class SeedResult:
    """A finished run of one seed."""

    points: list[Point]
    pool: int | None
    """Problems that were trained on; None: always new ones."""
    generated: int
    used: int
    """Groups that were generated, and those of them that had signal and were trained on."""


def run_seed(options: argparse.Namespace, seed: int) -> SeedResult:
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(options, seed, Path(folder))
        waiting: deque[list[Group]] = deque()
        generating_s = training_s = 0.0
        generated = used = 0
        started_s = time.monotonic()
        if options.pool:
            loop.load()
            loop.choose_pool()
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
    return SeedResult(points, None if loop.pool is None else len(loop.pool), generated, used)


def kept_or_run(options: argparse.Namespace, seed: int) -> SeedResult:
    """Returns the result of a seed, from the file if it has one of this name with the same settings."""
    if options.json is None:
        return run_seed(options, seed)
    places = ("json", "name", "plot", "seeds", "minutes")
    settings = {name: value for name, value in vars(options).items() if name not in places}
    head = {"run": options.name, "seed": seed, "settings": json.loads(json.dumps(settings))}
    records = json.loads(options.json.read_text()) if options.json.exists() else []
    for record in records:
        if all(record[name] == value for name, value in head.items()):
            points = [Point(**point) for point in record["points"]]
            return SeedResult(points, record["pool"], record["generated"], record["used"])
    result = run_seed(options, seed)
    # Another command may have written its own seeds to the file meanwhile.
    records = json.loads(options.json.read_text()) if options.json.exists() else []
    options.json.write_text(json.dumps([*records, head | asdict(result)]) + "\n")
    return result


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
    parser.add_argument("--mix", nargs="+", help="an option of the task and its values, posed in turn")
    parser.add_argument("--pool", type=int, help="train on this many problems, over and over")
    parser.add_argument("--band", type=float, nargs=2, help="keep problems solved in this share of 8 samples")
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
    parser.add_argument("--json", type=Path, help="keep finished seeds here, and continue from it")
    parser.add_argument("--name", default="", help="name of the run in the file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    curves = {seed: kept_or_run(options, seed).points for seed in options.seeds}
    for seed, points in curves.items():
        print(
            f"seed {seed}: held-out right {points[0].right:.3f} -> {points[-1].right:.3f}, reward "
            f"{points[0].reward:.3f} -> {points[-1].reward:.3f} in {points[-1].seconds:.0f} s"
        )
    if options.plot:
        plot(curves, f"{Path(options.model).name} on {options.task}", options.plot)


if __name__ == "__main__":
    main()
