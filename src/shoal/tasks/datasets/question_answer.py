"""The task `qa`: questions and answers of a file with any column names, graded by one of a few rules or by a Python function.

    exact      the reply is the answer, without spaces at the ends
    number     the last \\boxed{}, the number after ####, or else the last number
    math       the last \\boxed{}, compared by math-verify
    choice     a letter, such as B
    regex      the first group of the last match of `pattern` is the answer
    FILE:NAME  a function of a Python file: `def grade(reply, answer)` returns a reward from 0 to 1; it may also ask for `question`

The question of a row is a text or a list of chat messages; the answer a text, a number, or a list of right answers. The name
`info.answer` is the field `answer` of the object in the column `info`.
"""

import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.tasks.code_files import is_code, load_code
from shoal.tasks.datasets.data_set import ASK_BOXED, ASK_NUMBER, DataSet, Format, Row, Style, plain_decimal
from shoal.tasks.grading.math_grader import (
    compare,
    find_bad_expression,
    last_boxed,
    last_number,
    plain_number,
)
from shoal.tasks.grading.pattern_grader import find_last
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Outcome, Problem, Reward, reply_of

_MARK = "####"
_PLAIN_ASK = "{question}"
_ASK: dict[str, tuple[str, str]] = {
    "exact": ("{question}\nReply with the answer only.",) * 2,
    "number": (ASK_NUMBER["chat"], ASK_NUMBER["direct"]),
    "math": (ASK_BOXED["chat"], ASK_BOXED["direct"]),
    "choice": (
        "{question}\nThink step by step, then give the letter of the answer after ####.",
        "{question} Reply with the letter only.",
    ),
    "regex": (_PLAIN_ASK, _PLAIN_ASK),
}
"""Prompts of the styles chat and direct."""
_LETTERS = (
    # (?>...) never gives characters back: without it, an answer of many spaces would take cubic time.
    re.compile(r"\banswer(?>\s*)(?:(?<=\s)is(?>\s*))?:?(?>\s*)\(?([A-Za-z])\b", re.IGNORECASE),
    re.compile(r"\A\s*\(?([A-Za-z])\)?[.:]?\s*\Z"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\b([A-HJ-Z])\b(?! [a-z])"),
)
"""Where a choice is looked for, in this order; the last match counts. A word such as `A` or `I` in a sentence is no choice."""
_LITERAL = r"[^\\()\[\]{}?*+|^$.]*"
_ONE_GROUP = re.compile(rf"({_LITERAL})\((?!\?)[^()]*\)({_LITERAL})")

ROLES = ("system", "user", "assistant")

Grade = Callable[[str, Sequence[str], str], Reward]
"""Grades a reply by the right answers and the question."""


@dataclass(frozen=True, kw_only=True)
class QuestionAnswer(DataSet):
    """Questions and answers of a file."""

    format: Format = field(init=False)
    question: str = "question"
    """Name of the column with the question."""
    answer: str = "answer"
    """Name of the column with the answer, or with a list of right answers."""
    grader: str = "exact"
    grader_sha256: str = ""
    """Digest that the file of a Python grader must have."""
    pattern: str = ""
    """Regular expression of the grader `regex`."""
    template: str = ""
    """The prompt, with {question} in it. Empty: as the style and the grader need it."""
    eval_share: float = 0.2
    """Share of the rows to hold out if there is no `eval_path`."""
    eval_seed: int = 0
    """Chooses which rows are held out."""

    def __post_init__(self) -> None:
        check_asking("qa", self.template or _PLAIN_ASK, self.eval_share)
        format = Format(
            name="qa",
            read=self._read,
            grade=_graded(_grade_of(self.grader, self.grader_sha256, self.pattern)),
            find_bad=_find_bad_math if self.grader == "math" else lambda problems: {},
            is_held_out=lambda prompt: is_drawn(prompt, self.eval_share, self.eval_seed),
        )
        object.__setattr__(self, "format", format)
        super().__post_init__()

    def _read(self, row: Row, style: Style) -> Problem:
        """Makes a problem of a row."""
        *earlier, (_, asked) = self._turns(self._value(row, "question", self.question))
        given = self._value(row, "answer", self.answer)
        answers = [self._text(one) for one in (given if isinstance(given, list | tuple) else [given])]
        if not answers:
            raise ValueError(f"the list of answers in {self.answer!r} is empty")
        check = json.dumps({"answers": answers, "question": asked})
        prompt, right = self._prompt(asked, style), self._right(answers[0])
        return Problem(prompt, right, check=check, messages=tuple(earlier))

    def _value(self, row: Row, option: str, column: str) -> Any:
        try:
            return find_value(row, column)
        except KeyError:
            pass
        if name := holds_rows(row, column):
            raise ValueError(
                f"no column {column!r}; the rows are the list {name!r}: write that list alone into a file"
            )
        names = ", ".join(column_names(row))
        raise ValueError(
            f'no column {column!r}; name the column with the {option}: {option} = "..." of {names}'
        )

    def _turns(self, asked: Any) -> list[tuple[str, str]]:
        """Returns the turns of a question: a text, or a list of messages with `role` and `content` that ends with the user's."""
        if isinstance(asked, str):
            asked = [{"role": "user", "content": asked}]
        turns = [
            (one["role"], one["content"].strip())
            for one in (asked if isinstance(asked, list) else [])
            if isinstance(one, dict) and one.get("role") in ROLES and isinstance(one.get("content"), str)
        ]
        if not turns or len(turns) != len(asked) or turns[-1][0] != "user" or not turns[-1][1]:
            raise ValueError(
                f"the question in {self.question!r} is {str(asked)[:80]!r}, expected a text, or a list of messages with role "
                f"({', '.join(ROLES)}) and content, a text, that ends with the user's"
            )
        return turns

    def _prompt(self, question: str, style: Style) -> str:
        direct = int(style == "direct")
        ask = ASK_NUMBER["bare"] if style == "bare" else _ASK.get(self.grader, (_PLAIN_ASK,) * 2)[direct]
        return (self.template or ask).replace("{question}", question)

    def _right(self, answer: str) -> str:
        """Returns a reply with this answer."""
        if self.grader == "math":
            return f"\\boxed{{{answer}}}"
        # `The answer is (.*)` is a text around one group: a right reply can be made of it. Other patterns say too little.
        if self.grader == "regex" and (match := _ONE_GROUP.fullmatch(self.pattern)):
            return f"{match[1]}{answer}{match[2]}"
        return answer

    def _text(self, value: Any) -> str:
        """Returns one right answer as the grader needs it. Raises ValueError if it cannot grade by it."""
        if isinstance(value, bool) or value is None or isinstance(value, dict | list):
            raise ValueError(f"the answer in {self.answer!r} is {value!r}, expected a text or a number")
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"the answer in {self.answer!r} is {value!r}, expected a number")
            value = plain_decimal(value)  # in a column with an empty cell, 12 is read as 12.0
        text = str(value).strip()
        if not text:
            raise ValueError(f"the answer in {self.answer!r} is empty")
        if self.grader == "number" and plain_number(text) is None:
            raise ValueError(f'the answer {text[:80]!r} is not a number; use grader = "exact" or "regex"')
        if self.grader == "choice":
            if not (match := re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", text)):
                raise ValueError(f'the answer {text[:80]!r} is not a letter; use grader = "exact"')
            text = match[1].upper()
        return text


def find_value(row: Row, column: str) -> Any:
    """Returns the value of a column, or of `column.field`, a field of the object in a column. Raises KeyError if there is none."""
    if column in row:
        return row[column]
    name, _, inner = column.partition(".")
    if not isinstance(row[name], dict):
        raise KeyError(column)
    return row[name][inner]


def column_names(row: Row) -> list[str]:
    """Returns the names that `find_value` takes for a row."""
    return [
        name
        for column, value in row.items()
        for name in ([f"{column}.{inner}" for inner in value] if isinstance(value, dict) else [str(column)])
    ]


def holds_rows(row: Row, column: str) -> str | None:
    """Returns the name of a list in `row` whose objects have the column: the rows, in a file with one object around them."""
    lists = (
        name
        for name, value in row.items()
        if isinstance(value, list) and value and isinstance(value[0], dict) and column in value[0]
    )
    return next(lists, None)


def _grade_of(grader: str, digest: str, pattern: str) -> Grade:
    """Returns the function of a grader. Raises ValueError for an unknown one."""
    if (grader == "regex") != bool(pattern):
        raise ValueError('qa: grader = "regex" needs `pattern`, and no other grader has one')
    if is_code(grader):
        return _python_grader(grader, digest)
    if grader == "regex":
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"qa: pattern = {pattern!r}: {error}; correct the regular expression") from None
        return lambda reply, answers, _: _compare_text(find_last(pattern, reply), answers)
    known: dict[str, Grade] = {
        "exact": lambda reply, answers, _: _compare_text(reply, answers),
        "number": _grade_number,
        "math": _grade_math,
        "choice": lambda reply, answers, _: _compare_text(choice_in(reply), answers),
    }
    if grader not in known:
        raise ValueError(
            f"qa: grader={grader!r} is unknown; known: {', '.join(_ASK)}, or a function as FILE.py:NAME"
        )
    return known[grader]


