"""Checks of a submission after the forward pass, on the facts that recompute.py found. Each is pure and raises Rejected.

One lie shows in several facts, so the order of the checks gives each lie its own code:

    1 forged proof       a proof that matches everywhere, or one that matches nowhere although every token is the leased
                         model's own draw, was not made from hidden states
    2 early stop         only the last token of an answer does not match its draw: it was cut short
    3 wrong computation  proofs do not match: another model or another prompt; draws and log-probs then differ as well
    4 wrong sampling     proofs match and draws do not: the right model ran over tokens that were chosen otherwise
    5 wrong log-probs    only the reported log-probs differ
    6 uncertain          further off than honest work almost ever is, but not enough to be certain: void.uncertain

A calibration (`noise`) judges the segments and blocks of the sizes it knows; tolerances judge the rest, or all without one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.swarm.validator.format_checks import where
from shoal.toploc import Score, SegmentCheck, TokenBlock, judges_alone, noise_scores
from shoal.toploc.segment_rules import HALF, forgery, tolerance_factor, wrong_computation
from shoal.wire.codes import Rejected
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import Finish, Rollout
from shoal.wire.run_spec import Tolerances

BLOCK_TOKENS = 32
"""Tokens whose log-probs and draws are judged together."""
Evidence = dict[str, float | int | str]
"""The numbers behind a verdict, which the ledger keeps."""


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The results of one forward pass for one row of T output tokens."""

    segments: tuple[SegmentCheck, ...]
    logprobs_T: npt.NDArray[np.float64]
    """Recomputed log-probs, at the sampling temperature."""
    draw_distance_T: npt.NDArray[np.float64]
    """How far each token's uniform lies outside the token's interval of the cumulative distribution; 0 inside."""
    surprise_T: npt.NDArray[np.float64]
    """-log p of each token minus the entropy, which is its expectation: 0 on average for the model's own draws."""
    surprise_variance_T: npt.NDArray[np.float64]
    """Variance of the surprise under the model."""


def check_facts(
    rows: Sequence[Rollout],
    facts: Sequence[RowFacts],
    tolerances: Tolerances,
    noise: Noise | None = None,
    scores: Sequence[Score] | None = None,
) -> None:
    """Runs all checks in the order of the module's docstring. Raises Rejected at the first that fails.

    `scores` are those of `score_facts`, for callers that have them already.
    """
    check_forgery(rows, facts, tolerances)
    early_stop = find_early_stop(rows, facts, tolerances)
    if early_stop is not None and _draws_match(facts, tolerances, without_last=True):
        raise early_stop
    scores = score_facts(rows, facts, noise) if scores is None else scores
    check_computation(rows, facts, tolerances, noise)
    _check_scores(scores, ("mismatches", "mantissas"), "reject.wrong_computation")
    check_sampling(facts, tolerances, noise)
    _check_scores(scores, ("draws",), "reject.wrong_sampling")
    _check_far_draws(facts, tolerances, FAR_DRAWS_CERTAIN, "reject.wrong_sampling")
    check_surprise(facts)
    check_logprobs(rows, facts, tolerances, noise)
    _check_scores(scores, ("logprobs",), "reject.wrong_logprobs")
    # A few chosen tokens before the ends make `_draws_match` false above without failing any other check.
    if early_stop is not None:
        raise early_stop
    check_uncertain(rows, facts, tolerances, scores)


def check_one_row(row: Rollout, fact: RowFacts, tolerances: Tolerances, noise: Noise | None) -> None:
    """Refuses a row for what is certain to refuse its submission whatever the other rows are: a proof that was made up, or of which
    more than half of the exponents differ. Statistics over all rows and all else are left to `check_facts`.
    """
    _check_made_up([row], [fact], tolerances)
    if not is_beyond_rounding([fact]):
        return
    try:
        check_computation([row], [fact], tolerances, noise)
    except Rejected:
        check_forgery([row], [fact], tolerances)  # a random proof of honest tokens has a code of its own
        raise


def score_facts(rows: Sequence[Rollout], facts: Sequence[RowFacts], noise: Noise | None) -> list[Score]:
    """Returns the scores of a submission by a calibration; none without a calibration."""
    if noise is None:
        return []
    units = [units_of(row, fact) for row, fact in zip(rows, facts, strict=True)]
    return noise_scores(units, noise, [row.prompt_index for row in rows])


def _check_scores(scores: Sequence[Score], statistics: Sequence[str], code: str) -> None:
    for score in scores:
        if score.is_certain and score.statistic in statistics:
            raise Rejected(code, str(score))


def units_of(row: Rollout, fact: RowFacts) -> list[SegmentCheck | TokenBlock]:
    """Returns what a calibration measures and judges of a row: the segments of its proofs, and its tokens in blocks."""
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


# -- 1 forged proof -----------------------------------------------------------------------------------------

