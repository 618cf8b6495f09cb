"""Grades mathematical answers: plain numbers here, everything else with math-verify in a child process.

The answer is the last \\boxed{...} of the reply, which is the text after `</think>` if there is one. Tasks whose answers are plain
numbers also accept the number after the last `####`, or else the last number of the reply.

math-verify runs in a child process because its parsers and sympy can hang or crash. An answer that takes more processor time or
memory than it may, or that ends the child twice, is unparseable. A failure on our own side (the child does not start, or does not
answer in time although it has processor time left) raises CannotGrade and gives no reward.

    request  {"golds": [...]}               reply  {"parsed": [true, ...]}
    request  {"gold": ..., "answer": ...}   reply  {"outcome": "right" | "wrong" | "unparseable"}
"""

import importlib.util
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, TypeVar

from shoal.child_process import ChildDied, ChildError, ChildLimits, ChildProcess, serve
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, CannotGrade, Problem, Reward, reply_of

MAX_ANSWER_CHARS = 2000
"""Longer answers are unparseable: parsers take too long over long texts."""
CPU_S = 5
WALL_S = 60.0
"""Seconds of wall-clock time for one answer. Much longer than CPU_S, since an answer must not fail because the machine is
busy."""
MEMORY_BYTES = 1_000_000_000
BATCH = 50
"""Gold answers in one request to the child, which has the processor time of one answer for all of them."""

_PLAIN = re.compile(r"([-+]?)\s?\\?\$?\s?((?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?|\.\d{1,30})")
_MARK = "####"
_BASE = re.compile(r"[0-9A-Za-z}]_\{?(\d+(?:\.\d+)?)\}?\W*$")
"""The base of a number at the end of an answer, such as 5 in `204_5`."""
_APPROXIMATELY = re.compile(r"\\approx|\\simeq|\\sim(?![a-z])|≈")
_EQUAL_OR_BRACKET = re.compile(rf"(?<![<>!:])=|{_APPROXIMATELY.pattern}|[\[\](){{}}]")
_BETWEEN = re.compile(
    r"[,;]|\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\q?quad|\\(?:lor|land|vee|wedge|Rightarrow|implies)(?![a-z])"
)
"""Separators between two equations."""
_OPERATION = re.compile(
    r"^\s*[-\d.]|[-+*/](?![^({\[]*[)}\]])|\^(?!\{?-1\}?|\{?\\circ)|\\(?:[dt]?frac(?!\{d)|sqrt|cdot|times|div)"
)
"""A calculation, in contrast to a name such as x_1, f(x), f^{-1}(x) or \\overline{AB}."""
_SIMPLE = re.compile(
    r"[-+]?(?:\d{1,30}/[1-9]\d{0,29}|\\[dt]?frac\{\d{1,30}\}\{[1-9]\d{0,29}\}|\d{0,30}\\sqrt\{\d{1,30}\}|\d{0,30}\\pi)"
)
"""Gold answers that math-verify is known to parse. Asking it takes milliseconds each, which is minutes for a large data set."""
MAX_REMEMBERED = 100_000
_PARSED: dict[str, bool] = {}
"""Gold answers that were asked about, and whether they can be parsed: data sets repeat short ones."""
_REWARDS = {"right": RIGHT, "wrong": WRONG, "unparseable": UNPARSEABLE}
T = TypeVar("T")


def plain_number(text: str) -> Decimal | None:
    """Returns the value of a text such as `$1,234.50`, or None if it is not one decimal number."""
    return _value(_PLAIN.fullmatch(text.strip().rstrip("."))) if text.isascii() else None


def last_number(text: str) -> Decimal | None:
    """Returns the last decimal number in the text, or None."""
    found = None
    for found in _PLAIN.finditer(text):  # noqa: B007  # leaves the last match in `found`
        pass
    return _value(found)


def last_boxed(text: str) -> str | None:
    """Returns the content of the last \\boxed{...}, with balanced braces; None without one, or if it is never closed."""
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
    """Grades the boxed answer of a reply by `problem.check`."""
    boxed = last_boxed(reply_of(text))
    return UNPARSEABLE if not boxed else compare(problem.check, boxed)


def grade_plain_number(problem: Problem, text: str) -> Reward:
    """Grades the boxed answer, else the number after the last ####, else the last number of a reply."""
    reply = reply_of(text)
    boxed = last_boxed(reply)
    if boxed:
        return compare(problem.answer, boxed)
    given = last_number(reply) if _MARK not in reply else _value(_PLAIN.search(reply.rpartition(_MARK)[2]))
    if given is None:
        return UNPARSEABLE
    return RIGHT if given == plain_number(problem.answer) else WRONG


