"""Measures the grading pool: answers per second with one process and with all cores, and the cost of starting a program.

    python bench/grading.py                 4,096 answers, half programs with 20 tests, half mathematics
    python bench/grading.py --answers 256   a short run

Prints the rate with one worker and with all cores, their ratio to cores times one, and the overhead of a warmed start: the
wall-clock time of an empty script in its sandbox, and of a program with 20 tests that do nothing, per test.
"""

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import dataclass

from shoal.tasks.grading.math_grader import grade_expression
from shoal.tasks.grading.pool import Answer, GradingPool
from shoal.tasks.grading.program_grader import grade_program
from shoal.tasks.grading.sandbox import SandboxLimits, best_level, passes, run_script
from shoal.tasks.task import Problem, Reward, Split

NUM_TESTS = 20
WORK = 4000
"""Steps of the loop in each program: about a millisecond for each test."""


@dataclass(frozen=True)
class Mixture:
    """Grades a program if the problem has tests, otherwise an expression."""

    chat: bool = True

    def problem(self, split: Split, seed: int) -> Problem:
        raise NotImplementedError

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        grade = grade_program if problem.check.startswith("{") else grade_expression
        return grade(problem, text)


def make_answers(count: int) -> list[Answer]:
    """Returns answers, half of them programs; one in four is wrong."""
    rng = random.Random(1)
    answers = []
    for number in range(count):
        wrong, n = number % 4 == 3, rng.randrange(2, 1000)
        if number % 2 == 0:
            tests = [f"assert total({k}) == {k * (k - 1) // 2}" for k in range(WORK, WORK + NUM_TESTS)]
            body = f"    return sum(range(n)) + {int(wrong)}"
            text = f"```python\n# answer {n}\ndef total(n):\n    for i in range(n): pass\n{body}\n```"
            answers.append(Answer(Problem("", "", check=json.dumps({"tests": tests})), text, 1))
        else:
            gold = f"\\frac{{{n}}}{{{2 * n + 1}}}"
            answers.append(Answer(Problem("", "", check=gold), f"\\boxed{{{3 * n + wrong}/{6 * n + 3}}}", 1))
    return answers


def rate(answers: list[Answer], workers: int) -> float:
    """Returns the answers per second of a warmed pool."""
    pool = GradingPool(workers)
    pool.grade(Mixture(), answers[: 8 * workers])  # starts the processes of every thread
    started_s = time.perf_counter()
    rewards = pool.grade(Mixture(), answers)
    took_s = time.perf_counter() - started_s
    right = sum(reward.value for reward in rewards)
    wanted = sum(number % 4 != 3 for number in range(len(answers)))
    assert right == wanted, f"{right:.0f} answers are right, expected {wanted}"
    pool.close()
    return len(answers) / took_s


def start_cost_ms(count: int) -> tuple[float, float]:
    """Returns the median milliseconds of an empty script, and of each of 20 tests that do nothing."""
    limits = SandboxLimits()
    scripts, tests = [], []
    for _ in range(count):
        started_s = time.perf_counter()
        run_script("", b"", limits=limits)
        scripts.append(1000 * (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        assert passes("def f(x): return x", ["assert f(1) == 1"] * NUM_TESTS, limits=limits)
        tests.append(1000 * (time.perf_counter() - started_s) / NUM_TESTS)
    return statistics.median(scripts), statistics.median(tests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=4096, help="number of answers (default: 4096)")
    parser.add_argument(
        "--starts", type=int, default=50, help="number of starts that are measured (default: 50)"
    )
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"level {best_level()}, {cores} cores, load {os.getloadavg()[0]:.1f} before the start")
    script_ms, test_ms = start_cost_ms(options.starts)
    print(
        f"warmed start: {script_ms:.1f} ms a script, {test_ms:.2f} ms a test of a program with {NUM_TESTS} tests"
    )
    answers = make_answers(options.answers)
    one, all_cores = rate(answers, 1), rate(answers, cores)
    print(f"{options.answers} answers: {one:.1f}/s with 1 process, {all_cores:.1f}/s with {cores}")
    print(
        f"ratio to {cores} times one: {all_cores / (cores * one):.2f}; load {os.getloadavg()[0]:.1f} at the end"
    )


if __name__ == "__main__":
    main()
