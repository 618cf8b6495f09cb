"""Compares mathematical answers with math-verify, in a child process: its parsers and sympy can hang or crash.

An answer that takes more processor time or memory than it may, or that ends the child twice, is unparseable. A failure on our
own side (the child does not start, or does not answer in time although it has processor time left) raises CannotGrade and
gives no reward.

    request  {"golds": [...]}               reply  {"parsed": [true, ...]}
    request  {"gold": ..., "answer": ...}   reply  {"outcome": "right" | "wrong" | "unparseable"}
"""

import atexit
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from shoal.child_process import ChildDied, ChildError, ChildLimits, ChildProcess, serve
from shoal.tasks.task import RIGHT, UNPARSEABLE, WRONG, CannotGrade, Reward

CPU_S = 5
WALL_S = 60.0
"""Seconds of wall-clock time for one answer. Much longer than CPU_S, since an answer must not fail because the machine is
busy."""
MEMORY_BYTES = 1_000_000_000
BATCH = 200
"""Gold answers in one request to the child, which has the processor time of one answer for all of them."""

_REWARDS = {"right": RIGHT, "wrong": WRONG, "unparseable": UNPARSEABLE}
T = TypeVar("T")


class MathGrader:
    """Grades answers in one child process. Safe to use from several threads; answers are graded one at a time."""

    def __init__(
        self, *, cpu_s: int = CPU_S, wall_s: float = WALL_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._wall_s = wall_s
        self._child = ChildProcess(
            "shoal.tasks.grading.math_grader:serve_math",
            limits=ChildLimits(memory_bytes=memory_bytes, cpu_s=cpu_s),
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

    def close(self) -> None:
        """Kills the child process."""
        self._child.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the child's reply, or None if the request ends the child."""
        self.check_installed()
        try:
            frame = self._child.exchange(json.dumps(request).encode(), timeout_s=self._wall_s)
        except ChildDied:
            return None
        except ChildError as error:
            raise CannotGrade(str(error)) from None
        reply: dict[str, Any] = json.loads(frame)
        return reply


@functools.cache
def math_grader() -> MathGrader:
    """Returns the grader of this process. Its child ends when this process does: its input pipe closes."""
    grader = MathGrader()
    atexit.register(grader.close)
    return grader


# -- in the child process ---------------------------------------------------------------------------------


def serve_math(limits: ChildLimits) -> None:
    """Loads math-verify and answers requests.

    math-verify's own timeouts are signals that sympy may swallow, so they are off: the kernel limits processor time instead.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = (LatexExtractionConfig(), ExprExtractionConfig())

    def parsed(text: str) -> list[Any]:
        found = parse(
            f"\\boxed{{{text}}}", extraction_config=configs, parsing_timeout=None, raise_on_error=False
        )
        # math-verify also returns the text itself; text alone means that it could not parse it.
        return list(found) if any(not isinstance(one, str) for one in found) else []

    def can_parse(text: str) -> bool:
        return bool(parsed(text))

    def outcome(gold_text: str, answer_text: str) -> str:
        gold, given = parsed(gold_text), parsed(answer_text)
        if not given:
            return "unparseable"
        return "right" if gold and verify(gold, given, timeout_seconds=None) else "wrong"

    def answer(frame: bytes) -> bytes:
        request = json.loads(frame)
        reply: dict[str, Any]
        if "golds" in request:
            reply = {"parsed": [_or_else(False, partial(can_parse, gold)) for gold in request["golds"]]}
        else:
            reply = {"outcome": _or_else("unparseable", partial(outcome, request["gold"], request["answer"]))}
        return json.dumps(reply).encode()

    outcome("\\frac{1}{2}", "0.5")  # loads modules that math-verify imports late, before the limits apply
    serve(answer, limits)


def _or_else(otherwise: T, call: Callable[[], T]) -> T:
    """Returns what `call` returns, or `otherwise` if it raises: parsers of untrusted text may raise anything."""
    try:
        return call()
    except (Exception, RecursionError, MemoryError):  # noqa: BLE001
        return otherwise