def compare(gold: str, answer: str) -> Reward:
    """Returns RIGHT for equal numbers, equal texts, or answers that math-verify finds equal."""
    if len(answer) > MAX_ANSWER_CHARS:
        return UNPARSEABLE
    numbers = plain_number(gold), plain_number(answer)
    if None not in numbers:
        return RIGHT if numbers[0] == numbers[1] else WRONG
    if gold.strip() == answer.strip():
        return RIGHT
    bases = _BASE.search(gold), _BASE.search(answer)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return WRONG  # math-verify ignores the base of a number
    return math_grader().compare(gold, answer)


def compare_any(golds: Sequence[str], answer: str) -> Reward:
    """Returns RIGHT if the answer equals one of the gold answers."""
    rewards = []
    for gold in golds:
        rewards.append(compare(gold, answer))
        if rewards[-1] is RIGHT:
            return RIGHT
    return WRONG if WRONG in rewards else UNPARSEABLE


def find_bad_number(problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the problems whose gold answer is not a number, and why."""
    math_grader().check_installed()
    return {
        index: f"the answer {problem.answer[:80]!r} is not a number"
        for index, problem in enumerate(problems)
        if plain_number(problem.answer) is None
    }


def find_bad_expression(problems: Sequence[Problem]) -> dict[int, str]:
    """Returns the problems whose gold answer math-verify cannot parse, and why: no answer to them could be right."""
    return find_bad_golds([(problem.check,) for problem in problems])


def find_bad_golds(golds: Sequence[Sequence[str]]) -> dict[int, str]:
    """Returns the places of problems none of whose gold answers can be parsed, and why."""
    math_grader().check_installed()
    if len(_PARSED) > MAX_REMEMBERED:
        _PARSED.clear()
    parsed: dict[str, bool] = {}
    asked = []
    for gold in sorted({gold for several in golds for gold in several}):
        if (known := _PARSED.get(gold)) is not None:
            parsed[gold] = known
        elif plain_number(gold) is None and not _SIMPLE.fullmatch(gold.strip()):
            asked.append(gold)
    parsed |= zip(asked, math_grader().can_parse(asked), strict=True)
    _PARSED.update(parsed)
    return {
        index: f"math-verify cannot parse the answer {several[0][:80]!r}"
        for index, several in enumerate(golds)
        if not any(parsed.get(gold, True) for gold in several)
    }


def _value(match: re.Match[str] | None) -> Decimal | None:
    """Returns the number of a match of _PLAIN; None without a match, and for digits of other scripts."""
    if match is None or not match[0].isascii():
        return None
    number = Decimal(match[2].replace(",", ""))
    return -number if match[1] == "-" else number


# -- math-verify --------------------------------------------------------------------------------------------


class MathGrader:
    """Grades answers in one child process. Safe to use from several threads; answers are graded one at a time."""

    def __init__(self, *, cpu_s: int = CPU_S) -> None:
        self._child = ChildProcess(
            "shoal.tasks.grading.math_grader:serve_math",
            limits=ChildLimits(memory_bytes=MEMORY_BYTES, cpu_s=cpu_s),
        )

    def check_installed(self) -> None:
        """Raises ValueError if math-verify is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "grading mathematics needs the package math-verify: pip install 'shoal-rl[math]'"
            )

    def can_parse(self, golds: Sequence[str]) -> list[bool]:
        """Returns for each gold answer whether math-verify can parse it."""
        parsed: list[bool] = []
        for start in range(0, len(golds), BATCH):
            part = list(golds[start : start + BATCH])
            reply = self._ask({"golds": part})
            # One of them is too much for the child: ask one by one to find it.
            if reply is None and len(part) > 1:
                parsed += [good for gold in part for good in self.can_parse([gold])]
            else:
                parsed += [False] * len(part) if reply is None else reply["parsed"]
        return parsed

    def compare(self, gold: str, answer: str) -> Reward:
        """Returns the reward of an answer to a problem with this gold answer."""
        reply = self._ask({"gold": gold, "answer": answer})
        return UNPARSEABLE if reply is None else _REWARDS[reply["outcome"]]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the child's reply, or None if the request ends the child."""
        if self._child.pid is None:  # searching the packages takes as long as the rest of this function
            self.check_installed()
        try:
            frame = self._child.exchange(json.dumps(request).encode(), timeout_s=WALL_S)
        except ChildDied:
            return None
        except ChildError as error:
            raise CannotGrade(str(error)) from None
        reply: dict[str, Any] = json.loads(frame)
        return reply


