"""Runs `shoal` as a hostile DiLoCo site: it declares the norm of its honest update and sends one NaN in it, in every round.

python nan_site.py diloco train site.toml --dir DIR --join ADDRESS
"""

import sys

import numpy as np

from shoal.cli.main import main
from shoal.diloco.averaging.averager import AveragingGroup, Reduced
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.outer import Vector
from shoal.telemetry import Log

SENT = "sends a NaN"
"""A line of its log."""


class LyingAverager(PeerAverager):
    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        Log("liar").info(SENT, round=group.round)
        lie_N = delta_N.copy()
        lie_N[len(lie_N) // 3] = np.nan
        return super().reduce(group, lie_N, deadline_s=deadline_s)


if __name__ == "__main__":
    sys.modules["shoal.diloco.averaging.peers"].PeerAverager = LyingAverager  # type: ignore[attr-defined]
    sys.exit(main())
