"""Sorting digits: small enough for a model of random weights, wide enough that held-out problems mean something."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from shoal.tasks.task import (
    RIGHT,
    UNPARSEABLE,
    Outcome,
    Problem,
    Reward,
    Split,
    check_style,
    check_whole,
    draw_problem,
    reply_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """`5291=` asks for `1259`. A wrong answer of the right length earns `partial` times its share of right places.

    style "chat" asks `Sort the digits 5, 2, 9, 1 in ascending order.` and takes any reply with that many digits, be
    they in one piece or apart.
    """

    length: int = 4
    partial: float = 0.5
    style: Literal["bare", "chat"] = "bare"

    def __post_init__(self) -> None:
        check_whole("sort: length", self.length, least=2, most=12)
        if not 0 <= self.partial < 1:
            raise ValueError(f"sort: partial={self.partial} must be at least 0 and below 1")
        check_style("sort", self.style, ("bare", "chat"))

    @property
    def chat(self) -> bool:
        return self.style == "chat"

    def problem(self, split: Split, seed: int) -> Problem:
        return draw_problem(split, seed, self._draw)

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        digits = "".join(str(rng.randrange(10)) for _ in range(self.length))
        return digits, Problem(self._ask(digits), "".join(sorted(digits)))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        answer = self._answer(text)
        if answer == problem.answer:
            return RIGHT
        if len(answer) != self.length or not answer.isdecimal():
            return UNPARSEABLE
        right = sum(given == wanted for given, wanted in zip(answer, problem.answer, strict=True))
        return Reward(self.partial * right / self.length, Outcome.WRONG)

    def _answer(self, text: str) -> str:
        if self.style == "bare":
            return text.strip()
        return "".join(char for char in reply_of(text) if char.isascii() and char.isdigit())

    def _ask(self, digits: str) -> str:
        if self.style == "bare":
            return f"{digits}="
        return f"Sort the digits {', '.join(digits)} in ascending order. Reply with the digits only."
