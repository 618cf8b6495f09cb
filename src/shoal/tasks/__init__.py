"""Tasks: prompts and rewards as pure functions, without torch and without downloads. docs/tasks.md describes each.

`make_task(TaskSpec(name="add", options={"digits": 2}))` returns a Task, which makes a Problem of a seed and a Reward of a text.
"""

from shoal.tasks.registry import make_task
from shoal.tasks.task import (
    CannotGrade,
    Finite,
    Outcome,
    Problem,
    Reward,
    Split,
    Task,
    is_held_out,
    problem_rng,
)

__all__ = [
    "CannotGrade",
    "Finite",
    "Outcome",
    "Problem",
    "Reward",
    "Split",
    "Task",
    "is_held_out",
    "make_task",
    "problem_rng",
]
