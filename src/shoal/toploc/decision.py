"""One test over a whole submission: does it lie further off than honest noise does?

A unit is a segment of a proof, or a block of as many tokens. Its statistic minus the honest mean of its size class, summed over rows, in
units of its honest spread:

    z = sum (x - mean) / sqrt(inflation * sum variance + prompt variance * sum over prompts (number of units)^2)

Honest z stays small however many rows there are, while a lie that moves every segment a little grows with their root: weights
in 8 bits look honest in one segment and certain in sixty. Four statistics, two of proofs and two of tokens, each over the submission, over
its worst row and over its worst unit. Samples of one prompt share its noise, so they count for less than as many prompts.

The bound for a stated rate of false alarms comes from the honest tail, taken to fall by a factor of ten over each step
as wide as from 1 in 100 to 1 in 1,000. A normal tail falls faster, so this errs on the honest side. Single rows and units have a longer tail: it falls by ten
whenever z grows by a factor. A sum of few rows may be that of one such row, so it is allowed for.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shoal.toploc.segment_check import SegmentCheck
from shoal.wire.proof_noise import Moments, Noise, Statistic, Tail

CERTAIN = 1e-8
"""Chance that a sum over many rows calls honest work certain to be false. The tail is drawn on from what 1 in 1,000 exceed, so this is a
distance rather than a rate; every lie that proofs can show is further off by a factor of three."""
OUTLIER = 1e-6
"""Chance that a single honest row or unit does, whose tail is known better."""
OUTLIER_FACTOR = 1.6
"""How much further off the worst of ten times as many honest rows or units is, at least. Of 196,608 rows of SmolLM2-135M, 1 in 100 to 1 in
100,000 were off by 3.0, 4.4, 6.2 and 9.6 standard deviations, the worst by 16: no normal tail, now and then states are ill-conditioned."""
SUSPICIOUS = 3e-4
"""The same for merely suspicious."""
SPREAD_FLOOR = {"mismatches": 0.5, "mantissas": 0.01, "logprobs": 0.001, "draws": 0.003}
"""Standard deviation of a unit that is always allowed. In float32 hardly any two values differ, so a few hundred rows say
nothing about how often: one exponent that differs in one segment of a thousand is honest, and so is one mantissa of 128 that is
off by one, or a draw at the very edge of its interval."""
NORMAL_TAIL = (2.326, 3.090)
"""What 1 in 100 and 1 in 1,000 exceed of a normal z. A calibration of few rows may not promise less."""
ROW_STEP = 1.2
"""Nor for a single row less than this from one power of ten to the next: it counts few mismatches, and those are skewed."""
MIN_SEGMENTS = 30
"""A size class with fewer units says nothing about its mean and spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBlock:
    """Neighbouring tokens of an answer, as many as a segment has states, fewer at its end."""

    num_tokens: int
    logprob_gap: float
    """Mean |claimed - recomputed| log-prob."""
    draw_root: float
    """Mean root of a uniform's distance from its token's interval of the cumulative distribution, 0 inside. The root, because single
    honest draws lie far out: it takes the tail of an answer of two tokens from 22 standard deviations to 6."""


Unit = SegmentCheck | TokenBlock
Row = Sequence[Unit]


class Measured(NamedTuple):
    """One statistic of one unit."""

    size: int
    """Values of a segment, tokens of a block."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One z-score and what it is compared with."""

    statistic: str
    """A key of STATISTICS."""
    where: str
    """"over all rows", "of row 5" or "of row 5, part 0"."""
    z: float
    suspicious: float
    certain: float
    mean: float
    """Of the statistic, over the units tested."""
    honest_mean: float

    @property
    def is_certain(self) -> bool:
        return self.z > self.certain

    @property
    def is_suspicious(self) -> bool:
        return self.z > self.suspicious

    def __str__(self) -> str:
        return (
            f"{self.statistic} {self.where} average {self.mean:.3g}, honest work {self.honest_mean:.3g}: {self.z:.1f} "
            f"standard deviations too many, certain above {self.certain:.1f}"
        )


def mismatches(row: Row) -> list[Measured]:
    """A flipped sign counts as a wrong exponent: the published rule looks past it, honest noise never makes one."""
    return [
        Measured(unit.num_values, unit.exponent_mismatches + unit.sign_mismatches)
        for unit in row
        if isinstance(unit, SegmentCheck)
    ]


def mantissas(row: Row) -> list[Measured]:
    return [
        Measured(unit.num_values, unit.mantissa_bounded) for unit in row if isinstance(unit, SegmentCheck)
    ]


def logprobs(row: Row) -> list[Measured]:
    return [Measured(unit.num_tokens, unit.logprob_gap) for unit in row if isinstance(unit, TokenBlock)]


def draws(row: Row) -> list[Measured]:
    return [Measured(unit.num_tokens, unit.draw_root) for unit in row if isinstance(unit, TokenBlock)]


STATISTICS: dict[str, Callable[[Row], list[Measured]]] = {
    "mismatches": mismatches,
    "mantissas": mantissas,
    "logprobs": logprobs,
    "draws": draws,
}
OF_TOKENS = ("logprobs", "draws")


