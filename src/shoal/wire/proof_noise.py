"""Honest noise: how far apart two sound computations of the same proofs lie, as measured before a run.

Part of a run's public terms, so that anybody can repeat a decision. `shoal toploc calibrate` writes it; docs/toploc.md says
how it is used. A file of it is this record as JSON.
"""

from typing import Literal

from pydantic import Field, model_validator

from shoal.wire.record import Count, Record


class Moments(Record):
    """Of one statistic, over honest segments (or blocks of tokens) of one size class."""

    segments: Count
    mean: float = Field(ge=0)
    variance: float = Field(ge=0)
    largest: float = Field(ge=0)


class Tail(Record):
    """Of the z-score of honest submissions of this many rows: the values that 1 in 100 and 1 in 1,000 exceed."""

    rows: int = Field(ge=1)
    one_in_100: float
    one_in_1000: float


class Statistic(Record):
    """Its units are the segments of proofs, or blocks of as many tokens."""

    by_size: tuple[Moments, ...] = Field(min_length=1)
    inflation: float = Field(ge=1)
    """How much more the sum over a row varies than independent segments would."""
    prompt_variance: float = Field(default=0.0, ge=0)
    """Of what the segments of one prompt's samples have in common, beyond that."""
    tails: tuple[Tail, ...] = Field(min_length=1)
    """By rising number of rows, the first of 1."""
    alone: Tail | None = None
    """Of single units. Without it, as in older files, the run's tolerances judge them."""


class Noise(Record):
    """What honest work of one model and dtype looks like to a validator."""

    format: Literal["shoal/noise/1"] = "shoal/noise/1"
    model: str
    compute_dtype: Literal["float32", "bfloat16"]
    temperature: float = Field(default=1.0, gt=0)
    """At which rows were drawn: a colder run has larger log-prob errors. Older files, which do not say, were made at 1."""
    topk: int = Field(default=128, ge=1)
    segment_tokens: int = Field(default=32, ge=1)
    """Of the proofs."""
    measured: tuple[str, ...]
    """Which machine proved and which checked, with how many rows: one line each."""
    sizes: tuple[int, ...] = Field(min_length=1)
    """Values of the largest segment of each size class, rising. A class begins above the one before it, the first above half of its
    own. Segments outside of all, or of a class with fewer than 30 measured, are not tested."""
    mismatches: Statistic
    """Exponents and signs that differ, of the top-k."""
    mantissas: Statistic
    """Mean mantissa error where they agree, no point counting for more than 8."""
    token_sizes: tuple[int, ...] = ()
    """Classes as above, of blocks of tokens. Empty in older files: the run's tolerances judge log-probs and draws then."""
    logprobs: Statistic | None = None
    """Mean |claimed - recomputed| log-prob of a block."""
    draws: Statistic | None = None
    """Mean root of the distance of a block's uniforms from the intervals of its tokens."""

    @model_validator(mode="after")
    def _classes_fit(self) -> "Noise":
        for statistic in (self.mismatches, self.mantissas):
            _check_statistic(statistic, self.sizes)
        for statistic in filter(None, (self.logprobs, self.draws)):
            _check_statistic(statistic, self.token_sizes)
        return self


def _check_statistic(statistic: Statistic, sizes: tuple[int, ...]) -> None:
    if len(statistic.by_size) != len(sizes):
        raise ValueError(f"{len(statistic.by_size)} moments for {len(sizes)} sizes; calibrate again")
    rows = [tail.rows for tail in statistic.tails]
    if rows[0] != 1 or rows != sorted(set(rows)):
        raise ValueError(f"tails are for {rows} rows, must rise from 1; calibrate again")
    if list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes {sizes} must rise; calibrate again")