NOWHERE = 0.9
"""Share of mismatching exponents, over all segments, from which a proof matches nowhere. Random proofs reach 0.996."""


def check_forgery(rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    """Refuses polynomials that were made up: constants, ones that match control points, and ones that match nothing."""
    _check_made_up(rows, facts, tolerances)
    mismatches, points = _mismatches(facts)
    if points and mismatches > NOWHERE * points and _draws_match(facts, tolerances):
        raise Rejected(
            "reject.forged_proof",
            f"the tokens are the leased model's own draws, but the proofs match it nowhere: "
            f"{mismatches} of {points} exponents differ",
        )


def _check_made_up(rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            if (problem := forgery(segment, tolerances)) is not None:
                raise Rejected("reject.forged_proof", f"{where(row)}, proof {number}: {problem}")


# -- 2 early stop -------------------------------------------------------------------------------------------

IMPOSSIBLE = 1e-6
"""Probability of a token below which no numerical noise can explain its draw."""
UNLIKELY_ENDS = 500
"""One answer, and one more for every so many rows that end, may end on an unlikely token that the seed does not draw. The token
must not be IMPOSSIBLE."""


def find_early_stop(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances
) -> Rejected | None:
    """Returns the refusal if more answers end on an unlikely token that the seed does not draw than noise explains."""
    cut = [
        (row, fact)
        for row, fact in zip(rows, facts, strict=True)
        if row.finish is Finish.EOS
        and math.exp(fact.logprobs_T[-1]) < tolerances.eos_probability
        and fact.draw_distance_T[-1] > tolerances.draw
    ]
    if not cut:
        return None
    row, fact = min(cut, key=lambda one: float(one[1].logprobs_T[-1]))
    num_ended = sum(row.finish is Finish.EOS for row in rows)
    allowed = min(_allowed_misses(num_ended, tolerances), 1 + num_ended // UNLIKELY_ENDS)
    if len(cut) <= allowed and fact.logprobs_T[-1] > math.log(IMPOSSIBLE):
        return None
    return Rejected(
        "reject.early_stop",
        f"{where(row)}: ends where the model gives the end token {math.exp(fact.logprobs_T[-1]):.2g} and the seed "
        f"draws another one; this holds for {len(cut)} of {num_ended} rows that end",
    )


# -- 3 wrong computation ------------------------------------------------------------------------------------

PUBLISHED = 38 / 128
"""The published rule: no segment with a larger share of wrong points is accepted."""


def check_computation(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None
) -> None:
    """Refuses segments beyond the tolerances, or, of a size that the calibration knows, with half of their points wrong."""
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            if (problem := wrong_computation(segment, tolerances, noise)) is not None:
                mismatches, points = _mismatches(facts)
                raise Rejected(
                    "reject.wrong_computation",
                    f"{where(row)}, proof {number}: {problem}; "
                    f"over all rows that were computed {mismatches} of {points} exponents differ",
                )


def is_beyond_rounding(facts: Sequence[RowFacts]) -> bool:
    """Returns whether more than half of all exponents differ. That is another computation, whatever kernels were used."""
    mismatches, points = _mismatches(facts)
    return mismatches > HALF * points


def _mismatches(facts: Sequence[RowFacts]) -> tuple[int, int]:
    """Returns the mismatching exponents and the compared points of the submission."""
    segments = [segment for fact in facts for segment in fact.segments]
    return sum(s.exponent_mismatches for s in segments), sum(s.num_points for s in segments)


# -- 4 wrong sampling ---------------------------------------------------------------------------------------

FAR_DRAW = 0.3
"""Distance of a draw (or 4 times the run's tolerance, if that is more) that honest hardware almost never gives. Of SmolLM2-135M
in bfloat16, 1 in 100, 1,000 and 10,000 tokens are off by more than 0.022, 0.043 and 0.07, the worst by 0.17. Half of the tokens
that were chosen otherwise are further off."""
FAR_DRAWS_SUSPICIOUS = 1
"""Far draws beyond which a submission is void."""
FAR_DRAWS_CERTAIN = 3
"""Far draws beyond which a submission is refused. Extrapolated, 1 in 1,000,000 honest tokens is so far off, and 1 in 100,000 at
temperature 0.6. No block of 338,177 honest ones (7 million tokens) can have had 4."""
FAR_DRAWS_RATE = 1e-4
"""Share of the tokens that is added to both numbers."""
MAX_SURPRISE = 8.0
"""Standard deviations. A sum over hundreds of tokens is nearly normal and over a few is skewed; 8 is safe for both."""
MIN_SURPRISE_VARIANCE = 4.0
"""Least variance that is divided by: with less, too few tokens were left to chance to say anything."""
SURPRISE_CAP = 8.0
"""Most that one token may add to the surprise of `few_token_exponent`."""
CERTAIN_EXPONENT = math.log(1e8)
"""A surprise that honest draws reach with a probability of at most 1 in 100,000,000."""


def check_sampling(facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None) -> None:
    """Refuses too many tokens that the seed does not draw, among those in blocks that no calibration judges."""
    distances = [fact.draw_distance_T[_unknown(noise, "draws", len(fact.draw_distance_T))] for fact in facts]
    misses = sum(int((distance_T > tolerances.draw).sum()) for distance_T in distances)
    count = sum(map(len, distances))
    allowed = _allowed_misses(count, tolerances)
    if misses > allowed:
        raise Rejected(
            "reject.wrong_sampling",
            f"{misses} of {count} tokens are not what the lease's seed draws, at most {allowed}",
        )


def _check_far_draws(facts: Sequence[RowFacts], tolerances: Tolerances, most: int, code: str) -> None:
    """Refuses a few chosen tokens, which a mean would hide: more than `most` draws are further off than honest ones ever are."""
    far, count = _far_draws(facts, tolerances)
    allowed = most + int(FAR_DRAWS_RATE * count)
    if far > allowed:
        detail = f"{far} of {count} tokens are far from what the lease's seed draws, at most {allowed}"
        raise Rejected(code, detail)


def check_surprise(facts: Sequence[RowFacts]) -> None:
    """Refuses tokens that are more or less likely than draws of this model at this temperature.

    Independent of the seed, so it finds tokens of another model or sampler even where the draw check does not. Where a model is sure
    of nearly every token, one honest draw from the tail of a large vocabulary can be more than MAX_SURPRISE: tokens that are too
    unlikely must be several.
    """
    z = surprise_z(facts)
    if z < -MAX_SURPRISE or (z > MAX_SURPRISE and few_token_exponent(facts) > CERTAIN_EXPONENT):
        raise Rejected(
            "reject.wrong_sampling",
            f"the tokens are {abs(z):.1f} standard deviations {'less' if z > 0 else 'more'} likely than draws of the "
            f"leased model, at most {MAX_SURPRISE:g}",
        )


def surprise_z(facts: Sequence[RowFacts]) -> float:
    """Returns the summed surprise of a submission in standard deviations."""
    variance = sum(float(fact.surprise_variance_T.sum()) for fact in facts)
    total = sum(float(fact.surprise_T.sum()) for fact in facts)
    return total / math.sqrt(max(variance, MIN_SURPRISE_VARIANCE))


def few_token_exponent(facts: Sequence[RowFacts]) -> float:
    """Returns e such that draws of the model are so unlikely together with a probability of at most exp(-e), for any distribution.

    Bennett's inequality for a sum of terms with mean at most 0, bounded from above: each token counts at most SURPRISE_CAP.
    """
    total = sum(float(np.minimum(fact.surprise_T, SURPRISE_CAP).sum()) for fact in facts)
    if total <= 0:
        return 0.0
    variance = max(1e-6, sum(float(fact.surprise_variance_T.sum()) for fact in facts))
    ratio = SURPRISE_CAP * total / variance
    return variance / SURPRISE_CAP**2 * ((1 + ratio) * math.log1p(ratio) - ratio)


def _far_draws(facts: Sequence[RowFacts], tolerances: Tolerances) -> tuple[int, int]:
    """Returns the number of draws that are too far off for noise, and of all draws."""
    distance_N = np.concatenate([fact.draw_distance_T for fact in facts])
    logprob_N = np.concatenate([fact.logprobs_T for fact in facts])
    far_N = distance_N > max(FAR_DRAW, 4 * tolerances.draw)
    far_N |= (distance_N > tolerances.draw) & (logprob_N < math.log(IMPOSSIBLE))
    return int(far_N.sum()), len(distance_N)


def _draw_misses(
    facts: Sequence[RowFacts], tolerances: Tolerances, *, without_last: bool = False
) -> tuple[int, int]:
    """Returns the number of tokens that the seed does not draw, and of all tokens, optionally without each row's last."""
    distances = np.concatenate([fact.draw_distance_T[: -1 if without_last else None] for fact in facts])
    return int((distances > tolerances.draw).sum()), len(distances)


def _draws_match(facts: Sequence[RowFacts], tolerances: Tolerances, *, without_last: bool = False) -> bool:
    misses, count = _draw_misses(facts, tolerances, without_last=without_last)
    return misses <= _allowed_misses(count, tolerances)


def _allowed_misses(count: int, tolerances: Tolerances) -> int:
    """Returns how many of `count` draws may miss: at least one, unless the tolerance is 0."""
    return max(1, int(tolerances.draw_misses * count)) if tolerances.draw_misses > 0 else 0


def _unknown(noise: Noise | None, statistic: str, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Returns [T] whether each token is in a block of a size that no calibration judges."""
    unknown_T = np.zeros(num_tokens, dtype=np.bool_)
    for start in range(0, num_tokens, BLOCK_TOKENS):
        size = min(BLOCK_TOKENS, num_tokens - start)
        unknown_T[start : start + size] = not judges_alone(noise, statistic, size)
    return unknown_T


# -- 5 wrong log-probs --------------------------------------------------------------------------------------

SHORT_ROW = 3.0
"""Widens the tolerance of a row's log-probs by this over the root of its tokens. With one tolerance for all rows, 186 of 21,504
honest submissions in bfloat16 were refused."""
FAR_LOGPROBS = 0.15
"""Mean difference of a row's log-probs (or the run's tolerance, if that is more) from which it is far off."""
FEW_ROWS = 4
"""Rows that may be far off in a small submission: the samples of one prompt may be so together."""


def check_logprobs(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None
) -> None:
    """Refuses log-probs that are off on average over the submission or over one row.

    Short rows may be off by more. Tokens in blocks that a calibration judges are left out, unless most rows are off.
    """
    far = sum(is_far_off(row, fact, tolerances) for row, fact in zip(rows, facts, strict=True))
    if far > most_far_off(len(rows)):
        raise Rejected(
            "reject.wrong_logprobs",
            f"{far} of {len(rows)} rows have log-probs that are off by more than {tolerances.logprob:.3g} on average",
        )
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
        gap, allowed = float(left_T.mean()), _widened(tolerances.logprob, len(left_T))
        if gap > allowed:
            raise Rejected(
                "reject.wrong_logprobs",
                f"{where(row)}: log-probs are off by {gap:.3g} on average, at most {allowed:.3g}",
            )


def is_far_off(row: Rollout, fact: RowFacts, tolerances: Tolerances) -> bool:
    """Returns whether the mean difference of a row's log-probs is further off than that of nearly all honest rows of any model."""
    return logprob_gap(row, fact) > _widened(_far_gap(tolerances), len(row.output_tokens))


def most_far_off(num_rows: int) -> int:
    """Returns how many rows may be far off, whatever a calibration says.

    Where tokens are routed to experts, a few honest rows are far off. Their tail, extrapolated, would let all rows be.
    """
    return max(FEW_ROWS, int(HALF * num_rows))


def _far_gap(tolerances: Tolerances) -> float:
    return max(FAR_LOGPROBS, tolerances.logprob)


def _widened(gap: float, num_tokens: int) -> float:
    return gap * (1 + SHORT_ROW / math.sqrt(num_tokens))


def logprob_gaps(row: Rollout, fact: RowFacts) -> npt.NDArray[np.float64]:
    """Returns |claimed - recomputed| of each token's log-prob."""
    gaps_T: npt.NDArray[np.float64] = np.abs(np.asarray(row.logprobs, dtype=np.float64) - fact.logprobs_T)
    return gaps_T


def logprob_gap(row: Rollout, fact: RowFacts) -> float:
    """Returns the mean of `logprob_gaps` over the row."""
    return float(logprob_gaps(row, fact).mean())


# -- 6 uncertain --------------------------------------------------------------------------------------------


def check_uncertain(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, scores: Sequence[Score]
) -> None:
    """Voids work that is further off than honest work almost ever is, but not certainly false."""
    for score in scores:
        if score.is_suspicious:
            raise Rejected("void.uncertain", str(score))
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            most = max(tolerances.exponent_mismatches, PUBLISHED * segment.num_points)
            allowed = most * tolerance_factor(segment)
            if (wrong := segment.wrong_points) > allowed:
                raise Rejected(
                    "void.uncertain",
                    f"{where(row)}, proof {number}: {wrong} of its exponents or signs differ, at most {allowed:.0f}",
                )
    _check_far_draws(facts, tolerances, FAR_DRAWS_SUSPICIOUS, "void.uncertain")


def evidence(
    rows: Sequence[Rollout],
    facts: Sequence[RowFacts],
    tolerances: Tolerances,
    scores: Sequence[Score] = (),
) -> Evidence:
    """Returns the numbers behind a verdict, which the ledger keeps. `z_NAME` are the standard scores over all rows, which the
    coordinator adds up over a node's life; `mean_NAME` and `honest_NAME` are the means over all rows, here and in the calibration."""
    segments = [segment for fact in facts for segment in fact.segments]
    mismatches, _ = _mismatches(facts)
    misses, _ = _draw_misses(facts, tolerances)
    far, _ = _far_draws(facts, tolerances)
    numbers: Evidence = {
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
    for one in scores:
        if one.standard is not None:
            numbers |= {
                f"z_{one.statistic}": one.standard,
                f"mean_{one.statistic}": float(f"{one.mean:.5g}"),
                f"honest_{one.statistic}": float(f"{one.honest_mean:.5g}"),
            }
    return numbers
