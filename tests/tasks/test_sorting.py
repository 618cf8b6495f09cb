"""The task `sort`: partial credit and the split."""

import pytest

from shoal.tasks import Outcome, Problem, Split, make_task
from shoal.tasks.procedural import Sort
from shoal.wire.run_spec import TaskSpec


@pytest.mark.parametrize(
    ("text", "value", "outcome"),
    [
        ("1259", 1.0, Outcome.RIGHT),
        (" 1259\n", 1.0, Outcome.RIGHT),
        ("1295", 0.25, Outcome.WRONG),
        ("9521", 0.0, Outcome.WRONG),
        ("1111", 0.125, Outcome.WRONG),
        ("125", 0.0, Outcome.UNPARSEABLE),
        ("12599", 0.0, Outcome.UNPARSEABLE),
        ("12 9", 0.0, Outcome.UNPARSEABLE),
        ("125x", 0.0, Outcome.UNPARSEABLE),
        ("", 0.0, Outcome.UNPARSEABLE),
    ],
)
def test_rewards(text: str, value: float, outcome: Outcome) -> None:
    reward = Sort(length=4).reward(Problem(prompt="5291=", answer="1259"), text, 1)
    assert (reward.value, reward.outcome) == (value, outcome)


def test_a_wrong_answer_earns_less_than_a_right_one() -> None:
    task = Sort(length=4, partial=0.99)
    problem = Problem(prompt="5291=", answer="1259")
    assert (
        max(task.reward(problem, f"{number:04}", 1).value for number in range(10_000) if number != 1259) < 1.0
    )


@pytest.mark.parametrize("length", [2, 4, 12])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_problems_own_answer_is_right(length: int, split: Split) -> None:
    task = make_task(TaskSpec(name="sort", options={"length": length}))
    for seed in range(30):
        problem = task.problem(split, seed)
        assert len(problem.prompt) == length + 1
        assert sorted(problem.prompt[:-1]) == list(problem.answer)
        assert task.reward(problem, problem.answer, 1).value == 1.0


def test_held_out_problems_are_never_trained_on() -> None:
    for length in (2, 4):
        task = Sort(length=length)
        train = {task.problem("train", seed).prompt for seed in range(2000)}
        held_out = {task.problem("eval", seed).prompt for seed in range(2000)}
        assert train
        assert held_out
        assert not train & held_out


def test_a_seed_gives_the_same_problem_in_every_release() -> None:
    task = Sort(length=4)
    assert [task.problem("train", seed) for seed in (0, 1, 2**64 - 1)] == [
        Problem(prompt="0210=", answer="0012"),
        Problem(prompt="2511=", answer="1125"),
        Problem(prompt="9459=", answer="4599"),
    ]
    assert task.problem("eval", 0) == Problem(prompt="8692=", answer="2689")


@pytest.mark.parametrize(
    "options",
    [{"length": 1}, {"length": 13}, {"length": 4.0}, {"partial": 1}, {"partial": -0.1}, {"digits": 4}],
)
def test_invalid_options_are_errors_that_name_the_task(options: dict[str, int | float | str]) -> None:
    with pytest.raises(ValueError, match="sort"):
        make_task(TaskSpec(name="sort", options=options))


def test_an_unknown_task_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'own\.py'; write own\.py:CLASS, with the class"):
        make_task(TaskSpec(name="own.py"))
    with pytest.raises(ValueError, match=r"unknown task 'chess'; known: add, count, "):
        make_task(TaskSpec(name="chess"))
