"""One test over a whole submission: do its proofs lie further off than honest noise does?

A segment's statistic minus the honest mean of its size class, summed over rows, in units of its honest spread:

    z = sum (x - mean) / sqrt(inflation * sum variance + prompt variance * sum over prompts (number of segments)^2)

Honest z stays small however many rows there are, while a lie that moves every segment a little grows with their root: weights
in 8 bits look honest in one segment and certain in sixty. Two statistics, each over the submission and over its worst row. Samples of
one prompt share its noise, so they count for less than as many prompts.

The bound for a stated rate of false alarms comes from the honest tail, taken to fall by a factor of ten over each step
as wide as from 1 in 100 to 1 in 1,000. A normal tail falls faster, so this errs on the honest side.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.toploc.verify import SegmentCheck
from shoal.wire.noise import Noise, Statistic, Tail

CERTAIN = 1e-8
"""Chance that one test calls honest work certain to be false, four tests a submission. The tail is drawn on from what 1 in 1,000 exceed,
so this is a distance rather than a rate: at 1e-6, one of 21,504 honest submissions was beyond it (docs/LOG.md), and every lie that proofs
can show is further off by a factor of three."""
SUSPICIOUS = 1e-3
"""The same for merely suspicious."""
SPREAD_FLOOR = {"mismatches": 0.5, "mantissas": 0.01}
"""Standard deviation of a segment that is always allowed. In float32 hardly any two values differ, so a few hundred rows say
nothing about how often: one exponent that differs in one segment of a thousand is honest, and so is one mantissa of 128 that is
off by one."""
NORMAL_TAIL = (2.326, 3.090)
"""What 1 in 100 and 1 in 1,000 exceed of a normal z. A calibration of few rows may not promise less."""
ROW_STEP = 1.2
"""Nor for a single row less than this from one power of ten to the next: it counts few mismatches, and those are skewed."""
MIN_SEGMENTS = 30
"""A size class with fewer says nothing about its mean and spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One z-score and what it is compared with."""

    name: str
    """"mismatches" or "mantissas", "of row 5" if of one row."""
    z: float
    suspicious: float
    certain: float
    mean: float
    """Of the statistic, over the segments tested."""
    honest_mean: float

    @property
    def is_certain(self) -> bool:
        return self.z > self.certain

    @property
    def is_suspicious(self) -> bool:
        return self.z > self.suspicious

    def __str__(self) -> str:
        return (
            f"{self.name} average {self.mean:.3g}, honest work {self.honest_mean:.3g}: {self.z:.1f} standard deviations "
            f"too many, certain above {self.certain:.1f}"
        )


def mismatches(segment: SegmentCheck) -> float:
    """A flipped sign counts as a wrong exponent: the published rule looks past it, honest noise never makes one."""
    return segment.exponent_mismatches + segment.sign_mismatches


def mantissas(segment: SegmentCheck) -> float:
    return segment.mantissa_bounded


STATISTICS: dict[str, Callable[[SegmentCheck], float]] = {"mismatches": mismatches, "mantissas": mantissas}


def noise_scores(
    rows: Sequence[Sequence[SegmentCheck]], noise: Noise, prompts: Sequence[int] | None = None
) -> list[Score]:
    """Both statistics, over all rows and over the worst one. Empty if no row has a segment that can be tested.

    `prompts` numbers each row's prompt; without it every row is taken to have its own.
    """
    proven = []
    for number, row in enumerate(rows):
        tested = [segment for segment in row if tested_class(noise, segment.num_values) is not None]
        if tested:
            proven.append((number, number if prompts is None else prompts[number], tested))
    if not proven:
        return []
    scores: list[Score] = []
    for name, value in STATISTICS.items():
        honest: Statistic = getattr(noise, name)
        sums = [_Sum.of(row, value, honest, noise.sizes, SPREAD_FLOOR[name]) for _, _, row in proven]
        by_prompt: dict[int, _Sum] = {}
        for (_, prompt, _), of_row in zip(proven, sums, strict=True):
            by_prompt[prompt] = by_prompt.get(prompt, _Sum()) + of_row
        scores.append(_score(name, list(by_prompt.values()), honest, num_rows=len(sums), looks=1))
        worst = max(range(len(sums)), key=lambda index: _z([sums[index]], honest))
        row_name = f"{name} of row {proven[worst][0]}"
        scores.append(_score(row_name, [sums[worst]], honest, num_rows=1, looks=len(sums)))
    return scores


def size_class(sizes: Sequence[int], num_values: int) -> int:
    return min(bisect_left(sizes, num_values), len(sizes) - 1)


def tested_class(noise: Noise, num_values: int) -> int | None:
    """The size class of a segment, if enough is known of it."""
    if not noise.sizes[0] / 2 < num_values <= noise.sizes[-1]:
        return None
    number = size_class(noise.sizes, num_values)
    return number if noise.mismatches.by_size[number].segments >= MIN_SEGMENTS else None


def bound(tail: Tail, rate: float) -> float:
    """The z that honest work exceeds with a chance of `rate`, below 1 in 100."""
    first = max(tail.one_in_100, NORMAL_TAIL[0])
    least = ROW_STEP if tail.rows == 1 else NORMAL_TAIL[1] - NORMAL_TAIL[0]
    step = max(tail.one_in_1000 - tail.one_in_100, least)
    return first + step * math.log10(0.01 / rate)


def bound_for(tails: Sequence[Tail], num_rows: int, rate: float) -> float:
    """The same for any number of rows: the wider of the two tails around it. Beyond the last one it grows with the root, as
    the z of a pair of machines does that lies a little higher than others."""
    below = max((tail for tail in tails if tail.rows <= num_rows), key=lambda tail: tail.rows)
    above = min((tail for tail in tails if tail.rows >= num_rows), key=lambda tail: tail.rows, default=None)
    if above is None:
        return bound(below, rate) * math.sqrt(num_rows / below.rows)
    return max(bound(below, rate), bound(above, rate))


@dataclass(frozen=True, slots=True)
class _Sum:
    """A statistic added up over segments."""

    count: int = 0
    total: float = 0.0
    honest: float = 0.0
    variance: float = 0.0

    @classmethod
    def of(
        cls,
        segments: Sequence[SegmentCheck],
        value: Callable[[SegmentCheck], float],
        honest: Statistic,
        sizes: Sequence[int],
        floor: float,
    ) -> "_Sum":
        moments = [honest.by_size[size_class(sizes, segment.num_values)] for segment in segments]
        return cls(
            count=len(segments),
            total=sum(map(value, segments)),
            honest=sum(moment.mean for moment in moments),
            variance=sum(max(moment.variance, floor**2) for moment in moments),
        )

    def __add__(self, other: "_Sum") -> "_Sum":
        return _Sum(
            self.count + other.count,
            self.total + other.total,
            self.honest + other.honest,
            self.variance + other.variance,
        )


def _z(prompts: Sequence[_Sum], honest: Statistic) -> float:
    variance = honest.inflation * sum(one.variance for one in prompts)
    variance += honest.prompt_variance * sum(one.count**2 for one in prompts)
    return sum(one.total - one.honest for one in prompts) / math.sqrt(variance)


def _score(name: str, prompts: Sequence[_Sum], honest: Statistic, *, num_rows: int, looks: int) -> Score:
    """`looks`: how many rows this was the worst of; the rate is shared among them."""
    found = sum(prompts, _Sum())
    return Score(
        name=name,
        z=_z(prompts, honest),
        suspicious=bound_for(honest.tails, num_rows, SUSPICIOUS / looks),
        certain=bound_for(honest.tails, num_rows, CERTAIN / looks),
        mean=found.total / found.count,
        honest_mean=found.honest / found.count,
    )
