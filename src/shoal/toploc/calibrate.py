"""Honest noise from honest proofs.

Rows are what varies independently, so spreads and tails come from whole rows: a row's segments share its prompt and its
length. Submissions of several rows are drawn from the measured rows, with replacement, and only from rows of one pair of
machines: a pair's noise may lie a little higher than another's in all rows at once. The widest pair's tail counts.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.toploc.decision import SPREAD_FLOOR, STATISTICS, size_class
from shoal.toploc.verify import SegmentCheck
from shoal.wire.noise import Moments, Noise, Statistic, Tail

MIN_ROWS = 200
"""Fewer say nothing about 1 in 100."""
MIN_SEGMENTS = 30
"""A size class with fewer joins the next larger one."""
TAIL_ROWS = (1, 4, 16, 64)
NUM_DRAWS = 20_000
"""Submissions drawn for each tail."""

Floats = npt.NDArray[np.float64]
Row = Sequence[SegmentCheck]


def measure_noise(
    pairs: Mapping[str, Sequence[Row]],
    *,
    model: str,
    compute_dtype: Literal["float32", "bfloat16"],
    seed: int = 0,
) -> Noise:
    """What honest rows say about honest rows; `pairs` has them by which machine proved and which checked, in words.

    ValueError if one pair has too few.
    """
    proven = {name: [row for row in rows if row] for name, rows in pairs.items()}
    for name, rows in proven.items():
        if len(rows) < MIN_ROWS:
            raise ValueError(f"{name}: {len(rows)} rows have a proof, need {MIN_ROWS} or more; generate more")
    sizes = _size_classes([segment.num_values for rows in proven.values() for row in rows for segment in row])
    rng = np.random.default_rng(seed)
    statistics = {name: _measure(list(proven.values()), name, sizes, rng) for name in STATISTICS}
    return Noise(
        model=model,
        compute_dtype=compute_dtype,
        measured=tuple(f"{name}: {len(rows)} rows" for name, rows in proven.items()),
        sizes=sizes,
        mismatches=statistics["mismatches"],
        mantissas=statistics["mantissas"],
    )


def _size_classes(num_values: Sequence[int]) -> tuple[int, ...]:
    """Upper ends of classes that double in size, each with segments enough to know its mean and spread."""
    largest = max(num_values)
    ends: list[int] = []
    count = 0
    end = min(num_values)
    counts = np.sort(np.asarray(num_values))
    while True:
        below = int(np.searchsorted(counts, end, side="right"))
        if below - count >= MIN_SEGMENTS and end < largest:
            ends.append(end)
            count = below
        if end >= largest:
            break
        end = min(2 * end, largest)
    if ends and len(counts) - count < MIN_SEGMENTS:
        ends.pop()
    return (*ends, largest)


def _measure(
    pairs: Sequence[Sequence[Row]], name: str, sizes: Sequence[int], rng: np.random.Generator
) -> Statistic:
    value, floor = STATISTICS[name], SPREAD_FLOOR[name]
    by_class: list[list[float]] = [[] for _ in sizes]
    for row in (row for rows in pairs for row in rows):
        for segment in row:
            by_class[size_class(sizes, segment.num_values)].append(value(segment))
    moments = [_moments(values) for values in by_class]

    def sums(row: Row) -> tuple[float, float]:
        of = [moments[size_class(sizes, segment.num_values)] for segment in row]
        excess = sum(value(segment) - moment.mean for segment, moment in zip(row, of, strict=True))
        return excess, sum(max(moment.variance, floor**2) for moment in of)

    tables = [np.array([sums(row) for row in rows]) for rows in pairs]
    excess_R, variance_R = np.concatenate(tables).T
    inflation = max(1.0, float(np.square(excess_R).sum() / variance_R.sum()))
    tails = tuple(
        _widest([_tail(table[:, 0], table[:, 1] * inflation, num_rows, rng) for table in tables])
        for num_rows in TAIL_ROWS
    )
    return Statistic(by_size=tuple(moments), inflation=inflation, tails=tails)


def _moments(values: Sequence[float]) -> Moments:
    array = np.asarray(values, dtype=np.float64)
    return Moments(
        segments=len(array),
        mean=float(array.mean()),
        variance=float(array.var()),
        largest=float(array.max()),
    )


def _tail(excess_R: Floats, variance_R: Floats, num_rows: int, rng: np.random.Generator) -> Tail:
    if num_rows == 1:
        z = excess_R / np.sqrt(variance_R)
    else:
        drawn = rng.integers(0, len(excess_R), size=(NUM_DRAWS, num_rows))
        z = excess_R[drawn].sum(axis=1) / np.sqrt(variance_R[drawn].sum(axis=1))
    one_in_100, one_in_1000 = (float(q) for q in np.quantile(z, [0.99, 0.999]))
    assert math.isfinite(one_in_1000)
    return Tail(rows=num_rows, one_in_100=one_in_100, one_in_1000=one_in_1000)


def _widest(tails: Sequence[Tail]) -> Tail:
    return Tail(
        rows=tails[0].rows,
        one_in_100=max(tail.one_in_100 for tail in tails),
        one_in_1000=max(tail.one_in_1000 for tail in tails),
    )
