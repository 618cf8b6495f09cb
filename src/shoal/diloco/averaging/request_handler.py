"""Answers the requests of other peers: hellos, groups, votes, parts and states. Peers that are not admitted get no answer."""

import asyncio
import time
from collections.abc import Container

from shoal.diloco.averaging.leader import Leader
from shoal.diloco.averaging.membership import Membership
from shoal.diloco.averaging.peer_messages import (
    Bye,
    Hello,
    PartRequest,
    PeerRequest,
    ReadyRequest,
    StateRequest,
    VoteRequest,
)
from shoal.diloco.averaging.reducer import Reducer
from shoal.diloco.averaging.state_transfer import ServedState
from shoal.diloco.transport.mesh import Mesh
from shoal.diloco.transport.stream import Stream, StreamBroken
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

REQUEST_S = 30.0
"""Seconds that a peer may take between opening a stream and sending its request."""


class RequestHandler:
    """Answers the requests of other peers, on this peer's event loop."""

    def __init__(
        self,
        mesh: Mesh,
        membership: Membership,
        leader: Leader,
        reducer: Reducer,
        served: ServedState,
        *,
        admit: Container[str] | None,
        log: Log,
    ) -> None:
        self._mesh, self._membership, self._log = mesh, membership, log
        self._leader, self._reducer, self._served = leader, reducer, served
        self._admit = admit

    async def handle(self, stream: Stream) -> None:
        """Answers one request. A malformed request ends the stream without a reply, and so does a peer not admitted."""
        if self._admit is not None and stream.peer not in self._admit:
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
                await self._send_card(stream)
            case Bye():
                self._membership.remove(request.peer)
                await self._send_card(stream)
            case ReadyRequest():
                await self._reply_ready(request, stream)
            case VoteRequest():
                await stream.send((await self._leader.vote(request)).canonical())
            case PartRequest():
                await self._reducer.handle(request, stream)
            case StateRequest():
                await self._served.send(stream)

    async def _send_card(self, stream: Stream) -> None:
        await stream.send(self._served.card(self._mesh.peer, reachable=self._mesh.reachable).canonical())

    async def _reply_ready(self, request: ReadyRequest, stream: Stream) -> None:
        """Waits for the group and sends the decision. A peer that disconnects meanwhile loses its place in the group."""
        waiting = asyncio.create_task(self._leader.ready(request))
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
