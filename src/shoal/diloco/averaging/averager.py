"""The averager: how a peer meets others. One interface, three engines.

An engine joins a swarm, begins a round (who takes part, from which state), reduces, commits, and moves states. It is
never believed: `reduce` gives an average with a digest, and the average counts only after `commit` has found the same
digest at every member of the group (rounds.py).
"""

from dataclasses import dataclass
from typing import Protocol

from shoal.diloco.outer import OuterState, Vector


class RoundFailed(Exception):
    """A round, or one attempt at it, came to nothing. The message says why and who; nothing has changed."""


class Behind(Exception):
    """The swarm has moved on from, or never had, the state this peer started from: fetch the newest, go on from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A peer's word that it has a pseudo-gradient for a round."""

    round: int
    work: float
    digest: str
    """Of the state the pseudo-gradient was taken from."""
    weight: float
    """Samples behind the pseudo-gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Who takes part in one attempt at a round, in the order in which they are summed."""

    id: str
    round: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    owners: tuple[str, ...]
    """Those of the members that others can reach; each sums a part."""
    leader: str

    @property
    def work(self) -> float:
        return float(sum(self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    average_N: Vector
    digest: str
    """Of the coded average, every byte of it."""
    num_bytes: int
    """Sent by this peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    state: OuterState
    phase: int
    """Inner steps the sender had taken since its last round, so that a newcomer falls in step."""
    step: int
    """Inner steps behind the run, for the learning rate's schedule."""


class Averager(Protocol):
    @property
    def peer(self) -> str:
        """This peer's id."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """What others may join by, once this peer has joined."""

    def join(self, *, deadline_s: float) -> Fetched | None:
        """Find the swarm and download its newest state, verified; None if nobody has one yet."""

    def begin(self, ready: Ready, *, deadline_s: float) -> Group:
        """Wait for the others and agree on a group. Raises Behind or RoundFailed."""

    def reduce(self, group: Group, delta_N: Vector, *, deadline_s: float) -> Reduced:
        """The group's weighted mean. Raises RoundFailed."""

    def commit(self, group: Group, digest: str, *, deadline_s: float) -> bool:
        """Whether every member has this digest. An empty digest votes against."""

    def fetch(self, *, deadline_s: float) -> Fetched:
        """The newest state of the swarm, verified by its digest. Raises RoundFailed."""

    def serve(self, state: OuterState, *, step: int) -> str:
        """Offer `state` as this peer's own from now on; its digest."""

    def progress(self, *, phase: int, step: int) -> None:
        """Where this peer stands between two rounds."""

    def leave(self) -> None:
        """Say goodbye and stop."""
