"""Evidence that adds up over a node's life: convicts what no single submission shows. Pure functions.

Every full check gives standard scores: how far the submission is off honest work, in units in which honest work has mean 0 and
variance 1 (toploc/decision.py). A node that steers its draws within the tolerance, or replaces few tokens, stays below the bound of each
check, but its scores are too high on average. Each statistic has a CUSUM:

    sum = max(0, sum + min(score - baseline, CLIP) - DRIFT)        the node is convicted when the sum passes the threshold

The baseline is the median score of the whole run, followed in steps of STEP, never below 0: training changes the model and with it
the noise of everybody's work, and a calibration measured before the run does not know that. Because it is never below 0,
work that is too exact cannot make others look false.

Threshold. Let X = min(score, CLIP) of honest work have mean at most MEAN and variance at most VARIANCE, given everything before. It need
not be normal: of all such variables, Bennett's inequality says, one with two values has the largest E exp(t X). With b =
CLIP - MEAN and t the positive root of

    (b^2 exp(-t VARIANCE / b) + VARIANCE exp(t b)) / (b^2 + VARIANCE) = exp(t (DRIFT - MEAN))

exp(t * sum) is a supermartingale from each start of the CUSUM, which passes a threshold h with probability at most exp(-t h). A life
of LIFE submissions has at most LIFE starts in each of the tests, so that

    h = ln(LIFE * number of tests / RATE) / t

convicts an honest node with probability at most RATE = 1e-5 in a life of 10,000 submissions; owners have sums of their own. With MEAN
0.5, VARIANCE 1.5, DRIFT 1 and CLIP 4: t = 0.44, h = 51.9. Scores of 1.4 on average convict after about 130 submissions, 2 after 52, 4
and more after 18. Of 40 honest submissions of the model `tiny` in bfloat16 the five scores had means of -0.3 to 0.2 and
variances of 0.6 to 1.4.

A node that takes a new key before it is convicted has sums of 0 again. So all nodes with fewer than NEW_NODE accepted submissions
share another CUSUM, and do not move the baseline: otherwise keys that are thrown away could raise it for everybody. While the sum of
the new nodes is above its threshold, also after the conviction of one of them, their work is void.uncertain if its score is DOUBTFUL or
more above the baseline. Such work is not trained on and costs no trust beyond the streak, since one in forty honest submissions is as far off.

Submissions that are void.uncertain have a test of their own with scores 1 and 0. Of honest work at most UNCERTAIN_RATE may be uncertain
(measured: 13 of 12,288). Seven in a row convict. Submissions that were decoded again have another such test, in which the others do not
count: of a node that always uses old weights only the replayed share is uncertain, so the first test would never convict it.

The noise of correct work may rise above the calibration while a model learns. `NoiseWatch` says when the run should measure it again,
and which work does not count until then. What a new calibration explains is taken back from all sums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.wire.codes import ACCEPTED, ACCUMULATED, RECALIBRATING, UNCERTAIN
from shoal.wire.proof_noise import RISEN

LIFE = 10_000
RATE = 1e-5
STEP = 0.01
"""Change of the baseline by one submission."""
UNCERTAIN_RATE = 0.01
NEW_NODE = 20
"""Accepted submissions from which a node is no longer new. The largest scores convict after 18."""
NEW_NODES = "new nodes"
"""All new nodes together, where other nodes and owners have keys of their own."""
DOUBTFUL = 2.0
CALIBRATED = ("draws", "logprobs", "mismatches", "mantissas")
"""Statistics whose standard scores need a calibration. `z_NAME` in the evidence of a verdict has them."""
REPLAY, REPLAY_SCORES = "replay", {"equal": 0.0, "differs": 1.0}
"""Key in the evidence of what a decode replay found, and the scores of its findings. Other values mean that nothing was compared."""
GIVEN_CODE = "verdict"
"""Key in the evidence of a conviction: the validator's own code for the submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CumulativeTest:
    """The terms of one CUSUM: what is assumed of honest work, and what is subtracted from each score."""

    mean: float
    variance: float
    clip: float
    drift: float

    def excess(self, t: float) -> float:
        """Returns the logarithm of the largest possible E exp(t (X - drift)) of honest work."""
        b = self.clip - self.mean
        weights = b * b + self.variance
        low = b * b / weights * math.exp(-t * self.variance / b)
        high = self.variance / weights * math.exp(t * b)
        return math.log(low + high) - t * (self.drift - self.mean)

    def exponent(self) -> float:
        """Returns the positive root of `excess`, rounded down: the tail of the sum falls with exp(-t * sum) for honest work."""
        low, high = 1e-6, 64.0 / self.clip
        assert self.excess(low) < 0 < self.excess(high), "drift must be above the mean and below clip"
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.excess(middle) < 0 else (low, middle)
        return low