def _graded(grade: Grade) -> Callable[[Problem, str], Reward]:
    def of_text(problem: Problem, text: str) -> Reward:
        check = json.loads(problem.check)
        return grade(reply_of(text), check["answers"], check["question"])

    return of_text


def _compare_text(given: str | None, answers: Sequence[str]) -> Reward:
    if given is None or not given.strip():
        return UNPARSEABLE
    return RIGHT if given.strip() in answers else WRONG


def _grade_number(reply: str, answers: Sequence[str], question: str) -> Reward:
    boxed = last_boxed(reply)
    given = plain_number(boxed) if boxed else last_number(reply.rpartition(_MARK)[2])
    if given is None:
        return UNPARSEABLE
    return RIGHT if given in [plain_number(answer) for answer in answers] else WRONG


def _grade_math(reply: str, answers: Sequence[str], question: str) -> Reward:
    boxed = last_boxed(reply)
    if not boxed:
        return UNPARSEABLE
    rewards = [compare(answer, boxed) for answer in answers]
    return max(rewards, key=lambda reward: reward.value)


def choice_in(reply: str) -> str | None:
    """Returns the letter that a reply chooses, or None."""
    reply = last_boxed(reply) or reply.rpartition(_MARK)[2]
    for pattern in _LETTERS:
        if found := pattern.findall(reply):
            return str(found[-1]).upper()
    return None


