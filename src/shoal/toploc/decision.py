"""Tests a whole submission: is it further off than honest noise?

A unit is a segment of a proof, or a block of as many tokens. The score sums over units the statistic minus the honest mean of
the unit's size class, in units of the honest spread:

    z = sum (x - mean) / sqrt(inflation * sum variance + prompt variance * sum over prompts (number of units)^2)

Honest z stays small for any number of rows, while a lie that moves every segment a little grows with the square root of
their number: 8-bit weights look honest in one segment and are certain in sixty. There are four statistics, two of proofs and
two of tokens, each tested over the submission, its worst row and its worst unit. Samples of one prompt share noise, so they
count less than the same number of prompts.

The mean of honest noise moves while a policy learns, and in sums over many rows a small shift is many standard deviations: sums are
compared with a mean that is higher by MARGIN. Weights of 8 bits are further off than that.

The bound for a given rate of false alarms is extrapolated from the honest tail: each factor of ten adds the distance between
1 in 100 and 1 in 1,000. A normal tail falls faster, so this favours honest work. Single rows and units have a longer tail: each
factor of ten multiplies z by a factor. A sum of few rows may contain one such row, so its bound allows for it.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shoal.toploc.segments import SegmentCheck
from shoal.wire.proof_noise import Moments, Noise, Statistic, Tail

CERTAIN = 1e-8
"""Probability that a sum over many rows of honest work is called certain. The tail is extrapolated from 1 in 1,000, so this
is a distance rather than a measured rate; every lie that proofs can show is further off by a factor of three."""
OUTLIER = 1e-6
"""Probability that a single honest row or unit is called certain; its tail is known better."""
OUTLIER_FACTOR = 1.6
"""Least factor of z between the worst of n and the worst of 10 n honest rows or units. Of 196,608 rows of SmolLM2-135M, 1 in
100 to 1 in 100,000 were off by 3.0, 4.4, 6.2 and 9.6 standard deviations, the worst by 16: the tail is not normal, because
some states are ill-conditioned."""
SUSPICIOUS = 3e-4
"""Probability that honest work is called suspicious."""
MARGIN = 0.25
"""Share by which the mean of honest noise may exceed the calibrated one. Within ten versions of Qwen2.5-Coder-0.5B at a rate of 5e-6 the
mismatches of honest work rose from 2.4 to 2.6, 6 standard deviations of a sum over 256 rows; the least of the lies about weights, blocks of
8 bits, has 3.6."""
SPREAD_FLOOR = {"mismatches": 0.5, "mantissas": 0.01, "logprobs": 0.001, "draws": 0.003}
"""Least standard deviation of a unit. In float32 values hardly ever differ, so a few hundred rows do not show how often:
one wrong exponent in a thousand segments is honest, and so is one mantissa of 128 that is off by one, or a draw at the edge
of its interval."""
NORMAL_TAIL = (2.326, 3.090)
"""z that 1 in 100 and 1 in 1,000 of a normal distribution exceed. A calibration with few rows must not give less."""
NARROWEST = 3.0
"""Largest ratio of a standard score to z. It is above 1 where honest z varies less than SPREAD_FLOOR assumes: there z alone would
hide small lies that add up over many submissions."""
ROW_STEP = 1.2
"""Least step of a single row's bound per factor of ten: its few mismatches have a skewed distribution."""
MIN_SEGMENTS = 30
"""Units that a size class needs for a usable mean and spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlock:
    """Consecutive tokens of an answer, as many as a segment has states; fewer at its end."""

    num_tokens: int
    logprob_gap: float
    """Mean |claimed - recomputed| log-prob."""
    draw_root: float
    """Mean square root of the distance between the uniform random number and its token's interval of the cumulative
    distribution; 0 inside. The root is used because single honest draws are far off: with it, the tail of an answer of two tokens is
    at 6 standard deviations instead of 22."""


Unit = SegmentCheck | TokenBlock
Row = Sequence[Unit]


class Measured(NamedTuple):
    """One statistic of one unit."""

    size: int
    """Number of values of a segment, or of tokens of a block."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One z-score and the bounds it is compared with."""

    statistic: str
    """Name in STATISTICS."""
    where: str
    """"over all rows", "of row 5" or "of row 5, part 0"."""
    z: float
    suspicious: float
    certain: float
    mean: float
    """Mean of the statistic over the tested units."""
    honest_mean: float
    standard: float | None = None
    """z in units in which honest submissions of this size have mean 0 and variance 1; None for single rows and units."""

    @property
    def is_certain(self) -> bool:
        return self.z > self.certain

    @property
    def is_suspicious(self) -> bool:
        return self.z > self.suspicious

    def __str__(self) -> str:
        return (
            f"{self.statistic} {self.where} average {self.mean:.3g}, honest work {self.honest_mean:.3g}, at most {MARGIN:.0%} more: "
            f"{self.z:.1f} standard deviations too many, certain above {self.certain:.1f}"
        )


