"""Checks the facts of a forward pass with the noise of the compute class that a worker declares, if necessary by a second path.

A path is a way to compute the same states with other rounding: packed or cached attention, or plain matrix products.

    screen_many       one row of each large submission, before all rows are computed: refuses rows that were made up
    check_by_paths    all rows of a submission
"""

import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace

from shoal.swarm.validator import fact_checks
from shoal.swarm.validator.fact_checks import Evidence
from shoal.swarm.validator.prefill import CannotCheck, LoadedPolicy, num_fed
from shoal.swarm.validator.recompute import RowsToCheck, recompute_many
from shoal.wire.codes import UNCERTAIN, Rejected
from shoal.wire.messages import Claim
from shoal.wire.proof_noise import Noise
from shoal.wire.rollouts import Rollout, RolloutTable
from shoal.wire.run_spec import RunSpec

MAYBE_NOISE = frozenset(
    ("reject.wrong_computation", "reject.wrong_sampling", "reject.wrong_logprobs", "void.uncertain")
)
"""Refusals that the noise of an unknown compute class could explain."""

SCREENED_BATCHES = 4
"""A submission is screened only if it needs more prefills than this. With fewer, the additional prefill of the screening would be a
large part of the whole check."""
SCREENED_ROWS = 64
"""A submission is screened only if it has at least this many rows. The screened row is computed twice, and long rows are drawn more
often: measured on a CPU, the check takes 6 to 9% longer for 32 rows, 3 to 4% for 64 and 1 to 3% for 128."""


class RefusedWithEvidence(Rejected):
    """A refusal with the numbers behind it."""

    def __init__(self, rejected: Rejected, evidence: Evidence) -> None:
        super().__init__(rejected.code, rejected.detail)
        self.evidence = evidence


def check_by_paths(
    table: RolloutTable,
    claim: Claim,
    facts: Sequence[fact_checks.RowFacts],
    spec: RunSpec,
    policy: LoadedPolicy,
    stop: threading.Event | None,
) -> Evidence:
    """Checks the facts with the noise of the declared compute class and returns the numbers behind the verdict.

    Work of a class that the calibration does not have is judged by the widest noise of all its pairs. If that refuses it,
    a second forward pass with other kernels checks it again, and it is refused only if both do. Raises RefusedWithEvidence.

    If the second pass fails (plain attention needs more memory), the first one decides: a refusal that no rounding explains
    remains, and any other is void.uncertain. void.infra would let a liar escape by declaring a class that nobody knows.
    """
    try:
        return check_by_noise(table, claim, facts, spec, policy)
    except RefusedWithEvidence as refused:
        if _is_known(table, claim, spec) or refused.code not in MAYBE_NOISE:
            raise
        first = refused
    again = _other_path(policy)
    to_check = [RowsToCheck(table.rows, claim.lease)]
    try:
        (found,) = recompute_many(to_check, again, control_seed=secrets.randbits(64), stop=stop)
    except CannotCheck as failed:
        if fact_checks.is_beyond_rounding(facts):
            raise first from None
        detail = f"{first.detail}; the second path could not check it: {failed}"
        raise RefusedWithEvidence(Rejected(UNCERTAIN, detail), first.evidence) from None
    if isinstance(found, Rejected):
        raise first
    try:
        return check_by_noise(table, claim, found, spec, again) | {"refused_by_first_path": first.code}
    except RefusedWithEvidence:
        raise first from None


def screen_many(
    submissions: Sequence[tuple[RolloutTable, Claim]],
    spec: RunSpec,
    policy: LoadedPolicy,
    *,
    control_seed: int,
    stop: threading.Event | None,
) -> list[Rejected | None]:
    """Computes one row of each large submission; returns its refusal, or None for a submission whose rows must all be checked.

    A liar makes up rows of any length at almost no cost, but a prefill of all of them takes as long as for honest ones. Refuses
    only what `check_by_paths` would refuse as well, by both paths if the compute class is unknown. Raises CannotCheck or Stopped.
    """
    drawn = {
        number: _draw_row(table.rows)
        for number, (table, _) in enumerate(submissions)
        if len(table.rows) >= SCREENED_ROWS
        and sum(map(num_fed, table.rows)) > SCREENED_BATCHES * policy.batch_tokens
    }
    refused = _refuse_rows(drawn, submissions, spec, policy, control_seed, stop)
    unknown = {
        number: drawn[number]
        for number, refusal in refused.items()
        if refusal.code in MAYBE_NOISE and not _is_known(*submissions[number], spec)
    }
    try:
        again = _refuse_rows(unknown, submissions, spec, _other_path(policy), secrets.randbits(64), stop)
    except CannotCheck:
        again = {}  # `check_by_paths` decides
    return [
        None if number in unknown and number not in again else refused.get(number)
        for number in range(len(submissions))
    ]


