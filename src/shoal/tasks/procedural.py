"""Tasks whose problems are generated: sums, sorting digits, the largest number, counting letters.

Each draws a problem from a seed and grades the reply by comparing numbers. Problems are split by what they ask.
"""

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
    grade_number,
    is_held_out,
    problem_rng,
    reply_of,
)

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class DrawnTask:
    """What the generated tasks share: the last number of a reply is the answer.

    Each adds `_draw`, which returns the question by which problems are split, and the problem.
    """

    __slots__ = ()
    style: str

    @property
    def chat(self) -> bool:
        return self.style == "chat"

    def problem(self, split: Split, seed: int) -> Problem:
        attempt = 0
        while True:
            question, problem = self._draw(problem_rng(seed, attempt))
            if is_held_out(question) == (split == "eval"):
                return problem
            attempt += 1

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return grade_number(problem.answer, reply_of(text))

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(DrawnTask):
    """Asks for the sum of two numbers below 10**digits. The last number in the reply is the answer.

    Style "chat" asks in words, as a user's turn. The others are plain text: "bare" asks `47+38=`; "shots" shows two worked
    examples first, and only the first line of the reply counts, since a model continues with lines of its own. "shots" raises
    SmolLM2-135M from 5 % right to 30 %, where most groups have signal.
    """

    digits: int = 2
    style: Literal["bare", "chat", "shots"] = "chat"

    def __post_init__(self) -> None:
        check_whole("add: digits", self.digits, least=1, most=9)
        check_style("add", self.style, ("bare", "chat", "shots"))

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
        prompts = {
            "bare": f"{a}+{b}=",
            "chat": f"What is {a} + {b}? Reply with the number only.",
            "shots": f"13 + 25 = 38\n46 + 17 = 63\n{a} + {b} =",
        }
        return f"{a}+{b}", Problem(prompts[self.style], str(a + b))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        reply = text.strip().split("\n")[0] if self.style == "shots" else reply_of(text)
        return grade_number(problem.answer, reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort(DrawnTask):
    """Asks to sort digits: `5291=` asks for `1259`. Small enough for a model of random weights.

    A wrong answer of the right length earns `partial` times its share of correct positions. Style "chat" asks `Sort the digits
    5, 2, 9, 1 in ascending order.` and accepts any reply with that many digits, together or separated.
    """

    length: int = 4
    partial: float = 0.5
    style: Literal["bare", "chat"] = "bare"

    def __post_init__(self) -> None:
        check_whole("sort: length", self.length, least=2, most=12)
        if not 0 <= self.partial < 1:
            raise ValueError(f"sort: partial={self.partial} must be at least 0 and below 1")
        check_style("sort", self.style, ("bare", "chat"))

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        digits = "".join(str(rng.randrange(10)) for _ in range(self.length))
        asked = f"Sort the digits {', '.join(digits)} in ascending order. Reply with the digits only."
        prompt = f"{digits}=" if self.style == "bare" else asked
        return digits, Problem(prompt, "".join(sorted(digits)))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(DrawnTask):
    """Asks for the largest of `count` different numbers below `below`. The last number in the reply is the answer.

    There is nothing to compute, so it shows whether a model learns to select. Style "chat" asks `Which is the largest of 12, 907, 455 and 31?`, "bare" asks `12,907,455,31>`.
    """

    count: int = 4
    below: int = 1000
    style: Literal["bare", "chat"] = "chat"

    def __post_init__(self) -> None:
        check_whole("largest: count", self.count, least=2, most=32)
        # With fewer numbers, problems would repeat, and all or none of them could be held out.
        check_whole("largest: below", self.below, least=4 * self.count, most=10**9)
        check_style("largest", self.style, ("bare", "chat"))

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        numbers: list[int] = []
        while len(numbers) < self.count:
            number = rng.randrange(self.below)
            if number not in numbers:
                numbers.append(number)
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        asked = f"Which is the largest of {listed}? Reply with the number only."
        prompt = f"{','.join(map(str, numbers))}>" if self.style == "bare" else asked
        # Split by the set: the same numbers in another order must be on the same side.
        return ",".join(map(str, sorted(numbers))), Problem(prompt, str(max(numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(DrawnTask):
    """Asks how often a letter occurs in `length` letters drawn from the first `alphabet`. The last number is the answer.

    A tokenizer hides the letters from a model. Style "chat" asks `How many times does the letter "b" occur in "abcab"?`, "bare" asks `abcab b=`. A small alphabet gives
    large counts; the letter may not occur at all.
    """

    length: int = 8
    alphabet: int = 5
    style: Literal["bare", "chat"] = "chat"

    def __post_init__(self) -> None:
        check_whole("count: length", self.length, least=3, most=64)
        check_whole("count: alphabet", self.alphabet, least=2, most=26)
        check_style("count", self.style, ("bare", "chat"))
        if self.alphabet**self.length < 32:
            raise ValueError(
                f"count: length={self.length} of alphabet={self.alphabet} makes fewer than 32 words; raise either"
            )

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        word = "".join(_LETTERS[rng.randrange(self.alphabet)] for _ in range(self.length))
        letter = _LETTERS[rng.randrange(self.alphabet)]
        asked = f'How many times does the letter "{letter}" occur in "{word}"? Reply with the number only.'
        prompt = f"{word} {letter}=" if self.style == "bare" else asked
        # Split by the word: a word of the training problems must not be held out with another letter.
        return word, Problem(prompt, str(word.count(letter)))
