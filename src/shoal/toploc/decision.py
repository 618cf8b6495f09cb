"""One test over a whole submission: do its proofs lie further off than honest noise does?

A segment's statistic minus the honest mean of its size class, summed over rows, in units of its honest spread:

    z = sum (x - mean) / sqrt(inflation * sum variance)

Honest z stays small however many rows there are, while a lie that moves every segment a little grows with their root: weights
in 8 bits look honest in one segment and certain in sixty. Two statistics, each over the submission and over its worst row.

The bound for a stated rate of false alarms comes from the honest tail, taken to fall by a factor of ten over each step
as wide as from 1 in 100 to 1 in 1,000. A normal tail falls faster, so this errs on the honest side.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.toploc.verify import SegmentCheck
from shoal.wire.noise import Noise, Statistic, Tail

CERTAIN = 1e-6
"""Chance that one test calls honest work certain to be false. Four tests a submission."""
SUSPICIOUS = 1e-3
"""The same for merely suspicious."""
SPREAD_FLOOR = {"mismatches": 0.5, "mantissas": 0.01}
"""Standard deviation of a segment that is always allowed. In float32 hardly any two values differ, so a few hundred rows say
nothing about how often: one exponent that differs in one segment of a thousand is honest, and so is one mantissa of 128 that is
off by one."""
NORMAL_TAIL = (2.326, 3.090)
"""What 1 in 100 and 1 in 1,000 exceed of a normal z. A calibration of few rows may not promise less."""


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


def noise_scores(rows: Sequence[Sequence[SegmentCheck]], noise: Noise) -> list[Score]:
    """Both statistics, over all rows and over the worst one. Empty if no row has a segment."""
    proven = [(number, row) for number, row in enumerate(rows) if row]
    if not proven:
        return []
    scores: list[Score] = []
    for name, value in STATISTICS.items():
        honest: Statistic = getattr(noise, name)
        sums = [_Sum.of(row, value, honest, noise.sizes, SPREAD_FLOOR[name]) for _, row in proven]
        scores.append(_score(name, sum(sums, _Sum()), honest, num_rows=len(sums), looks=1))
        worst = _worst(sums, honest)
        of_row = f"{name} of row {proven[worst][0]}"
        scores.append(_score(of_row, sums[worst], honest, num_rows=1, looks=len(sums)))
    return scores


def size_class(sizes: Sequence[int], num_values: int) -> int:
    return min(bisect_left(sizes, num_values), len(sizes) - 1)


def bound(tail: Tail, rate: float) -> float:
    """The z that honest work exceeds with a chance of `rate`, below 1 in 100."""
    first = max(tail.one_in_100, NORMAL_TAIL[0])
    step = max(tail.one_in_1000 - tail.one_in_100, NORMAL_TAIL[1] - NORMAL_TAIL[0])
    return first + step * math.log10(0.01 / rate)


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

    def z(self, inflation: float) -> float:
        return (self.total - self.honest) / math.sqrt(inflation * self.variance)


def _worst(sums: Sequence[_Sum], honest: Statistic) -> int:
    return max(range(len(sums)), key=lambda index: sums[index].z(honest.inflation))


def _score(name: str, found: _Sum, honest: Statistic, *, num_rows: int, looks: int) -> Score:
    """`looks`: how many rows this was the worst of; the rate is shared among them."""
    tail = max((tail for tail in honest.tails if tail.rows <= num_rows), key=lambda tail: tail.rows)
    return Score(
        name=name,
        z=found.z(honest.inflation),
        suspicious=bound(tail, SUSPICIOUS / looks),
        certain=bound(tail, CERTAIN / looks),
        mean=found.total / found.count,
        honest_mean=found.honest / found.count,
    )
