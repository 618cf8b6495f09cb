"""The interface of a task: problems by seed, rewards by text. No problem is both trained on and held out."""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

Split = Literal["train", "eval"]

HELD_OUT_IN = 5
"""One problem in this many is held out, by the hash of its question."""

_NUMBER = re.compile(r"-?\d+")
_BOX = re.compile(r"\\boxed\{(.*?)\}", re.DOTALL)
THOUGHT_END = "</think>"


class Outcome(Enum):
    """The grade of an answer: right, wrong, or without anything to grade."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSEABLE = "unparseable"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and the text of one right answer."""

    prompt: str
    answer: str
    check: str = ""
    """Data for the reward if the answer's text is not enough: a program's tests as JSON, or an expression's value."""
    budget: int | None = None
    """Number of tokens that the prompt asks for, with a length budget."""
    messages: tuple[tuple[str, str], ...] = ()
    """Turns before the prompt, which is the last user's turn: `("system" | "user" | "assistant", text)`. For chat tasks."""

    @property
    def num_chars(self) -> int:
        """Number of characters of all turns."""
        return len(self.prompt) + sum(len(text) for _, text in self.messages)


@dataclass(frozen=True, slots=True)
class Reward:
    """The value of an answer and how it was graded."""

    value: float
    outcome: Outcome


class CannotGrade(RuntimeError):
    """Grading failed on our own side, not because of the answer. The answer gets no reward."""


RIGHT, WRONG = Reward(1.0, Outcome.RIGHT), Reward(0.0, Outcome.WRONG)
UNPARSEABLE = Reward(0.0, Outcome.UNPARSEABLE)


class Task(Protocol):
    """Makes problems of seeds and grades answers."""

    @property
    def chat(self) -> bool:
        """Whether prompts are a user's turn, to be put in the model's chat template; else plain text to continue."""

    def problem(self, split: Split, seed: int) -> Problem:
        """Returns the problem of this seed. It must be the same on every machine and in every release."""

    def reward(self, problem: Problem, text: str, num_tokens: int) -> Reward:
        """Returns the reward of an answer of `num_tokens` tokens: 0 to 1, less what a length budget subtracts."""


@runtime_checkable
class Finite(Protocol):
    """A task with a known number of problems: seeds 0 .. size-1 give each once."""

    def size(self, split: Split) -> int: ...


@runtime_checkable
class PromptLengths(Protocol):
    """A task that knows the lengths of its prompts without making its problems."""

    def prompt_chars(self, split: Split) -> Sequence[int]:
        """Returns the number of characters of each prompt, by its seed from 0; none if they are not known."""


def prompt_chars(task: Task, split: Split) -> Sequence[int]:
    """Returns the number of characters of each prompt, by its seed from 0; none if the task does not know them."""
    return task.prompt_chars(split) if isinstance(task, PromptLengths) else ()


def problem_rng(seed: int, attempt: int) -> random.Random:
    """Returns the random numbers of one attempt to draw the problem of a seed."""
    return random.Random(
        int.from_bytes(hashlib.sha256(f"problem/{seed}/{attempt}".encode()).digest()[:8], "big")
    )


def is_held_out(question: str) -> bool:
    """Returns whether the problem with this question is held out, by its hash."""
    return hashlib.sha256(f"split/{question}".encode()).digest()[0] % HELD_OUT_IN == 0


def reply_of(text: str) -> str:
    """Returns the text after the last `</think>`, or all of it if there is none, as with a model that does not think first."""
    return text.rpartition(THOUGHT_END)[2]


def vote_key(text: str) -> str:
    """Returns what an answer says, for counting votes: its last box, or the last number or the whole of its last line."""
    reply = reply_of(text)
    # Without what follows the last brace, since each box that is never closed would be searched to the end of the text.
    boxes = _BOX.findall(reply[: reply.rfind("}") + 1])
    if boxes:
        return "".join(boxes[-1].split())
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    numbers = _NUMBER.findall(last.replace(",", ""))
    return numbers[-1].lstrip("0") or "0" if numbers else last.casefold()


def grade_number(answer: str, text: str) -> Reward:
    """Grades a reply by its last whole number."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return UNPARSEABLE
    given = numbers[-1]
    right = not given.startswith("-") and given.lstrip("0") == answer.lstrip("0")
    return RIGHT if right else WRONG


def check_whole(name: str, value: object, *, least: int, most: int) -> None:
    """Raises ValueError if an option is not a whole number in this range. `name` is `task: option`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} to {most}")


def check_style(name: str, style: object, known: tuple[str, ...]) -> None:
    """Raises ValueError if a task's style is unknown."""
    if style not in known:
        raise ValueError(f"{name}: style={style!r} must be one of {', '.join(known)}")
