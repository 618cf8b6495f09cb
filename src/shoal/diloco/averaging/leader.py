"""The leader's part in a round: it forms a group of the peers that are ready, and counts their votes.

The reachable peer with the first id leads; it need not take part itself. The leader keeps nothing beyond a round: a new
leader starts from what the peers tell it.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from shoal.diloco.averaging.membership import Membership, Ping
from shoal.diloco.averaging.peer_messages import (
    GroupReply,
    ReadyRequest,
    StateVersion,
    VoteReply,
    VoteRequest,
)
from shoal.diloco.transport.stream import Stream

PING_EVERY_S = 0.5
"""Seconds between two checks that the missing peers are alive."""

CLOSED_VOTE_S = 60.0
"""Seconds for which a decided vote is kept, so that a late vote still gets its result."""


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The peers that form the group, and those that must fetch its resulting state first."""

    members: tuple[ReadyRequest, ...]
    behind: tuple[str, ...]

    def reply(self) -> GroupReply:
        """Returns the reply for every member, with a new group id."""
        return GroupReply(
            outcome="group",
            id=secrets.token_hex(16),
            members=tuple(request.peer for request in self.members),
            weights=tuple(request.weight for request in self.members),
            norms=tuple(request.norm for request in self.members),
            owners=tuple(request.peer for request in self.members if request.reachable)
            or (self.members[0].peer,),
        )


def choose_group(
    requests: Iterable[ReadyRequest],
    absent: Iterable[StateVersion],
    *,
    leader: str = "",
    leader_suspects: Iterable[str] = (),
) -> GroupChoice:
    """Chooses the peers whose state has the most work behind it. `absent`: states of peers that are not ready.

    If an absent peer holds a newer state, all ready peers are behind. Peers that others cannot reach are left out (see
    unreachable_peers); `leader_suspects` are those that the leader itself cannot reach.
    """
    ready, absent = sorted(requests, key=lambda request: request.peer), list(absent)
    newest = max(version.order() for version in (*(request.standing for request in ready), *absent))
    current = [request for request in ready if request.standing.order() == newest]
    suspicions = {request.peer: request.suspects for request in current} | {leader: tuple(leader_suspects)}
    able = {request.peer for request in ready if request.reachable}
    out = unreachable_peers(
        suspicions, able, num_ready=len(ready), only_two=len(ready) + len(absent) <= 2, leader=leader
    )
    # If all were left out there would be no group at all.
    members = tuple(request for request in current if request.peer not in out) or tuple(current)
    kept = {request.peer for request in members}
    return GroupChoice(members, tuple(request.peer for request in ready if request.peer not in kept))


def unreachable_peers(
    suspicions: Mapping[str, Iterable[str]], able: Set[str], *, num_ready: int, only_two: bool, leader: str
) -> set[str]:
    """Returns the peers to leave out as unreachable. `able`: the ready peers that others have to reach.

    One peer's word counts only against a peer that suspects it too, if it is the leader's word, or if there are only two
    peers: otherwise a liar could form a group alone, and all others would adopt its state. A peer that suspects more than
    half of the ready peers is ignored. Of two peers that suspect each other, the one with the later id is left out.
    """
    standing = {peer: set(suspects) & able - {peer} for peer, suspects in suspicions.items()}
    standing = {
        peer: suspects
        for peer, suspects in standing.items()
        if peer == leader or 2 * len(suspects) <= num_ready
    }

    def confirmed(peer: str, num: int) -> bool:
        return (
            num > 1
            or only_two
            or peer in standing.get(leader, ())
            or any(peer in standing.get(other, ()) for other in standing.get(peer, ()))
        )

    return _leave_out(standing, confirmed)


def refused_peers(requests: Iterable[ReadyRequest]) -> set[str]:
    """Returns the ready peers whose values others refuse.

    Refusals of more than half of the ready peers are ignored, so that one liar cannot leave out all others.
    """
    ready = {request.peer: request for request in requests}
    refusals = {peer: set(request.refused) & ready.keys() for peer, request in ready.items()}
    return _leave_out({peer: out for peer, out in refusals.items() if 2 * len(out) <= len(ready)})


