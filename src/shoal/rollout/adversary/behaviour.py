"""How a worker does its work. Honest workers use this class as it is; lies.py has the others, for tests and demos.

The hooks stand where a dishonest worker would interfere, so that the honest path needs no branches for them.
"""

from collections.abc import Sequence
from typing import Literal

from shoal.rollout.engine.api import Engine, Request
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable

Dtype = Literal["float32", "bfloat16"]


class Conduct:
    """Leaves everything as it is."""

    def compute_dtype(self, leased: Dtype) -> Dtype:
        """What the engine computes in."""
        return leased

    def engine(self, engine: Engine) -> Engine:
        """The engine, once, before it loads anything."""
        return engine

    def requests(self, requests: Sequence[Request], lease: Lease) -> Sequence[Request]:
        """What is generated for a lease."""
        return requests

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        """What is reported of it."""
        return table

    def data(self, data: bytes) -> bytes:
        """The bytes that are sent."""
        return data
