"""Mistakes in a task's code: each is reported with its place and what to do."""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from shoal.tasks import Outcome, Problem, Reward, Split, make_task
from shoal.tasks.task import RIGHT
from shoal.tasks.task_errors import TaskError, grade_answer, pose_problem, try_task
from shoal.wire.run_spec import TaskSpec


@dataclass
class Mine:
    """A task whose methods return, or raise, what a test gives them."""

    gives: Any = RIGHT
    chat: bool = False

    def problem(self, split: Split, seed: int) -> Problem:
        return Problem(f"say {seed}", str(seed))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        if isinstance(self.gives, Exception):
            raise self.gives
        if text != problem.answer:
            return Reward(0.0, Outcome.WRONG)
        given: Reward = self.gives
        return given


class Unseeded(Mine):
    def problem(self, split: Split, seed: int) -> Problem:
        return Problem(str(random.getrandbits(60)), "1")


class Missing(Mine):
    def problem(self, split: Split, seed: int) -> Problem:
        row: dict[str, Problem] = {}
        return row["prompt"]


def test_an_exception_in_reward_names_file_and_line() -> None:
    with pytest.raises(
        TaskError, match=r"reward\(\) raised ValueError: my bug .*test_task_errors\.py:\d+\)"
    ) as raised:
        grade_answer(Mine(ValueError("my bug")), Problem("p", "a"), "a", 1)
    assert "raise self.gives" in raised.value.trace and "task_errors.py" in raised.value.trace


def test_an_exception_in_problem_names_file_and_line() -> None:
    with pytest.raises(
        TaskError, match=r"problem\('train', 3\) raised KeyError: 'prompt' \(.*test_task_errors\.py:\d+"
    ):
        pose_problem(Missing(), "train", 3)


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (0.5, r"returned 0\.5; return shoal\.tasks\.Reward"),
        (Reward(float("nan"), Outcome.RIGHT), r"gave nan for the answer 'a'; return a finite number"),
        (Reward(float("inf"), Outcome.RIGHT), r"gave inf"),
        (None, r"returned None"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_refused(gives: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        grade_answer(Mine(gives), Problem("p", "a"), "a", 1)


def test_a_problem_that_differs_the_second_time_is_refused() -> None:
    with pytest.raises(TaskError, match="must depend on the seed only"):
        try_task(Unseeded())


def test_a_good_task_has_no_warnings() -> None:
    assert try_task(Mine()) == []
    assert try_task(make_task(TaskSpec(name="sort", options={"length": 4}))) == []


def test_unusual_rewards_are_warned_of() -> None:
    (large,) = try_task(Mine(Reward(1e9, Outcome.RIGHT)))
    assert "gave 1e+09; divide it" in large
    (equal,) = try_task(Mine(Reward(0.0, Outcome.RIGHT)))
    assert "no more than a wrong one" in equal


def test_errors_of_built_in_tasks_stay_as_they_are() -> None:
    task = make_task(TaskSpec(name="gsm8k", options={"path": "no-such-file.jsonl"}))
    with pytest.raises(ValueError, match="no-such-file") as raised:
        pose_problem(task, "train", 0)
    assert not isinstance(raised.value, TaskError)


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"task 'count' has no option 'lenght'; did you mean length\? it has: .*style"
    ):
        make_task(TaskSpec(name="count", options={"lenght": 4}))


def test_options_may_be_booleans() -> None:
    spec = TaskSpec.parse('{"name": "mine", "options": {"chat": false, "size": 1, "share": 0.5}}')
    assert spec.options == {"chat": False, "size": 1, "share": 0.5}
    assert type(spec.options["chat"]) is bool and type(spec.options["size"]) is int
    assert '"chat":false' in spec.canonical().decode()