def _leave_out(
    accusations: dict[str, set[str]], confirmed: Callable[[str, int], bool] = lambda peer, num: True
) -> set[str]:
    """Returns the peers that others accuse: the one that most accuse comes first, and its own accusations are then ignored.

    `accusations` are those of each peer, and are changed. `confirmed(peer, num)`: whether `num` accusations of a peer count.
    """
    out: set[str] = set()
    while True:
        counts = Counter(peer for accused in accusations.values() for peer in accused - out)
        candidates = [peer for peer, num in counts.items() if confirmed(peer, num)]
        if not candidates:
            return out
        worst = max(candidates, key=lambda peer: (counts[peer], peer))
        out.add(worst)
        accusations.pop(worst, None)


@dataclass(slots=True)
class Ballot:
    """The votes of one group: commit when every member has the same digest, fail at the first that differs."""

    members: tuple[str, ...]
    votes: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    """Why the round is not committed; empty while it can be."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the result is known."""

    def vote(self, peer: str, digest: str) -> None:
        """Counts a member's digest. Votes of other peers are ignored."""
        if peer not in self.members:
            return
        self.votes[peer] = digest
        if not digest:
            self.fail(f"{peer} has no average")
        elif len(set(filter(None, self.votes.values()))) > 1:
            self.fail(f"{peer} has another average than {next(iter(self.votes))}")
        elif len(self.votes) == len(self.members):
            self.ended.set()

    def fail(self, reason: str) -> None:
        """Ends the vote, unless its result is known: members may have been told to commit."""
        if not self.ended.is_set():
            self.failure = reason
            self.ended.set()

    def dissenters(self) -> set[str]:
        """Returns the members whose digest differs from that of more than half: their average is the wrong one."""
        cast = {peer: digest for peer, digest in self.votes.items() if digest}
        for digest, num in Counter(cast.values()).most_common(1):
            if 2 * num > len(self.members):
                return {peer for peer, other in cast.items() if other != digest}
        return set()

    @property
    def commit(self) -> bool:
        """Returns whether the round is committed."""
        return self.ended.is_set() and not self.failure