def _of_segments(value: Callable[[SegmentCheck], float]) -> Callable[[Row], list[Measured]]:
    return lambda row: [
        Measured(unit.num_values, value(unit)) for unit in row if isinstance(unit, SegmentCheck)
    ]


def _of_blocks(value: Callable[[TokenBlock], float]) -> Callable[[Row], list[Measured]]:
    return lambda row: [
        Measured(unit.num_tokens, value(unit)) for unit in row if isinstance(unit, TokenBlock)
    ]


STATISTICS = {
    "mismatches": _of_segments(lambda segment: segment.wrong_points),
    "mantissas": _of_segments(lambda segment: segment.mantissa_bounded),
    "logprobs": _of_blocks(lambda block: block.logprob_gap),
    "draws": _of_blocks(lambda block: block.draw_root),
}
"""Functions that measure the units of a row: the segments of its proofs, or its blocks of tokens."""
OF_TOKENS = ("logprobs", "draws")


def noise_scores(rows: Sequence[Row], noise: Noise, prompts: Sequence[int] | None = None) -> list[Score]:
    """Returns the scores of each statistic in the calibration: over all rows, of the worst row, and of the worst unit.

    The list is empty if no unit can be tested. `prompts` gives each row's prompt number; without it every row has its own.
    """
    numbers = range(len(rows)) if prompts is None else prompts
    found: list[Score] = []
    for name, measure in STATISTICS.items():
        calibrated = calibrated_statistic(noise, name)
        if calibrated is not None:
            measured = [
                (number, prompt, [unit for unit in measure(row) if calibrated.tests(unit.size)])
                for number, (prompt, row) in enumerate(zip(numbers, rows, strict=True))
            ]
            found += _scores_of(calibrated, [one for one in measured if one[2]])
    return found


@dataclass(frozen=True, slots=True)
class CalibratedStatistic:
    """One statistic of a calibration."""

    name: str
    sizes: Sequence[int]
    honest: Statistic

    def moments(self, size: int) -> Moments:
        """Returns mean and variance of honest units of a size."""
        return self.honest.by_size[size_class(self.sizes, size)]

    def tests(self, size: int) -> bool:
        """Returns whether the calibration has enough units of this size to test one."""
        known = self.sizes[0] / 2 < size <= self.sizes[-1]
        return known and self.moments(size).segments >= MIN_SEGMENTS

    def variance(self, size: int) -> float:
        """Returns the honest variance of a unit, at least the square of SPREAD_FLOOR."""
        return max(self.moments(size).variance, SPREAD_FLOOR[self.name] ** 2)


def calibrated_statistic(noise: Noise, name: str) -> CalibratedStatistic | None:
    """Returns a statistic of the calibration, or None if it was not measured."""
    honest: Statistic | None = getattr(noise, name)
    sizes = noise.token_sizes if name in OF_TOKENS else noise.sizes
    return None if honest is None else CalibratedStatistic(name, sizes, honest)


def judges_alone(noise: Noise | None, name: str, size: int) -> bool:
    """Returns whether the calibration judges single units of a size. If not, the run's tolerances do."""
    calibrated = None if noise is None else calibrated_statistic(noise, name)
    return calibrated is not None and calibrated.honest.alone is not None and calibrated.tests(size)


def _scores_of(
    calibrated: CalibratedStatistic, measured: Sequence[tuple[int, int, list[Measured]]]
) -> list[Score]:
    """Returns the scores of one statistic. `measured` has each row's number, prompt and units."""
    if not measured:
        return []
    sums = [_Sum.of(units, calibrated) for _, _, units in measured]
    by_prompt: dict[int, list[_Sum]] = defaultdict(list)
    for (_, prompt, _), of_row in zip(measured, sums, strict=True):
        by_prompt[prompt].append(of_row)
    name, score = calibrated.name, partial(_score, calibrated)
    found = [score("over all rows", list(map(_Sum.over, by_prompt.values())), num_rows=len(sums), looks=1)]
    worst = max(range(len(sums)), key=lambda index: _z([sums[index]], calibrated.honest))
    number = measured[worst][0]
    found.append(score(f"of row {number}", [sums[worst]], num_rows=1, looks=len(sums)))
    if calibrated.honest.alone is not None:
        places = [(row, part, unit) for row, _, units in measured for part, unit in enumerate(units)]
        row, part, unit = max(places, key=lambda place: _alone_z(place[2], calibrated))
        found.append(
            Score(
                statistic=name,
                where=f"of row {row}, part {part}",
                z=_alone_z(unit, calibrated),
                suspicious=outlier_bound(calibrated.honest.alone, SUSPICIOUS / len(places)),
                certain=outlier_bound(calibrated.honest.alone, OUTLIER / len(places)),
                mean=unit.value,
                honest_mean=calibrated.moments(unit.size).mean,
            )
        )
    return found


def _alone_z(unit: Measured, calibrated: CalibratedStatistic) -> float:
    return (unit.value - calibrated.moments(unit.size).mean) / math.sqrt(calibrated.variance(unit.size))


def size_class(sizes: Sequence[int], size: int) -> int:
    """Returns the index of the size class of a unit."""
    return min(bisect_left(sizes, size), len(sizes) - 1)