def _draw_row(rows: Sequence[Rollout]) -> Rollout:
    """Draws a row with a probability in proportion to its tokens, so that made-up rows are found by their share of the work.

    The draw must be secret, because a node that could foresee it would compute only that row.
    """
    (row,) = secrets.SystemRandom().choices(rows, weights=[num_fed(row) for row in rows])
    return row


def _refuse_rows(
    drawn: dict[int, Rollout],
    submissions: Sequence[tuple[RolloutTable, Claim]],
    spec: RunSpec,
    policy: LoadedPolicy,
    control_seed: int,
    stop: threading.Event | None,
) -> dict[int, Rejected]:
    """Computes one row of each submission by one path, and returns the refusals by the number of the submission."""
    refused: dict[int, Rejected] = {}
    to_check = [RowsToCheck([row], submissions[number][1].lease) for number, row in drawn.items()]
    found = recompute_many(to_check, policy, control_seed=control_seed, stop=stop)
    for (number, row), facts in zip(drawn.items(), found, strict=True):
        if isinstance(facts, Rejected):
            refused[number] = facts
            continue
        noise, about = _noise_for(*submissions[number], spec, policy)
        try:
            fact_checks.check_one_row(row, facts[0], spec.tolerances, noise)
        except Rejected as rejected:
            evidence = fact_checks.evidence([row], facts, spec.tolerances) | about | {"rows_computed": 1}
            refused[number] = RefusedWithEvidence(rejected, evidence)
    return refused


def check_by_noise(
    table: RolloutTable,
    claim: Claim,
    facts: Sequence[fact_checks.RowFacts],
    spec: RunSpec,
    policy: LoadedPolicy,
) -> Evidence:
    """Checks the facts of one path. Returns the numbers, or raises RefusedWithEvidence."""
    rows = table.rows
    noise, about = _noise_for(table, claim, spec, policy)
    scores = fact_checks.score_facts(rows, facts, noise)
    evidence = fact_checks.evidence(rows, facts, spec.tolerances, scores) | about
    try:
        fact_checks.check_facts(rows, facts, spec.tolerances, noise, scores)
    except Rejected as rejected:
        raise RefusedWithEvidence(rejected, evidence) from None
    return evidence


def _noise_for(
    table: RolloutTable, claim: Claim, spec: RunSpec, policy: LoadedPolicy
) -> tuple[Noise | None, Evidence]:
    """Returns the noise of the pair of compute classes, or of all pairs if it was not measured, and what the evidence says of it."""
    made_by, checked_by = table.made_by, str(policy.compute_class())
    calibration = spec.noise_of(claim.policy_version)
    of_all = calibration and calibration.at(claim.lease.sampling.temperature)
    noise = (of_all and of_all.of_pair(made_by, checked_by)) or of_all
    about: Evidence = {}
    if of_all is not None:
        about["calibrated_at"] = spec.calibrated_at(claim.policy_version)
    if made_by:
        about |= {"made_by": made_by, "checked_by": checked_by, "pair_measured": int(noise is not of_all)}
    return noise, about


def _is_known(table: RolloutTable, claim: Claim, spec: RunSpec) -> bool:
    """Returns whether the calibration has the declared compute class, or there is no calibration."""
    noise = spec.noise_of(claim.policy_version)
    return noise is None or noise.covers(table.made_by)


def _other_path(policy: LoadedPolicy) -> LoadedPolicy:
    return replace(policy, plain=not policy.plain)
