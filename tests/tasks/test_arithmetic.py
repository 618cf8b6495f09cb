"""The task `add`: rewards, prompts and the split."""

import pytest

from shoal.tasks import Outcome, Problem, Split, make_task
from shoal.tasks.procedural import Add
from shoal.tasks.task import is_held_out
from shoal.wire.run_spec import TaskSpec


@pytest.mark.parametrize(
    ("answer", "text", "outcome"),
    [
        ("85", "85", Outcome.RIGHT),
        ("85", "The answer is 85.", Outcome.RIGHT),
        ("85", "47 + 38 = 85", Outcome.RIGHT),
        ("85", "085", Outcome.RIGHT),
        ("85", "first 84, no: 85\n", Outcome.RIGHT),
        ("0", "0", Outcome.RIGHT),
        ("0", "00", Outcome.RIGHT),
        ("85", "85, or perhaps 86", Outcome.WRONG),
        ("85", "850", Outcome.WRONG),
        ("85", "-85", Outcome.WRONG),
        ("85", "8 5", Outcome.WRONG),
        ("85", "0", Outcome.WRONG),
        ("0", "-0", Outcome.WRONG),
        ("85", "٨٥", Outcome.WRONG),
        ("85", "", Outcome.UNPARSEABLE),
        ("85", "eighty-five", Outcome.UNPARSEABLE),
        ("85", "²", Outcome.UNPARSEABLE),
    ],
)
def test_rewards(answer: str, text: str, outcome: Outcome) -> None:
    reward = Add(digits=2).reward(Problem(prompt="47+38=", answer=answer), text, 1)
    assert reward.outcome is outcome
    assert reward.value == (1.0 if outcome is Outcome.RIGHT else 0.0)


def test_style_shots_grades_only_the_first_line() -> None:
    problem = Problem(prompt="47 + 38 =", answer="85")
    task = Add(style="shots")
    assert task.reward(problem, " 85\n12 + 7 = 19", 1).outcome is Outcome.RIGHT
    assert task.reward(problem, "\n85", 1).outcome is Outcome.RIGHT
    assert task.reward(problem, " 84\n85", 1).outcome is Outcome.WRONG
    assert task.reward(problem, "", 1).outcome is Outcome.UNPARSEABLE
    assert Add(style="chat").reward(problem, " 85\n12 + 7 = 19", 1).outcome is Outcome.WRONG


def test_only_style_chat_is_a_users_turn() -> None:
    assert Add(style="chat").chat
    assert not Add(style="shots").chat and not Add(style="bare").chat


@pytest.mark.parametrize("style", ["bare", "chat", "shots"])
@pytest.mark.parametrize("digits", [1, 2, 9])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_problems_own_answer_is_right(style: str, digits: int, split: Split) -> None:
    task = make_task(TaskSpec(name="add", options={"digits": digits, "style": style}))
    for seed in range(30):
        problem = task.problem(split, seed)
        assert task.reward(problem, problem.answer, 1).value == 1.0
        assert task.reward(problem, f"I think it is {problem.answer}.", 1).value == 1.0
        assert task.reward(problem, str(int(problem.answer) + 1), 1).value == 0.0


def test_held_out_sums_are_never_trained_on() -> None:
    for digits in (1, 2):
        task = Add(digits=digits, style="bare")
        train = {task.problem("train", seed).prompt for seed in range(2000)}
        held_out = {task.problem("eval", seed).prompt for seed in range(2000)}
        assert train
        assert held_out
        assert not train & held_out


def test_about_a_fifth_is_held_out() -> None:
    share = sum(is_held_out(f"{a}+{b}") for a in range(100) for b in range(100)) / 10_000
    assert 0.18 < share < 0.22


def test_a_seed_gives_the_same_problem_in_every_release() -> None:
    # Golden values: a validator of a later release must derive the same problems.
    bare = Add(digits=2, style="bare")
    assert [bare.problem("train", seed) for seed in (0, 1, 2**64 - 1)] == [
        Problem(prompt="2+19=", answer="21"),
        Problem(prompt="78+85=", answer="163"),
        Problem(prompt="95+76=", answer="171"),
    ]
    assert bare.problem("eval", 0) == Problem(prompt="55+13=", answer="68")


@pytest.mark.parametrize(
    "options",
    [{"digits": 0}, {"digits": 10}, {"digits": 2.5}, {"digits": "2"}, {"style": "prose"}, {"base": 10}],
)
def test_invalid_options_are_errors_that_name_the_task(options: dict[str, int | float | str]) -> None:
    with pytest.raises(ValueError, match="add"):
        make_task(TaskSpec(name="add", options=options))
