"""Environments of other packages as tasks.

Tests marked `environments` need the packages: `make environments`.
"""

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks import Outcome, Split
from shoal.tasks.environments import hosted, reasoning_gym_tasks
from shoal.tasks.environments.environment_child import ServedEnvironment
from shoal.tasks.environments.hosted import HostedTask
from shoal.tasks.environments.reasoning_gym_tasks import ReasoningGym, parse_formula
from shoal.tasks.environments.rlve_tasks import RlveGym
from shoal.tasks.task import UNPARSEABLE

ROOT = Path(__file__).parents[2]


class Toy:
    """An environment that draws from global random numbers and fails now and then."""

    def __init__(self, environment: str, fails: bool = False) -> None:
        if environment != "toy":
            raise ValueError(f"no environment {environment!r}")
        self._fails = fails

    @staticmethod
    def names() -> list[str]:
        return ["toy"]

    def make(self, seed: int) -> dict[str, Any]:
        import random

        if self._fails or seed % 7 == 0:
            raise KeyError("broken")
        number = random.randrange(10**6)
        return {"question": f"Repeat {number}", "answer": str(number), "wanted": [number]}

    def score(self, problem: dict[str, Any], answer: str) -> float:
        return float(int(answer) == problem["wanted"].pop())


class ToyTask(HostedTask):
    extra = "toy"
    selects = "environment"
    distributions = ("pytest",)
    package = "unused"

    def __init__(self, *, environment: str = "toy", packages: str = "", **options: Any) -> None:
        super().__init__(
            options={"environment": environment, **options}, style="chat", template="", packages=packages
        )


class InProcess:
    """Stands in for the child process."""

    def __init__(self, package: str, options: dict[str, Any]) -> None:
        self._served = ServedEnvironment(Toy, options)

    def exchange(self, request: bytes, *, timeout_s: float) -> bytes:
        return self._served.answer(request)

    def close(self) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_child", InProcess)


@pytest.mark.usefixtures("in_process")
def test_problems_follow_from_the_seed_and_failures_are_skipped() -> None:
    splits: tuple[Split, ...] = ("train", "eval")
    first = [ToyTask().problem(split, seed) for split in splits for seed in range(20)]
    task = ToyTask()
    assert (
        list(reversed([task.problem(s, n) for s in reversed(splits) for n in reversed(range(20))])) == first
    )
    assert len({problem.prompt for problem in first}) == 40, "no problem is in both splits"
    problem = first[0]
    wrong = "<answer>1</answer>"
    outcomes = [task.reward(problem, text, 1).outcome for text in (problem.answer, problem.answer, wrong)]
    assert outcomes == [Outcome.RIGHT, Outcome.RIGHT, Outcome.WRONG], "a scorer cannot change the problem"
    for text in ("1", "<answer></answer>", "</answer><answer>", "<answer>x</answer>"):
        assert task.reward(problem, text, 1).outcome is Outcome.UNPARSEABLE
    assert ToyTask.environments() == ["toy"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf"), -0.5])
def test_a_score_that_is_no_number_earns_nothing(monkeypatch: pytest.MonkeyPatch, score: float) -> None:
    """Scorers that calculate with an answer such as `nan` or `1e999` return one."""
    monkeypatch.setattr(Toy, "score", lambda *_: score)
    task = ToyTask()
    assert task.reward(task.problem("train", 0), "<answer>nan</answer>", 1) == UNPARSEABLE


@pytest.mark.usefixtures("in_process")
def test_an_unusable_environment_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="toy toi: ValueError: no environment 'toi'"):
        ToyTask(environment="toi").problem("train", 0)
    with pytest.raises(
        ValueError, match="toy toy: no train problem in 100 tries: KeyError: 'broken'; use other"
    ):
        ToyTask(fails=True).problem("train", 0)


@pytest.mark.usefixtures("in_process")
def test_another_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = ToyTask.pins({})
    ToyTask(**pins)
    with pytest.raises(ValueError, match=r"the run has pytest 0.1, .*; pip install 'pytest==0.1'"):
        ToyTask(packages="pytest 0.1, python 3.11")
    monkeypatch.setattr(ToyTask, "distributions", ("no-such-package",))
    with pytest.raises(ValueError, match=r"needs the package no-such-package: pip install 'shoal-rl\[toy\]'"):
        ToyTask()


