"""What other peers ask of this one, and where each question goes."""

import asyncio
import time

from shoal.diloco.averaging.leader import Leader
from shoal.diloco.averaging.membership import Holding
from shoal.diloco.averaging.peer_messages import Asked, Bye, Hello, PartAsk, ReadyAsk, StateAsk, VoteAsk
from shoal.diloco.averaging.reducer import Reducer
from shoal.diloco.averaging.roster import Roster
from shoal.diloco.transport.mesh import Broken, Mesh, Stream
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

ASK_S = 30.0
"""How long a peer that opened a stream may take to say what it wants."""


class Answers:
    """Lives on the peer's event loop."""

    def __init__(
        self, mesh: Mesh, roster: Roster, leader: Leader, reducer: Reducer, holding: Holding, *, log: Log
    ) -> None:
        self._mesh, self._roster, self._log = mesh, roster, log
        self._leader, self._reducer, self._holding = leader, reducer, holding

    async def handle(self, stream: Stream) -> None:
        """One question of a peer; bytes that are none are dropped with the stream."""
        try:
            async with asyncio.timeout(ASK_S):
                payload = await stream.receive()
            ask = Asked.parse(bytes(payload)).ask
            said = ask.card.peer if isinstance(ask, Hello) else ask.peer
            if stream.peer not in ("", said):
                raise Rejected("request.malformed", f"{stream.peer} asks as {said}")
            await self._answer(ask, stream)
        except (Broken, Rejected, TimeoutError) as error:
            self._log.warning(
                "a stream came to nothing", reason=str(error) or f"no question in {ASK_S:.0f} s"
            )
            return
        # Whoever asked closes first: a daemon may drop what is still in flight when we do.
        await stream.closed_by_peer(30.0)

    async def _answer(self, ask: Record, stream: Stream) -> None:
        match ask:
            case Hello():
                self._roster.heard(ask.card)
                await self._send_card(stream)
            case Bye():
                self._roster.left(ask.peer)
                await self._send_card(stream)
            case ReadyAsk():
                await self._answer_ready(ask, stream)
            case VoteAsk():
                await stream.send((await self._leader.vote(ask)).canonical())
            case PartAsk():
                await self._reducer.handle(ask, stream)
            case StateAsk():
                await self._holding.send(stream)

    async def _send_card(self, stream: Stream) -> None:
        await stream.send(self._holding.card(self._mesh.peer, reachable=self._mesh.reachable).canonical())

    async def _answer_ready(self, ask: ReadyAsk, stream: Stream) -> None:
        """Hold it until there is a group; if the one who asked goes away meanwhile, so does its place in the group."""
        waiting = asyncio.create_task(self._leader.ready(ask))
        gone = asyncio.create_task(stream.closed_by_peer(ask.wait_s + 5))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                self._roster.suspect(ask.peer, time.monotonic())
                return
        finally:
            for task in (waiting, gone):
                if not task.done():
                    task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)
        await stream.send(waiting.result().canonical())
