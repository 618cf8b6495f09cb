"""Shoal's decision as a scheme of `shoal arena`: the checks of swarm/validator/fact_checks.py, as one score.

A score above 1 is a refusal by the validator's rules with the same calibration; `void.uncertain` is below 1. Checks that have no
scale, such as a constant polynomial, give BROKEN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shoal.cli.arena.schemes import CheckedRow, Floats, PublishedToploc, Table, by_prompt, verify
from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.fact_checks import RowFacts
from shoal.toploc import SegmentCheck
from shoal.toploc.decision import (
    CERTAIN,
    MARGIN,
    OUTLIER,
    STATISTICS,
    CalibratedStatistic,
    Unit,
    bound_for,
    calibrated_statistic,
    outlier_bound,
)
from shoal.toploc.segment_rules import HALF
from shoal.wire.codes import Rejected
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import Finish
from shoal.wire.run_spec import Tolerances

BROKEN = 10.0
PER_STATISTIC = 4
"""Columns of each statistic: excess, variance, units, rows."""
COMMON = 8
"""Columns after those: far draws, tokens, surprise, its variance, cut ends, ends, rows with far log-probs, rows."""


def row_facts(row: CheckedRow, segments: Sequence[SegmentCheck]) -> RowFacts:
    """Returns the facts that the validator's checks need."""
    logprob_T, low_T, high_T, entropy_T, variance_T, uniform_T = row.columns_6T
    distance_T = np.maximum(np.maximum(low_T - uniform_T, uniform_T - high_T), 0.0)
    return RowFacts(tuple(segments), logprob_T, distance_T, -logprob_T - entropy_T, variance_T)


