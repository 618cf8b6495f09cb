"""Another peer's state: who has the newest, and getting it from one of them."""

import random
from collections.abc import Iterable

from shoal.diloco.averaging.averager import Fetched, RoundFailed
from shoal.diloco.averaging.peer_messages import Asked, Card, Standing, StateAsk
from shoal.diloco.averaging.state_transfer import receive_state
from shoal.diloco.transport.mesh import Broken, Mesh, Stream
from shoal.wire.codes import Rejected


def newest_holders(cards: Iterable[Card], own: Standing | None, *, at_least: int) -> list[Card]:
    """Those with the newest state, if it is newer than `own`; in any order, so that newcomers do not all ask the same one."""
    newer = [
        (card.standing.order(), card)
        for card in cards
        if card.standing is not None
        and card.reachable
        and card.standing.round >= at_least
        and (own is None or card.standing.order() > own.order())
    ]
    newest = max((order for order, _ in newer), default=None)
    holders = [card for order, card in newer if order == newest]
    random.shuffle(holders)
    return holders


async def fetch_from(mesh: Mesh, peer: str, lengths: tuple[int, ...] | None) -> Fetched:
    """The state that `peer` holds, verified. Raises RoundFailed."""
    stream: Stream | None = None
    try:
        stream = await mesh.open(peer, bulk=True)
        await stream.send(Asked(ask=StateAsk(peer=mesh.peer)).canonical())
        return await receive_state(stream, lengths)
    except (Broken, Rejected) as error:
        mesh.broke(peer)
        raise RoundFailed(f"broke off: {error}") from None
    finally:
        if stream is not None:
            stream.close()
