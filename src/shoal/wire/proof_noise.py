"""Honest noise: how far two correct computations of the same proofs differ, measured before a run.

It is part of a run's public terms, so that anybody can repeat a decision. `shoal toploc calibrate` writes it as a JSON file
of this record; docs/toploc.md says how it is used.
"""

from bisect import bisect_left
from typing import Literal

from pydantic import Field, model_validator

from shoal.wire.record import Count, Record

RISEN = 1.125
"""Mean of a statistic, relative to the calibrated one, from which noise has risen: half of the margin of sums (toploc/decision.py)."""


class Moments(Record):
    """Moments of one statistic over honest segments (or blocks of tokens) of one size class."""

    segments: Count
    mean: float = Field(ge=0)
    variance: float = Field(ge=0)
    largest: float = Field(ge=0)


class Tail(Record):
    """Tail of the z-scores of honest submissions with this many rows: the values that 1 in 100 and 1 in 1,000 exceed."""

    rows: int = Field(ge=1)
    one_in_100: float
    one_in_1000: float


class Statistic(Record):
    """The calibration of one statistic. Its units are segments of proofs, or blocks of as many tokens."""

    by_size: tuple[Moments, ...] = Field(min_length=1)
    inflation: float = Field(ge=1)
    """Variance of the sum over a row, divided by the variance that independent segments would have."""
    prompt_variance: float = Field(default=0.0, ge=0)
    """Additional variance that all segments of one prompt's samples share."""
    tails: tuple[Tail, ...] = Field(min_length=1)
    """Tails by increasing number of rows, starting with 1 row."""
    alone: Tail | None = None
    """Tail of single units. Older files lack it; then the run's tolerances judge single units."""


class PairNoise(Record):
    """The noise of rows of one compute class, checked by another (requirements.ComputeClass, as text)."""

    made_by: str = Field(max_length=200)
    checked_by: str = Field(max_length=200)
    noise: "Noise"


class Noise(Record):
    """The differences that a validator measures on honest work of one model and dtype."""

    format: Literal["shoal/noise/1"] = "shoal/noise/1"
    model: str
    compute_dtype: Literal["float32", "bfloat16"]
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the measured rows: a lower temperature gives larger log-prob errors. Older files lack it and were made at 1."""
    topk: int = Field(default=128, ge=1)
    segment_tokens: int = Field(default=32, ge=1)
    """Tokens per segment of the proofs."""
    measured: tuple[str, ...]
    """One line per measurement: the machine that proved, the machine that checked, the number of rows."""
    sizes: tuple[int, ...] = Field(min_length=1)
    """Upper bounds of the size classes, in values per segment, increasing. A class begins above the bound before it; the first
    one begins above half of its own bound. Segments outside of all classes, or in a class with fewer than 30 measured
    segments, are not tested."""
    mismatches: Statistic
    """Number of top-k values whose exponents or signs differ."""
    mantissas: Statistic
    """Mean mantissa error of the values whose exponents and signs agree; each error is capped at 8."""
    token_sizes: tuple[int, ...] = ()
    """Size classes of blocks of tokens, as in `sizes`. Empty in older files: then the run's tolerances judge log-probs and draws."""
    logprobs: Statistic | None = None
    """Mean |claimed - recomputed| log-prob of a block."""
    draws: Statistic | None = None
    """Mean square root of the distance between a block's uniforms and the intervals of its tokens."""

    pairs: tuple[PairNoise, ...] = ()
    """The noise of single pairs of compute classes. The other fields are for all of them together, with the widest tails."""

    other_temperatures: tuple["Noise", ...] = ()
    """The same measurements at the other temperatures of a run, whose tasks or evaluations have their own."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures that were measured."""
        return (self.temperature, *(one.temperature for one in self.other_temperatures))

    def at(self, temperature: float) -> "Noise":
        """Returns the noise of rows that were sampled at one of `temperatures`."""
        return {one.temperature: one for one in (self, *self.other_temperatures)}[temperature]

    def of_pair(self, made_by: str, checked_by: str) -> "Noise | None":
        """Returns the noise of a pair of compute classes, or None if it was not measured."""
        for pair in self.pairs:
            if (pair.made_by, pair.checked_by) == (made_by, checked_by):
                return pair.noise
        return None

    def covers(self, made_by: str) -> bool:
        """Returns whether rows of a compute class were measured; also True if the file does not tell classes apart."""
        return not self.pairs or any(pair.made_by == made_by for pair in self.pairs)

    def rise_since(self, earlier: "Noise") -> dict[str, float]:
        """Returns, for each statistic, the mean over this calibration's units as a multiple of what the earlier one expects of them."""
        found = {}
        for name in ("mismatches", "mantissas", "logprobs", "draws"):
            now: Statistic | None = getattr(self, name)
            then: Statistic | None = getattr(earlier, name)
            if now is None or then is None:
                continue
            of_tokens = name in ("logprobs", "draws")
            sizes = (self.token_sizes, earlier.token_sizes) if of_tokens else (self.sizes, earlier.sizes)
            measured = expected = 0.0
            for size, moments in zip(sizes[0], now.by_size, strict=True):
                before = then.by_size[min(bisect_left(sizes[1], size), len(sizes[1]) - 1)]
                measured += moments.segments * moments.mean
                expected += moments.segments * before.mean
            found[name] = measured / expected if expected else 1.0
        return found

    @model_validator(mode="after")
    def _classes_fit(self) -> "Noise":
        for statistic in (self.mismatches, self.mantissas):
            _check_statistic(statistic, self.sizes)
        for statistic in filter(None, (self.logprobs, self.draws)):
            _check_statistic(statistic, self.token_sizes)
        return self


class LaterNoise(Record):
    """A calibration that was repeated during the run, because the model has changed since the one before."""

    from_version: Count
    """The first version whose work it judges."""
    measured: Count | None = None
    """The version that it was measured with; None: `from_version`. Measuring takes as long as some versions do."""
    moved: float = Field(ge=0)
    """How far that version is from the weights of the calibration before, relative to their norm."""
    noise: Noise

    @property
    def measured_version(self) -> int:
        """Returns the version that it was measured with."""
        return self.from_version if self.measured is None else self.measured


class NoiseDoubt(Record):
    """Why the run's calibration should be repeated: recent work is further off than it expects."""

    version: Count
    """The newest version whose work was doubtful."""
    submissions: Count
    """Doubtful submissions since the newest calibration that could be of noise. 0: only the mean has risen."""
    ratio: float
    """The largest mean of a proof's statistic in doubtful work, or the recent mean of accepted work, relative to the calibrated mean."""


def _check_statistic(statistic: Statistic, sizes: tuple[int, ...]) -> None:
    if len(statistic.by_size) != len(sizes):
        raise ValueError(f"{len(statistic.by_size)} moments for {len(sizes)} sizes; calibrate again")
    rows = [tail.rows for tail in statistic.tails]
    if rows[0] != 1 or rows != sorted(set(rows)):
        raise ValueError(f"tails are for {rows} rows; they must increase from 1; calibrate again")
    if list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes {sizes} must increase; calibrate again")
