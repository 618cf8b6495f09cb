"""Tasks that are made of another task: with length budgets, and with every problem once.

Budgeted adds a length budget: the prompt asks for a number of tokens, and the reward falls with the distance from it.

    r = r_task - alpha * |target - length|

Targets come from a set, as in the INTELLECT-2 report (2,000 to 10,000 tokens, alpha 0.0003). Shorter targets need a larger
alpha: alpha times the longest target should be about r_task.

EachOnce, the task `each`, poses every problem of another task's training part once, as the evaluation of a run that does not train.
`shoal data filter` writes such runs, to measure how often a model solves each problem. The seeds of held-out problems follow from the
run's name and the number of their chunk (wire/seeded_draw.py), so this task knows all of them before the run and gives each a number.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.tasks.task import Finite, Problem, Reward, Split, Task, check_whole, prompt_chars
from shoal.wire.seeded_draw import problem_seeds

REQUEST = " Think for {} tokens before giving a response."


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgeted:
    """A task with a target length drawn for each problem."""

    task: Task
    targets: tuple[int, ...]
    alpha: float

    def __post_init__(self) -> None:
        if not self.task.chat:
            raise ValueError(
                "budgets need a task that asks in words; set the task's style to chat, or remove the budgets"
            )

    @property
    def chat(self) -> bool:
        return True

    def problem(self, split: Split, seed: int) -> Problem:
        problem = self.task.problem(split, seed)
        drawn = hashlib.sha256(f"budget/{seed}".encode()).digest()
        target = self.targets[int.from_bytes(drawn[:8], "big") % len(self.targets)]
        return replace(problem, prompt=problem.prompt + REQUEST.format(target), budget=target)

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        reward = self.task.reward(problem, text, num_tokens)
        assert problem.budget is not None, "the problem has no budget: it comes from another task"
        return replace(reward, value=reward.value - self.alpha * abs(problem.budget - num_tokens))

    def prompt_chars(self, split: Split) -> Sequence[int]:
        """Returns those of the task: the request is equally long in all of them, but for digits."""
        return prompt_chars(self.task, split)


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteBudgeted(Budgeted):
    """A budgeted task with a known number of problems."""

    def size(self, split: Split) -> int:
        assert isinstance(self.task, Finite)
        return self.task.size(split)


def with_budgets(task: Task, targets: tuple[int, ...], alpha: float) -> Task:
    """Returns the task with length budgets."""
    kind = FiniteBudgeted if isinstance(task, Finite) else Budgeted
    return kind(task=task, targets=targets, alpha=alpha)


@dataclass(frozen=True, kw_only=True)
class EachOnce:
    """Poses `count` problems of a task, or all of them, each once."""

    task: Task
    run: str
    """The run's name."""
    chunk: int
    """Prompts in a chunk of the run's evaluation."""
    count: int = 0
    """Problems that are drawn from the training part; 0: all."""
    seed: int = 0
    """Chooses which ones are drawn."""

    def __post_init__(self) -> None:
        check_whole("each: chunk", self.chunk, least=1, most=1 << 20)
        check_whole("each: count", self.count, least=0, most=1 << 31)
        if not isinstance(self.task, Finite):
            raise ValueError("each: the task generates problems without end; use one that reads a file")

    @property
    def chat(self) -> bool:
        return self.task.chat

    def problem(self, split: Split, seed: int) -> Problem:
        if split == "train":
            return self.task.problem("train", seed)
        if seed not in self._numbers:
            seed = self._seeds[seed % len(self._seeds)]  # a number, for example from try_task
        return self.task.problem("train", self._numbers[seed])

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self.task.reward(problem, text, num_tokens)

    def size(self, split: Split) -> int:
        return len(self.chosen)

    def prompt_chars(self, split: Split) -> Sequence[int]:
        chars = prompt_chars(self.task, "train")
        if split == "train" or not chars:
            return chars
        return [chars[number] for number in self.chosen]

    @cached_property
    def chosen(self) -> Sequence[int]:
        """The seeds of the problems in the task's training part, in the order of the chunks."""
        assert isinstance(self.task, Finite)
        return choose_problems(self.task.size("train"), self.count or None, self.seed)

    @cached_property
    def _seeds(self) -> list[int]:
        total = len(self.chosen)
        if not total:
            self.task.problem("train", 0)  # raises an error that says why there are none
        found: list[int] = []
        for number in range(-(-total // self.chunk)):
            size = min(self.chunk, total - number * self.chunk)
            found += problem_seeds("", run=self.run, purpose="eval", chunk=number, num_prompts=size)
        return found

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return dict(zip(self._seeds, self.chosen, strict=True))


def choose_problems(size: int, count: int | None, seed: int) -> Sequence[int]:
    """Returns the seeds of `count` different problems of a task with `size` problems, in order; None: all."""
    if count is None or count >= size:
        return range(size)
    return sorted(random.Random(f"pose/{seed}").sample(range(size), count))
