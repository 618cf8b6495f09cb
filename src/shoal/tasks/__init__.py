"""Prompts and rewards as pure functions. No torch, no downloads.

`make_task(TaskSpec(name="add", options={"digits": 2}))` gives a Task; a seed gives a Problem; a text gives a Reward.
"""

from shoal.tasks.registry import make_task
from shoal.tasks.task import Outcome, Problem, Reward, Split, Task

__all__ = ["Outcome", "Problem", "Reward", "Split", "Task", "make_task"]
