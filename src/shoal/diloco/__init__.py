"""Low-communication training: every site takes inner steps, then all take one outer step on the average change."""

from shoal.diloco.averaging.averager import Averager, AveragerSettings, Behind, RoundFailed
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.optimizer import DiLoCo, RoundReport, Schedule
from shoal.diloco.outer import Outer, OuterState
from shoal.diloco.robust import RobustSettings
from shoal.diloco.rounds import RoundOutcome
from shoal.diloco.transport.mesh import LocalHub

__all__ = [
    "Averager",
    "AveragerSettings",
    "Behind",
    "DiLoCo",
    "LocalHub",
    "Outer",
    "OuterState",
    "PeerAverager",
    "RobustSettings",
    "RoundFailed",
    "RoundOutcome",
    "RoundReport",
    "Schedule",
]