def _python_grader(address: str, digest: str) -> Grade:
    function = load_code(address, digest)
    names = set(inspect.signature(function).parameters)
    if not {"reply", "answer"} <= names <= {"reply", "answer", "question"}:
        raise ValueError(
            f"{address}: the parameters are {', '.join(sorted(names))}; a grader is `def grade(reply, answer)` or "
            "`def grade(reply, answer, question)`"
        )

    def grade(reply: str, answers: Sequence[str], question: str) -> Reward:
        extra = {"question": question} if "question" in names else {}
        values = [function(reply=reply, answer=answer, **extra) for answer in answers]
        return max((_checked(address, value) for value in values), key=lambda reward: reward.value)

    return grade


def _checked(address: str, value: Any) -> Reward:
    if value is None:
        return UNPARSEABLE
    if getattr(value, "shape", None) == ():
        value = value.item()  # one number of numpy or torch
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise ValueError(f"{address} returned {value!r}; a grader returns a number from 0 to 1, or None")
    return Reward(float(value), Outcome.RIGHT if value == 1 else Outcome.WRONG)


def _find_bad_math(problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the problems that have an answer that math-verify cannot parse."""
    golds = [
        (index, Problem("", "", check=answer))
        for index, problem in enumerate(problems)
        for answer in json.loads(problem.check)["answers"]
    ]
    bad = find_bad_expression([problem for _, problem in golds])
    return {golds[place][0]: reason for place, reason in bad.items()}


def check_asking(name: str, template: str, eval_share: object) -> None:
    """Raises ValueError for a template without the question, and for a share of held-out rows that leaves none on a side."""
    if not isinstance(eval_share, int | float) or not 0 < eval_share < 1:
        raise ValueError(f"{name}: eval_share={eval_share!r} must be above 0 and below 1, such as 0.1")
    if "{question}" not in template:
        raise ValueError(f"{name}: template={template!r} must contain {{question}}, where the question goes")


def is_drawn(prompt: str, share: float, seed: int) -> bool:
    """Returns whether the row with this prompt is among the `share` of rows that are held out."""
    drawn = hashlib.sha256(f"qa/{seed}/{prompt}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64