def bound(tail: Tail, rate: float) -> float:
    """Returns the z that honest work exceeds with probability `rate`, which is below 1 in 100."""
    first = max(tail.one_in_100, NORMAL_TAIL[0])
    least = ROW_STEP if tail.rows == 1 else NORMAL_TAIL[1] - NORMAL_TAIL[0]
    step = max(tail.one_in_1000 - tail.one_in_100, least)
    return first + step * math.log10(0.01 / rate)


def _nearest_tails(tails: Sequence[Tail], num_rows: int) -> tuple[Tail, Tail | None]:
    """Returns the tails of the nearest numbers of rows below and above; None beyond the last."""
    below = max((tail for tail in tails if tail.rows <= num_rows), key=lambda tail: tail.rows)
    above = min((tail for tail in tails if tail.rows >= num_rows), key=lambda tail: tail.rows, default=None)
    return below, above


def bound_for(tails: Sequence[Tail], num_rows: int, rate: float) -> float:
    """Returns `bound` for any number of rows: the wider of the two nearest tails.

    Beyond the last tail it grows with the square root, like the z of a pair of machines that is slightly off in every row.
    """
    below, above = _nearest_tails(tails, num_rows)
    if above is None:
        return bound(below, rate) * math.sqrt(num_rows / below.rows)
    return max(bound(below, rate), bound(above, rate))


def standard_score(tails: Sequence[Tail], num_rows: int, z: float) -> float:
    """Returns z in units of the honest spread of submissions with this many rows, for sums over many submissions.

    The spread is that of the pair of machines with the widest tail, so that 1 in 100 of its honest submissions exceed 2.326. Where the
    tail is narrow for its distance from 0, the pair is off in every submission by about the same amount, and that is
    subtracted: it would otherwise add up.
    """
    below, above = _nearest_tails(tails, num_rows)
    if above is None:
        return _standard(below, z / math.sqrt(num_rows / below.rows))
    return min(_standard(below, z), _standard(above, z))


def _standard(tail: Tail, z: float) -> float:
    """Returns the score by one tail, from the mean and spread of a normal distribution with the same two values."""
    one_in_100 = max(tail.one_in_100, NORMAL_TAIL[0] / NARROWEST)
    spread = (tail.one_in_1000 - tail.one_in_100) / (NORMAL_TAIL[1] - NORMAL_TAIL[0])
    offset = max(0.0, one_in_100 - NORMAL_TAIL[0] * max(1.0, spread))
    return (z - offset) * NORMAL_TAIL[0] / (one_in_100 - offset)


def outlier_bound(tail: Tail, rate: float, *, num_rows: int = 1) -> float:
    """Returns the z of a sum over `num_rows` that its worst row alone exceeds with probability `rate`."""
    first = max(tail.one_in_100, NORMAL_TAIL[0])
    factor = max(tail.one_in_1000 / first, OUTLIER_FACTOR)
    z: float = first * factor ** max(0.0, math.log10(0.01 * num_rows / rate)) / math.sqrt(num_rows)
    return z


class _Sum(NamedTuple):
    """A statistic summed over units."""

    num_units: int
    total: float
    honest: float
    variance: float

    @classmethod
    def of(cls, units: Sequence[Measured], calibrated: CalibratedStatistic) -> "_Sum":
        return cls(
            num_units=len(units),
            total=sum(unit.value for unit in units),
            honest=sum(calibrated.moments(unit.size).mean for unit in units),
            variance=sum(calibrated.variance(unit.size) for unit in units),
        )

    @classmethod
    def over(cls, parts: Iterable["_Sum"]) -> "_Sum":
        return cls(*map(sum, zip(*parts, strict=True)))


def _z(prompts: Sequence[_Sum], honest: Statistic) -> float:
    variance = honest.inflation * sum(one.variance for one in prompts)
    variance += honest.prompt_variance * sum(one.num_units**2 for one in prompts)
    return sum(one.total - (1 + MARGIN) * one.honest for one in prompts) / math.sqrt(variance)


def _score(
    calibrated: CalibratedStatistic, where: str, prompts: Sequence[_Sum], *, num_rows: int, looks: int
) -> Score:
    """Returns the score of some sums. `looks` is the number of rows this is the worst of; they share the rate."""
    found, tails = _Sum.over(prompts), calibrated.honest.tails
    z = _z(prompts, calibrated.honest)
    return Score(
        statistic=calibrated.name,
        where=where,
        z=z,
        suspicious=max(
            bound_for(tails, num_rows, SUSPICIOUS / looks),
            outlier_bound(tails[0], SUSPICIOUS / looks, num_rows=num_rows),
        ),
        certain=max(
            bound_for(tails, num_rows, CERTAIN / looks),
            outlier_bound(tails[0], OUTLIER / looks, num_rows=num_rows),
        ),
        mean=found.total / found.num_units,
        honest_mean=found.honest / found.num_units,
        standard=standard_score(tails, num_rows, z) if looks == 1 else None,
    )
