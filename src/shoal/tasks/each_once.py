"""The task `each`: poses every problem of another task's training part once, as the evaluation of a run that does not train.

`shoal data filter` writes such runs, to measure how often a model solves each problem. The seeds of held-out problems follow from the
run's name and the number of their chunk (wire/seeded_draw.py), so this task knows all of them before the run and gives each a number.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shoal.tasks.task import Finite, Problem, Reward, Split, Task, check_whole
from shoal.wire.seeded_draw import problem_seeds


@dataclass(frozen=True, kw_only=True)
class EachOnce:
    """Poses `count` problems of a task, or all of them, each once."""

    task: Task
    run: str
    """The run's name."""
    chunk: int
    """The run's coordinator.prompts_per_lease."""
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
