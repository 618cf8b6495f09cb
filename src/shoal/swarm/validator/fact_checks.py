"""Checks of a submission after one prefill, on the facts that recompute.py found: forged proofs, early stops, computation, sampling,
log-probs. Pure: each passes in silence or raises Rejected with its code. What needs no model comes before, in form.py.

Their order gives each lie its own code, because one lie shows in several facts:
  - a proof that fits everywhere, or one that fits nowhere although every token is the draw of the leased model, was not
    made from states: forged, whatever else is wrong;
  - an answer whose last token alone does not fit was cut short;
  - if proofs do not fit, the model (or what it was shown) was another one, and its draws and log-probs follow from that;
  - if proofs fit and draws do not, the right model ran over tokens that somebody else chose;
  - if both fit, only the reported log-probs can still be wrong.
A submission that is off by more than honest work hardly ever is, but not by enough to be certain, is void.uncertain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.swarm.validator.format_checks import where
from shoal.toploc import Score, SegmentCheck, TokenBlock, judges_alone, noise_scores
from shoal.wire.codes import Rejected
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import Finish, Rollout
from shoal.wire.run_spec import Tolerances

MIN_CONTROLS = 32
"""Fewer control points decide nothing."""
MIN_SPREAD = 8
"""Control points decide only if a segment has this many times the values that a proof commits to."""
FEW_VALUES = 9.0
"""How much wider the tolerances of a segment are, times K over its number of values: 3 times for one state of 576, 1.06 for 32 of them.
With equal ones for all, 46 of 21,504 honest submissions in bfloat16 were refused (bench/log/2026-11-toploc-h200-lies.md)."""
SHORT_ROW = 3.0
"""How much wider the tolerance of a row's log-probs is, over the root of its tokens. With one for all, 186 of the same were refused."""
BLOCK_TOKENS = 32
"""Tokens whose log-probs and draws are judged together."""
NOWHERE = 0.9
"""Share of mismatching exponents, over all segments, at which a proof fits nowhere. Noise reaches 0.996."""
PUBLISHED, HALF = 38 / 128, 0.5
"""Shares of a segment's points whose exponent or sign differs: past the first, the published rule, no segment is accepted, past the second
every one is refused, whatever a calibration says. It shares its rate of false alarms among all segments, so in a submission of thousands none alone would
ever be certain. The worst of 335,213 honest segments in bfloat16 had 25 of 128, the worst of more than one state 20."""
FAR_DRAW = 0.3
"""Distance of a draw that honest hardware hardly ever gives (or 4 times the run's tolerance, if that is more): 1 in 100, 1,000 and 10,000 tokens
of SmolLM2-135M in bfloat16 are off by more than 0.022, 0.043 and 0.07, the worst by 0.17. Half the tokens that somebody chose are."""
FAR_DRAWS_SUSPICIOUS, FAR_DRAWS_CERTAIN, FAR_DRAWS_RATE = 1, 3, 1e-4
"""How many of them pass, how many without blame, and of what share of tokens more. Drawn on from the tail above, 1 in 1,000,000 honest tokens is so far off, at
temperature 0.6, where distances grow by as much, 1 in 100,000; no block of 338,177 honest ones (7 million tokens) can have held 4."""
IMPOSSIBLE = 1e-6
"""Probability of a token that no noise turns into a draw: one that is off by more than the run's tolerance counts as far off too."""
UNLIKELY_ENDS = 500
"""Of as many rows that end, one more may end on an unlikely token that is off its draw; none on an impossible one."""
MAX_SURPRISE = 8.0
"""Standard deviations. A sum over hundreds of tokens is nearly normal, over a few it is skewed: 8 leaves room for both."""
MIN_SURPRISE_VARIANCE = 4.0
"""Below it too little was left to chance to say anything."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What one prefill says about one row of T output tokens."""

    segments: tuple[SegmentCheck, ...]
    logprobs_T: npt.NDArray[np.float64]
    """Recomputed, under the sampling temperature."""
    draw_distance_T: npt.NDArray[np.float64]
    """How far each token's uniform lies outside the token's interval of the cumulative distribution; 0 inside."""
    surprise_T: npt.NDArray[np.float64]
    """-log p of each token minus its expectation under the model, the entropy: 0 on average for the model's own draws."""
    surprise_variance_T: npt.NDArray[np.float64]
    """Of the above, under the model."""