_THREAD = threading.local()


def math_grader() -> MathGrader:
    """Returns the grader of this thread. Its child ends when the thread or this process does: its input pipe closes."""
    if not hasattr(_THREAD, "grader"):
        _THREAD.grader = MathGrader()
    grader: MathGrader = _THREAD.grader
    return grader


# -- in the child process ---------------------------------------------------------------------------------


def serve_math(limits: ChildLimits) -> None:
    """Loads math-verify and answers requests.

    math-verify's own timeouts are signals that sympy may swallow, so they are off: the kernel limits processor time instead.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[Any]:
        # A full stop at the end, or a sign `approximately` at the start, is no part of the answer.
        text = text.strip().removeprefix("\\approx").strip()
        text = text if text.endswith("\\right.") else text.removesuffix(".").strip()
        # first_match: otherwise an answer that cannot be parsed as a whole is graded by a part of it that can, such as the
        # numbers of the pair in `\left(3, \frac{1}{2}\right)+1`.
        found = parse(
            f"\\boxed{{{text}}}",
            extraction_config=configs,
            extraction_mode="first_match",
            parsing_timeout=None,
            raise_on_error=False,
        )
        # math-verify also returns the text itself; text alone means that it could not parse it.
        values = [one for one in found if not isinstance(one, str)]
        return list(found) if values and not any(map(_is_false_equation, values)) else []

    def number(text: str) -> complex | None:
        values = [one for one in parsed(text) if not isinstance(one, str)]
        if len(values) != 1 or getattr(values[0], "free_symbols", True):
            return None
        return _or_else(None, lambda: complex(values[0]))

    def outcome(gold_text: str, answer_text: str) -> str:
        gold, given = parsed(gold_text), parsed(answer_text)
        if not given or (len(_sides(gold_text)) == 1 and _is_false_chain(answer_text, number)):
            return "unparseable"
        return "right" if gold and verify(gold, given, timeout_seconds=None) else "wrong"

    def answer(frame: bytes) -> bytes:
        request = json.loads(frame)
        reply: dict[str, Any]
        if "golds" in request:
            reply = {"parsed": [bool(_or_else([], partial(parsed, gold))) for gold in request["golds"]]}
        else:
            reply = {"outcome": _or_else("unparseable", partial(outcome, request["gold"], request["answer"]))}
        return json.dumps(reply).encode()

    outcome("\\frac{1}{2}", "0.5")  # loads modules that math-verify imports late, before the limits apply
    serve(answer, limits)


def _is_false_equation(value: Any) -> bool:
    """Returns whether the value is an equation of different numbers, such as 987 = 42: math-verify would compare one side of it."""
    if type(value).__name__ != "Equality" or value.free_symbols:
        return False
    return not math.isclose(float(value.lhs), float(value.rhs), rel_tol=1e-9, abs_tol=1e-9)


def _is_false_chain(text: str, number: Callable[[str], complex | None]) -> bool:
    """Returns whether an answer has a chain of equations that does not state one value, such as 2+2=5=7, 3x=7 or 5≈7.

    math-verify compares one side of a chain only, so the others could say anything. All numbers of a chain must be equal, and the
    other sides beside a number must be names, such as x or f(x).
    """
    for part in _BETWEEN.split(text):
        sides = _sides(part)
        values = [number(side) if side.strip() else None for side in sides]
        numbers = [value for value in values if value is not None]
        if len(sides) == 1 or not numbers:
            continue
        tolerance = 0.05 if _APPROXIMATELY.search(part) else 1e-9
        if any(abs(one - numbers[0]) > tolerance * max(1e-9, abs(one), abs(numbers[0])) for one in numbers):
            return True
        if any(value is None and _OPERATION.search(side) for side, value in zip(sides, values, strict=True)):
            return True
    return False


def _sides(text: str) -> list[str]:
    """Returns the sides of a chain of equations; signs inside brackets do not split it."""
    if "\\begin" in text:
        return [text]
    sides, depth, start = [], 0, 0
    for found in _EQUAL_OR_BRACKET.finditer(text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif depth <= 0:
            sides.append(text[start : found.start()])
            start = found.end()
    return [*sides, text[start:]]


def _or_else(otherwise: T, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or `otherwise` if it raises: parsers of untrusted text may raise anything."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        return otherwise
