"""Mistakes in a task's code: each is reported with its place and what to do."""

import errno
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks import CannotGrade, Outcome, Problem, Reward, Split, make_task
from shoal.tasks.grading import program_grader
from shoal.tasks.grading.math_grader import compare, math_grader
from shoal.tasks.task import RIGHT
from shoal.tasks.task_errors import SLOW_S, TaskError, UnseededProblem, grade_answer, pose_problem, try_task
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


class SometimesUnseeded(Mine):
    def problem(self, split: Split, seed: int) -> Problem:
        return Problem(str(random.getrandbits(60)) if seed == 11 else "1", "1")


class Random(Mine):
    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return Reward(random.random(), Outcome.WRONG)


class Slow(Mine):
    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        time.sleep(1.1 * SLOW_S)
        return super().reward(problem, text, num_tokens)


class Exits(Mine):
    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        sys.exit("bye")


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


def test_one_random_problem_among_others_is_found() -> None:
    with pytest.raises(UnseededProblem, match=r"problem\('train', 11\) gave .* instead of random"):
        try_task(SometimesUnseeded())


def test_a_reward_that_differs_when_it_is_given_twice_is_reported() -> None:
    (warning,) = try_task(Random())
    assert "for the same answer '0'; every validator and audit must get the same number" in warning


def test_a_slow_grader_is_reported() -> None:
    (slow,) = try_task(Slow())
    assert "reward() takes 0.2 s for an answer" in slow and "local.validators" in slow


@dataclass
class Programs(Mine):
    """A task whose answers are graded by tests that are in a file."""

    path: str = ""

    def problem(self, split: Split, seed: int) -> Problem:
        return Problem(f"say {seed}", str(seed), check='{"tests": ["assert f(1) == 2"]}')


@pytest.mark.parametrize(("level", "warned"), [("user", True), ("namespace", False)])
def test_tests_that_programs_can_read_are_reported(
    level: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_grader, "best_level", lambda: level)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        data = Path(folder) / "rows.jsonl"
        data.touch(0o644)
        assert try_task(Programs(path=str(data))) == []  # the folder is closed
        Path(folder).chmod(0o755)
        warnings = try_task(Programs(path=str(data)))
        assert [f"every user of this machine can read {data}" in one for one in warnings] == [True] * warned
        assert try_task(Programs(path=str(data.parent / "no-such-file"))) == []
        data.chmod(0o640)
        assert try_task(Programs(path=str(data))) == []


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


def test_a_failure_of_the_system_is_not_the_answers_fault() -> None:
    with pytest.raises(CannotGrade, match=r"task Mine: reward\(\) raised BlockingIOError: .*unavailable"):
        grade_answer(Mine(BlockingIOError(errno.EAGAIN, "unavailable")), Problem("p", "a"), "a", 1)


def test_an_exception_of_our_own_grader_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    math_grader()._child.close()  # a child that runs has the package
    task = make_task(TaskSpec(name="count", options={"length": 4}))
    monkeypatch.setattr(type(task), "reward", lambda self, problem, text, n: compare(r"\frac12", "x"))
    with pytest.raises(TaskError, match=r"^grading mathematics needs the package math-verify"):
        grade_answer(task, Problem("p", "a"), "a", 1)


def test_a_grader_that_exits_does_not_end_the_process() -> None:
    with pytest.raises(TaskError, match=r"reward\(\) raised SystemExit: bye"):
        grade_answer(Exits(), Problem("p", "a"), "a", 1)


def test_a_grader_of_a_file_that_fails_on_one_answer_is_a_task_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, rows = tmp_path / "g.py", tmp_path / "rows.jsonl"
    code.write_text("def grade(reply, answer):\n    return 1 + reply.count(chr(33))\n")
    rows.write_text("".join(json.dumps({"question": f"q{n}", "answer": "a"}) + "\n" for n in range(40)))
    monkeypatch.setenv("SHOAL_TASK_FILES", str(code))
    options: dict[str, Any] = {"path": str(rows), "grader": f"{code}:grade"}
    task = make_task(TaskSpec(name="qa", options=options))
    with pytest.raises(TaskError, match=r"g\.py:grade returned 2; a grader returns a number from 0 to 1"):
        grade_answer(task, task.problem("train", 0), "!", 1)


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