def check_facts(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None = None
) -> None:
    """All that the prefill decides, in the order the header explains. What the calibration knows it judges; what it does not
    know, or all without one, the tolerances judge."""
    check_forgery(rows, facts, tolerances)
    check_early_stop(rows, facts, tolerances)
    units = [units_of(row, fact) for row, fact in zip(rows, facts, strict=True)]
    scores = [] if noise is None else noise_scores(units, noise, [row.prompt_index for row in rows])
    check_computation(rows, facts, tolerances, noise)
    _check_certain(scores, ("mismatches", "mantissas"), "reject.wrong_computation")
    check_sampling(facts, tolerances, noise)
    _check_certain(scores, ("draws",), "reject.wrong_sampling")
    check_far_draws(facts, tolerances)
    check_surprise(facts)
    check_logprobs(rows, facts, tolerances, noise)
    _check_certain(scores, ("logprobs",), "reject.wrong_logprobs")
    # Again: a few chosen tokens before their ends would have hidden them above, and pass for noise.
    check_early_stop(rows, facts, tolerances, whatever_else=True)
    _check_suspicious(rows, facts, tolerances, scores)


def _check_suspicious(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, scores: Sequence[Score]
) -> None:
    """Further off than honest work hardly ever is, and not certain."""
    for score in scores:
        if score.is_suspicious:
            raise Rejected("void.uncertain", str(score))
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            allowed = max(tolerances.exponent_mismatches, PUBLISHED * segment.num_points) * _slack(segment)
            if (wrong := _wrong_points(segment)) > allowed:
                raise Rejected(
                    "void.uncertain",
                    f"{where(row)}, proof {number}: {wrong} of its exponents or signs differ, at most {allowed:.0f}",
                )
    far, count = _far_draws(facts, tolerances)
    if far > (allowed_draws := FAR_DRAWS_SUSPICIOUS + int(FAR_DRAWS_RATE * count)):
        raise Rejected("void.uncertain", _far_words(far, count, allowed_draws))


def _check_certain(scores: Sequence[Score], statistics: Sequence[str], code: str) -> None:
    for score in scores:
        if score.is_certain and score.statistic in statistics:
            raise Rejected(code, str(score))


def units_of(row: Rollout, fact: RowFacts) -> list[SegmentCheck | TokenBlock]:
    """What of a row is calibrated and tested: its proofs' segments, and its tokens in blocks."""
    gaps_T = logprob_gaps(row, fact)
    root_T = np.sqrt(fact.draw_distance_T)
    blocks = [
        TokenBlock(
            num_tokens=len(gaps),
            logprob_gap=float(gaps.mean()),
            draw_root=float(root_T[start : start + BLOCK_TOKENS].mean()),
        )
        for start in range(0, len(gaps_T), BLOCK_TOKENS)
        for gaps in [gaps_T[start : start + BLOCK_TOKENS]]
    ]
    return [*fact.segments, *blocks]


