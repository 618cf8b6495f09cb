"""Prompts and rewards as pure functions. No torch, no downloads. docs/tasks.md has each of them.

`make_task(TaskSpec(name="add", options={"digits": 2}))` gives a Task; a seed gives a Problem; a text gives a Reward.
"""

from shoal.tasks.registry import make_task
from shoal.tasks.task import CannotGrade, Finite, Outcome, Problem, Reward, Split, Task

__all__ = ["CannotGrade", "Finite", "Outcome", "Problem", "Reward", "Split", "Task", "make_task"]
