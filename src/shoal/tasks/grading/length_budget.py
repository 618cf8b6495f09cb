"""Length budgets: any task, with a number of tokens to think for stated in the prompt and held against the answer.

    r = r_task - alpha * |target - length|

Targets come from a set, as in the INTELLECT-2 report (2,000 to 10,000 tokens, alpha 0.0003). A shorter set wants a
larger alpha: what being off by the longest target costs is alpha times that target, and should stay about r_task.
"""

import hashlib
from dataclasses import dataclass, replace

from shoal.tasks.task import Finite, Problem, Reward, Split, Task

WORDS = " Think for {} tokens before giving a response."


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgeted:
    """`task` with a target length drawn for each problem."""

    task: Task
    targets: tuple[int, ...]
    alpha: float

    def __post_init__(self) -> None:
        if not self.task.chat:
            raise ValueError(
                "budgets: a length can only be asked for in words; choose the task's style chat, or drop the budgets"
            )

    @property
    def chat(self) -> bool:
        return True

    def problem(self, split: Split, seed: int) -> Problem:
        problem = self.task.problem(split, seed)
        drawn = hashlib.sha256(f"budget/{seed}".encode()).digest()
        target = self.targets[int.from_bytes(drawn[:8], "big") % len(self.targets)]
        return replace(problem, prompt=problem.prompt + WORDS.format(target), budget=target)

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        reward = self.task.reward(problem, text, num_tokens)
        assert problem.budget is not None, "a problem of another task"
        return replace(reward, value=reward.value - self.alpha * abs(problem.budget - num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteBudgeted(Budgeted):
    """The same over a task of so many problems."""

    def size(self, split: Split) -> int:
        assert isinstance(self.task, Finite)
        return self.task.size(split)


def with_budgets(task: Task, targets: tuple[int, ...], alpha: float) -> Task:
    kind = FiniteBudgeted if isinstance(task, Finite) else Budgeted
    return kind(task=task, targets=targets, alpha=alpha)