SCORE_TEST = CumulativeTest(mean=0.5, variance=1.5, clip=4.0, drift=1.0)
UNCERTAIN_TEST = CumulativeTest(
    mean=UNCERTAIN_RATE, variance=UNCERTAIN_RATE * (1 - UNCERTAIN_RATE), clip=1.0, drift=0.1
)
TESTS: dict[str, CumulativeTest] = {
    **dict.fromkeys((*CALIBRATED, "surprise", "lack of surprise"), SCORE_TEST),
    "uncertain": UNCERTAIN_TEST,
    "replays": UNCERTAIN_TEST,
}
THRESHOLDS = {name: math.log(LIFE * len(TESTS) / RATE) / test.exponent() for name, test in TESTS.items()}

Sums = dict[str, float]
"""The sum of each test, by the name of its statistic. A statistic that is missing has the sum 0."""


def scores_of(code: str, evidence: Mapping[str, Any]) -> Sums:
    """Returns the scores in a verdict. Empty if it was refused, or given without a forward pass."""
    surprise = _number(evidence.get("surprise_z"))
    if code not in (ACCEPTED, UNCERTAIN) or surprise is None:
        return {}
    scores = {"surprise": surprise, "lack of surprise": -surprise}
    for name in CALIBRATED:
        if (value := _number(evidence.get(f"z_{name}"))) is not None:
            scores[name] = value
    scores["uncertain"] = 1.0 if code == UNCERTAIN else 0.0
    if (found := evidence.get(REPLAY)) in REPLAY_SCORES:
        scores["replays"] = REPLAY_SCORES[found]
    return scores


def new_scores(scores: Sums, earlier: Sequence[Sums]) -> Sums:
    """Returns the scores that are new evidence, if the same work was uncertain with the scores in `earlier`.

    The node owes it and gets it again, and an honest engine makes nearly the same bits from it, which show nothing new. Scores that
    are DOUBTFUL or more above all earlier ones are of other bits: doubtful work could otherwise be replaced by worse work.
    """
    if not earlier:
        return scores
    highest = {name: max(one.get(name, -math.inf) for one in earlier) for name in scores}
    return {name: score for name, score in scores.items() if score >= highest[name] + DOUBTFUL}


def next_baseline(baseline: Mapping[str, float], scores: Mapping[str, float]) -> Sums:
    """Returns the run's baseline after one more submission: a step towards each score, never below 0."""
    after = dict(baseline)
    for name, score in scores.items():
        if name in CALIBRATED:
            before = after.get(name, 0.0)
            after[name] = max(0.0, before + (STEP if score > before else -STEP))
    return {name: value for name, value in after.items() if value > 0}


def next_sums(sums: Mapping[str, float], scores: Mapping[str, float], baseline: Mapping[str, float]) -> Sums:
    """Returns the sums after one more submission. `baseline` is the one before it."""
    after = dict(sums)
    for name, score in scores.items():
        test = TESTS[name]
        step = min(score - baseline.get(name, 0.0), test.clip) - test.drift
        after[name] = max(0.0, after.get(name, 0.0) + step)
    return {name: value for name, value in after.items() if value > 0}


def convicting(sums: Mapping[str, float]) -> str | None:
    """Returns the statistic whose sum passes its threshold by the largest factor; None if no sum does."""
    worst = max(sums, key=lambda name: sums[name] / THRESHOLDS[name], default=None)
    return worst if worst is not None and sums[worst] > THRESHOLDS[worst] else None


class Finding(NamedTuple):
    """The code that the evidence gives a submission in place of the validator's, and why."""

    code: str
    detail: str