class Leader:
    """Forms groups and counts votes, on the peer's event loop. `ping` asks a peer for its card.

    On busy machines peers may believe different peers to be dead, and so choose different leaders. A peer that is asked to
    lead but knows a live peer with an earlier id redirects everybody to it, so all end at the first reachable id.
    """

    def __init__(self, membership: Membership, ping: Ping, *, gather_s: float, min_peers: int) -> None:
        self._membership, self._ping = membership, ping
        self._gather_s, self._min_peers = gather_s, min_peers
        self._waiting: dict[str, tuple[ReadyRequest, asyncio.Future[GroupReply]]] = {}
        self._changed = asyncio.Event()
        self._forming: asyncio.Task[None] | None = None
        self._votes: dict[str, Ballot] = {}
        self._dissents: dict[str, set[str]] = {}
        """Peers whose average differed from the majority's, and in which groups, since the last commit."""
        self._watching: set[asyncio.Task[None]] = set()
        self.version: StateVersion | None = None
        """The state that the leader itself holds."""

    async def ready(self, request: ReadyRequest) -> GroupReply:
        """Waits until the group is formed, at most `request.wait_s`, and returns the decision."""
        reply: asyncio.Future[GroupReply] = asyncio.get_running_loop().create_future()
        if request.peer in self._waiting:
            replaced = GroupReply(outcome="retry", reason="replaced by a new request")
            _set_replies([self._waiting[request.peer][1]], replaced)
        self._waiting[request.peer] = request, reply
        self._changed.set()
        if self._forming is None or self._forming.done():
            self._forming = asyncio.create_task(self._form_group())
        try:
            async with asyncio.timeout(request.wait_s):
                return await reply
        except TimeoutError:
            missing = ", ".join(sorted(self._missing())) or "more peers"
            return GroupReply(outcome="retry", reason=f"waited {request.wait_s:.0f} s for {missing}")
        finally:
            if self._waiting.get(request.peer, (None, None))[1] is reply:
                self._waiting.pop(request.peer)

    async def answer(self, request: ReadyRequest, stream: Stream) -> None:
        """Waits for the group and sends the decision. A peer that disconnects meanwhile loses its place in the group."""
        waiting = asyncio.create_task(self.ready(request))
        closed = asyncio.create_task(stream.wait_closed_by_peer(request.wait_s + 5))
        try:
            await asyncio.wait({waiting, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._membership.suspect(request.peer, time.monotonic())
                return
        finally:
            for task in (waiting, closed):
                if not task.done():
                    task.cancel()
            await asyncio.gather(waiting, closed, return_exceptions=True)
        await stream.send(waiting.result().canonical())

    async def vote(self, request: VoteRequest) -> VoteReply:
        """Counts a vote and waits for the result, at most `request.wait_s`."""
        ballot = self._votes.get(request.group)
        if ballot is None:
            return VoteReply(commit=False, reason=f"this peer does not lead group {request.group[:8]}")
        ballot.vote(request.peer, request.average_digest)
        for peer in ballot.dissenters():
            self._dissents.setdefault(peer, set()).add(request.group)
        try:
            async with asyncio.timeout(request.wait_s):
                await ballot.ended.wait()
        except TimeoutError:
            # This member is told that the round failed, so no other member may be told to commit it.
            ballot.fail(f"{request.peer} timed out waiting for the others' votes")
        return VoteReply(commit=ballot.commit, reason=ballot.failure)

    def stop(self) -> None:
        """Cancels the leader's tasks."""
        for task in (*self._watching, *([self._forming] if self._forming else [])):
            task.cancel()

    def _missing(self) -> set[str]:
        alive = self._membership.alive(time.monotonic())
        return alive.keys() - self._waiting.keys() - {self._membership.own_id}

    async def _form_group(self) -> None:
        own_id = self._membership.own_id
        started_s = time.monotonic()
        while self._waiting:
            self._changed.clear()
            missing = self._missing()
            # The leader's own request arrives like every other; until then the leader is missing too.
            complete = not missing and (own_id in self._waiting or self.version is None)
            first = self._membership.leader(time.monotonic(), self_reachable=True)
            if first != own_id:
                reason = f"{first} leads, not this peer"
                self._reply_to_all(GroupReply(outcome="retry", reason=reason, leader=first or ""))
                return
            half_s = self._half_wait_s()
            waited_s = time.monotonic() - started_s
            late = waited_s > min(self._gather_s, half_s)
            choice = self._choose()
            enough = len(choice.members) >= self._min_peers
            if not choice.members or ((complete or late) and enough):
                self._close_group(choice)
                return
            if waited_s > half_s:
                # They ask again at once with their suspicions updated: a peer may have been left out as unreachable.
                reason = f"{len(choice.members)} of at least {self._min_peers} peers after {waited_s:.0f} s"
                self._reply_to_all(GroupReply(outcome="retry", reason=reason))
                return
            try:
                async with asyncio.timeout(PING_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                await asyncio.gather(*(self._ping(peer) for peer in missing))

    def _half_wait_s(self) -> float:
        """Returns how long to wait for others: a peer takes its round alone when its wait ends, so half of the wait.

        The leader's own wait counts, else the median of the others: a liar with a short wait would close the group before
        the others are ready. One peer alone without the leader could be that liar, so it waits for `gather_s`.
        """
        waits_s = {peer: request.wait_s for peer, (request, _) in self._waiting.items()}
        if self._membership.own_id in waits_s:
            return waits_s[self._membership.own_id] / 2
        half_s = sorted(waits_s.values())[len(waits_s) // 2] / 2
        return half_s if len(waits_s) > 1 else max(half_s, self._gather_s)

    def _reply_to_all(self, reply: GroupReply) -> None:
        waiting, self._waiting = self._waiting, {}
        _set_replies((future for _, future in waiting.values()), reply)

    def _choose(self) -> GroupChoice:
        requests = [request for request, _ in self._waiting.values()]
        out = (self._repeat_dissenters() & self._waiting.keys()) | refused_peers(requests)
        out |= self._false_claims([request for request in requests if request.peer not in out])
        if out == self._waiting.keys():
            out = set()  # no other peer is ready; leaving all out would form no group at all
        ready = [request for request in requests if request.peer not in out]
        choice = choose_group(
            ready,
            self._absent_versions(),
            leader=self._membership.own_id,
            leader_suspects=self._membership.suspects(time.monotonic()),
        )
        return replace(choice, behind=(*choice.behind, *sorted(out)))

    def _repeat_dissenters(self) -> set[str]:
        """Returns the peers that were wrong twice in this round. They are left out and fetch the round's result.

        A single wrong average is repaired by the retry.
        """
        return {peer for peer, groups in self._dissents.items() if len(groups) > 1}

    def _false_claims(self, requests: list[ReadyRequest]) -> set[str]:
        """Returns the peers that claim a newer state than all others and do not serve it, so that no peer could adopt it."""
        now_s = time.monotonic()
        claims = {request.peer: request.standing.order() for request in requests}
        doubtful = {peer for peer in claims if self._membership.withholds_state(peer, now_s)}
        believed = [order for peer, order in claims.items() if peer not in doubtful]
        newest = max([*believed, *(version.order() for version in self._absent_versions())], default=None)
        return set() if newest is None else {peer for peer in doubtful if claims[peer] > newest}

    def _absent_versions(self) -> list[StateVersion]:
        """Returns the states of live peers that are not ready. If one is newer, the ready peers need not wait."""
        now_s = time.monotonic()
        cards, wrong = self._membership.alive(now_s), self._repeat_dissenters()
        held = [
            card.standing
            for peer, card in cards.items()
            if peer not in self._waiting
            and peer not in wrong
            and not self._membership.withholds_state(peer, now_s)
        ]
        own = [] if self._membership.own_id in self._waiting else [self.version]
        return [version for version in (*held, *own) if version is not None]

    def _close_group(self, choice: GroupChoice) -> None:
        if not choice.members:
            newest = max(self._absent_versions(), key=StateVersion.order)
            reason = "another peer's state is newer"
            self._reply_to_all(GroupReply(outcome="behind", reason=reason, at_least=newest.round))
            return
        half_s = self._half_wait_s()
        waiting, self._waiting = self._waiting, {}
        group = choice.reply()
        self._votes[group.id] = ballot = Ballot(group.members)
        _set_replies((waiting[request.peer][1] for request in choice.members), group)
        behind = [waiting[peer][1] for peer in choice.behind]
        next_round = choice.members[0].standing.round + 1
        task = asyncio.create_task(self._watch_vote(group.id, ballot, behind, next_round, half_s))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch_vote(
        self,
        group: str,
        ballot: Ballot,
        behind: list[asyncio.Future[GroupReply]],
        next_round: int,
        half_s: float,
    ) -> None:
        """Pings the members that have not voted; tells the peers that were left behind how the vote ended.

        After `half_s` without a result they are told to fetch the state from which the group started. Otherwise a peer that
        claims a newer state and never votes would keep them waiting until their deadline.
        """
        started_s = time.monotonic()
        while not ballot.ended.is_set():
            try:
                async with asyncio.timeout(2 * PING_EVERY_S):
                    await ballot.ended.wait()
            except TimeoutError:
                for peer in ballot.members:
                    if peer not in (self._membership.own_id, *ballot.votes) and not await self._ping(peer):
                        ballot.fail(f"{peer} is gone")
            if time.monotonic() - started_s > half_s:
                slow = GroupReply(outcome="behind", reason="the group is slow", at_least=next_round - 1)
                _set_replies(behind, slow)
        result = GroupReply(outcome="retry", reason=ballot.failure)
        if ballot.commit:
            self._dissents.clear()
            result = GroupReply(outcome="behind", reason="the group committed its round", at_least=next_round)
        _set_replies(behind, result)
        await asyncio.sleep(CLOSED_VOTE_S)
        self._votes.pop(group, None)


def _set_replies(futures: "Iterable[asyncio.Future[GroupReply]]", reply: GroupReply) -> None:
    for future in futures:
        if not future.done():
            future.set_result(reply)
