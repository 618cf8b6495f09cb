"""The leader's side: which of the ready peers make a group, and whether their digests agree.

Any reachable peer leads when it has the first id on the roster; it need not take part itself. Nothing here is
remembered beyond a round: a new leader starts from what the peers tell it.
"""

import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.diloco.averaging.peer_messages import GroupAnswer, ReadyAsk, Standing


@dataclass(frozen=True, slots=True)
class Choice:
    """Which peers make the group, and which have to take over its state first."""

    members: tuple[ReadyAsk, ...]
    behind: tuple[str, ...]

    def answer(self) -> GroupAnswer:
        return GroupAnswer(
            outcome="group",
            id=secrets.token_hex(16),
            members=tuple(ask.peer for ask in self.members),
            weights=tuple(ask.weight for ask in self.members),
            owners=tuple(ask.peer for ask in self.members if ask.reachable) or (self.members[0].peer,),
        )


def choose(asks: Iterable[ReadyAsk], elsewhere: Iterable[Standing]) -> Choice:
    """Group those who hold the state with most work behind it; `elsewhere`: states of peers that are not ready.

    If somebody who is not here holds a newer state, all who are here are behind. A peer that a member could not reach
    is left out, unless nobody has to reach it; of two that could not reach each other, the later id goes.
    """
    ready = sorted(asks, key=lambda ask: ask.peer)
    newest = max(standing.order() for standing in (*(ask.standing for ask in ready), *elsewhere))
    out: set[str] = set()
    dialled = {ask.peer for ask in ready if ask.reachable}
    for ask in ready:
        if ask.peer not in out and ask.standing.order() == newest:
            out |= set(ask.suspects) & dialled - {ask.peer}
    members = tuple(ask for ask in ready if ask.standing.order() == newest and ask.peer not in out)
    kept = {ask.peer for ask in members}
    return Choice(members, tuple(ask.peer for ask in ready if ask.peer not in kept))


@dataclass(slots=True)
class Ballot:
    """The votes of one group: commit when every member has the same digest, drop at the first that differs."""

    members: tuple[str, ...]
    votes: dict[str, str] = field(default_factory=dict)
    lost: str = ""
    """Why it cannot end well any more."""

    def vote(self, peer: str, digest: str) -> None:
        if peer not in self.members:
            return
        self.votes[peer] = digest
        if not digest:
            self.lost = self.lost or f"{peer} has no average"
        elif len(set(filter(None, self.votes.values()))) > 1:
            self.lost = self.lost or f"{peer} has another average than {next(iter(self.votes))}"

    def odd(self) -> set[str]:
        """Members whose digest differs from that of more than half: it is their average that is wrong."""
        cast = {peer: digest for peer, digest in self.votes.items() if digest}
        for digest, num in Counter(cast.values()).most_common(1):
            if 2 * num > len(self.members):
                return {peer for peer, other in cast.items() if other != digest}
        return set()

    @property
    def decided(self) -> bool:
        return bool(self.lost) or len(self.votes) == len(self.members)

    @property
    def commit(self) -> bool:
        return self.decided and not self.lost
