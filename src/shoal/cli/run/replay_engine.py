"""The engine with which `shoal validator --replay` decodes submissions once more (swarm/validator/decode_replay.py)."""

import time
from collections.abc import Sequence
from pathlib import Path

from shoal.rollout.engine.api import make_requests
from shoal.rollout.engine.selection import AutoEngine, compute_class, replay_terms
from shoal.wire.lease import Lease
from shoal.wire.requirements import ReplayTerms, WeightFormat
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import RunSpec


class WorkerReplay:
    """Generates the rows of leases with a worker's engine. Holds one policy version besides those of the validator."""

    def __init__(self, spec: RunSpec, *, device: str) -> None:
        self._spec, self._device = spec, device
        self._engine = self._make(max_rows=64)
        self._max_rows = 64

    def compute_class(self, weights: WeightFormat | None) -> str:
        engine = self._make(max_rows=1)
        engine.weights = weights
        return str(compute_class(engine, device=self._device, compute_dtype=self._spec.compute_dtype))

    def terms(self, max_rows: int) -> ReplayTerms | None:
        if self._engine.kind != "torch":
            return None
        # Not of the engine itself: memory that was short for one lease says nothing about the next.
        return replay_terms(self._make(max_rows=max_rows), device=self._device, max_rows=max_rows)

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
        """Returns all rows of a lease, in the order of a file. Raises TimeoutError if that takes longer than `limit_s`.

        Raises ValueError if memory was short: the worker's prompts were then computed beside other prompts, which rounds differently.
        """
        give_up_s = time.monotonic() + limit_s
        if max_rows != self._max_rows or self._engine.has_work:  # an error has left rows behind
            self._engine, self._max_rows = self._make(max_rows=max_rows), max_rows
        engine = self._engine
        if (engine.policy_version, engine.weights) != (version, weights):
            engine.weights = weights
            engine.load(folder, version)
        engine.submit(make_requests(lease, engine.tokenizer))
        rows: list[Rollout] = []
        while engine.has_work:
            if time.monotonic() > give_up_s:
                raise TimeoutError(
                    f"{len(rows)} of {lease.num_rows} rows within {limit_s:.0f} s, {max_rows} at a time"
                )
            rows += [row.to_rollout() for row in engine.step()]
        if engine.memory_was_short:
            raise ValueError("memory was too short for all rows at once, so bits may differ")
        return sorted(rows, key=lambda row: (row.prompt_index, row.sample_index))

    def _make(self, *, max_rows: int) -> AutoEngine:
        spec = self._spec
        return AutoEngine(
            compute_dtype=spec.compute_dtype, proof=spec.proof, max_rows=max_rows, device=self._device
        )
