"""Grades of mathematical answers: right and wrong pairs, and answers made to hang or crash a grader."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from shoal.tasks import Outcome, Problem
from shoal.tasks.grading.math_grader import (
    MathGrader,
    compare,
    find_bad_expression,
    grade_expression,
    grade_plain_number,
    last_boxed,
    math_grader,
)

R, W, U = Outcome.RIGHT, Outcome.WRONG, Outcome.UNPARSEABLE


@pytest.mark.parametrize(
    ("gold", "text", "outcome"),
    [
        ("72", "48 + 24 = 72\n#### 72", R),
        ("72", "The answer is 72.", R),
        ("72", "\\boxed{72}", R),
        ("72", "\\boxed{72.0}", R),
        ("72", "\\boxed{\\frac{144}{2}}", R),
        ("1234", "#### 1,234", R),
        ("1234", "She pays $1,234.00", R),
        ("18", "#### $18 a day, for 3 days", R),
        ("0.5", "#### .5", R),
        ("-3", "It falls to -3", R),
        ("72", "<think>#### 71</think>\n#### 72", R),
        ("72", "#### 72\n#### 71", W),
        ("72", "72, or 73", W),
        ("72", "\\boxed{71} and 72", W),
        ("72", "<think>72</think> 71", W),
        ("3", "-3", W),
        ("72", "7 2", W),
        ("72", "", U),
        ("72", "seventy-two", U),
        ("72", "<think>72</think>", U),
        ("72", "#### none", U),
        ("72", "٧٢", U),
    ],
)
def test_plain_numbers(gold: str, text: str, outcome: Outcome) -> None:
    assert grade_plain_number(Problem("", gold), text).outcome is outcome


@pytest.mark.parametrize(
    ("gold", "text", "outcome"),
    [
        ("\\frac{14}{3}", "\\boxed{\\frac{14}{3}}", R),
        ("\\frac{14}{3}", "so \\boxed{14/3}", R),
        ("\\frac{1}{2}", "\\boxed{0.5}", R),
        ("p - q", "\\boxed{-q + p}", R),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", R),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", R),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", R),
        ("42", "<think>\\boxed{41}</think>\\boxed{42}", R),
        ("42", "\\boxed{41}, no: \\boxed{42}", R),
        ("\\frac{14}{3}", "\\boxed{\\frac{14}{5}}", W),
        ("p - q", "\\boxed{q - p}", W),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(\\pi/2, 3)}", W),
        ("42", "\\boxed{42}, no: \\boxed{41}", W),
        ("42", "\\boxed{\\approx 42.}", R),
        ("x + \\frac{1}{2}", "\\boxed{\\frac{1}{2} + x.}", R),
        # A part of the answer that can be parsed is not the answer.
        (
            "\\left( \\frac{1}{4}, \\frac{3}{4} \\right)",
            "\\boxed{\\left( \\frac{1}{4}, \\frac{3}{4} \\right)+1}",
            U,
        ),
        (
            "\\left( \\frac{1}{4}, \\frac{3}{4} \\right)",
            "\\boxed{2\\left( \\frac{1}{4}, \\frac{3}{4} \\right)}",
            U,
        ),
        ("42", "\\boxed{987 \\\\ 42}", U),
        ("42", "\\boxed{987 = 42}", U),
        ("7", "\\boxed{987=0=7}", U),
        ("7", "\\boxed{2+2=5=7}", U),
        ("7", "\\boxed{x=5=7}", U),
        ("7", "\\boxed{5=x=7}", U),
        ("7", "\\boxed{x^2=7}", U),
        ("5", "\\boxed{3x=5}", U),
        ("5", "\\boxed{x+y=5}", U),
        ("5", "\\boxed{5 \\approx 7}", U),
        ("5", "\\boxed{5≈7}", U),
        ("2x+1", "\\boxed{2x+1=0}", U),
        ("7", "\\boxed{3+4=7}", R),
        ("7", "\\boxed{x = 3 + 4 = 7}", R),
        ("7", "\\boxed{f(x+1)=7}", R),
        ("7", "\\boxed{x_{1}=7}", R),
        ("2x+1", "\\boxed{f(x)=2x+1}", R),
        ("2x+1", "\\boxed{y = x+x+1 = 2x+1}", R),
        ("x^2+y^2=4", "\\boxed{x^2+y^2=4}", R),
        ("y=2x+1", "\\boxed{y=2x+1}", R),
        ("\\frac{1}{3}", "\\boxed{x=\\frac{2}{6}=\\frac{1}{3}}", R),
        ("42", "\\boxed{84/2 = 42}", R),
        ("0.56 = 56\\%", "\\boxed{0.56 = 56\\%+1}", U),
        ("204_5", "\\boxed{204_{5}}", R),
        ("204_5", "\\boxed{204_7}", W),
        ("43_5.", "\\boxed{43_5.7}", W),
        ("42", "42", U),
        ("42", "\\boxed{", U),
        ("42", "\\boxed{}", U),
        ("42", "<think>\\boxed{42}</think>", U),
        ("\\frac{1}{2}", "\\boxed{" + "x" * 3000 + "}", U),
    ],
)
def test_expressions(gold: str, text: str, outcome: Outcome) -> None:
    assert grade_expression(Problem("", f"\\boxed{{{gold}}}", check=gold), text).outcome is outcome


def test_braces_in_a_box_are_matched() -> None:
    assert last_boxed("a \\boxed{\\frac{1}{2}} b") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1} \\boxed{{2}") is None
    assert last_boxed("nothing") is None


def test_gold_answers_that_cannot_be_parsed_are_found() -> None:
    golds = ["\\frac{1}{2}", "7", "", "x^2", "\\left( \\right."]
    bad = find_bad_expression([Problem("", "", check=gold) for gold in golds])
    assert 2 in bad and not {0, 1, 3} & bad.keys()
    assert "math-verify cannot parse" in bad[2]


HOSTILE = [
    "9^{9^{9^{9^{9}}}}",
    "10^{10^{10}}!",
    "\\sqrt{" * 200 + "2" + "}" * 200,
    "(" * 900 + "x" + ")" * 900,
    "\\int_0^1 \\int_0^1 \\int_0^1 e^{x^{y^{z}}} dx dy dz",
    "\\sum_{n=1}^{10^{12}} \\frac{1}{n^n}",
    "\\lim_{x \\to 0} \\frac{\\sin(\\sin(\\sin(\\sin(x))))}{x^{x^{x}}}",
    "\\frac" * 300,
    "x^2 + 1 = " * 100,
    "\x00\ud7ff\\\\{}{}$$",
    "__import__('os').system('echo bad')",
    "\\begin{matrix}" + "1 & " * 300 + "\\end{matrix}",
]


@pytest.fixture(scope="module")
def strict() -> Iterator[MathGrader]:
    grader = MathGrader(cpu_s=1)
    yield grader
    grader._child.close()


SLOW = (1, 2, 3, 4, 5, 6)
"""Indices of those that use up their processor time, which takes seconds."""


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=str(index), marks=[pytest.mark.slow] if index in SLOW else [])
        for index, answer in enumerate(HOSTILE)
    ],
)
def test_hostile_answers_end_soon_and_earn_no_reward(strict: MathGrader, answer: str) -> None:
    started_s = time.monotonic()
    assert strict.compare("\\frac{14}{3}", answer).value == 0.0
    assert time.monotonic() - started_s < 60
    assert strict.compare("\\frac{14}{3}", "14/3").value == 1.0  # the next answer is graded as usual


def test_answers_may_be_graded_in_any_thread() -> None:
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(compare("\\frac{1}{2}", "0.5").outcome))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [R, R, R]


def test_packages_are_searched_only_before_the_child_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = math_grader()
    assert grader.compare("p - q", "-q + p").outcome is R
    searched: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", searched.append)
    assert grader.compare("p - q", "q - p").outcome is W
    assert not searched, (
        "the pool's threads share one interpreter lock, and the search takes as long as the rest"
    )


def test_a_child_that_died_is_replaced() -> None:
    grader = math_grader()
    assert grader.compare("p - q", "-q + p").outcome is R
    pid = grader._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert grader.compare("p - q", "-q + p").outcome is R
