"""Validator and `shoal eval` grade the same part of an answer: what follows the thought, if the template makes the model think."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.commands.sample_answers import _graded
from shoal.swarm.validator.judge import grade
from shoal.tasks import Problem, make_task
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import TaskSpec

TEXTS = ["maybe 42", "maybe 41</think>42", "42</think>"]


class StubTokenizer:
    """Decodes token n to the n-th text. Its template thinks, or does not."""

    def __init__(self, thinks: bool) -> None:
        self._thinks = thinks

    def thinks(self, **asked: Any) -> bool:
        assert asked["chat"] is True
        return self._thinks

    def decode(self, tokens: tuple[int, ...]) -> str:
        return TEXTS[tokens[0]]


@pytest.mark.parametrize(("thinks", "values"), [(True, [0.0, 1.0, 0.0]), (False, [1.0, 1.0, 0.0])])
def test_validator_and_eval_agree(thinks: bool, values: list[float]) -> None:
    task, tokenizer = make_task(TaskSpec(name="add")), cast(Any, StubTokenizer(thinks))
    rows = [SimpleNamespace(prompt_index=0, output_tokens=(place,), finish=Finish.EOS) for place in range(3)]
    problem = Problem("40 + 2", "42")
    spec = TaskSpec(name="add")
    lease = SimpleNamespace(chat=True, task=spec)
    submission = SimpleNamespace(
        problems=[problem], table=SimpleNamespace(rows=rows), claim=SimpleNamespace(lease=lease)
    )
    policy = cast(Any, SimpleNamespace(tokenizer=tokenizer))
    graded = grade(cast(Any, submission), task, policy, limit_s=None, stop=None)
    assert [one.value for one in graded] == values
    engine = cast(Any, SimpleNamespace(tokenizer=tokenizer))
    by_eval = _graded(engine, task, [problem] * len(rows), cast(Any, rows), spec)
    assert [one.value for one in by_eval] == values
