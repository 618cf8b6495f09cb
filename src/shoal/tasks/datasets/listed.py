"""Problems listed in a file: what `shoal data filter` writes for a task that makes its problems up.

Each row has a problem and the task that grades it: {"prompt": ..., "answer": ..., "task": {"name": ..., "options": ...}}.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.tasks.datasets.data_set import read_rows
from shoal.tasks.task import Problem, Reward, Split, Task
from shoal.wire.run_spec import TaskSpec


def listed_row(problem: Problem, spec: TaskSpec) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer, "task": spec.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """All of `path` is trained on; held-out problems are those of the task itself, so that they never meet."""

    path: str

    @property
    def chat(self) -> bool:
        return self._task.chat

    def problem(self, split: Split, seed: int) -> Problem:
        if split == "eval":
            return self._task.problem("eval", seed)
        return self._problems[seed % len(self._problems)]

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return self._task.reward(problem, text, num_tokens)

    @cached_property
    def _rows(self) -> list[tuple[int, dict[str, Any]]]:
        rows = read_rows(Path(self.path))
        if not rows:
            raise ValueError(f"{self.path} has no rows")
        first = rows[0][1].get("task")
        for number, row in rows:
            if set(row) != {"prompt", "answer", "task"} or row["task"] != first:
                raise ValueError(
                    f"{self.path}, row {number}: expected prompt, answer and the same task in every row"
                )
        return rows

    @cached_property
    def _problems(self) -> list[Problem]:
        return [Problem(row["prompt"], row["answer"]) for _, row in self._rows]

    @cached_property
    def _task(self) -> Task:
        from shoal.tasks.registry import make_task  # the registry knows this class

        try:
            spec = TaskSpec.model_validate_json(json.dumps(self._rows[0][1]["task"]))
        except ValueError as error:
            raise ValueError(f"{self.path}, row 1: no task: {error}") from None
        if spec.budgets:
            raise ValueError(f"{self.path}, row 1: budgets belong to the task that reads the list")
        if spec.name == "listed":
            raise ValueError(f"{self.path}, row 1: a list of problems cannot be graded by another list")
        return make_task(spec)