def check_forgery(rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    """A polynomial that was made up, to fit everywhere or anyhow."""
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            if segment.constant:
                raise Rejected("reject.forged_proof", f"{where(row)}: proof {number} is one constant")
            allowed = allowed_hits(segment, tolerances)
            if segment.control_hits > allowed:
                raise Rejected(
                    "reject.forged_proof",
                    f"{where(row)}: proof {number} fits {segment.control_hits} of {segment.num_controls} points "
                    f"that no proof commits to, at most {allowed:.0f}",
                )
    mismatches, points = _mismatches(facts)
    if points and mismatches > NOWHERE * points and _draws_fit(facts, tolerances):
        raise Rejected(
            "reject.forged_proof",
            f"the tokens are the leased model's own draws, but its proofs fit it nowhere: "
            f"{mismatches} of {points} exponents differ",
        )


def check_early_stop(
    rows: Sequence[Rollout],
    facts: Sequence[RowFacts],
    tolerances: Tolerances,
    *,
    whatever_else: bool = False,
) -> None:
    """An end token that the model found unlikely and the seed does not give, after tokens that it does give, or `whatever_else`
    came before it."""
    cut = [
        (row, fact)
        for row, fact in zip(rows, facts, strict=True)
        if row.finish is Finish.EOS
        and math.exp(fact.logprobs_T[-1]) < tolerances.eos_probability
        and fact.draw_distance_T[-1] > tolerances.draw
    ]
    if not cut:
        return
    row, fact = min(cut, key=lambda one: float(one[1].logprobs_T[-1]))
    num_ended = sum(row.finish is Finish.EOS for row in rows)
    allowed = min(_allowance(num_ended, tolerances), 1 + num_ended // UNLIKELY_ENDS)
    if len(cut) <= allowed and fact.logprobs_T[-1] > math.log(IMPOSSIBLE):
        return
    if not whatever_else and not _draws_fit(facts, tolerances, but_last=True):
        return
    raise Rejected(
        "reject.early_stop",
        f"{where(row)}: ends where the model gives the end token {math.exp(fact.logprobs_T[-1]):.2g} and the seed "
        f"another one; so in {len(cut)} of {num_ended} rows that end",
    )


def check_computation(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None = None
) -> None:
    """Segment by segment: those that no calibration knows by the tolerances, the others if half of their points are wrong."""
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            known = judges_alone(noise, "mismatches", segment.num_values)
            if too_far := (_half_wrong if known else _too_far)(segment, tolerances):
                mismatches, points = _mismatches(facts)
                raise Rejected(
                    "reject.wrong_computation",
                    f"{where(row)}, proof {number}: {too_far}; "
                    f"over all rows {mismatches} of {points} exponents differ",
                )


def check_sampling(facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None = None) -> None:
    """The tokens whose blocks no calibration knows."""
    distances = [fact.draw_distance_T[_unknown(noise, "draws", len(fact.draw_distance_T))] for fact in facts]
    misses = sum(int((distance_T > tolerances.draw).sum()) for distance_T in distances)
    count = sum(map(len, distances))
    allowed = _allowance(count, tolerances)
    if misses > allowed:
        raise Rejected(
            "reject.wrong_sampling",
            f"{misses} of {count} tokens are not what the lease's seed draws, at most {allowed}",
        )


def check_far_draws(facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    """Tokens that somebody chose, too few of them to show in a mean: their draws are where honest ones are not."""
    far, count = _far_draws(facts, tolerances)
    allowed = FAR_DRAWS_CERTAIN + int(FAR_DRAWS_RATE * count)
    if far > allowed:
        raise Rejected("reject.wrong_sampling", _far_words(far, count, allowed))


def check_surprise(facts: Sequence[RowFacts]) -> None:
    """Tokens that are no draw of this model at this temperature: likelier than its draws are, or less likely.

    It needs no seed, so it stands beside the draw check: each alone stops tokens that another model or sampler chose.
    """
    z = surprise_z(facts)
    if abs(z) > MAX_SURPRISE:
        raise Rejected(
            "reject.wrong_sampling",
            f"the tokens are {abs(z):.1f} standard deviations {'less' if z > 0 else 'more'} likely than draws of the "
            f"leased model, at most {MAX_SURPRISE:g}",
        )


def surprise_z(facts: Sequence[RowFacts]) -> float:
    """Summed surprise of a submission in standard deviations."""
    variance = sum(float(fact.surprise_variance_T.sum()) for fact in facts)
    total = sum(float(fact.surprise_T.sum()) for fact in facts)
    # A model that is sure of every token has no spread to measure by; the draw check still holds it to its tokens.
    return total / math.sqrt(max(variance, MIN_SURPRISE_VARIANCE))


def check_logprobs(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None = None
) -> None:
    """Over the submission, and row by row: an answer of a few tokens may be off by more than a long one. Tokens whose blocks a
    calibration knows are left to it."""
    gaps = [logprob_gaps(row, fact) for row, fact in zip(rows, facts, strict=True)]
    mean = float(np.concatenate(gaps).mean())
    if mean > tolerances.logprob and (noise is None or noise.logprobs is None):
        raise Rejected(
            "reject.wrong_logprobs",
            f"log-probs are off by {mean:.3g} on average over all rows, at most {tolerances.logprob:.3g}",
        )
    for row, gaps_T in zip(rows, gaps, strict=True):
        left_T = gaps_T[_unknown(noise, "logprobs", len(gaps_T))]
        if not len(left_T):
            continue
        gap, allowed = float(left_T.mean()), tolerances.logprob * (1 + SHORT_ROW / math.sqrt(len(left_T)))
        if gap > allowed:
            raise Rejected(
                "reject.wrong_logprobs",
                f"{where(row)}: log-probs are off by {gap:.3g} on average, at most {allowed:.3g}",
            )


def logprob_gaps(row: Rollout, fact: RowFacts) -> npt.NDArray[np.float64]:
    """|claimed - recomputed| of each token."""
    gaps_T: npt.NDArray[np.float64] = np.abs(np.asarray(row.logprobs, dtype=np.float64) - fact.logprobs_T)
    return gaps_T


def logprob_gap(row: Rollout, fact: RowFacts) -> float:
    """Mean |claimed - recomputed| over the row."""
    return float(logprob_gaps(row, fact).mean())


def evidence(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances
) -> dict[str, float | int | str]:
    """The numbers behind a verdict."""
    segments = [segment for fact in facts for segment in fact.segments]
    mismatches, _ = _mismatches(facts)
    misses, _ = _draw_misses(facts, tolerances)
    far, _ = _far_draws(facts, tolerances)
    return {
        "segments": len(segments),
        "exponent_mismatches_max": max((s.exponent_mismatches for s in segments), default=0),
        "exponent_mismatches_mean": mismatches / max(1, len(segments)),
        "mantissa_mean_max": max((s.mantissa_mean for s in segments), default=0.0),
        "mantissa_median_max": max((s.mantissa_median for s in segments), default=0.0),
        "sign_mismatches": sum(s.sign_mismatches for s in segments),
        "control_hits_max": max((s.control_hits for s in segments), default=0),
        "draw_misses": misses,
        "far_draws": far,
        "draw_distance_max": max(float(fact.draw_distance_T.max()) for fact in facts),
        "surprise_z": surprise_z(facts),
        "logprob_gap_max": max(logprob_gap(row, fact) for row, fact in zip(rows, facts, strict=True)),
    }


def allowed_hits(segment: SegmentCheck, tolerances: Tolerances) -> float:
    """Control points that a proof of some states may hit, be they the right ones or not."""
    if segment.num_controls < MIN_CONTROLS or segment.num_values < MIN_SPREAD * segment.num_points:
        return math.inf
    # Another model's proof commits to points anywhere, so also to some of ours. That is a wrong model, not a forgery.
    others = segment.num_controls * segment.num_points / segment.num_values
    return tolerances.control_hits * segment.num_controls / 128 + 3 * others


def _too_far(segment: SegmentCheck, tolerances: Tolerances) -> str | None:
    """The first statistic past its tolerance, in words."""
    slack, mismatches = _slack(segment), _wrong_points(segment)
    if mismatches > (allowed := slack * tolerances.exponent_mismatches):
        return f"{mismatches} of its exponents or signs differ, at most {allowed:.0f}"
    if segment.mantissa_mean > (allowed := slack * tolerances.mantissa_mean):
        return f"mantissas are off by {segment.mantissa_mean:.3g} on average, at most {allowed:.3g}"
    if segment.mantissa_median > (allowed := slack * tolerances.mantissa_median):
        return f"half the mantissas are off by {segment.mantissa_median:g}, at most {allowed:.3g}"
    return None


def _half_wrong(segment: SegmentCheck, tolerances: Tolerances) -> str | None:
    """The same where only that much is certain."""
    wrong = _wrong_points(segment)
    if wrong > (allowed := max(HALF * segment.num_points, _slack(segment) * tolerances.exponent_mismatches)):
        return f"{wrong} of its exponents or signs differ, at most {allowed:.0f}"
    return None


def _slack(segment: SegmentCheck) -> float:
    """The fewer values there are to choose the top-k from, the smaller are the last of them, and the noisier."""
    return 1 + FEW_VALUES * segment.num_points / segment.num_values


def _wrong_points(segment: SegmentCheck) -> int:
    """A flipped sign counts as a wrong exponent: the published rule looks past it, honest noise never makes one."""
    return segment.exponent_mismatches + segment.sign_mismatches


def _far_draws(facts: Sequence[RowFacts], tolerances: Tolerances) -> tuple[int, int]:
    """Draws too far off to be anybody's noise, and draws looked at."""
    distance_N = np.concatenate([fact.draw_distance_T for fact in facts])
    logprob_N = np.concatenate([fact.logprobs_T for fact in facts])
    far_N = distance_N > max(FAR_DRAW, 4 * tolerances.draw)
    far_N |= (distance_N > tolerances.draw) & (logprob_N < math.log(IMPOSSIBLE))
    return int(far_N.sum()), len(distance_N)


def _far_words(far: int, count: int, allowed: int) -> str:
    return f"{far} of {count} tokens are nowhere near what the lease's seed draws, at most {allowed}"


def _mismatches(facts: Sequence[RowFacts]) -> tuple[int, int]:
    """Mismatching exponents, and points compared, over the submission."""
    segments = [segment for fact in facts for segment in fact.segments]
    return sum(s.exponent_mismatches for s in segments), sum(s.num_points for s in segments)


def _unknown(noise: Noise | None, statistic: str, num_tokens: int) -> npt.NDArray[np.bool_]:
    """[T] the tokens that stand in blocks of a size that no calibration judges."""
    unknown_T = np.zeros(num_tokens, dtype=np.bool_)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, num_tokens - start)
        unknown_T[start : start + size] = not judges_alone(noise, statistic, size)
    return unknown_T


def _draw_misses(
    facts: Sequence[RowFacts], tolerances: Tolerances, *, but_last: bool = False
) -> tuple[int, int]:
    """Tokens that the seed does not give, and tokens looked at; `but_last` leaves out each row's last."""
    distances = np.concatenate([fact.draw_distance_T[: -1 if but_last else None] for fact in facts])
    return int((distances > tolerances.draw).sum()), len(distances)


def _draws_fit(facts: Sequence[RowFacts], tolerances: Tolerances, *, but_last: bool = False) -> bool:
    misses, count = _draw_misses(facts, tolerances, but_last=but_last)
    return misses <= _allowance(count, tolerances)


def _allowance(count: int, tolerances: Tolerances) -> int:
    """How many of `count` draws may miss. A share above 0 always allows one: small files are not held to fractions."""
    return max(1, int(tolerances.draw_misses * count)) if tolerances.draw_misses > 0 else 0
