"""Sorting digits: small enough for a model of random weights, wide enough that held-out problems mean something."""

from dataclasses import dataclass

from shoal.tasks.task import Outcome, Problem, Reward, Split, is_held_out, problem_rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """`5291=` asks for `1259`. A wrong answer of the right length earns `partial` times its share of right places."""

    length: int = 4
    partial: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or not 2 <= self.length <= 12:
            raise ValueError(f"sort: length={self.length!r} must be a whole number from 2 to 12")
        if not 0 <= self.partial < 1:
            raise ValueError(f"sort: partial={self.partial} must be at least 0 and below 1")

    @property
    def chat(self) -> bool:
        return False

    def problem(self, split: Split, seed: int) -> Problem:
        attempt = 0
        while True:
            rng = problem_rng(seed, attempt)
            digits = "".join(str(rng.randrange(10)) for _ in range(self.length))
            if is_held_out(digits) == (split == "eval"):
                return Problem(prompt=f"{digits}=", answer="".join(sorted(digits)))
            attempt += 1

    def reward(self, problem: Problem, text: str) -> Reward:
        answer = text.strip()
        if answer == problem.answer:
            return Reward(1.0, Outcome.RIGHT)
        if len(answer) != self.length or not answer.isdecimal():
            return Reward(0.0, Outcome.UNPARSEABLE)
        right = sum(given == wanted for given, wanted in zip(answer, problem.answer, strict=True))
        return Reward(self.partial * right / self.length, Outcome.WRONG)
