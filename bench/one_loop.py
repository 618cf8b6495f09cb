"""Runs the trainer's own step and a plain generator in one process. staleness.py, clipping.py and stability.py use it.

The task is `sort` and the model `tiny`, so that a run takes seconds. Version v trains on rollouts of version v - lag, which
are sampled from the bfloat16 weights that a swarm would have published.

Shape letters: B rows (prompts x samples), T tokens of a row, V vocabulary.
"""

import argparse
import copy
import json
import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoal.model.builtin import create_model
from shoal.model.decoder import Decoder, KVCache
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.tasks import Split, make_task
from shoal.telemetry import Log
from shoal.trainer.config import TrainerConfig
from shoal.trainer.data.batch import TrainBatch, TrainSample, group_advantages
from shoal.trainer.optim.learner import Learner
from shoal.trainer.optim.reference import Reference
from shoal.trainer.optim.supervised import warm_up
from shoal.trainer.reporting.early_warnings import WarningTracker
from shoal.trainer.reporting.step_figures import StepFigures, step_report
from shoal.wire.messages import Batch
from shoal.wire.run_spec import TaskSpec

NEW_TOKENS = 6
SCALARS = ("rewards", "warnings", "generate_s", "train_s", "held_out")


@dataclass
class Curve:
    """The results of one run."""

    rewards: list[float] = field(default_factory=list)
    figures: list[StepFigures] = field(default_factory=list)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    """Step and kind of each early warning that the trainer would have sent."""
    generate_s: float = 0.0
    train_s: float = 0.0
    held_out: float = 0.0
    """Mean reward of the last version on 256 prompts that were not trained on."""


