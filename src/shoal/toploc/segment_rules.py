"""The rules for one segment of a proof, and `find_problem`, which applies them to whole rows: yes or no, and why."""

import math
from collections.abc import Sequence
from typing import Literal

from shoal.toploc.decision import judges_alone, noise_scores
from shoal.toploc.segments import SegmentCheck
from shoal.wire.proof_noise import Noise
from shoal.wire.run_spec import Tolerances, default_tolerances

MIN_CONTROLS = 32
"""Fewest control points that can decide."""
MIN_SPREAD = 8
"""Control points decide only in a segment that has this many times more values than its proof commits to."""
FEW_VALUES = 9.0
"""Widens the tolerances of a segment by this times K over its number of values: 3 times for one state of 576 values, 1.06 times
for 32 of them. With equal tolerances for all segments, 46 of 21,504 honest submissions in bfloat16 were refused
(bench/log/2026-11-toploc-h200-lies.md)."""
HALF = 0.5
"""Share of a segment's points with a wrong exponent or sign from which it is refused, whatever a calibration says: a calibration
divides its rate of false alarms among all segments, so in a submission of thousands no single segment is ever certain. The worst
of 335,213 honest segments in bfloat16 had 25 of 128 wrong, the worst with more than one state 20."""


def find_problem(
    rows: Sequence[Sequence[SegmentCheck]],
    *,
    compute_dtype: Literal["float32", "bfloat16"],
    noise: Noise | None = None,
) -> str | None:
    """Returns why the proofs of `verify_proofs` are not those of these states; None if they are.

    Without `noise`, every segment is compared with the default tolerances of `compute_dtype`, which find another model but not
    weights that were rounded. With it, the rows are judged as a whole by their distance from measured honest work.
    """
    tolerances = default_tolerances(compute_dtype)
    for number, row in enumerate(rows):
        for place, segment in enumerate(row):
            problem = forgery(segment, tolerances) or wrong_computation(segment, tolerances, noise)
            if problem is not None:
                return f"row {number}, proof {place}: {problem}"
    scores = [] if noise is None else noise_scores(rows, noise)
    return next((str(score) for score in scores if score.is_certain), None)


def forgery(segment: SegmentCheck, tolerances: Tolerances) -> str | None:
    """Returns in words why a segment's proof was not made from any hidden states; None if it may have been."""
    if segment.constant:
        return "it is one constant"
    if segment.control_hits > (allowed := allowed_hits(segment, tolerances)):
        return (
            f"it matches {segment.control_hits} of {segment.num_controls} control points that no proof commits to, "
            f"at most {allowed:.0f}"
        )
    return None


def allowed_hits(segment: SegmentCheck, tolerances: Tolerances) -> float:
    """Returns how many control points a proof of any states may match, whether or not they are the right states."""
    if segment.num_controls < MIN_CONTROLS or segment.num_values < MIN_SPREAD * segment.num_points:
        return math.inf
    # Another model's proof commits to other points, so also to some control points. That is no forgery.
    others = segment.num_controls * segment.num_points / segment.num_values
    return tolerances.control_hits * segment.num_controls / 128 + 3 * others


def wrong_computation(segment: SegmentCheck, tolerances: Tolerances, noise: Noise | None) -> str | None:
    """Returns in words which statistic is beyond its tolerance. If the calibration knows this size: that half the points are wrong."""
    factor, wrong = tolerance_factor(segment), segment.wrong_points
    known = judges_alone(noise, "mismatches", segment.num_values)
    allowed = factor * tolerances.exponent_mismatches
    allowed = max(HALF * segment.num_points, allowed) if known else allowed
    if wrong > allowed:
        return f"{wrong} of its exponents or signs differ, at most {allowed:.0f}"
    if known:
        return None
    if segment.mantissa_mean > (allowed := factor * tolerances.mantissa_mean):
        return f"mantissas are off by {segment.mantissa_mean:.3g} on average, at most {allowed:.3g}"
    if segment.mantissa_median > (allowed := factor * tolerances.mantissa_median):
        return f"half the mantissas are off by {segment.mantissa_median:g}, at most {allowed:.3g}"
    return None


def tolerance_factor(segment: SegmentCheck) -> float:
    """Returns the factor for a segment's tolerances: the top-k of few values includes small ones, which are noisier."""
    return 1 + FEW_VALUES * segment.num_points / segment.num_values
