"""The peer-to-peer engine: the averager over any mesh. One thread with an event loop does everything that waits.

No server knows the swarm. Peers find each other by the mesh's directory, the first reachable id leads, each owner sums
its part, and every stream is opened by the one who wants something.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.diloco.averaging.answering import Answers
from shoal.diloco.averaging.asking import Silent, ask_peer
from shoal.diloco.averaging.averager import Behind, Fetched, Group, Ready, Reduced, RoundFailed
from shoal.diloco.averaging.fetching import fetch_from, newest_holders
from shoal.diloco.averaging.leader import Leader
from shoal.diloco.averaging.membership import Holding
from shoal.diloco.averaging.peer_messages import (
    Bye,
    Card,
    GroupAnswer,
    Hello,
    ReadyAsk,
    Standing,
    VoteAnswer,
    VoteAsk,
)
from shoal.diloco.averaging.reducer import Reducer
from shoal.diloco.averaging.roster import Roster
from shoal.diloco.codec import CodecName
from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.transport.mesh import Broken, Mesh, Stream
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

T = TypeVar("T")

HELLO_S = 5.0
"""How long a peer may take to say it lives."""
START_S = 120.0
"""How long one attempt to come up may take: the daemon has 60 s, the directory the rest."""
DIRECTORY_S = 30.0
"""How long the directory may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How long whom is waited for."""

    gather_s: float = 60.0
    """A round waits this long for those who are alive but not ready."""
    min_peers: int = 1
    """A smaller group is no group."""
    stall_s: float = 20.0
    """An exchange that stands still so long leaves out whoever holds it up."""
    announce_s: float = 3.0
    """Between two entries in the directory; four of these without one, and a peer is forgotten."""
    shared: str = ""
    """What all peers have to have alike beside the model, in words: two that differ would never agree on a round."""


def _check_alike(shared: str, cards: Sequence[Card]) -> None:
    for card in cards:
        if shared and card.shared and card.shared != shared:
            raise ValueError(
                f"peer {card.peer} has {card.shared}, this one {shared}: no round would ever be agreed on; "
                "give every site the same file"
            )


class PeerAverager:
    """See averager.Averager."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        log: Log,
        codec: CodecName = "fp16",
        terms: Terms | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._mesh, self._log = mesh, log
        self._stop = stop or threading.Event()
        self._codec: CodecName = codec
        self._terms = terms or Terms()
        self._holding = Holding(self._terms.shared)
        self._at_least = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="averager", daemon=True)
        self._thread.start()
        self._chores: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def peer(self) -> str:
        return self._mesh.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._mesh.addresses

    def peers(self) -> dict[str, Card]:
        """Everybody else that is thought to be alive, for whoever wants to show it."""
        return {} if self._chores is None else self._roster.shown(time.monotonic())

    # -- what the training thread calls -------------------------------------------------------------------

    def join(self, *, deadline_s: float) -> Fetched | None:
        once_s = min(START_S, deadline_s)
        wait_for(
            "the swarm",
            lambda: self._try_to_start(once_s),
            deadline_s=deadline_s,
            log=self._log,
            stop=self._stop,
        )
        cards = self._call(self._meet(), deadline_s, "the other peers' hellos")
        _check_alike(self._terms.shared, cards)
        if not newest_holders(cards, self._holding.standing, at_least=self._at_least):
            return None
        return self.fetch(deadline_s=deadline_s)

    def begin(self, ready: Ready, *, deadline_s: float) -> Group:
        self._holding.in_round = True
        return self._call(self._begin(ready, deadline_s), deadline_s + 5, f"a group for round {ready.round}")

    def reduce(self, group: Group, delta_N: Vector, *, deadline_s: float) -> Reduced:
        work = self._reducer.reduce(group, delta_N, deadline_s=deadline_s)
        return self._call(work, deadline_s + 5, f"the exchange of round {group.round}")

    def commit(self, group: Group, digest: str, *, deadline_s: float) -> bool:
        try:
            return self._call(
                self._vote(group, digest, deadline_s), deadline_s + 5, f"the votes on round {group.round}"
            )
        except RoundFailed as failed:
            self._log.warning("no word on the vote", leader=group.leader, reason=failed)
            return False

    def fetch(self, *, deadline_s: float) -> Fetched:
        return self._call(self._fetch(deadline_s), deadline_s + 5, "another peer's state")

    def serve(self, state: OuterState, *, step: int) -> str:
        digest = state.digest()
        standing = Standing(work=state.work, round=state.round, state_digest=digest)

        def show() -> None:
            self._holding.show(state, standing)
            self._leader.standing = standing

        held = self._holding
        held.step, held.phase, held.in_round = step, 0, False
        self._loop.call_soon_threadsafe(show)
        return digest

    def progress(self, *, phase: int, step: int) -> None:
        self._holding.phase, self._holding.step = phase, step

    def leave(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(RoundFailed):
            self._call(self._end(), 10.0, "the other peers to hear our goodbye")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                return future.result(min(0.2, deadline_s))
            except TimeoutError:
                # A future's own TimeoutError would look the same; ours never end with one.
                if self._stop.is_set() and not self._stopped:
                    future.cancel()
                    raise Stopped(f"stopped while waiting for {what}") from None
                if time.monotonic() > until_s:
                    future.cancel()
                    raise RoundFailed(f"waited {deadline_s:.0f} s for {what}") from None

    def _try_to_start(self, deadline_s: float) -> None:
        try:
            self._call(self._start(), deadline_s, "the swarm's directory")
        except Broken as broken:
            raise NotYet(f"{broken}; check --join, and that somebody is there") from None

    # -- coming and going -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._chores is not None:
            return
        terms = self._terms
        answers: asyncio.Future[Answers] = self._loop.create_future()

        async def handle(stream: Stream) -> None:
            await (await answers).handle(stream)

        await self._mesh.start(handle)  # which tells us who we are
        self._roster = Roster(self._mesh.peer)
        self._leader = Leader(self._roster, self._ping, gather_s=terms.gather_s, min_peers=terms.min_peers)
        self._reducer = Reducer(
            self._mesh, self._roster, self._ping, codec=self._codec, stall_s=terms.stall_s
        )
        answers.set_result(
            Answers(self._mesh, self._roster, self._leader, self._reducer, self._holding, log=self._log)
        )
        await self._refresh()
        self._chores = asyncio.create_task(self._announce())

    async def _end(self) -> None:
        if self._chores is not None:
            self._chores.cancel()
            self._leader.stop()
            goodbyes = (ask_peer(self._mesh, peer, Bye(peer=self.peer), Card, 2.0) for peer in self._others())
            await asyncio.gather(*goodbyes, return_exceptions=True)
        # Stopped while it came up, it has nobody to say goodbye to, and still a daemon and tasks to end.
        await self._mesh.stop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close on the loop's next turns

    def _others(self) -> list[str]:
        return list(self._roster.alive(time.monotonic()))

    async def _announce(self) -> None:
        while True:
            await asyncio.sleep(self._terms.announce_s)
            try:
                async with asyncio.timeout(DIRECTORY_S):
                    await self._refresh()
            except (Broken, TimeoutError) as error:
                self._log.warning(
                    "the directory does not answer", reason=str(error) or f"{DIRECTORY_S:.0f} s"
                )

    async def _refresh(self) -> None:
        await self._mesh.announce(self._card().canonical(), for_s=4 * self._terms.announce_s)
        cards: dict[str, Card] = {}
        for peer, payload in (await self._mesh.cards()).items():
            with contextlib.suppress(Rejected):
                card = Card.parse(bytes(payload))
                if card.peer == peer:
                    cards[peer] = card
        self._roster.read(cards, time.monotonic())

    def _card(self) -> Card:
        return self._holding.card(self.peer, reachable=self._mesh.reachable)

    async def _meet(self) -> list[Card]:
        """Say hello to everybody: they know of us before the directory does, and we of their states."""
        cards = await asyncio.gather(*(self._hello(peer) for peer in self._others()))
        return [card for card in cards if card is not None]

    async def _hello(self, peer: str) -> Card | None:
        if not self._roster.reachable(peer):
            return None  # and no proof of anything: who only reaches out need not be connected to us
        try:
            card = await ask_peer(self._mesh, peer, Hello(card=self._card()), Card, HELLO_S)
        except Silent:
            self._roster.missed(peer, time.monotonic())
            return None
        except RoundFailed:
            self._roster.suspect(peer, time.monotonic())
            return None
        self._roster.heard(card)
        return card

    async def _ping(self, peer: str) -> bool:
        """Whether it answers, or may yet: one hello that found it busy is no proof."""
        return await self._hello(peer) is not None or not self._roster.suspected(peer, time.monotonic())

    # -- rounds -------------------------------------------------------------------------------------------

    async def _begin(self, ready: Ready, deadline_s: float) -> Group:
        now_s = time.monotonic()
        leader = self._roster.leader(now_s, me_reachable=self._mesh.reachable)
        if leader is None:
            raise RoundFailed("no reachable peer to lead a round")
        ask = ReadyAsk(
            peer=self.peer,
            reachable=self._mesh.reachable,
            standing=Standing(work=ready.work, round=ready.round, state_digest=ready.digest),
            weight=ready.weight,
            suspects=self._roster.suspects(now_s),
            wait_s=deadline_s,
        )
        answer = await self._ready(leader, ask, deadline_s)
        if answer.outcome == "behind":
            self._at_least = answer.at_least
            raise Behind(answer.reason)
        if answer.outcome == "retry":
            if answer.leader:
                await self._hello(answer.leader)  # whom we took for gone; if it answers, it is asked next
            raise RoundFailed(answer.reason)
        return Group(
            id=answer.id,
            round=ready.round,
            members=answer.members,
            weights=answer.weights,
            owners=answer.owners,
            leader=leader,
        )

    async def _ready(self, leader: str, ask: ReadyAsk, deadline_s: float) -> GroupAnswer:
        if leader == self.peer:
            return await self._leader.ready(ask)
        try:
            return await ask_peer(self._mesh, leader, ask, GroupAnswer, deadline_s + 2)
        except RoundFailed:
            self._roster.suspect(leader, time.monotonic())
            raise

    async def _vote(self, group: Group, digest: str, deadline_s: float) -> bool:
        ask = VoteAsk(peer=self.peer, group=group.id, average_digest=digest, wait_s=deadline_s)
        try:
            if group.leader == self.peer:
                answer = await self._leader.vote(ask)
            else:
                answer = await ask_peer(self._mesh, group.leader, ask, VoteAnswer, deadline_s + 2)
        finally:
            self._loop.call_later(60, self._reducer.forget, group.id)
        if not answer.commit:
            self._log.warning("round not committed", round=group.round, reason=answer.reason)
        return answer.commit

    # -- states -------------------------------------------------------------------------------------------

    async def _fetch(self, deadline_s: float) -> Fetched:
        until_s = time.monotonic() + deadline_s
        reason = "nobody is there"
        while time.monotonic() < until_s:
            cards = await self._meet()
            for card in newest_holders(cards, self._holding.standing, at_least=self._at_least):
                try:
                    async with asyncio.timeout(max(1.0, until_s - time.monotonic())):
                        fetched = await fetch_from(self._mesh, card.peer, self._holding.lengths)
                except (RoundFailed, TimeoutError) as error:
                    reason = f"{card.peer}: {str(error) or 'took too long'}"
                    self._log.warning("no state from that peer", peer=card.peer, reason=reason)
                else:
                    self._at_least = 0
                    return fetched
            await asyncio.sleep(0.2)
        raise RoundFailed(f"no newer state after {deadline_s:.0f} s: {reason}")
