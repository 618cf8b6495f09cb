"""The averager interface: how a peer finds the others and averages with them. PeerAverager and TorchftAverager implement it.

An engine joins a swarm, begins a round (who takes part, from which state), reduces, commits, and transfers states. Its
result is never trusted as it is: `reduce` returns an average with a digest, and the average is used only after `commit`
has found the same digest at every member of the group (rounds.py).
"""

from dataclasses import dataclass, field
from typing import Protocol

from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.robust import RobustSettings


class RoundFailed(Exception):
    """A round, or one attempt at it, failed. The message names the reason and the peer; no state has changed."""


class Behind(Exception):
    """The swarm does not hold the state that this peer started from: fetch the newest state and continue from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A peer's statement that it has a pseudo-gradient for a round."""

    round: int
    work: float
    digest: str
    """Digest of the state that the pseudo-gradient starts from."""
    weight: float
    """Samples behind the pseudo-gradient."""
    norm: float = 0.0
    """Norm of the pseudo-gradient. `rounds.take_round` sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingGroup:
    """The peers that take part in one attempt at a round, in the order in which they are summed."""

    id: str
    round: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    """Norms of the members' pseudo-gradients, as declared; the reducer checks them."""
    owners: tuple[str, ...]
    """The members that others can reach; each sums one part of the vector."""
    leader: str

    @property
    def work(self) -> float:
        """Returns the number of samples behind the group's average."""
        return float(sum(self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The result of one exchange."""

    average_N: Vector
    digest: str
    """Digest over every byte of the coded average."""
    num_bytes: int
    """Bytes that this peer sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedState:
    """A state that was downloaded from another peer and verified."""

    state: OuterState
    phase: int
    """Inner steps the sender had taken since its last round, so that a new peer joins in step."""
    step: int
    """Inner steps of the run so far, for the learning-rate schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragerSettings:
    """Timeouts of the peer-to-peer engine, and what its peers must have in common."""

    gather_s: float = 60.0
    """Seconds that a round waits for peers that are alive but not ready."""
    min_peers: int = 1
    """The smallest group that may take a round."""
    stall_s: float = 20.0
    """An exchange without progress for this long fails, and the peers it waits for are suspected."""
    announce_s: float = 3.0
    """Seconds between two directory entries; a peer without a new entry for four of these is dropped."""
    shared: str = ""
    """Settings that all peers must have in common, as text: peers that differ could never commit a round."""
    robust: RobustSettings = field(default_factory=RobustSettings)
    """How the group's updates become one."""
    admit: frozenset[str] | None = None
    """Ids of the peers of this run, this one's included; None admits every peer that knows the run's name."""


class Averager(Protocol):
    """What the optimizer needs from an engine."""

    @property
    def peer(self) -> str:
        """Returns this peer's id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that other peers can join by, once this peer has joined."""

    def join(self, *, deadline_s: float, lengths: tuple[int, ...] | None = None) -> FetchedState | None:
        """Finds the swarm and downloads its newest state; returns None if no peer has one yet.

        `lengths`: values per fragment of this peer's model. An engine may refuse other states unread.
        """

    def begin(self, ready: Ready, *, deadline_s: float) -> AveragingGroup:
        """Waits for the other peers and agrees on a group with them. Raises Behind or RoundFailed."""

    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        """Returns the group's weighted mean. Raises RoundFailed."""

    def commit(self, group: AveragingGroup, digest: str, *, deadline_s: float) -> bool:
        """Returns whether every member has this digest. An empty digest votes against the round."""

    def fetch(self, *, deadline_s: float) -> FetchedState:
        """Returns the newest state of the swarm, verified by its digest. Raises RoundFailed."""

    def serve(self, state: OuterState, *, step: int, phase: int = 0) -> str:
        """Offers `state` to other peers from now on, with the progress of this peer, and returns its digest."""

    def progress(self, *, phase: int, step: int) -> None:
        """Records how many inner steps this peer has taken since its last round and in all."""

    def leave(self) -> None:
        """Tells the other peers that this one leaves, and stops."""
