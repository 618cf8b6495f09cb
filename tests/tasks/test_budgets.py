"""Length budgets: in the prompt and in the reward."""

import pytest

from shoal.tasks import Outcome, make_task
from shoal.wire.run_spec import TaskSpec

SPEC = TaskSpec(name="add", budgets=(2000, 4000, 6000))


def test_the_reward_is_that_of_the_intellect_2_report() -> None:
    task = make_task(SPEC)
    problem = task.problem("train", 0)
    assert problem.budget in SPEC.budgets
    right = task.reward(problem, problem.answer, problem.budget + 500)
    assert right.value == pytest.approx(1 - 0.0003 * 500) and right.outcome is Outcome.RIGHT
    wrong = task.reward(problem, "-1", problem.budget - 1000)
    assert wrong.value == pytest.approx(-0.3) and wrong.outcome is Outcome.WRONG
    assert task.reward(problem, "", problem.budget).outcome is Outcome.UNPARSEABLE


def test_the_prompt_states_the_budget_and_every_budget_is_drawn() -> None:
    task, plain = make_task(SPEC), make_task(SPEC.model_copy(update={"budgets": ()}))
    seen = set()
    for seed in range(60):
        problem, bare = task.problem("eval", seed), plain.problem("eval", seed)
        assert problem.prompt == f"{bare.prompt} Think for {problem.budget} tokens before giving a response."
        assert problem.answer == bare.answer
        seen.add(problem.budget)
    assert seen == set(SPEC.budgets)


def test_a_budget_needs_a_task_that_asks_in_words() -> None:
    with pytest.raises(ValueError, match="style to chat"):
        make_task(TaskSpec(name="add", options={"style": "bare"}, budgets=(10,)))
