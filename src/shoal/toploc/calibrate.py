"""Measures honest noise from checks of honest proofs.

A row's segments share its prompt and its length, and the samples of a prompt share the prompt. Only prompts vary
independently, so submissions of several rows are resampled from the measured prompts, with replacement, and from one pair of
machines at a time: one pair's noise may be slightly higher than another's in every row. The widest tail of all pairs is used.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from shoal.toploc.decision import MIN_SEGMENTS, OF_TOKENS, SPREAD_FLOOR, STATISTICS, Measured, Row, size_class
from shoal.toploc.segments import SegmentCheck
from shoal.wire.proof_noise import Moments, Noise, Statistic, Tail

MIN_ROWS = 200
"""Rows needed to estimate what 1 in 100 exceeds."""
TAIL_ROWS = (1, 4, 16, 64, 256)
NUM_DRAWS = 20_000
"""Submissions resampled for each tail."""

Floats = npt.NDArray[np.float64]
Units = Sequence[Measured]
"""One statistic of the units of one row."""


def measure_noise(
    pairs: Mapping[str, Sequence[Row]],
    *,
    model: str,
    compute_dtype: Literal["float32", "bfloat16"],
    prompts: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
) -> Noise:
    """Measures the noise of honest rows: of proof segments and, for log-probs and draws, of blocks of tokens.

    `pairs` has the rows by a name for the pair of proving and checking machine. `prompts` has each row's prompt number;
    without it every row has its own. Raises ValueError if a pair has too few rows.
    """
    grouped: dict[str, list[list[Row]]] = {}
    for name, rows in pairs.items():
        numbers = range(len(rows)) if prompts is None else prompts[name]
        grouped[name] = _by_prompt(rows, numbers)
        count = sum(any(isinstance(unit, SegmentCheck) for unit in row) for row in rows)
        if count < MIN_ROWS:
            raise ValueError(f"{name}: {count} rows have a proof, need {MIN_ROWS} or more; generate more")
    rng = np.random.default_rng(seed)
    statistics: dict[str, Statistic] = {}
    sizes: dict[bool, tuple[int, ...]] = {False: (), True: ()}
    for name, measure in STATISTICS.items():
        tables = [[[measure(row) for row in rows] for rows in groups] for groups in grouped.values()]
        found = [unit.size for groups in tables for rows in groups for row in rows for unit in row]
        if found:
            sizes[name in OF_TOKENS] = _size_classes(found)
            statistics[name] = _measure(tables, name, sizes[name in OF_TOKENS], rng)
    return Noise(
        model=model,
        compute_dtype=compute_dtype,
        measured=tuple(f"{name}: {sum(map(len, groups))} rows" for name, groups in grouped.items()),
        sizes=sizes[False],
        token_sizes=sizes[True],
        mismatches=statistics["mismatches"],
        mantissas=statistics["mantissas"],
        logprobs=statistics.get("logprobs"),
        draws=statistics.get("draws"),
    )


def _by_prompt(rows: Sequence[Row], numbers: Sequence[int]) -> list[list[Row]]:
    groups: dict[int, list[Row]] = {}
    for row, number in zip(rows, numbers, strict=True):
        if row:
            groups.setdefault(number, []).append(row)
    return list(groups.values())


def _size_classes(num_values: Sequence[int]) -> tuple[int, ...]:
    """Returns the upper ends of size classes that double, without empty classes."""
    ordered = np.sort(np.asarray(num_values))
    ends: list[int] = []
    end, largest = int(ordered[0]), int(ordered[-1])
    below = 0
    while below < len(ordered):
        end = min(end, largest)
        count = int(np.searchsorted(ordered, end, side="right"))
        if count > below:
            ends.append(end)
            below = count
        end *= 2
    return tuple(ends)


def _measure(
    pairs: Sequence[Sequence[Sequence[Units]]], name: str, sizes: Sequence[int], rng: np.random.Generator
) -> Statistic:
    floor = SPREAD_FLOOR[name]
    by_class: list[list[float]] = [[] for _ in sizes]
    for unit in (unit for groups in pairs for rows in groups for row in rows for unit in row):
        by_class[size_class(sizes, unit.size)].append(unit.value)
    moments = [
        Moments(
            segments=len(array),
            mean=float(array.mean()),
            variance=float(array.var()),
            largest=float(array.max()),
        )
        for array in (np.asarray(values, dtype=np.float64) for values in by_class)
    ]

    def of_units(row: Units) -> list[tuple[float, float]]:
        """Returns excess and variance of the units that are tested."""
        of = [moments[size_class(sizes, unit.size)] for unit in row]
        return [
            (unit.value - moment.mean, max(moment.variance, floor**2))
            for unit, moment in zip(row, of, strict=True)
            if moment.segments >= MIN_SEGMENTS
        ]

    def sums(row: Units) -> tuple[float, float, float]:
        """Returns the summed excess, summed variance and number of the units that are tested."""
        tested = of_units(row)
        return (
            sum(excess for excess, _ in tested),
            sum(variance for _, variance in tested),
            float(len(tested)),
        )

    tables = [[np.array([sums(row) for row in rows]) for rows in groups] for groups in pairs]
    inflation, prompt_variance = _spreads([table for groups in tables for table in groups])
    tails = tuple(
        _widest([_tail(groups, inflation, prompt_variance, num_rows, rng) for groups in tables])
        for num_rows in TAIL_ROWS
    )
    alone = [
        [
            excess / math.sqrt(variance)
            for rows in groups
            for row in rows
            for excess, variance in of_units(row)
        ]
        for groups in pairs
    ]
    return Statistic(
        by_size=tuple(moments),
        inflation=inflation,
        prompt_variance=prompt_variance,
        tails=tails,
        alone=_widest([_quantiles(np.array(z), 1) for z in alone]),
    )


def _spreads(groups: Sequence[Floats]) -> tuple[float, float]:
    """Returns the inflation of a row's variance over independent segments, and the variance shared by a prompt's rows.

    Squared excesses of rows sum to inflation * variance + common * count^2, and so do those of whole prompts. The difference of
    both sums gives `common`, and then the first gives the inflation.
    """
    rows_R3 = np.concatenate(groups)
    prompts_P3 = np.array([group.sum(axis=0) for group in groups])
    of_rows, of_prompts = np.square(rows_R3[:, 0]).sum(), np.square(prompts_P3[:, 0]).sum()
    counts_of_rows, counts_of_prompts = np.square(rows_R3[:, 2]).sum(), np.square(prompts_P3[:, 2]).sum()
    more = counts_of_prompts - counts_of_rows
    common = max(0.0, float((of_prompts - of_rows) / more)) if more > 0 else 0.0
    inflation = max(1.0, float((of_rows - common * counts_of_rows) / rows_R3[:, 1].sum()))
    return inflation, common


def _tail(
    groups: Sequence[Floats],
    inflation: float,
    prompt_variance: float,
    num_rows: int,
    rng: np.random.Generator,
) -> Tail:
    if num_rows == 1:
        of_P3 = np.concatenate(groups)
        drawn = np.arange(len(of_P3))[:, None]
    else:
        of_P3 = np.array([group.sum(axis=0) for group in groups])
        per_prompt = sum(map(len, groups)) / len(groups)
        drawn = rng.integers(0, len(groups), size=(NUM_DRAWS, max(1, round(num_rows / per_prompt))))
    excess, variance, count = (of_P3[:, column][drawn] for column in range(3))
    spread = inflation * variance.sum(axis=1) + prompt_variance * np.square(count).sum(axis=1)
    z = excess.sum(axis=1)[spread > 0] / np.sqrt(spread[spread > 0])
    return _quantiles(z, num_rows)


def _quantiles(z: Floats, num_rows: int) -> Tail:
    one_in_100, one_in_1000 = (float(q) for q in np.quantile(z, [0.99, 0.999]))
    assert math.isfinite(one_in_1000)
    return Tail(rows=num_rows, one_in_100=one_in_100, one_in_1000=one_in_1000)


def _widest(tails: Sequence[Tail]) -> Tail:
    return Tail(
        rows=tails[0].rows,
        one_in_100=max(tail.one_in_100 for tail in tails),
        one_in_1000=max(tail.one_in_1000 for tail in tails),
    )
