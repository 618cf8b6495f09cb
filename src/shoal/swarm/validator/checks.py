"""Every check of a submission, from cheap to dear. Pure: each passes in silence or raises Rejected with its code.

Before the model runs (on the claim, the table and the lease):
    claim (copies, leased version), binding to the lease, complete groups, prompts, values, proof format, endings
After one prefill (on the facts that recompute.py found):
    forged proofs, early stops, computation, sampling, log-probs

The order after the prefill gives each lie its own code, because one lie shows in several facts:
  - a proof that fits everywhere, or one that fits nowhere although every token is the draw of the leased model, was not
    made from states: forged, whatever else is wrong;
  - an answer whose last token alone does not fit was cut short;
  - if proofs do not fit, the model (or what it was shown) was another one, and its draws and log-probs follow from that;
  - if proofs fit and draws do not, the right model ran over tokens that somebody else chose;
  - if both fit, only the reported log-probs can still be wrong.
A submission that is off by more than honest work hardly ever is, but not by enough to be certain, is void.uncertain.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.toploc import ProofError, Score, SegmentCheck, TokenBlock, check_format, judges_alone, noise_scores
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Claim
from shoal.wire.noise import Noise
from shoal.wire.rollouts import Finish, Rollout, RolloutTable
from shoal.wire.run import ProofSpec, Tolerances

LOGPROB_ROUNDING = 1e-4
"""A certain token's log-prob may come out this far above 0."""
MIN_CONTROLS = 32
"""Fewer control points decide nothing."""
MIN_SPREAD = 8
"""Control points decide only if a segment has this many times the values that a proof commits to."""
FEW_VALUES = 9.0
"""How much wider the tolerances of a segment are, times K over its number of values: 3 times for one state of 576, 1.06 for 32 of them.
With equal ones for all, 46 of 21,504 honest submissions in bfloat16 were refused (docs/LOG.md)."""
SHORT_ROW = 3.0
"""How much wider the tolerance of a row's log-probs is, over the root of its tokens. With one for all, 186 of the same were refused."""
BLOCK_TOKENS = 32
"""Tokens whose log-probs and draws are judged together."""
NOWHERE = 0.9
"""Share of mismatching exponents, over all segments, at which a proof fits nowhere. Noise reaches 0.996."""


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


def where(row: Rollout) -> str:
    return f"row ({row.prompt_index}, {row.sample_index})"


# -- before the model runs ------------------------------------------------------------------------------


def check_claim(claim: Claim) -> None:
    """What the claim alone says."""
    if claim.copy_of == claim.lease.node:
        raise Rejected("reject.replayed", f"the node submitted file {claim.sha256[:16]} before")
    if claim.copy_of is not None:
        raise Rejected(
            "reject.copied", f"node {claim.copy_of[:16]} submitted file {claim.sha256[:16]} before"
        )
    leased = [policy.version for policy in claim.lease.policies]
    if claim.policy_version not in leased:
        raise Rejected(
            "reject.wrong_lease", f"policy version {claim.policy_version} is not leased; leased: {leased}"
        )


def check_binding(table: RolloutTable, claim: Claim) -> None:
    lease = claim.lease
    if table.lease_id != lease.lease_id:
        raise Rejected(
            "reject.wrong_lease", f"the file was made for lease {table.lease_id[:32]!r}, not {lease.lease_id}"
        )
    if table.policy_version != claim.policy_version:
        raise Rejected(
            "reject.wrong_lease",
            f"the file names policy version {table.policy_version}, the submission {claim.policy_version}",
        )


def check_groups(table: RolloutTable, lease: Lease) -> None:
    """Every sample of every prompt, once."""
    samples = lease.sampling.samples_per_prompt
    wanted = {(prompt, sample) for prompt in range(len(lease.prompts)) for sample in range(samples)}
    found = Counter((row.prompt_index, row.sample_index) for row in table.rows)
    problems = (
        ("is missing", sorted(wanted - found.keys())),
        ("is not leased", sorted(found.keys() - wanted)),
        ("is there more than once", sorted(place for place, count in found.items() if count > 1)),
    )
    for problem, places in problems:
        if places:
            raise Rejected(
                "reject.incomplete_group",
                f"row {places[0]} {problem}, and {len(places) - 1} more; the lease is for {len(wanted)} rows",
            )


