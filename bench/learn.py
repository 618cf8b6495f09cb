"""What makes a model learn: the trainer's own step and the engine in one process, without a swarm.

    python bench/learn.py --model tiny --task sort --groups 16 --samples 16 --new-tokens 8 --lag 2 --rate 3e-4 --steps 40

Prints the mean reward of each batch as it was generated, and the held-out reward before and after. `--lag` trains on
batches that are that many steps old, as a swarm does.
"""

import argparse
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import torch

from shoal.model.builtin import copy_all_but_weights, create_model
from shoal.model.load import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.model.weights import WEIGHTS_FILE, save_weights
from shoal.rollout.engine import Finished, Request
from shoal.rollout.torch_engine import TorchEngine
from shoal.tasks import Split, make_task
from shoal.telemetry import Log
from shoal.trainer.advantage import group_advantages
from shoal.trainer.batch import Sample, TrainBatch
from shoal.trainer.config import TrainerConfig
from shoal.trainer.learner import Learner
from shoal.trainer.supervised import warm_up
from shoal.wire.draw import sample_seed
from shoal.wire.run import ProofSpec, TaskSpec

EVAL_PROMPTS, EVAL_SAMPLES = 64, 4
Scored = list[tuple[Finished, float]]


class Loop:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.task = make_task(TaskSpec(name=options.task, options=dict(options.option)))
        self.model, self.current = folder / "model", folder / "current"
        create_model(options.model, self.model, options.seed)
        self.current.mkdir()
        copy_all_but_weights(self.model, self.current)
        config = TrainerConfig(
            learning_rate=options.rate,
            supervised_steps=options.supervised_steps,
            row_tokens=options.row_tokens,
            rows_per_micro_batch=64,
            seed=options.seed,
        )
        decoder = load_decoder(self.model, torch.float32, options.device)
        self.learner = Learner(decoder, config, temperature=1.0)
        self.stop = threading.Event()
        warm_up(self.learner, self.task, load_tokenizer(self.model), log=Log("bench"), stop=self.stop)
        rows = max(options.groups * options.samples, EVAL_PROMPTS * EVAL_SAMPLES)
        self.engine = TorchEngine(
            compute_dtype="float32", proof=ProofSpec(), max_rows=rows, device=options.device
        )
        self.generations = 0

    def generate(self, split: Split, num_prompts: int, num_samples: int) -> list[Scored]:
        """Groups of answers by the learner's present weights, with their rewards."""
        save_weights(self.learner.decoder, self.current / WEIGHTS_FILE)
        self.engine.load(self.current, self.generations)
        first = 0 if split == "eval" else self.generations * num_prompts
        problems = [self.task.problem(split, first + index) for index in range(num_prompts)]
        seed = f"{self.options.seed:032x}{self.generations:032x}"
        self.generations += 1
        encode = self.engine.tokenizer.encode_prompt
        self.engine.submit(
            [
                Request(
                    prompt_index=prompt,
                    sample_index=sample,
                    prompt_tokens=tuple(encode(problem.prompt, chat=self.task.chat)),
                    sample_seed=sample_seed(seed, prompt, sample),
                    max_new_tokens=self.options.new_tokens,
                    temperature=1.0,
                )
                for prompt, problem in enumerate(problems)
                for sample in range(num_samples)
            ]
        )
        groups: list[Scored] = [[] for _ in problems]
        while self.engine.has_work:
            for row in self.engine.step():
                problem = problems[row.request.prompt_index]
                text = self.engine.tokenizer.decode(row.output_tokens)
                reward = self.task.reward(problem, text, len(row.output_tokens))
                groups[row.request.prompt_index].append((row, reward.value))
        return groups

    def train(self, groups: list[Scored]) -> None:
        """One step on the groups that have signal; none if there are none."""
        samples: list[Sample] = []
        for group in groups:
            rewards = [reward for _, reward in group]
            if max(rewards) > min(rewards):
                advantages = group_advantages(rewards, self.learner.config.recipe.advantage)
                samples += [to_sample(row, value) for (row, _), value in zip(group, advantages, strict=True)]
        if samples:
            batch = TrainBatch(
                version=self.learner.version,
                samples=tuple(samples),
                num_groups=len(groups),
                dropped_groups=0,
                reward_mean=mean_reward(groups),
            )
            self.learner.step(batch, self.stop)


def to_sample(row: Finished, advantage: float) -> Sample:
    prompt = row.request.prompt_tokens
    return Sample(
        tokens=(*prompt, *row.output_tokens),
        prompt_len=len(prompt),
        logprobs=tuple(row.logprobs),
        advantage=advantage,
        lag=0,
    )


def mean_reward(groups: list[Scored]) -> float:
    rewards = [reward for group in groups for _, reward in group]
    return sum(rewards) / len(rewards)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="sort")
    parser.add_argument(
        "--option", action="append", default=[], type=lambda text: text.split("=", 1), metavar="KEY=TEXT"
    )
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--supervised-steps", type=int, default=0)
    parser.add_argument("--row-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(options, Path(folder))
        before = mean_reward(loop.generate("eval", EVAL_PROMPTS, EVAL_SAMPLES))
        waiting: deque[list[Scored]] = deque()
        for step in range(options.steps):
            waiting.append(loop.generate("train", options.groups, options.samples))
            print(f"step {step:>3}  reward {mean_reward(waiting[-1]):.3f}", flush=True)
            if len(waiting) > options.lag:
                loop.train(waiting.popleft())
        after = mean_reward(loop.generate("eval", EVAL_PROMPTS, EVAL_SAMPLES))
    print(f"held-out reward {before:.3f} -> {after:.3f} in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