class KeptRuns:
    """Keeps the curve of every finished run in a file of JSON lines, so that a command can be continued after an interruption.

    Without a file nothing is kept. After `seconds` no new run is begun: the caller says that the command must be repeated.
    """

    def __init__(self, path: Path | None, seconds: float | None) -> None:
        self._path = path
        self._end_s = math.inf if seconds is None else time.monotonic() + seconds
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._kept = {_key(record["settings"]): record for record in map(json.loads, lines)}
        self.missing = 0
        """Runs that were not begun because the time was over."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--results", type=Path, help="keep finished runs here, and continue from it")
        parser.add_argument(
            "--seconds", type=float, help="begin no new run after this time; repeat the command to continue"
        )

    def get(self, settings: dict[str, Any], make: Callable[[], Curve]) -> Curve | None:
        """Returns the run with these settings, from the file or made now; None if the time is over."""
        if (record := self._kept.get(_key(settings))) is not None:
            figures = [StepFigures(**figures) for figures in record["figures"]]
            return Curve(**{name: record[name] for name in SCALARS if name in record}, figures=figures)
        if time.monotonic() >= self._end_s:
            self.missing += 1
            return None
        curve = make()
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"settings": settings, **asdict(curve)}) + "\n")
        return curve

    def say_what_is_missing(self) -> None:
        if self.missing:
            print(f"{self.missing} runs are missing: repeat the command with the same --results")


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


class OneLoop:
    """Makes one run. `lag` 0 is synchronous training."""

    def __init__(self, config: TrainerConfig, *, lag: int, groups: int, samples: int) -> None:
        self.lag, self.groups, self.samples = lag, groups, samples
        self.task = make_task(TaskSpec(name="sort", options={"length": 4, "partial": 0.5}))
        self.stop = threading.Event()
        self.random = torch.Generator().manual_seed(config.seed)
        with tempfile.TemporaryDirectory() as folder:
            create_model("tiny", Path(folder) / "model", config.seed)
            decoder = load_decoder(Path(folder) / "model")
            self.tokenizer = load_tokenizer(Path(folder) / "model")
        self.decoder = decoder  # the one that the learner trains
        self.posed = 0
        self.start(config)
        warm_up(self.learner, [self.task], self.tokenizer, log=Log("bench"), stop=self.stop)
        self.start(config)

    def start(self, config: TrainerConfig) -> None:
        """Makes the current weights version 0 of a run with these settings, with a new optimizer."""
        self.learner = Learner(self.decoder, config, max_new_tokens=NEW_TOKENS)
        self.learner.reference = Reference(self.decoder) if config.kl else None
        self.published = deque([published(self.decoder)], maxlen=self.lag + 1)

    def run(self, num_steps: int) -> Curve:
        curve = Curve()
        tracker = WarningTracker()
        while self.learner.version < num_steps:
            started_s = time.monotonic()
            rows = self.generate(self.published[0], "train", self.posed, self.groups, self.samples)
            self.posed += self.groups
            generated_s = time.monotonic()
            batch, reward = self.batch(rows, lag=len(self.published) - 1)
            curve.rewards.append(reward)
            figures = self.learner.step(batch, self.stop)
            curve.figures.append(figures)
            warnings = tracker.add(step_report(batch, figures, wait_s=0.0))
            curve.warnings += [(self.learner.version, kind) for kind in warnings]
            curve.generate_s += generated_s - started_s
            curve.train_s += time.monotonic() - generated_s
            self.published.append(published(self.decoder))
        held_out = self.generate(self.published[-1], "eval", 0, 256, 1)
        curve.held_out = sum(reward for _, reward in held_out) / len(held_out)
        return curve

    def batch(self, rows: list[tuple[TrainSample, float]], *, lag: int) -> tuple[TrainBatch, float]:
        """Returns the groups with signal. A swarm would generate more if they are too few; here groups without signal fill up."""
        groups = [rows[start : start + self.samples] for start in range(0, len(rows), self.samples)]
        useful = [group for group in groups if len({reward for _, reward in group}) > 1]
        missing = max(0, self.learner.config.optimizer_steps - len(useful))
        useful += [group for group in groups if len({reward for _, reward in group}) == 1][:missing]
        kind = self.learner.config.recipe.advantage
        samples = []
        for index, group in enumerate(useful):
            values = group_advantages([reward for _, reward in group], kind)
            for (sample, _), value in zip(group, values, strict=True):
                samples.append(replace(sample, advantage=value, lag=lag, group=index))
        reward = sum(reward for _, reward in rows) / len(rows)
        version = self.learner.version
        # Without the dropped groups, the early warning of missing signal could never come.
        told = Batch(
            version=version,
            groups=(),
            dropped_groups=len(groups) - len(useful),
            stale_groups=0,
            reward_mean=reward,
        )
        batch = TrainBatch(version=version, samples=tuple(samples), num_groups=len(useful), told=told)
        return batch, reward

    @torch.no_grad()
    def generate(
        self, policy: Decoder, split: Split, first: int, num_prompts: int, num_samples: int
    ) -> list[tuple[TrainSample, float]]:
        """Samples answers and computes their rewards. Samples of a prompt are adjacent; all prompts have one length."""
        problems = [self.task.problem(split, first + index) for index in range(num_prompts)]
        encoded = [self.tokenizer.encode_prompt(problem.prompt, chat=False) for problem in problems]
        tokens_BT = torch.tensor(encoded).repeat_interleave(num_samples, 0)
        num_rows, prompt_len = tokens_BT.shape
        cache = KVCache(policy, num_slots=num_rows, max_context=prompt_len + NEW_TOKENS)
        new_BT, logprobs_BT = tokens_BT, torch.zeros(num_rows, 0)
        for _ in range(NEW_TOKENS):
            cache.context = tokens_BT.shape[1]
            positions_BT = torch.arange(cache.context - new_BT.shape[1], cache.context).expand_as(new_BT)
            logp_BV = policy.logits(policy(new_BT, positions_BT, cache=cache)[:, -1]).log_softmax(-1)
            new_BT = torch.multinomial(logp_BV.exp(), 1, generator=self.random)
            tokens_BT = torch.cat([tokens_BT, new_BT], 1)
            logprobs_BT = torch.cat([logprobs_BT, logp_BV.gather(1, new_BT)], 1)
        found = []
        for row in range(num_rows):
            outputs = tokens_BT[row, prompt_len:].tolist()
            ends = [place for place, token in enumerate(outputs) if token in self.tokenizer.end_tokens]
            length = ends[0] + 1 if ends else NEW_TOKENS
            sample = TrainSample(
                tokens=tuple(tokens_BT[row, : prompt_len + length].tolist()),
                prompt_len=prompt_len,
                logprobs=tuple(logprobs_BT[row, :length].tolist()),
                advantage=0.0,
                lag=0,
            )
            text = self.tokenizer.decode(outputs[:length])
            found.append((sample, self.task.reward(problems[row // num_samples], text, length).value))
        return found


def published(decoder: Decoder) -> Decoder:
    """Returns the weights that workers get: the fp32 master weights rounded to bfloat16."""
    policy = copy.deepcopy(decoder)
    for parameter in policy.parameters():
        parameter.data = parameter.data.bfloat16().float()
        parameter.grad = None
    return policy
