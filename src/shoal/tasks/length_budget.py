"""Adds a length budget to any task: the prompt asks for a number of tokens, and the reward falls with the distance from it.

    r = r_task - alpha * |target - length|

Targets come from a set, as in the INTELLECT-2 report (2,000 to 10,000 tokens, alpha 0.0003). Shorter targets need a larger
alpha: alpha times the longest target should be about r_task.
"""

import hashlib
from dataclasses import dataclass, replace

from shoal.tasks.task import Finite, Problem, Reward, Split, Task

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