def noise_scores(rows: Sequence[Row], noise: Noise, prompts: Sequence[int] | None = None) -> list[Score]:
    """Each statistic that the calibration has, over all rows, over the worst one and over the worst unit. Empty if no row has
    a unit that can be tested.

    `prompts` numbers each row's prompt; without it every row is taken to have its own.
    """
    numbers = range(len(rows)) if prompts is None else prompts
    found: list[Score] = []
    for name, measure in STATISTICS.items():
        terms = terms_of(noise, name)
        if terms is not None:
            measured = [
                (number, prompt, [unit for unit in measure(row) if terms.tests(unit.size)])
                for number, (prompt, row) in enumerate(zip(numbers, rows, strict=True))
            ]
            found += _scores_of(terms, [one for one in measured if one[2]])
    return found


@dataclass(frozen=True, slots=True)
class Terms:
    """What one statistic is judged by."""

    name: str
    sizes: Sequence[int]
    honest: Statistic

    def moments(self, size: int) -> Moments:
        return self.honest.by_size[size_class(self.sizes, size)]

    def tests(self, size: int) -> bool:
        """Whether enough is known of units of that size."""
        known = self.sizes[0] / 2 < size <= self.sizes[-1]
        return known and self.moments(size).segments >= MIN_SEGMENTS

    def variance(self, size: int) -> float:
        return max(self.moments(size).variance, SPREAD_FLOOR[self.name] ** 2)


def terms_of(noise: Noise, name: str) -> Terms | None:
    """None if the calibration does not have this statistic."""
    honest: Statistic | None = getattr(noise, name)
    return (
        None
        if honest is None
        else Terms(name, noise.token_sizes if name in OF_TOKENS else noise.sizes, honest)
    )


def judges_alone(noise: Noise | None, name: str, size: int) -> bool:
    """Whether the calibration judges single units of that size; if not, tolerances have to."""
    terms = None if noise is None else terms_of(noise, name)
    return terms is not None and terms.honest.alone is not None and terms.tests(size)


def _scores_of(terms: Terms, measured: Sequence[tuple[int, int, list[Measured]]]) -> list[Score]:
    """`measured`: each row's number, its prompt and its units."""
    if not measured:
        return []
    sums = [_Sum.of(units, terms) for _, _, units in measured]
    by_prompt: dict[int, _Sum] = {}
    for (_, prompt, _), of_row in zip(measured, sums, strict=True):
        by_prompt[prompt] = by_prompt.get(prompt, _Sum()) + of_row
    name, score = terms.name, partial(_score, terms)
    found = [score("over all rows", list(by_prompt.values()), num_rows=len(sums), looks=1)]
    worst = max(range(len(sums)), key=lambda index: _z([sums[index]], terms.honest))
    number = measured[worst][0]
    found.append(score(f"of row {number}", [sums[worst]], num_rows=1, looks=len(sums)))
    if terms.honest.alone is not None:
        places = [(row, part, unit) for row, _, units in measured for part, unit in enumerate(units)]
        row, part, unit = max(places, key=lambda place: _alone_z(place[2], terms))
        found.append(
            Score(
                statistic=name,
                where=f"of row {row}, part {part}",
                z=_alone_z(unit, terms),
                suspicious=outlier_bound(terms.honest.alone, SUSPICIOUS / len(places)),
                certain=outlier_bound(terms.honest.alone, OUTLIER / len(places)),
                mean=unit.value,
                honest_mean=terms.moments(unit.size).mean,
            )
        )
    return found


def _alone_z(unit: Measured, terms: Terms) -> float:
    return (unit.value - terms.moments(unit.size).mean) / math.sqrt(terms.variance(unit.size))


def size_class(sizes: Sequence[int], size: int) -> int:
    return min(bisect_left(sizes, size), len(sizes) - 1)


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


def outlier_bound(tail: Tail, rate: float, *, num_rows: int = 1) -> float:
    """The z of a sum over `num_rows` that the worst of its rows alone exceeds with a chance of `rate`."""
    first = max(tail.one_in_100, NORMAL_TAIL[0])
    factor = max(tail.one_in_1000 / first, OUTLIER_FACTOR)
    z: float = first * factor ** max(0.0, math.log10(0.01 * num_rows / rate)) / math.sqrt(num_rows)
    return z


@dataclass(frozen=True, slots=True)
class _Sum:
    """A statistic added up over units."""

    count: int = 0
    total: float = 0.0
    honest: float = 0.0
    variance: float = 0.0

    @classmethod
    def of(cls, units: Sequence[Measured], terms: Terms) -> "_Sum":
        return cls(
            count=len(units),
            total=sum(unit.value for unit in units),
            honest=sum(terms.moments(unit.size).mean for unit in units),
            variance=sum(terms.variance(unit.size) for unit in units),
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


def _score(terms: Terms, where: str, prompts: Sequence[_Sum], *, num_rows: int, looks: int) -> Score:
    """`looks`: how many rows this was the worst of; the rate is shared among them."""
    found, tails = sum(prompts, _Sum()), terms.honest.tails
    return Score(
        statistic=terms.name,
        where=where,
        z=_z(prompts, terms.honest),
        suspicious=max(
            bound_for(tails, num_rows, SUSPICIOUS / looks),
            outlier_bound(tails[0], SUSPICIOUS / looks, num_rows=num_rows),
        ),
        certain=max(
            bound_for(tails, num_rows, CERTAIN / looks),
            outlier_bound(tails[0], OUTLIER / looks, num_rows=num_rows),
        ),
        mean=found.total / found.count,
        honest_mean=found.honest / found.count,
    )
