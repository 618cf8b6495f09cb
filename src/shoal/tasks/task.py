"""What a task is: problems by seed, rewards by text. Training and held-out problems never meet."""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

Split = Literal["train", "eval"]

HELD_OUT_IN = 5
"""One problem in this many is held out, by the hash of what it asks."""

_NUMBER = re.compile(r"-?\d+")
_THOUGHT_ENDS = "</think>"


class Outcome(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, and the text of one right answer."""

    prompt: str
    answer: str
    check: str = ""
    """What a reward goes by where an answer's text is not enough: the tests of a program as JSON, or an
    expression's value."""
    budget: int | None = None
    """Tokens that the prompt asks for."""


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    outcome: Outcome


class CannotGrade(RuntimeError):
    """Our own side failed to grade an answer: not the answer's doing, and no reward."""


RIGHT, WRONG, UNPARSEABLE = (
    Reward(1.0, Outcome.RIGHT),
    Reward(0.0, Outcome.WRONG),
    Reward(0.0, Outcome.UNPARSEABLE),
)


class Task(Protocol):
    @property
    def chat(self) -> bool:
        """Whether a prompt is a user's turn, put in the model's chat template, or plain text to go on from."""

    def problem(self, split: Split, seed: int) -> Problem:
        """The problem of this seed; the same for everybody, for ever."""

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        """What an answer of so many tokens is worth: 0 to 1, unless a length budget takes something off."""


@runtime_checkable
class Finite(Protocol):
    """A task of so many problems: seeds 0 .. size-1 give each once."""

    def size(self, split: Split) -> int: ...


def problem_rng(seed: int, attempt: int) -> random.Random:
    return random.Random(
        int.from_bytes(hashlib.sha256(f"problem/{seed}/{attempt}".encode()).digest()[:8], "big")
    )


def draw_problem(split: Split, seed: int, draw: Callable[[random.Random], tuple[str, Problem]]) -> Problem:
    """The first problem drawn from this seed that is on this side of the split. `draw` also says by which words it is split."""
    attempt = 0
    while True:
        question, problem = draw(problem_rng(seed, attempt))
        if is_held_out(question) == (split == "eval"):
            return problem
        attempt += 1


def is_held_out(question: str) -> bool:
    return hashlib.sha256(f"split/{question}".encode()).digest()[0] % HELD_OUT_IN == 0


def reply_of(text: str) -> str:
    """What a model says once it has thought: the text after the last `</think>`, all of it if there is none."""
    return text.rpartition(_THOUGHT_ENDS)[2]


def grade_number(answer: str, text: str) -> Reward:
    """By the last whole number in the reply."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return UNPARSEABLE
    given = numbers[-1]
    right = not given.startswith("-") and given.lstrip("0") == answer.lstrip("0")
    return RIGHT if right else WRONG


def check_whole(name: str, value: object, *, least: int, most: int) -> None:
    """Options come from files that people write; `name` is `task: option`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}")


def check_style(name: str, style: object, known: tuple[str, ...]) -> None:
    if style not in known:
        raise ValueError(f"{name}: style={style!r} must be one of {', '.join(known)}")