@dataclass(slots=True)
class RunEvidence:
    """The evidence about nodes and owners, by key, and about all new nodes together."""

    baseline: Sums = field(default_factory=dict)
    new_nodes: Sums = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    watch: "NoiseWatch" = field(default_factory=lambda: NoiseWatch())

    def calibrated(self, measured: int, now_s: float, risen: Sequence[str]) -> None:
        """Begins to watch the noise by a new calibration, and takes back what the rise of these statistics explains."""
        self.watch.calibrated(measured, now_s, risen=bool(risen))
        self.baseline, self.new_nodes = (
            without_risen(self.baseline, risen),
            without_risen(self.new_nodes, risen),
        )
        self.sums = {key: without_risen(sums, risen) for key, sums in self.sums.items()}

    def add(
        self,
        keys: Sequence[str],
        code: str,
        evidence: Mapping[str, Any],
        *,
        version: int,
        now_s: float,
        is_new: bool,
        earlier: Sequence[Sums],
    ) -> Finding | None:
        """Adds a validator's verdict on work of a version. Returns what the evidence finds instead, if anything.

        `keys` are those of the node and of its owner, if it has one. `earlier` are the scores of the same work, as often as it was
        uncertain before; only what is new is added.
        """
        if self.watch.add(code, evidence, version, now_s, NEW_NODES if is_new else keys[-1]):
            return Finding(
                RECALIBRATING,
                f"the noise of its proofs is {noise_ratio(evidence):.2f} times that of the calibration, and version {version} has not "
                "been measured; the run measures it again",
            )
        scores = scores_of(code, evidence)
        doubt = self._doubt(scores) if is_new and code == ACCEPTED else None
        new = new_scores(scores, earlier)
        conviction = self._add_scores(keys, new, is_new=is_new) if new else None
        return conviction or doubt

    def _doubt(self, scores: Mapping[str, float]) -> Finding | None:
        """Returns why the accepted work of a new node is doubtful; None if it is not."""
        for name in (*CALIBRATED, "surprise", "lack of surprise"):
            above = scores.get(name, 0.0) - self.baseline.get(name, 0.0)
            if above >= DOUBTFUL and self.new_nodes.get(name, 0.0) > THRESHOLDS[name]:
                return Finding(
                    UNCERTAIN,
                    f"{name}: the scores of all new nodes add up to more than honest work's, and this one is "
                    f"{scores[name]:.1f}; work of another seed, or more accepted work, is not affected",
                )
        return None

    def _add_scores(
        self, keys: Sequence[str], scores: Mapping[str, float], *, is_new: bool
    ) -> Finding | None:
        """Adds scores to the sums of a node and its owner. Returns what convicts one of them; its sums begin at 0 again."""
        found, before = None, self.baseline
        for key in keys:
            sums = next_sums(self.sums.get(key, {}), scores, before)
            if (statistic := convicting(sums)) is not None:
                found = Finding(
                    ACCUMULATED,
                    f"{statistic}: the scores of {key[:22]} add up to {sums[statistic]:.1f} above honest work, at most "
                    f"{THRESHOLDS[statistic]:.1f}",
                )
                sums = {}
            self.sums[key] = sums
        if not is_new:
            self.baseline = next_baseline(before, scores)
        else:
            # Also after a conviction: the next key is free, and would have as many false submissions accepted as the convicted one.
            after = next_sums(self.new_nodes, scores, before)
            # A bound lets the doubt end when the false work does.
            self.new_nodes = {name: min(value, 2 * THRESHOLDS[name]) for name, value in after.items()}
        return found


# -- the noise of honest work may have risen -----------------------------------------------------------------

MOST_NOISE = 2.0
"""Means beyond this are no noise that a few versions bring: refusals stay refusals. int8 weights are at 2.4 in a model of 0.5B."""
LEAST_WAIT_S, MOST_WAIT_S = 60.0, 3600.0
"""Time after a calibration during which the node that asked for it in vain may not ask again. It doubles each time."""
PATIENCE_S = 300.0
"""Longest time from the first doubt to the new calibration during which doubtful work does not count."""
ACCEPTED_WORK = "accepted work"
"""Who asks for a calibration if the mean of accepted work has risen."""
DRIFT_STEP = 1 / 8
"""Weight of a submission in the recent mean of accepted work."""
MIN_ACCEPTED = 8
"""Accepted submissions of one calibration without which their mean says nothing."""
LEAST_MEANS = {"mismatches": 0.5, "mantissas": 0.05}
"""Statistics of proofs, and the least mean that another is compared with: in float32 the calibrated mean is nearly 0."""
EXCUSABLE = (UNCERTAIN, "reject.wrong_computation", "reject.wrong_sampling", "reject.wrong_logprobs")


def noise_ratio(evidence: Mapping[str, Any]) -> float | None:
    """Returns the largest mean of a proof's statistic relative to the calibrated mean; None without a calibration of this pair."""
    found = [
        mean / max(honest, least)
        for name, least in LEAST_MEANS.items()
        if (mean := _number(evidence.get(f"mean_{name}"))) is not None
        and (honest := _number(evidence.get(f"honest_{name}"))) is not None
    ]
    return max(found) if found and evidence.get("pair_measured") == 1 else None


def _proofs_are_off(evidence: Mapping[str, Any]) -> bool:
    """Returns whether the proofs of a submission are further off than chance explains. Chosen tokens leave them as they are."""
    return any((_number(evidence.get(f"z_{name}")) or 0.0) >= DOUBTFUL for name in LEAST_MEANS)


