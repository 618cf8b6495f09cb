"""What a task is: problems by seed, rewards by text. Training and held-out problems never meet."""

import hashlib
import random
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

Split = Literal["train", "eval"]

HELD_OUT_IN = 5
"""One problem in this many is held out, by the hash of what it asks."""


class Outcome(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, and the text of one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    outcome: Outcome


class Task(Protocol):
    @property
    def chat(self) -> bool:
        """Whether a prompt is a user's turn, put in the model's chat template, or plain text to go on from."""

    def problem(self, split: Split, seed: int) -> Problem:
        """The problem of this seed; the same for everybody, for ever."""

    def reward(self, problem: Problem, text: str) -> Reward:
        """What an answer is worth, 0 to 1."""


def problem_rng(seed: int, attempt: int) -> random.Random:
    return random.Random(
        int.from_bytes(hashlib.sha256(f"problem/{seed}/{attempt}".encode()).digest()[:8], "big")
    )


def is_held_out(question: str) -> bool:
    return hashlib.sha256(f"split/{question}".encode()).digest()[0] % HELD_OUT_IN == 0
