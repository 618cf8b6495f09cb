"""Counting a letter in a word of made-up letters: what a tokenizer hides from a model, and reasoning brings back."""

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

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How often a letter occurs in `length` letters drawn from the first `alphabet`. The last number is the answer.

    "chat" asks `How many times does the letter "b" occur in "abcab"?`, "bare" asks `abcab b=`. A small alphabet gives
    large counts; the letter asked for need not occur.
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

    @property
    def chat(self) -> bool:
        return self.style == "chat"

    def problem(self, split: Split, seed: int) -> Problem:
        return draw_problem(split, seed, self._draw)

    def _draw(self, rng: Random) -> tuple[str, Problem]:
        word = "".join(_LETTERS[rng.randrange(self.alphabet)] for _ in range(self.length))
        letter = _LETTERS[rng.randrange(self.alphabet)]
        # Split by the word: a word met in training is not asked for another of its letters.
        return word, Problem(self._ask(word, letter), str(word.count(letter)))

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        return grade_number(problem.answer, reply_of(text))

    def _ask(self, word: str, letter: str) -> str:
        if self.style == "bare":
            return f"{word} {letter}="
        return f'How many times does the letter "{letter}" occur in "{word}"? Reply with the number only.'
