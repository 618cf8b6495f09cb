"""Finding the answer in a reply takes time in proportion to its length, whatever the reply is.

It happens in the validator's own process, and a regular expression holds Python's lock while it searches: one that needs quadratic
time would stop every thread, and with it every clock that limits grading.
"""

import json

import pytest

from shoal.tasks.datasets.question_answer import choice_in
from shoal.tasks.grading.math_grader import grade_plain_number, last_boxed
from shoal.tasks.grading.program_grader import program_in
from shoal.tasks.task import Problem, Reward, grade_number, vote_key

pytestmark = pytest.mark.timeout(60)  # quadratic time would be minutes

LENGTH = 100_000
REPLIES = {
    "newlines after a fence": ("```python", "\n"),
    "fences": ("", "```python\n"),
    "fences without a label": ("", "```\n"),
    "spaces after the answer": ("the answer", " "),
    "spaces after the answer's verb": ("the answer is", " "),
    "open boxes": ("", "\\boxed{"),
    "boxes in boxes": ("", "\\boxed{1"),
    "thousands": ("#### ", "1,111"),
}


def plain_number(text: str) -> Reward:
    return grade_plain_number(Problem(prompt="", answer="5", check=json.dumps("5")), text)


@pytest.mark.parametrize(("begun", "repeated"), REPLIES.values(), ids=REPLIES.keys())
def test_a_long_reply_is_searched_once(begun: str, repeated: str) -> None:
    text = begun + repeated * (LENGTH // len(repeated))
    program_in(text)
    choice_in(text)
    vote_key(text)
    last_boxed(text)
    grade_number("5", text)
    plain_number(text)


def test_what_is_found_is_the_same() -> None:
    assert program_in("```python\n\n\n  x = 1\n```") == "  x = 1\n"
    assert program_in("```py   \nx = 1\n```") == "x = 1\n"
    assert program_in("```python" + "\n" * 50) is None
    for reply in ("The answer is (b).", "Answer:   b", "answer is: b", "answer\nb"):
        assert choice_in(reply) == "B", reply
    assert choice_in("the answeris b") != "I"
    assert vote_key("\\boxed{1} \\boxed{2} \\boxed{3") == "2"
