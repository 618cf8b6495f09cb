"""Decode replay: generates a submission once more with the worker's engine and compares it bit for bit.

A prefill sums in another order than decoding, so checks that allow for noise cannot see a change that is smaller than rounding, such
as weights that are one small step old. An engine of the same build on the same kind of machine, with the same rows in the same
batch, has no noise at all: any difference means other weights, other inputs or another machine than declared.

A worker declares with each file what its bits depend on (requirements.ReplayTerms). If this validator has other terms, nothing is
compared. A difference is void.uncertain, not a refusal: a memory error, or a setting that the terms do not contain, must not
convict an honest node. A node whose work differs repeatedly is convicted by its accumulated evidence (rules/cumulative_evidence.py).

    B  rows    T  tokens
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.files import is_out_of_memory
from shoal.swarm.validator.fact_checks import Evidence
from shoal.swarm.validator.format_checks import where
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.wire.codes import UNCERTAIN, Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Claim
from shoal.wire.requirements import ReplayTerms, WeightFormat
from shoal.wire.rollouts import Rollout, RolloutTable

MAX_ROWS = 4096
"""Most rows at once that a replay uses; a worker could declare any number."""


class ReplayEngine(Protocol):
    """An engine of this machine that generates as a worker does: cli/run/replay_engine.py, because swarm does not import rollout."""

    def compute_class(self, weights: WeightFormat | None) -> str:
        """Returns the compute class of what it generates."""

    def terms(self, max_rows: int) -> ReplayTerms | None:
        """Returns the terms of what it generates; None if it promises no equal bits."""

    def generate(
        self,
        folder: Path,
        version: int,
        weights: WeightFormat | None,
        lease: Lease,
        max_rows: int,
        *,
        limit_s: float,
    ) -> Sequence[Rollout]:
        """Returns all rows of a lease. Raises TimeoutError if that takes longer than `limit_s`."""


@dataclass(frozen=True, slots=True)
class DecodeReplay:
    """Replays a share of the submissions that this machine can compare."""

    engine: ReplayEngine
    share: float
    """Submissions that are replayed, from 0 to 1. A replay costs as much as the generation."""

    def check(self, table: RolloutTable, claim: Claim, policy: LoadedPolicy, rng: random.Random) -> Evidence:
        """Returns what was compared, for the evidence. Raises Rejected (void.uncertain) if a row has other bits.

        A replay is given up after half of the claim's time, and then says nothing about the submission: a worker could declare that
        it decodes row by row, which takes many times as long.
        """
        lease, limit_s = claim.lease, max(0.0, claim.deadline_s - time.time()) / 2
        if (reason := self.not_comparable(table, lease, policy)) is not None:
            return {"replay": reason}
        if rng.random() >= self.share:
            return {"replay": "not drawn"}
        assert policy.folder is not None, "not_comparable has checked it"
        max_rows = ReplayTerms.parse(table.replay).max_rows
        try:
            again = self.engine.generate(
                policy.folder, policy.version, policy.weights, lease, max_rows, limit_s=limit_s
            )
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # the other checks have passed
            if not isinstance(error, (ValueError, OSError)) and not is_out_of_memory(error):
                raise
            return {"replay": f"failed: {str(error)[:200]}"}
        differing = [row for row, other in zip(table.rows, again, strict=True) if row != other]
        if differing:
            raise Rejected(
                UNCERTAIN,
                f"decoded again on the same kind of machine, {len(differing)} of {len(table.rows)} rows have other bits, first "
                f"{where(differing[0])}: {_difference(differing[0], again[table.rows.index(differing[0])])}",
            )
        return {"replay": "equal", "replayed_rows": len(again)}

    def not_comparable(self, table: RolloutTable, lease: Lease, policy: LoadedPolicy) -> str | None:
        """Returns why this machine cannot expect the same bits, or None if it can."""
        if not table.replay:
            return "not promised"
        declared = ReplayTerms.parse(table.replay)
        if not 1 <= declared.max_rows <= MAX_ROWS or self.engine.terms(declared.max_rows) != declared:
            return "another machine"
        if table.made_by != self.engine.compute_class(policy.weights):
            return "another class"
        if lease.task.stop:
            return "stop strings"
        if policy.folder is None or not policy.folder.exists():
            return "weights not on disk"
        return None


def _difference(row: Rollout, again: Rollout) -> str:
    """Returns in words what differs first."""
    if row.output_tokens != again.output_tokens:
        pairs = zip(row.output_tokens, again.output_tokens, strict=False)
        first = next(
            (place for place, (one, other) in enumerate(pairs) if one != other), len(again.output_tokens)
        )
        return f"token {first}"
    if row.logprobs != again.logprobs:
        pairs_T = zip(row.logprobs, again.logprobs, strict=True)
        gap = max(abs(one - other) for one, other in pairs_T)
        return f"log-probs, by up to {gap:.2g}"
    return "proofs"
