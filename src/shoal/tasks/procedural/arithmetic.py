"""Sums: the smallest task on which a language model visibly learns to reason its way to a number."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from shoal.tasks.task import (
    Problem,
    Reward,
    Split,
    check_style,
    check_whole,
    draw_problem,
    grade_number,
    reply_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """The sum of two numbers below 10**digits. The last number in the reply is the answer.

    style "chat" asks in words, as a user's turn. The others are plain text: "bare" asks `47+38=`; "shots" shows two
    worked lines first, and only the first line of the reply counts, since a model goes on with lines of its own. That
    lifts SmolLM2-135M from 5 % right to 30 %, a start where most groups have signal.
    """

    digits: int = 2
    style: Literal["bare", "chat", "shots"] = "chat"

    def __post_init__(self) -> None:
        check_whole("add: digits", self.digits, least=1, most=9)
        check_style("add", self.style, ("bare", "chat", "shots"))

    @property
    def chat(self) -> bool:
        return self.style == "chat"

    def problem(self, split: Split, seed: int) -> Problem:
        return draw_problem(split, seed, self._draw)

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        return f"{a}+{b}", Problem(self._ask(a, b), str(a + b))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        reply = text.strip().split("\n")[0] if self.style == "shots" else reply_of(text)
        return grade_number(problem.answer, reply)

    def _ask(self, a: int, b: int) -> str:
        if self.style == "bare":
            return f"{a}+{b}="
        if self.style == "chat":
            return f"What is {a} + {b}? Reply with the number only."
        return f"13 + 25 = 38\n46 + 17 = 63\n{a} + {b} ="