def check_prompts(table: RolloutTable, prompt_tokens: Sequence[Sequence[int]]) -> None:
    """`prompt_tokens` are the leased prompts as the policy's tokenizer encodes them."""
    expected = [tuple(tokens) for tokens in prompt_tokens]
    edited = [row for row in table.rows if row.prompt_tokens != expected[row.prompt_index]]
    if not edited:
        return
    if len(edited) == len(table.rows):
        raise Rejected("reject.other_prompts", f"none of the {len(expected)} prompts is the leased one")
    raise Rejected(
        "reject.edited_prompt",
        f"{where(edited[0])}: the prompt is not the leased one; so in {len(edited)} of {len(table.rows)} rows",
    )


def check_values(table: RolloutTable, vocab_size: int) -> None:
    for row in table.rows:
        lowest, highest = min(row.output_tokens), max(row.output_tokens)
        if lowest < 0 or highest >= vocab_size:
            bad = lowest if lowest < 0 else highest
            raise Rejected(
                "reject.bad_values", f"{where(row)}: token {bad} is outside the vocabulary of {vocab_size}"
            )
        for logprob in row.logprobs:
            if not math.isfinite(logprob) or logprob > LOGPROB_ROUNDING:
                raise Rejected("reject.bad_values", f"{where(row)}: a log-prob is {logprob}")


def check_proof_format(table: RolloutTable, proof: ProofSpec, hidden_size: int) -> None:
    try:
        check_format(
            [row.proof for row in table.rows],
            [len(row.output_tokens) - 1 for row in table.rows],
            hidden_size=hidden_size,
            topk=proof.topk,
            segment_tokens=proof.segment_tokens,
        )
    except ProofError as error:
        raise Rejected("reject.malformed_proof", f"{where(table.rows[error.row])}: {error.reason}") from None


def check_endings(table: RolloutTable, end_tokens: Iterable[int], max_new_tokens: int) -> None:
    """An answer ends at its first end token, or at the cap; nowhere else."""
    ends = frozenset(end_tokens)
    for row in table.rows:
        if not ends.isdisjoint(row.output_tokens[:-1]):
            raise Rejected("reject.early_stop", f"{where(row)}: goes on after an end token")
        ended = row.output_tokens[-1] in ends
        length = len(row.output_tokens)
        if not ended and length != max_new_tokens:
            raise Rejected(
                "reject.early_stop",
                f"{where(row)}: stops after {length} of {max_new_tokens} tokens without an end token",
            )
        if ended != (row.finish is Finish.EOS):
            raise Rejected(
                "reject.early_stop",
                f"{where(row)}: says it finished by {row.finish.name}, but its last token is {row.output_tokens[-1]}",
            )


# -- after the prefill ----------------------------------------------------------------------------------


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
    if noise is None or noise.draws is None:
        check_sampling(facts, tolerances)
    _check_certain(scores, ("draws",), "reject.wrong_sampling")
    check_surprise(facts)
    check_logprobs(rows, facts, tolerances, noise)
    _check_certain(scores, ("logprobs",), "reject.wrong_logprobs")
    for score in scores:
        if score.is_suspicious:
            raise Rejected("void.uncertain", str(score))


def _check_certain(scores: Sequence[Score], statistics: Sequence[str], code: str) -> None:
    for score in scores:
        if score.is_certain and score.statistic in statistics:
            raise Rejected(code, str(score))


def units_of(row: Rollout, fact: RowFacts) -> list[SegmentCheck | TokenBlock]:
    """What of a row is calibrated and tested: its proofs' segments, and its tokens in blocks."""
    gaps_T = np.abs(np.asarray(row.logprobs, dtype=np.float64) - fact.logprobs_T)
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


