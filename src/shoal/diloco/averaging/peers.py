"""The peer-to-peer engine: the averager over any mesh. One thread with an event loop does everything that waits.

There is no server. Peers find each other through the mesh's directory, the reachable peer with the first id leads, each
owner sums its part, and every stream is opened by the peer that has a request.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.background import BackgroundTask
from shoal.diloco.averaging.averager import (
    AveragerSettings,
    AveragingGroup,
    Behind,
    FetchedState,
    Ready,
    Reduced,
    RoundFailed,
)
from shoal.diloco.averaging.leader import Leader
from shoal.diloco.averaging.membership import Discovery, ask_peer
from shoal.diloco.averaging.peer_messages import (
    Bye,
    Card,
    GroupReply,
    Hello,
    PartRequest,
    PeerRequest,
    ReadyRequest,
    StateRequest,
    StateVersion,
    VoteReply,
    VoteRequest,
)
from shoal.diloco.averaging.reducer import Reducer
from shoal.diloco.averaging.state_transfer import (
    FRAME_STALLS,
    OtherModel,
    ServedState,
    fetch_state,
    newest_cards,
)
from shoal.diloco.codec import CodecName
from shoal.diloco.outer import OuterState, Vector
from shoal.diloco.transport.mesh import Mesh
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

T = TypeVar("T")

START_S = 120.0
"""Timeout of one attempt to start the mesh: the daemon has 60 s, the directory the rest."""
REQUEST_S = 30.0
"""Seconds that a peer may take between opening a stream and sending its request."""


class PeerAverager:
    """The engine without a server (see averager.Averager)."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        log: Log,
        codec: CodecName = "fp16-scaled",
        settings: AveragerSettings | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._mesh, self._log = mesh, log
        self._stop = stop or threading.Event()
        self._codec: CodecName = codec
        self._settings = settings or AveragerSettings()
        self._served = ServedState(self._settings.shared)
        self._at_least = 0
        self._model_lengths: tuple[int, ...] | None = None
        """Values per fragment of this peer's model, if `join` was told."""
        self._loop = asyncio.new_event_loop()
        self._thread = BackgroundTask("averager", self._loop.run_forever)
        self._announcer: asyncio.Task[None] | None = None
        self._started = asyncio.Event()
        """Set when requests of other peers can be answered; they may come in before."""
        self._left = False

    @property
    def peer(self) -> str:
        return self._mesh.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._mesh.addresses

    def peers(self) -> dict[str, Card]:
        """Returns the newest card of every other live peer, for display."""
        return {} if self._announcer is None else self._membership.latest_cards(time.monotonic())

    # -- called by the training thread ----------------------------------------------------------------------

    def join(self, *, deadline_s: float, lengths: tuple[int, ...] | None = None) -> FetchedState | None:
        self._model_lengths = lengths
        once_s = min(START_S, deadline_s)

        def attempt() -> None:
            try:
                self._call(self._start(), once_s, "the swarm's directory")
            except StreamBroken as broken:
                raise NotYet(f"{broken}; check --join, and that a peer is running there") from None

        wait_for("the swarm", attempt, deadline_s=deadline_s, log=self._log, stop=self._stop)
        cards = self._call(self._discovery.greet_as_newcomer(), deadline_s, "the other peers' cards")
        if not newest_cards(cards, self._served.version, at_least=self._at_least):
            return None
        return self.fetch(deadline_s=deadline_s)

    def begin(self, ready: Ready, *, deadline_s: float) -> AveragingGroup:
        self._served.in_round = True
        return self._call(self._begin(ready, deadline_s), deadline_s + 5, f"a group for round {ready.round}")

    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        work = self._reducer.reduce(group, delta_N, deadline_s=deadline_s)
        return self._call(work, deadline_s + 5, f"the exchange of round {group.round}")

    def commit(self, group: AveragingGroup, digest: str, *, deadline_s: float) -> bool:
        try:
            return self._call(
                self._vote(group, digest, deadline_s), deadline_s + 5, f"the votes on round {group.round}"
            )
        except RoundFailed as failed:
            self._log.warning("no result of the vote", leader=group.leader, reason=failed)
            return False

    def fetch(self, *, deadline_s: float) -> FetchedState:
        return self._call(self._fetch(deadline_s), deadline_s + 5, "another peer's state")

    def serve(self, state: OuterState, *, step: int, phase: int = 0) -> str:
        digest = state.digest()
        version = StateVersion(work=state.work, round=state.round, state_digest=digest)

        def replace() -> None:
            self._served.replace(state, version, phase=phase, step=step)
            self._leader.version = version

        self._served.in_round = False
        self._loop.call_soon_threadsafe(replace)
        return digest

    def progress(self, *, phase: int, step: int) -> None:
        self._loop.call_soon_threadsafe(lambda: self._served.set_progress(phase=phase, step=step))

    def leave(self) -> None:
        if self._left:
            return
        self._left = True
        with contextlib.suppress(RoundFailed):
            self._call(self._shut_down(), 10.0, "the shutdown of the mesh")
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.wait(10):
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], deadline_s: float, what: str) -> T:
        """Runs `work` on the event loop and waits for it. Raises Stopped, or RoundFailed after the deadline."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        until_s = time.monotonic() + deadline_s
        while True:
            try:
                return future.result(min(0.2, deadline_s))
            except TimeoutError:
                # A TimeoutError raised by `work` itself would look the same; no coroutine here raises one.
                if self._stop.is_set() and not self._left:
                    future.cancel()
                    raise Stopped(f"stopped while waiting for {what}") from None
                if time.monotonic() > until_s:
                    future.cancel()
                    raise RoundFailed(f"timed out after {deadline_s:.0f} s waiting for {what}") from None

    # -- joining and leaving --------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._announcer is not None:
            return
        settings = self._settings
        self._started.clear()
        await self._mesh.start(self._handle)  # sets `self._mesh.peer`, which the rest needs
        discovery = Discovery(
            self._mesh,
            lambda: self._served.card(self.peer, reachable=self._mesh.reachable),
            settings,
            self._log,
        )
        if not discovery.admits(self.peer):
            await self._mesh.stop()
            raise ValueError(
                f"this peer's id, {self.peer}, is not in `admit`; add it to the file of every site"
            )
        self._discovery, self._membership = discovery, discovery.membership
        self._leader = Leader(
            self._membership, discovery.ping, gather_s=settings.gather_s, min_peers=settings.min_peers
        )
        self._reducer = Reducer(
            self._mesh,
            self._membership,
            discovery.ping,
            codec=self._codec,
            robust=settings.robust,
            stall_s=settings.stall_s,
        )
        self._started.set()
        await discovery.update_directory()
        self._announcer = asyncio.create_task(discovery.announce_loop())

    async def _shut_down(self) -> None:
        if self._announcer is not None:
            self._announcer.cancel()
            self._leader.stop()
            await self._discovery.say_goodbye()
        # An interrupted start may have left a daemon and tasks behind, so the mesh is stopped after it too.
        await self._mesh.stop()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in the next iterations of the loop

    # -- rounds -------------------------------------------------------------------------------------------

    async def _begin(self, ready: Ready, deadline_s: float) -> AveragingGroup:
        now_s = time.monotonic()
        leader = self._membership.leader(now_s, self_reachable=self._mesh.reachable)
        if leader is None:
            raise RoundFailed("no reachable peer to lead a round")
        request = ReadyRequest(
            peer=self.peer,
            reachable=self._mesh.reachable,
            standing=StateVersion(work=ready.work, round=ready.round, state_digest=ready.digest),
            weight=ready.weight,
            norm=ready.norm,
            suspects=self._membership.suspects(now_s),
            refused=self._membership.refused(now_s),
            wait_s=deadline_s,
        )
        reply = await self._ask_leader(leader, request, deadline_s)
        if problem := await self._false_reply(leader, reply, request):
            self._membership.suspect_lie(leader, time.monotonic())
            raise RoundFailed(f"false reply of the leader {leader}: {problem}")
        if reply.outcome == "behind":
            self._at_least = reply.at_least
            raise Behind(reply.reason)
        if reply.outcome == "retry":
            if reply.leader:
                # This peer did not know the named leader or suspected it; if it answers, the next attempt asks it.
                await self._discovery.hello(reply.leader)
            raise RoundFailed(reply.reason)
        strangers = [peer for peer in reply.members if not self._discovery.admits(peer)]
        if strangers:
            raise RoundFailed(
                f"{leader} formed a group with peers that are not admitted: {', '.join(strangers)}"
            )
        return AveragingGroup(
            id=reply.id,
            round=ready.round,
            members=reply.members,
            weights=self._settings.robust.bounded_weights(reply.weights),
            norms=reply.norms,
            owners=reply.owners,
            leader=leader,
        )

    async def _false_reply(self, leader: str, reply: GroupReply, request: ReadyRequest) -> str:
        """Returns why a leader's reply cannot be true; empty if it can."""
        if reply.outcome == "group":
            return reply.problem(request)
        if reply.outcome == "retry" or leader == self.peer:
            return ""
        for _ in range(2):
            known = self._membership.highest_round(time.monotonic(), leader=leader)
            # A group that has just committed is one round ahead of its cards. A higher round would never be served.
            if reply.at_least <= 1 + max(request.standing.round, known):
                return ""
            await self._discovery.greet_all()
        return f"round {reply.at_least}, which no peer has"

    async def _ask_leader(self, leader: str, request: ReadyRequest, deadline_s: float) -> GroupReply:
        if leader == self.peer:
            return await self._leader.ready(request)
        try:
            return await ask_peer(self._mesh, leader, request, GroupReply, deadline_s + 2)
        except RoundFailed:
            self._membership.suspect(leader, time.monotonic())
            raise

    async def _vote(self, group: AveragingGroup, digest: str, deadline_s: float) -> bool:
        request = VoteRequest(peer=self.peer, group=group.id, average_digest=digest, wait_s=deadline_s)
        try:
            if group.leader == self.peer:
                reply = await self._leader.vote(request)
            else:
                reply = await ask_peer(self._mesh, group.leader, request, VoteReply, deadline_s + 2)
        finally:
            self._loop.call_later(60, self._reducer.forget, group.id)
        if not reply.commit:
            self._log.warning("round not committed", round=group.round, reason=reply.reason)
        return reply.commit

    # -- states -------------------------------------------------------------------------------------------

    async def _fetch(self, deadline_s: float) -> FetchedState:
        until_s = time.monotonic() + deadline_s
        reason = "no peer offers one"
        new, lengths = self._served.version is None, self._served.lengths or self._model_lengths
        while time.monotonic() < until_s:
            cards = [card for card in await self._discovery.greet_all() if not self._discovery.differs(card)]
            newer = newest_cards(cards, self._served.version, at_least=self._at_least)
            now_s = time.monotonic()
            served = [card for card in newer if not self._membership.withholds_state(card.peer, now_s)]
            if newer and not served and not new:
                raise RoundFailed(f"no newer state is served: {reason}")
            num_other = 0
            for card in served or newer:  # a new peer has no state of its own, so it tries again
                left_s, stall_s = max(1.0, until_s - time.monotonic()), self._settings.stall_s
                try:
                    async with asyncio.timeout(left_s):
                        fetched = await fetch_state(self._mesh, card, lengths, stall_s=stall_s)
                except (RoundFailed, TimeoutError) as error:
                    reason = f"{card.peer}: {str(error) or 'timed out'}"
                    self._log.warning("state download failed", peer=card.peer, reason=reason)
                    # A download that is cut off by a deadline soon after its start says nothing about the peer.
                    if isinstance(error, RoundFailed) or left_s > FRAME_STALLS * stall_s:
                        self._membership.record_fetch(card.peer, time.monotonic(), failed=True)
                    num_other += isinstance(error, OtherModel)
                else:
                    self._at_least = 0
                    self._membership.record_fetch(card.peer, time.monotonic(), failed=False)
                    return fetched
            if new and num_other and 2 * num_other >= len(cards):
                raise ValueError(reason)
            await asyncio.sleep(0.2)
        raise RoundFailed(f"no newer state after {deadline_s:.0f} s: {reason}")

    # -- requests of other peers ----------------------------------------------------------------------------

    async def _handle(self, stream: Stream) -> None:
        """Answers one request. A malformed request ends the stream without a reply, and so does a peer not admitted."""
        await self._started.wait()
        if not self._discovery.admits(stream.peer):
            self._log.warning("peer refused: its id is not in `admit`", peer=stream.peer)
            return
        try:
            async with asyncio.timeout(REQUEST_S):
                payload = await stream.receive()
            request = PeerRequest.parse(bytes(payload)).ask
            claimed = request.card.peer if isinstance(request, Hello) else request.peer
            if stream.peer not in ("", claimed):
                raise Rejected("request.malformed", f"peer {stream.peer} claims to be {claimed}")
            await self._reply(request, stream)
        except (StreamBroken, Rejected, TimeoutError) as error:
            self._log.warning("request failed", reason=str(error) or f"no request within {REQUEST_S:.0f} s")
            return
        # The requester closes first: a libp2p daemon may drop bytes in flight if this side closes.
        await stream.wait_closed_by_peer(30.0)

    async def _reply(self, request: Record, stream: Stream) -> None:
        match request:
            case Hello():
                self._membership.record_card(request.card)
                await stream.send(self._discovery.card().canonical())
            case Bye():
                self._membership.remove(request.peer)
                await stream.send(self._discovery.card().canonical())
            case ReadyRequest():
                await self._leader.answer(request, stream)
            case VoteRequest():
                await stream.send((await self._leader.vote(request)).canonical())
            case PartRequest():
                await self._reducer.handle(request, stream)
            case StateRequest():
                await self._served.send(stream)
