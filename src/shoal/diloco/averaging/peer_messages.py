"""The messages between peers: JSON in one frame; chunks and states follow as frames of bytes (docs/wire/diloco.md)."""

from typing import Literal

from pydantic import Field

from shoal.wire.record import Count, Record


class StateVersion(Record):
    """Identifies the state that a peer holds. More work is newer; ties are decided by round, then by digest."""

    work: float = Field(ge=0)
    round: Count
    state_digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    def order(self) -> tuple[float, int, str]:
        """Returns a sort key that is larger for the newer state."""
        return self.work, self.round, self.state_digest


class Card(Record):
    """A peer's entry in the directory, and its reply to a hello."""

    peer: str = Field(max_length=128)
    reachable: bool
    standing: StateVersion | None
    """The state that the peer holds; None until it has one."""
    phase: Count
    """Inner steps since its last round."""
    in_round: bool
    shared: str = Field(default="", max_length=256)
    """Settings that must be equal at all peers of the run, as text; empty if the peer does not tell."""

    def age_order(self) -> tuple[int, int]:
        """Returns a sort key that is larger for the newer of two cards of one peer."""
        return -1 if self.standing is None else self.standing.round, self.phase


class Hello(Record):
    """Announces a peer, and checks that the other is alive. The reply is a Card."""

    kind: Literal["hello"] = "hello"
    card: Card


class Bye(Record):
    """Announces that a peer leaves, so that no round waits for it."""

    kind: Literal["bye"] = "bye"
    peer: str = Field(max_length=128)


class ReadyRequest(Record):
    """Tells the leader that a peer has a pseudo-gradient. The GroupReply comes when the group is known."""

    kind: Literal["ready"] = "ready"
    peer: str = Field(max_length=128)
    reachable: bool
    standing: StateVersion
    weight: float = Field(ge=0)
    norm: float = Field(default=0.0, ge=0)
    """Norm of the pseudo-gradient."""
    suspects: tuple[str, ...] = Field(max_length=1024)
    """Peers that this one could not reach in the previous attempt."""
    refused: tuple[str, ...] = Field(default=(), max_length=1024)
    """Peers that sent this one values that no average may contain."""
    wait_s: float = Field(gt=0)


class GroupReply(Record):
    """The leader's decision about a peer that is ready."""

    outcome: Literal["group", "behind", "retry"]
    reason: str = ""
    at_least: Count = 0
    """With `behind`: the lowest round of the state to fetch."""
    leader: str = Field(default="", max_length=128)
    """With `retry`: the peer that leads instead, which the asking peer may not know."""
    id: str = ""
    members: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    owners: tuple[str, ...] = ()

    def problem(self, request: ReadyRequest) -> str:
        """Returns why this cannot be the group of the peer that sent `request`; empty if it can. A leader may lie."""
        sizes = {len(self.members), len(set(self.members)), len(self.weights), len(self.norms)}
        if len(sizes) > 1:
            return f"{len(self.members)} members, {len(self.weights)} weights, {len(self.norms)} norms"
        if min((*self.weights, *self.norms), default=0.0) < 0:
            return "a weight or norm below 0"
        if (
            not self.owners
            or len(set(self.owners)) < len(self.owners)
            or set(self.owners) - set(self.members)
        ):
            return f"the owners {self.owners} of the members {self.members}"
        said = dict(zip(self.members, zip(self.weights, self.norms, strict=True), strict=True))
        if said.get(request.peer) != (request.weight, request.norm):
            return f"{request.peer} without its weight and norm"
        return ""


class VoteRequest(Record):
    """Sends the leader the digest of a peer's average, or "" if it has none. The reply comes when all have voted."""

    kind: Literal["vote"] = "vote"
    peer: str = Field(max_length=128)
    group: str
    average_digest: str = Field(max_length=64)
    wait_s: float = Field(gt=0)


class VoteReply(Record):
    """Tells a member whether the round is committed."""

    commit: bool
    reason: str = ""


class PartRequest(Record):
    """Tells an owner that a member's chunks of its part follow. The reply is each summed chunk, as it is complete."""

    kind: Literal["part"] = "part"
    peer: str = Field(max_length=128)
    group: str
    wait_s: float = Field(gt=0)


class StateRequest(Record):
    """Asks for a peer's state. The reply is a StateHeader and the state's vectors in frames."""

    kind: Literal["state"] = "state"
    peer: str = Field(max_length=128)


class StateHeader(Record):
    """Precedes the vectors of a state."""

    standing: StateVersion | None
    lengths: tuple[Count, ...] = ()
    """Values per fragment. The bases follow in this order, then the momenta."""
    phase: Count = 0
    step: Count = 0


class PeerRequest(Record):
    """The first frame of every stream: one of the requests above, told apart by its kind."""

    ask: Hello | Bye | ReadyRequest | VoteRequest | PartRequest | StateRequest = Field(discriminator="kind")
