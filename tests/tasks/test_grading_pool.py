"""The grading pool: order, parallel processes, clocks, and what one bad submission does to the next."""

import os
import threading
import time
from dataclasses import dataclass

import pytest

from shoal.tasks import CannotGrade
from shoal.tasks.grading.math_grader import grade_expression
from shoal.tasks.grading.pool import Answer, GradingPool, GradingStopped, GradingTimeout
from shoal.tasks.grading.program_grader import grade_program
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Problem, Reward, Split

PROGRAM = Problem("p", "", check='{"tests": ["assert double(2) == 4"]}')
GOOD = "```python\ndef double(x): return 2 * x\n```"
BAD = "```python\ndef double(x): return 3 * x\n```"


@dataclass(frozen=True)
class Mixed:
    """Grades programs and expressions; `sleep` and `fail` are answers that do as they say."""

    chat: bool = True

    def problem(self, split: Split, seed: int) -> Problem:
        return PROGRAM

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
            return WRONG
        if text == "fail":
            raise CannotGrade("on purpose")
        return (
            grade_program(problem, text) if problem.check.startswith("{") else grade_expression(problem, text)
        )


@pytest.fixture
def pool() -> GradingPool:
    return GradingPool(2)


def test_rewards_come_in_the_order_of_the_rows(pool: GradingPool) -> None:
    half = Problem("p", "", check="\\frac{1}{2}")
    rows = [
        *(Answer(PROGRAM, GOOD, 1), Answer(PROGRAM, BAD, 1), Answer(half, "\\boxed{2/4}", 1)),
        *(Answer(half, "\\boxed{x}", 1), Answer(PROGRAM, "none", 1), Answer(PROGRAM, GOOD, 1)),
    ]
    assert pool.grade(Mixed(), rows) == [RIGHT, WRONG, RIGHT, WRONG, UNPARSEABLE, RIGHT]
    assert pool.grade(Mixed(), []) == []


def test_rows_are_graded_at_the_same_time(pool: GradingPool) -> None:
    started_s = time.monotonic()
    pool.grade(Mixed(), [Answer(PROGRAM, "sleep 0.5", 1)] * 4)
    assert time.monotonic() - started_s < 1.6
    assert GradingPool().workers == len(os.sched_getaffinity(0))


def test_a_bad_submission_delays_the_next_by_no_more_than_its_own_limit(pool: GradingPool) -> None:
    started_s = time.monotonic()
    with pytest.raises(GradingTimeout, match="16 answers were not graded within 1 s"):
        pool.grade(Mixed(), [Answer(PROGRAM, "sleep 1.5", 1)] * 16, limit_s=1.0)
    assert time.monotonic() - started_s < 1.5
    assert pool.grade(Mixed(), [Answer(PROGRAM, GOOD, 1)]) == [RIGHT]
    assert time.monotonic() - started_s < 8


def test_a_failure_of_the_grader_is_not_the_answers_fault(pool: GradingPool) -> None:
    with pytest.raises(CannotGrade, match="on purpose"):
        pool.grade(Mixed(), [Answer(PROGRAM, "fail", 1), Answer(PROGRAM, "sleep 0.1", 1)])


def test_stop_ends_the_grading(pool: GradingPool) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started_s = time.monotonic()
    with pytest.raises(GradingStopped):
        pool.grade(Mixed(), [Answer(PROGRAM, "sleep 1", 1)] * 20, stop=stop)
    assert time.monotonic() - started_s < 3
