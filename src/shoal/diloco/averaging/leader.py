"""What a peer does for others when it leads: hold their readiness until a group can be made, count their votes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from shoal.diloco.averaging.gather import Ballot, Choice, choose
from shoal.diloco.averaging.peer_messages import GroupAnswer, ReadyAsk, Standing, VoteAnswer, VoteAsk
from shoal.diloco.averaging.roster import Roster

LOOK_S = 0.5
"""How often those who are missing are asked whether they live."""

Ping = Callable[[str], Awaitable[bool]]
"""Whether a peer may be taken to live."""


@dataclass(slots=True)
class _Open:
    ballot: Ballot
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class Leader:
    """Lives on the peer's event loop. `ping` asks a peer for its card and keeps the roster up to date.

    Peers that waited for a core take different ones for gone, and so different ones for the leader. Whoever is asked but knows of
    an earlier id that lives sends all who wait here on to it: everybody ends up with the first id that anybody can reach.
    """

    def __init__(self, roster: Roster, ping: Ping, *, gather_s: float, min_peers: int) -> None:
        self._roster, self._ping = roster, ping
        self._gather_s, self._min_peers = gather_s, min_peers
        self._asks: dict[str, tuple[ReadyAsk, asyncio.Future[GroupAnswer]]] = {}
        self._news = asyncio.Event()
        self._gathering: asyncio.Task[None] | None = None
        self._open: dict[str, _Open] = {}
        self._odd: dict[str, set[str]] = {}
        """Whose average was another than most peers', and in which groups, since a round was last committed."""
        self._watching: set[asyncio.Task[None]] = set()
        self.standing: Standing | None = None
        """Of the leader itself."""

    async def ready(self, ask: ReadyAsk) -> GroupAnswer:
        answer: asyncio.Future[GroupAnswer] = asyncio.get_running_loop().create_future()
        if ask.peer in self._asks:
            _answer(self._asks[ask.peer][1], GroupAnswer(outcome="retry", reason="asked again"))
        self._asks[ask.peer] = ask, answer
        self._news.set()
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather())
        try:
            async with asyncio.timeout(ask.wait_s):
                return await answer
        except TimeoutError:
            missing = ", ".join(sorted(self._missing())) or "more peers"
            return GroupAnswer(outcome="retry", reason=f"waited {ask.wait_s:.0f} s for {missing}")
        finally:
            if self._asks.get(ask.peer, (None, None))[1] is answer:
                self._asks.pop(ask.peer)

    async def vote(self, ask: VoteAsk) -> VoteAnswer:
        held = self._open.get(ask.group)
        if held is None:
            return VoteAnswer(commit=False, reason="nobody votes on that group here")
        held.ballot.vote(ask.peer, ask.average_digest)
        for peer in held.ballot.odd():
            self._odd.setdefault(peer, set()).add(ask.group)
        if held.ballot.decided:
            held.decided.set()
        try:
            async with asyncio.timeout(ask.wait_s):
                await held.decided.wait()
        except TimeoutError:
            # From here on nobody may be told to commit: this one was not.
            held.ballot.lost = held.ballot.lost or f"{ask.peer} waited too long for the others' votes"
            held.decided.set()
        return VoteAnswer(commit=held.ballot.commit, reason=held.ballot.lost)

    def stop(self) -> None:
        for task in (*self._watching, *([self._gathering] if self._gathering else [])):
            task.cancel()

    def _missing(self) -> set[str]:
        return self._roster.alive(time.monotonic()).keys() - self._asks.keys() - {self._roster.me}

    async def _gather(self) -> None:
        started_s = time.monotonic()
        while self._asks:
            self._news.clear()
            missing = self._missing()
            # The leader's own readiness comes like everybody's; until then it is missing too.
            everybody = not missing and (self._roster.me in self._asks or self.standing is None)
            if (first := self._roster.leader(time.monotonic(), me_reachable=True)) != self._roster.me:
                self._send_off(f"{first} leads, not this peer", first or "")
                return
            # Whoever is ready takes its round alone when its wait ends: half of it goes to waiting for others, no more.
            half_s = min(ask.wait_s / 2 for ask, _ in self._asks.values())
            waited_s = time.monotonic() - started_s
            late = waited_s > min(self._gather_s, half_s)
            choice = self._choose()
            enough = len(choice.members) >= self._min_peers
            if not choice.members or ((everybody or late) and enough):
                self._close(choice)
                return
            if waited_s > half_s:
                # They come again at once, and with a fresh mind: a peer they could not reach may have been left out.
                self._send_off(
                    f"{len(choice.members)} of at least {self._min_peers} peers after {waited_s:.0f} s"
                )
                return
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                await asyncio.gather(*(self._ping(peer) for peer in missing))

    def _send_off(self, reason: str, leader: str = "") -> None:
        asks, self._asks = self._asks, {}
        told = GroupAnswer(outcome="retry", reason=reason, leader=leader)
        for _, answer in asks.values():
            _answer(answer, told)

    def _choose(self) -> Choice:
        out = self._wrong_again() & self._asks.keys()
        if out == self._asks.keys():
            out = set()  # nobody else is here; if nobody comes they are on their own
        choice = choose([ask for ask, _ in self._asks.values() if ask.peer not in out], self._elsewhere())
        return replace(choice, behind=(*choice.behind, *sorted(out)))

    def _wrong_again(self) -> set[str]:
        """Once is a fault that a retry mends. Whoever is wrong twice in a round is left out of it, and takes its result over."""
        return {peer for peer, groups in self._odd.items() if len(groups) > 1}

    def _elsewhere(self) -> list[Standing]:
        """States of those who are not ready: if one is newer, nobody here needs to wait."""
        cards, wrong = self._roster.alive(time.monotonic()), self._wrong_again()
        held = [card.standing for peer, card in cards.items() if peer not in self._asks and peer not in wrong]
        own = [] if self._roster.me in self._asks else [self.standing]
        return [standing for standing in (*held, *own) if standing is not None]

    def _close(self, choice: Choice) -> None:
        asks, self._asks = self._asks, {}
        if not choice.members:
            newest = max(self._elsewhere(), key=Standing.order)
            told = GroupAnswer(
                outcome="behind", reason="another peer's state is newer", at_least=newest.round
            )
            for _, answer in asks.values():
                _answer(answer, told)
            return
        group = choice.answer()
        self._open[group.id] = held = _Open(Ballot(group.members))
        for ask in choice.members:
            _answer(asks[ask.peer][1], group)
        behind = [asks[peer][1] for peer in choice.behind]
        task = asyncio.create_task(self._watch(group.id, held, behind, choice.members[0].standing.round + 1))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(
        self, group: str, held: _Open, behind: list[asyncio.Future[GroupAnswer]], reached: int
    ) -> None:
        """Ask those who have not voted whether they live; tell those left behind how it ended."""
        while not held.decided.is_set():
            try:
                async with asyncio.timeout(2 * LOOK_S):
                    await held.decided.wait()
            except TimeoutError:
                await self._look_after(held)
        if held.ballot.commit:
            self._odd.clear()
        told = (
            GroupAnswer(outcome="behind", reason="the group went on", at_least=reached)
            if held.ballot.commit
            else GroupAnswer(outcome="retry", reason=held.ballot.lost)
        )
        for answer in behind:
            _answer(answer, told)
        await asyncio.sleep(60)  # a vote that comes late finds how it ended
        self._open.pop(group, None)

    async def _look_after(self, held: _Open) -> None:
        for peer in held.ballot.members:
            if peer not in held.ballot.votes and peer != self._roster.me and not await self._ping(peer):
                held.ballot.lost = held.ballot.lost or f"{peer} is gone"
                held.decided.set()


def _answer(future: "asyncio.Future[GroupAnswer]", answer: GroupAnswer) -> None:
    if not future.done():
        future.set_result(answer)
