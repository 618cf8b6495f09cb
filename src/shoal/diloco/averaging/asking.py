"""One question to a peer, one answer."""

import asyncio
from typing import TypeVar

from shoal.diloco.averaging.averager import RoundFailed
from shoal.diloco.averaging.peer_messages import Asked
from shoal.diloco.transport.mesh import Broken, Mesh, Stream
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

R = TypeVar("R", bound=Record)


class Silent(RoundFailed):
    """No answer in time. The peer may be gone, or slow: who waits for a core on a busy machine is silent too."""


async def ask_peer(mesh: Mesh, peer: str, ask: Record, answer: type[R], deadline_s: float) -> R:
    """Raises Silent after `deadline_s`, RoundFailed at once if the peer cannot be reached or hangs up."""
    stream: Stream | None = None
    try:
        async with asyncio.timeout(deadline_s):
            stream = await mesh.open(peer)
            await stream.send(Asked.model_validate({"ask": ask}).canonical())
            return answer.parse(bytes(await stream.receive()))
    except TimeoutError:
        raise Silent(f"{peer} does not answer in {deadline_s:.0f} s") from None
    except (Broken, Rejected) as error:
        raise RoundFailed(f"{peer} does not answer: {error}") from None
    finally:
        if stream is not None:
            stream.close()
