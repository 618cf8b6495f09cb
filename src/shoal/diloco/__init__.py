"""Low-communication training: inner steps at every site, one outer step on the average of what they moved."""

from shoal.diloco.averaging.averager import Averager, Behind, RoundFailed
from shoal.diloco.averaging.peers import PeerAverager, Terms
from shoal.diloco.optimizer import DiLoCo, Landed, Schedule
from shoal.diloco.outer import Outer, OuterState
from shoal.diloco.rounds import Outcome
from shoal.diloco.transport.mesh import LocalHub

__all__ = [
    "Averager",
    "Behind",
    "DiLoCo",
    "Landed",
    "LocalHub",
    "Outcome",
    "Outer",
    "OuterState",
    "PeerAverager",
    "RoundFailed",
    "Schedule",
    "Terms",
]
