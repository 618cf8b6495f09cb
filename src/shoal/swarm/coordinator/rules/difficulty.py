"""Difficulty sampling: problems that the model solves sometimes are posed more often. Pure functions.

A train lease draws its problems from its seed as always. With difficulty sampling, attempt a of prompt i draws the problem

    n = prompt seed (i, a) modulo the number of problems

and is accepted if `acceptance_draw(seed, i, a)` is below the weight of n; the last of MAX_ATTEMPTS is always accepted. The weight is 1
for a problem that was not graded yet, otherwise 4 p (1 - p), but at least MIN_WEIGHT, where p is the problem's pass rate: half of it is the
mean reward of the newest accepted group, a quarter that of the one before, and so on.

Seeds are committed before they are used and rewards are in the ledger, so anybody can repeat every choice when the secrets are
revealed (ledger_replay.py). The coordinator cannot choose problems, and neither can a node.
"""

from collections.abc import Callable, Sequence

from shoal.wire.seeded_draw import acceptance_draw, prompt_seed

MIN_WEIGHT = 0.1
MAX_ATTEMPTS = 32

RateOf = Callable[[int], float | None]
"""Returns the pass rate of a problem, by its number; None if it was not graded yet."""


def weight(rate: float | None) -> float:
    """Returns the probability with which an attempt that draws a problem of this pass rate is accepted."""
    return 1.0 if rate is None else max(MIN_WEIGHT, 4 * rate * (1 - rate))


def next_rate(rate: float | None, rewards: Sequence[float]) -> float:
    """Returns the pass rate after another accepted group. Rewards outside of 0 to 1 count as the nearer end."""
    mean = sum(min(1.0, max(0.0, reward)) for reward in rewards) / len(rewards)
    return mean if rate is None else (rate + mean) / 2


def choose_attempts(seed: str, num_prompts: int, size: int, rate_of: RateOf) -> tuple[int, ...]:
    """Returns the accepted attempt of each prompt."""

    def choose(index: int) -> int:
        for attempt in range(MAX_ATTEMPTS - 1):
            rate = rate_of(prompt_seed(seed, index, attempt) % size)
            if acceptance_draw(seed, index, attempt) < weight(rate):
                return attempt
        return MAX_ATTEMPTS - 1

    return tuple(choose(index) for index in range(num_prompts))


def problem_numbers(seed: str, attempts: Sequence[int], size: int) -> list[int]:
    """Returns the numbers of the problems that these attempts draw."""
    return [prompt_seed(seed, index, attempt) % size for index, attempt in enumerate(attempts)]