def test_every_entry_point_exists_and_has_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, address in project["entry-points"]["shoal.tasks"].items():
        module, _, attribute = address.partition(":")
        task = getattr(import_module(module), attribute)
        assert (
            issubclass(task, HostedTask) and task.extra == name and name in project["optional-dependencies"]
        )


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "eval(bytes((49,)))",
        "open(1)",
        "x.func",
        "(1).real",
        "9**99999",
        "x;y",
        "[1]",
        "a_b",
    ],
)
def test_a_formula_is_never_code(text: str) -> None:
    with pytest.raises(ValueError, match="not a formula"):
        parse_formula(text)


def test_formulas_are_parsed() -> None:
    assert str(parse_formula("2*(3 + 4) - x**2/1.5 + sin(x)"))
    assert int(parse_formula("76*(61 + 10 - 66)")) == 380


# -- with the packages --------------------------------------------------------------------------------------

TEN = (
    *("spell_backward", "basic_arithmetic", "leg_counting", "countdown", "number_sorting"),
    *("caesar_cipher", "gcd", "word_ladder", "mini_sudoku", "polynomial_multiplication"),
)


@pytest.mark.environments
@pytest.mark.parametrize("name", TEN)
def test_gold_answers_of_reasoning_gym_are_right(name: str) -> None:
    task, again = ReasoningGym(dataset=name), ReasoningGym(dataset=name)
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        problems = [task.problem(split, seed) for seed in range(3)]
        assert [again.problem(split, seed) for seed in (2, 1, 0)] == problems[::-1]
        for problem in problems:
            assert task.reward(problem, problem.answer, 1).value == 1.0
            assert task.reward(problem, "<answer>?</answer>", 1).value < 0.5


@pytest.mark.environments
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("string_insertion", "[print('forged'), 1]"),
        ("n_queens", "__import__('os').system('true')"),
        ("countdown", "open(chr(47))"),
        ("simple_integration", "eval(bytes((49,)))"),
    ],
)
def test_answers_are_not_executed(name: str, answer: str) -> None:
    task = ReasoningGym(dataset=name)
    problem = task.problem("train", 0)
    assert task.reward(problem, f"<answer>{answer}</answer>", 1).value < 0.1
    assert task.reward(problem, problem.answer, 1).value == 1.0, "the child still works"


@pytest.mark.environments
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("game_of_life_halting", "?"),
        ("puzzle24", "6*5/2 + 9"),
    ],
)
def test_data_sets_with_faulty_scorers_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: str
) -> None:
    assert name not in ReasoningGym.environments()
    with pytest.raises(ValueError, match=f"the scorer of {name} is faulty: .*; use another data set"):
        ReasoningGym(dataset=name).problem("train", 0)
    monkeypatch.setattr(reasoning_gym_tasks, "_FAULTY", {})
    package = reasoning_gym_tasks.ReasoningGymPackage(name, -1)
    scores = [package.score(package.make(seed), answer) for seed in range(5)]
    assert scores.count(1.0) > 2, "remove it from the list if a release scores it correctly"


@pytest.mark.environments
def test_options_and_levels_of_reasoning_gym() -> None:
    short = ReasoningGym(dataset="spell_backward", max_word_len=3, style="bare")
    assert {len(short.problem("train", seed).answer) for seed in range(8)} == {3}
    lists = ReasoningGym(dataset="basic_arithmetic", operators="+", style="direct", max_terms=2)
    assert " + " in lists.problem("train", 0).prompt
    easy, hard = (ReasoningGym(dataset="number_sorting", level=level) for level in (0, 3))
    longest = [max(len(task.problem("train", n).answer) for n in range(8)) for task in (easy, hard)]
    assert longest[0] < longest[1]
    with pytest.raises(ValueError, match="has no option 'max_len'; it has: data_file, max_word_len"):
        ReasoningGym(dataset="spell_backward", max_len=3).problem("train", 0)
    assert len(ReasoningGym.environments()) > 100


@pytest.mark.environments
@pytest.mark.parametrize(
    "name", ["Sorting", "GCDOne_Counting", "SubsetSum", "ShortestPath", "BinaryAlternation"]
)
def test_reference_answers_of_rlve_gym_are_right(name: str) -> None:
    task = RlveGym(environment=name, level=1)
    problem = task.problem("eval", 1)
    assert task.reward(problem, problem.answer, 1).value == 1.0
    assert task.reward(problem, "<answer>?</answer>", 1).value < 1.0
    assert RlveGym(environment=name, level=1).problem("eval", 1) == problem


@pytest.mark.environments
def test_the_tasks_command_lists_environments() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "shoal", "tasks", "show", "rlve-gym"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "400 environments; choose one with --option environment=NAME" in shown.stdout
    assert json.dumps(RlveGym.pins({})["packages"]).startswith('"rlve-gym 0.0.1, ')