def check_early_stop(rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    """An end token that the model found unlikely and the seed does not give, after tokens that it does give."""
    cut = [
        (row, fact)
        for row, fact in zip(rows, facts, strict=True)
        if row.finish is Finish.EOS
        and math.exp(fact.logprobs_T[-1]) < tolerances.eos_probability
        and fact.draw_distance_T[-1] > tolerances.draw
    ]
    num_ended = sum(row.finish is Finish.EOS for row in rows)
    if len(cut) <= _allowance(num_ended, tolerances) or not _draws_fit(facts, tolerances, but_last=True):
        return
    row, fact = cut[0]
    raise Rejected(
        "reject.early_stop",
        f"{where(row)}: ends where the model gives the end token {math.exp(fact.logprobs_T[-1]):.2g} and the seed "
        f"another one; so in {len(cut)} of {num_ended} rows that end",
    )


def check_computation(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances, noise: Noise | None = None
) -> None:
    """Segment by segment, those that no calibration knows."""
    for row, fact in zip(rows, facts, strict=True):
        for number, segment in enumerate(fact.segments):
            if judges_alone(noise, "mismatches", segment.num_values):
                continue
            if too_far := _too_far(segment, tolerances):
                mismatches, points = _mismatches(facts)
                raise Rejected(
                    "reject.wrong_computation",
                    f"{where(row)}, proof {number}: {too_far}; "
                    f"over all rows {mismatches} of {points} exponents differ",
                )


def check_sampling(facts: Sequence[RowFacts], tolerances: Tolerances) -> None:
    misses, count = _draw_misses(facts, tolerances)
    allowed = _allowance(count, tolerances)
    if misses > allowed:
        raise Rejected(
            "reject.wrong_sampling",
            f"{misses} of {count} tokens are not what the lease's seed draws, at most {allowed}",
        )


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
    """Over the submission, and row by row: an answer of a few tokens may be off by more than a long one. Rows whose blocks a
    calibration knows are left to it."""
    gaps = [logprob_gap(row, fact) for row, fact in zip(rows, facts, strict=True)]
    lengths = [len(row.output_tokens) for row in rows]
    mean = float(np.average(gaps, weights=lengths))
    if mean > tolerances.logprob and (noise is None or noise.logprobs is None):
        raise Rejected(
            "reject.wrong_logprobs",
            f"log-probs are off by {mean:.3g} on average over all rows, at most {tolerances.logprob:.3g}",
        )
    for row, gap, length in zip(rows, gaps, lengths, strict=True):
        if judges_alone(noise, "logprobs", min(length, BLOCK_TOKENS)):
            continue
        allowed = tolerances.logprob * (1 + SHORT_ROW / math.sqrt(length))
        if gap > allowed:
            raise Rejected(
                "reject.wrong_logprobs",
                f"{where(row)}: log-probs are off by {gap:.3g} on average, at most {allowed:.3g}",
            )


def logprob_gap(row: Rollout, fact: RowFacts) -> float:
    """Mean |claimed - recomputed| over the row."""
    return float(np.abs(np.asarray(row.logprobs, dtype=np.float64) - fact.logprobs_T).mean())


def evidence(
    rows: Sequence[Rollout], facts: Sequence[RowFacts], tolerances: Tolerances
) -> dict[str, float | int | str]:
    """The numbers behind a verdict."""
    segments = [segment for fact in facts for segment in fact.segments]
    mismatches, _ = _mismatches(facts)
    misses, _ = _draw_misses(facts, tolerances)
    return {
        "segments": len(segments),
        "exponent_mismatches_max": max((s.exponent_mismatches for s in segments), default=0),
        "exponent_mismatches_mean": mismatches / max(1, len(segments)),
        "mantissa_mean_max": max((s.mantissa_mean for s in segments), default=0.0),
        "mantissa_median_max": max((s.mantissa_median for s in segments), default=0.0),
        "sign_mismatches": sum(s.sign_mismatches for s in segments),
        "control_hits_max": max((s.control_hits for s in segments), default=0),
        "draw_misses": misses,
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
    # The fewer values there are to choose the top-k from, the smaller are the last of them, and the noisier.
    slack = 1 + FEW_VALUES * segment.num_points / segment.num_values
    # A flipped sign counts as a wrong exponent: the published rule looks past it, honest noise never makes one.
    mismatches = segment.exponent_mismatches + segment.sign_mismatches
    if mismatches > (allowed := slack * tolerances.exponent_mismatches):
        return f"{mismatches} of its exponents or signs differ, at most {allowed:.0f}"
    if segment.mantissa_mean > (allowed := slack * tolerances.mantissa_mean):
        return f"mantissas are off by {segment.mantissa_mean:.3g} on average, at most {allowed:.3g}"
    if segment.mantissa_median > (allowed := slack * tolerances.mantissa_median):
        return f"half the mantissas are off by {segment.mantissa_median:g}, at most {allowed:.3g}"
    return None


def _mismatches(facts: Sequence[RowFacts]) -> tuple[int, int]:
    """Mismatching exponents, and points compared, over the submission."""
    segments = [segment for fact in facts for segment in fact.segments]
    return sum(s.exponent_mismatches for s in segments), sum(s.num_points for s in segments)


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
