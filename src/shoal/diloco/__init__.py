"""Low-communication training: inner steps at every site, one outer step on the average of what they moved."""

from shoal.diloco.averager import Averager, Behind, RoundFailed
from shoal.diloco.mesh import LocalHub
from shoal.diloco.optimizer import DiLoCo, Landed, Schedule
from shoal.diloco.outer import Outer, OuterState
from shoal.diloco.peers import PeerAverager, Terms
from shoal.diloco.rounds import Outcome

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