@dataclass(frozen=True)
class ShoalDecision(PublishedToploc):
    """TOPLOC proofs, log-probs and draws against a calibration (docs/toploc.md), with a limit from honest scores."""

    name = "Shoal tuned"
    measured_as = "shoal"
    source = "docs/toploc.md, with a tuned limit"
    bytes_per_token = PublishedToploc.bytes_per_token + 4.0
    has_limit = False
    noise: Noise
    tolerances: Tolerances

    def measure(
        self, rows: Sequence[CheckedRow], commitments: Sequence[object], prompts: Sequence[int]
    ) -> Table:
        checks = verify(rows, commitments, self.proof)
        facts = [row_facts(row, segments) for row, segments in zip(rows, checks, strict=True)]
        sums, largest = [], []
        for row, fact in zip(rows, facts, strict=True):
            of_row = [self._statistic(one, row, fact) for one in self._calibrated()]
            sums.append([number for one, _ in of_row for number in one] + self._common(row, fact))
            largest.append([number for _, worst in of_row for number in worst] + [self._broken(row, fact)])
        table = by_prompt(np.array(sums), np.array(largest), prompts)
        units_P4 = table.sums_PA[:, 2 : PER_STATISTIC * len(self._calibrated()) : PER_STATISTIC]
        return Table(np.concatenate([table.sums_PA, np.square(units_P4)], axis=1), table.largest_PB)

    def score(self, sums_SA: Floats, largest_SB: Floats) -> Floats:
        found: Floats = largest_SB[:, -1]
        calibrated = self._calibrated()
        for place, one in enumerate(calibrated):
            excess, variance, units, rows = sums_SA[:, PER_STATISTIC * place :][:, :PER_STATISTIC].T
            squares = sums_SA[:, PER_STATISTIC * len(calibrated) + COMMON + place]
            spread = one.honest.inflation * variance + one.honest.prompt_variance * squares
            z = np.where(spread > 0, excess / np.sqrt(np.maximum(spread, 1e-300)), 0.0)
            worst_row, worst_unit = largest_SB[:, 2 * place], largest_SB[:, 2 * place + 1]
            found = np.maximum(found, z / _each(rows, partial(_sum_bound, one)))
            found = np.maximum(found, worst_row / _each(rows, partial(_row_bound, one)))
            found = np.maximum(found, worst_unit / _each(units, partial(_unit_bound, one)))
        common = sums_SA[:, PER_STATISTIC * len(calibrated) :][:, :COMMON]
        far, tokens, surprise, variance, cut, ended, off, rows = common.T
        most = np.maximum(fact_checks.FEW_ROWS, np.floor(HALF * rows))
        found = np.where(off > most, np.maximum(found, BROKEN), found)
        allowed = fact_checks.FAR_DRAWS_CERTAIN + np.floor(fact_checks.FAR_DRAWS_RATE * tokens)
        found = np.where(far > allowed, np.maximum(found, BROKEN), found)
        sigma = np.sqrt(np.maximum(variance, fact_checks.MIN_SURPRISE_VARIANCE))
        found = np.maximum(found, np.abs(surprise) / sigma / fact_checks.MAX_SURPRISE)
        misses = np.maximum(1, np.floor(self.tolerances.draw_misses * ended))
        misses = misses if self.tolerances.draw_misses > 0 else np.zeros_like(ended)
        ends = np.minimum(misses, 1 + np.floor(ended / fact_checks.UNLIKELY_ENDS))
        return np.where(cut > ends, np.maximum(found, BROKEN), found)

    def _calibrated(self) -> list[CalibratedStatistic]:
        found = [calibrated_statistic(self.noise, name) for name in STATISTICS]
        return [one for one in found if one is not None]

    def _statistic(
        self, one: CalibratedStatistic, row: CheckedRow, fact: RowFacts
    ) -> tuple[list[float], list[float]]:
        units: list[Unit] = fact_checks.units_of(row.rollout, fact)
        tested = [unit for unit in STATISTICS[one.name](units) if one.tests(unit.size)]
        if not tested:
            return [0.0] * PER_STATISTIC, [0.0, 0.0]
        honest = [one.moments(unit.size).mean for unit in tested]
        excess = [unit.value - mean for unit, mean in zip(tested, honest, strict=True)]
        variance = [one.variance(unit.size) for unit in tested]
        spread = one.honest.inflation * sum(variance) + one.honest.prompt_variance * len(tested) ** 2
        worst_unit = max(e / math.sqrt(v) for e, v in zip(excess, variance, strict=True))
        # As in toploc/decision.py, sums may exceed the honest mean by MARGIN, and single units may not.
        summed = sum(excess) - MARGIN * sum(honest)
        sums = [summed, sum(variance), float(len(tested)), 1.0]
        return sums, [summed / math.sqrt(spread), worst_unit]

    def _common(self, row: CheckedRow, fact: RowFacts) -> list[float]:
        far, count = fact_checks._far_draws([fact], self.tolerances)
        ended = row.rollout.finish is Finish.EOS
        cut = (
            ended
            and math.exp(fact.logprobs_T[-1]) < self.tolerances.eos_probability
            and fact.draw_distance_T[-1] > self.tolerances.draw
        )
        surprise, variance = float(fact.surprise_T.sum()), float(fact.surprise_variance_T.sum())
        off = float(fact_checks.is_far_off(row.rollout, fact, self.tolerances))
        return [far, count, surprise, variance, float(cut), float(ended), off, 1.0]

    def _broken(self, row: CheckedRow, fact: RowFacts) -> float:
        """Returns BROKEN if a check without a scale refuses the row."""
        try:
            fact_checks.check_forgery([row.rollout], [fact], self.tolerances)
            fact_checks.check_computation([row.rollout], [fact], self.tolerances, self.noise)
        except Rejected:
            return BROKEN
        impossible = fact.logprobs_T[-1] < math.log(fact_checks.IMPOSSIBLE)
        off = fact.draw_distance_T[-1] > self.tolerances.draw
        return BROKEN if row.rollout.finish is Finish.EOS and impossible and off else 0.0


class ShoalVerdict(ShoalDecision):
    """Uses the limit of validators: a score of 1."""

    name = "Shoal"
    source = "docs/toploc.md, as validators decide"
    has_limit = True


def _each(numbers: Floats, bound: Callable[[int], float]) -> Floats:
    """Returns the bound of each number; infinity for 0."""
    unique, inverse = np.unique(numbers, return_inverse=True)
    bounds = np.array([bound(int(number)) if number > 0 else math.inf for number in unique])
    found: Floats = bounds[inverse]
    return found


def _sum_bound(one: CalibratedStatistic, num_rows: int) -> float:
    tails = one.honest.tails
    return max(bound_for(tails, num_rows, CERTAIN), outlier_bound(tails[0], OUTLIER, num_rows=num_rows))


def _row_bound(one: CalibratedStatistic, num_rows: int) -> float:
    tails = one.honest.tails
    return max(bound_for(tails, 1, CERTAIN / num_rows), outlier_bound(tails[0], OUTLIER / num_rows))


def _unit_bound(one: CalibratedStatistic, num_units: int) -> float:
    alone = one.honest.alone
    return math.inf if alone is None else outlier_bound(alone, OUTLIER / num_units)
