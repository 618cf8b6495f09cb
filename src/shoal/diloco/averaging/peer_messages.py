"""What peers say to each other, as JSON in one frame; chunks and states follow as frames of bytes."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from shoal.wire.record import Count, Record

_KEY = re.compile(r"[0-9a-f]{64}")


class Standing(Record):
    """Which state a peer holds. More work is newer; equal work goes by round, then by digest."""

    work: float = Field(ge=0)
    round: Count
    state_digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    def order(self) -> tuple[float, int, str]:
        return self.work, self.round, self.state_digest


class Card(Record):
    """A peer's entry in the directory, and its answer to a hello."""

    peer: str = Field(max_length=128)
    reachable: bool
    standing: Standing | None
    """None until it holds a state."""
    phase: Count
    """Inner steps since its last round."""
    in_round: bool
    shared: str = Field(default="", max_length=256)
    """What all peers of the run have to have alike, in words; empty: not said."""

    def age_order(self) -> tuple[int, int]:
        """Of two cards of one peer the newer has the larger."""
        return -1 if self.standing is None else self.standing.round, self.phase


class Hello(Record):
    """I am here. Answered with a Card; also how a peer is asked whether it lives."""

    kind: Literal["hello"] = "hello"
    card: Card


class Bye(Record):
    """I leave; do not wait for me."""

    kind: Literal["bye"] = "bye"
    peer: str = Field(max_length=128)


class ReadyAsk(Record):
    """To the leader: I have a pseudo-gradient. Answered with a GroupAnswer, when the group is known."""

    kind: Literal["ready"] = "ready"
    peer: str = Field(max_length=128)
    reachable: bool
    standing: Standing
    weight: float = Field(ge=0)
    suspects: tuple[str, ...] = Field(max_length=1024)
    """Whom this peer could not reach in the attempt before."""
    wait_s: float = Field(gt=0)


class GroupAnswer(Record):
    outcome: Literal["group", "behind", "retry"]
    reason: str = ""
    at_least: Count = 0
    """With `behind`: the round that the state to fetch has reached."""
    leader: str = Field(default="", max_length=128)
    """With `retry`: who leads instead, of whom the one who asked may not know."""
    id: str = ""
    members: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    owners: tuple[str, ...] = ()


class VoteAsk(Record):
    """To the leader: the digest of my average, or nothing if I have none. Answered when all have voted."""

    kind: Literal["vote"] = "vote"
    peer: str = Field(max_length=128)
    group: str
    average_digest: str = Field(max_length=64)
    wait_s: float = Field(gt=0)


class VoteAnswer(Record):
    commit: bool
    reason: str = ""


class PartAsk(Record):
    """To an owner: my chunks of your part follow. Answered with the summed chunks, each as soon as it is complete."""

    kind: Literal["part"] = "part"
    peer: str = Field(max_length=128)
    group: str
    wait_s: float = Field(gt=0)


class StateAsk(Record):
    """Send me your state. Answered with a StateHead and its vectors in frames."""

    kind: Literal["state"] = "state"
    peer: str = Field(max_length=128)


class StateHead(Record):
    standing: Standing | None
    lengths: tuple[int, ...] = ()
    """Values per fragment; bases in this order, then momenta."""
    phase: Count = 0
    step: Count = 0


class LinkOffer(Record):
    """Over the daemon's stream: dial this port where you reach me, with this token; what you send is sealed with the first key."""

    port: int = Field(ge=0, le=65535)
    """0: no direct link."""
    token: str = Field(pattern=r"^([0-9a-f]{32})?$")
    keys: tuple[str, ...] = Field(max_length=2)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.port and (
            len(self.token) != 32 or any(not _KEY.fullmatch(key) for key in self.keys) or len(self.keys) != 2
        ):
            raise ValueError("an offer has a token of 16 bytes and two keys of 32")
        return self


class Asked(Record):
    """Any of the above, by its kind."""

    ask: Hello | Bye | ReadyAsk | VoteAsk | PartAsk | StateAsk = Field(discriminator="kind")
