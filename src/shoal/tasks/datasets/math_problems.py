"""What a mathematical answer is worth: plain numbers here, everything else by math-verify in a child process.

The answer is the last \\boxed{...} of the reply, which is what stands after `</think>` if there is one. Tasks whose
answers are plain numbers also take the number after the last `####`, or else the last number of the reply.
"""

import re
from collections.abc import Sequence
from decimal import Decimal

from shoal.tasks.grading.math_grader import math_grader
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, Problem, Reward, reply_of

MAX_ANSWER_CHARS = 2000
"""A longer answer is no answer; parsers take long over long texts."""

_PLAIN = re.compile(r"([-+]?)\s?\\?\$?\s?((?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?|\.\d{1,30})")
_MARK = "####"


def plain_number(text: str) -> Decimal | None:
    """`$1,234.50` is 1234.5; None for anything that is not one decimal number."""
    match = _PLAIN.fullmatch(text.strip().rstrip("."))
    return None if match is None or not text.isascii() else _value(match)


def last_number(text: str) -> Decimal | None:
    found = None
    for found in _PLAIN.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    return None if found is None or not found[0].isascii() else _value(found)


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, braces balanced; None without one, or if it is never closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None


def grade_expression(problem: Problem, text: str) -> Reward:
    """By the boxed answer alone."""
    boxed = last_boxed(reply_of(text))
    return UNPARSEABLE if not boxed else compare(problem.check, boxed)


def grade_plain_number(problem: Problem, text: str) -> Reward:
    """By the boxed answer, the number after ####, or the last number."""
    reply = reply_of(text)
    boxed = last_boxed(reply)
    if boxed:
        return compare(problem.answer, boxed)
    given = last_number(reply) if _MARK not in reply else _first_number(reply.rpartition(_MARK)[2])
    if given is None:
        return UNPARSEABLE
    return RIGHT if given == plain_number(problem.answer) else WRONG


def compare(gold: str, answer: str) -> Reward:
    """Equal numbers, equal texts, or equal to math-verify."""
    if len(answer) > MAX_ANSWER_CHARS:
        return UNPARSEABLE
    numbers = plain_number(gold), plain_number(answer)
    if None not in numbers:
        return RIGHT if numbers[0] == numbers[1] else WRONG
    if gold.strip() == answer.strip():
        return RIGHT
    return math_grader().compare(gold, answer)


def find_bad_number(problems: Sequence[Problem]) -> dict[int, str]:
    math_grader().check_installed()
    return {
        index: f"the answer {problem.answer[:80]!r} is not a number"
        for index, problem in enumerate(problems)
        if plain_number(problem.answer) is None
    }


def find_bad_expression(problems: Sequence[Problem]) -> dict[int, str]:
    """The gold answers that math-verify makes nothing of. It would be a reward for nothing, or none for anything."""
    math_grader().check_installed()
    unclear = [index for index, problem in enumerate(problems) if plain_number(problem.check) is None]
    parsed = math_grader().can_parse([problems[index].check for index in unclear])
    return {
        index: f"math-verify cannot parse the answer {problems[index].check[:80]!r}"
        for index, good in zip(unclear, parsed, strict=True)
        if not good
    }


def _first_number(text: str) -> Decimal | None:
    match = _PLAIN.search(text)
    return None if match is None or not match[0].isascii() else _value(match)


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match[2].replace(",", ""))
    return -number if match[1] == "-" else number