@dataclass(slots=True)
class NoiseWatch:
    """Watches whether the noise of work has risen above the calibration, and asks for another one.

    Only rows of the run's own machines enter a calibration, so no submission can raise it. Until it comes, work that the noise could
    explain does not count: it is not trained on, earns nothing, and is no evidence. That ends PATIENCE_S after the first such work of
    the same node or owner. If the calibration does not show a rise, it must wait before its work is excused again, so that a liar cannot
    ask again and again. New nodes, whose keys are free, wait together. Nobody waits for another's doubts: liars could otherwise keep
    the run from measuring again when the noise rises, and refusals would end honest nodes.
    """

    measured: int = -1
    """The version that the newest calibration was measured with; -1: the model of the run file."""
    calibrated_s: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    """Time after the newest calibration before one more may be asked for, by who asked in vain: a node or owner, NEW_NODES, or
    ACCEPTED_WORK. It halves with each calibration that somebody else asked for."""
    doubted: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Time and version of the first doubtful work of which no calibration was measured since, by whose it was."""
    doubts: int = 0
    version: int = -1
    """The newest version whose work was doubtful."""
    ratio: float = 0.0
    """The largest `noise_ratio` of doubtful work."""
    accepted: int = 0
    mean: float = 1.0
    """Recent mean of the ratios of accepted work of nodes that are not new."""

    def add(self, code: str, evidence: Mapping[str, Any], version: int, now_s: float, who: str) -> bool:
        """Adds a verdict on work of a version. Returns whether the work does not count because its noise may be the model's.

        A refusal is excused only for nodes that are not new, and only below MOST_NOISE. Work of a version that was measured is not.
        """
        ratio = noise_ratio(evidence)
        if ratio is None or version <= self.measured:
            return False
        if code == ACCEPTED and who != NEW_NODES:
            self.accepted += 1
            self.mean += max(DRIFT_STEP, 1 / self.accepted) * (min(ratio, MOST_NOISE) - self.mean)
        if code not in EXCUSABLE or ratio < RISEN or not _proofs_are_off(evidence):
            return False
        if code != UNCERTAIN and (who == NEW_NODES or ratio >= MOST_NOISE):
            return False
        if evidence.get(REPLAY) == "differs" or self._must_wait(who, now_s):
            return False
        first_s, _ = self.doubted.setdefault(who, (now_s, version))
        if now_s > first_s + PATIENCE_S:
            return False
        self.doubts += 1
        self.version, self.ratio = max(self.version, version), max(self.ratio, ratio)
        return True

    def calibrated(self, measured: int, now_s: float, *, risen: bool) -> None:
        """Forgets what was noted before a new calibration, which shows that the noise has risen or that it has not.

        Without a rise, doubts about later versions than the measured one remain: measuring takes as long as some versions do.
        """
        waits: dict[str, float] = {}
        remaining: dict[str, tuple[float, int]] = {}
        if not risen:
            waits = {who: wait_s / 2 for who, wait_s in self.waits.items() if wait_s > LEAST_WAIT_S}
            remaining = {who: first for who, first in self.doubted.items() if first[1] > measured}
            in_vain = [who for who in self.doubted if who not in remaining]
            for who in [*in_vain, ACCEPTED_WORK] if self._has_drifted() else in_vain:
                waits[who] = min(max(2 * self.waits.get(who, 0.0), LEAST_WAIT_S), MOST_WAIT_S)
        self.measured, self.calibrated_s, self.waits, self.doubted = measured, now_s, waits, remaining
        if not remaining:
            self.doubts, self.version, self.ratio = 0, -1, 0.0
        self.accepted, self.mean = 0, 1.0

    def asks(self, now_s: float) -> bool:
        """Returns whether the calibration should be repeated now."""
        return bool(self.doubts) or (self._has_drifted() and not self._must_wait(ACCEPTED_WORK, now_s))

    def _has_drifted(self) -> bool:
        """Returns whether accepted work is further off than the calibration expects."""
        return self.accepted >= MIN_ACCEPTED and self.mean > RISEN

    def _must_wait(self, who: str, now_s: float) -> bool:
        return now_s < self.calibrated_s + self.waits.get(who, 0.0)


def risen_statistics(rises: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the statistics whose noise has risen, by `Noise.rise_since` of a new calibration."""
    return tuple(name for name, rise in rises.items() if rise > RISEN)


def without_risen(sums: Sums, risen: Sequence[str]) -> Sums:
    """Returns the sums without those of statistics whose noise has risen; then uncertain work is no evidence either."""
    gone = {*risen, "uncertain"} if risen else set()
    return {name: value for name, value in sums.items() if name not in gone}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
