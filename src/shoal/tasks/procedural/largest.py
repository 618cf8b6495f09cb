"""The largest of some numbers: nothing to compute, so it shows whether a model learns to pick rather than to reckon."""

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
class Largest:
    """The largest of `count` different numbers below `below`. The last number in the reply is the answer.

    "chat" asks `Which is the largest of 12, 907, 455 and 31?`, "bare" asks `12,907,455,31>`.
    """

    count: int = 4
    below: int = 1000
    style: Literal["bare", "chat"] = "chat"

    def __post_init__(self) -> None:
        check_whole("largest: count", self.count, least=2, most=32)
        # Enough to choose from: with fewer, problems would repeat and the held-out ones could be all or none.
        check_whole("largest: below", self.below, least=4 * self.count, most=10**9)
        check_style("largest", self.style, ("bare", "chat"))

    @property
    def chat(self) -> bool:
        return self.style == "chat"

    def problem(self, split: Split, seed: int) -> Problem:
        return draw_problem(split, seed, self._draw)

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        numbers: list[int] = []
        while len(numbers) < self.count:
            number = rng.randrange(self.below)
            if number not in numbers:
                numbers.append(number)
        # Split by the set: the same numbers in another order are the same question.
        return ",".join(map(str, sorted(numbers))), Problem(self._ask(numbers), str(max(numbers)))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return grade_number(problem.answer, reply_of(text))

    def _ask(self, numbers: list[int]) -> str:
        if self.style == "bare":
            return f"{','.join(map(str, numbers))}>"
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        return f"Which is the largest of {listed}? Reply with the number only."
