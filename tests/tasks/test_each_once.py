"""The task `each`: every problem of another task's training part is posed once by the leases of an evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks import make_task
from shoal.tasks.registry import keep_task_files
from shoal.tasks.wrapped_tasks import EachOnce, choose_problems
from shoal.wire.run_spec import TaskSpec
from shoal.wire.seeded_draw import problem_seeds


def each_spec(folder: Path, rows: int = 45, **options: Any) -> TaskSpec:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(rows)))
    own: dict[str, Any] = {"task": "qa", "path": str(data), "run": "filter-qa", "chunk": 8}
    return TaskSpec(name="each", options=own | options)


def each_task(spec: TaskSpec) -> EachOnce:
    task = make_task(spec)
    assert isinstance(task, EachOnce)
    return task


@pytest.mark.parametrize("count", [0, 13])
def test_the_chunks_of_an_evaluation_pose_each_problem_once(tmp_path: Path, count: int) -> None:
    task = each_task(each_spec(tmp_path, count=count, seed=3))
    total = task.size("eval")
    posed = []
    for chunk in range(-(-total // 8)):
        size = min(8, total - 8 * chunk)
        seeds = problem_seeds("", run="filter-qa", purpose="eval", chunk=chunk, num_prompts=size)
        posed += [task.problem("eval", seed).prompt for seed in seeds]
    inner = task.task
    size = inner.size("train")  # type: ignore[attr-defined]
    assert total == (count or size)
    assert posed == [
        inner.problem("train", number).prompt for number in choose_problems(size, count or None, 3)
    ]
    assert len(set(posed)) == total


def test_answers_are_graded_by_the_task_itself(tmp_path: Path) -> None:
    task = each_task(each_spec(tmp_path))
    problem = task.problem("eval", 5)
    assert task.reward(problem, problem.answer, 1).value == 1
    assert task.reward(problem, "?", 1).value == 0


def test_files_travel_by_their_digests(tmp_path: Path) -> None:
    kept = keep_task_files(each_spec(tmp_path), tmp_path / "kept", reports=tmp_path)
    assert str(kept.options["path"]).startswith("sha256:")
    assert str(kept.options["checks_path"]).startswith("sha256:"), "every machine leaves out the same rows"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "sort", "length": 3}, "generates problems without end"),
        ({"task": "nothing"}, "unknown task 'nothing'"),
        ({"task": "each", "chunk": 2}, "each"),
        ({"chunk": 0}, "chunk=0 must be a whole number"),
        ({"count": -1}, "count=-1 must be a whole number"),
        ({"anser": "x"}, "task 'qa' has no option 'anser'; did you mean answer"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    spec = each_spec(tmp_path, **options)
    if options.get("task") == "sort":
        spec = TaskSpec(name="each", options={"run": "filter-qa", "chunk": 8, **options})
    with pytest.raises(ValueError, match=words):
        make_task(spec)
