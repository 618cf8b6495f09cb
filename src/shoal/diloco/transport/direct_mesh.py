"""Links around the daemon: a TCP connection of their own for vectors, with keys that the peers exchanged over the daemon's stream.

 member ── daemon's stream (knows who is who, encrypted) ──▶ owner: a link, please
        ◀── offer: port, token, two keys ──
        ── TCP to that port, where the daemon's stream goes: token ──▶ owner looks the token up, once
        ◀── one sealed frame ── from here on frames both ways, all of them sealed

Through the daemons every byte passes two more processes and four more sockets. A link that cannot be made costs DIAL_S at most:
whoever wanted it takes the daemon's stream.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass

from shoal.diloco.averaging.peer_messages import LinkOffer
from shoal.diloco.transport.encrypted_stream import KEY_SIZE, SealedStream
from shoal.diloco.transport.mesh import Handler
from shoal.diloco.transport.stream import Broken
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

DIAL_S = 5.0
"""From the connection's first packet to the first sealed frame."""
OFFER_S = 30.0
"""An offer nobody took up by then is forgotten."""
MAX_OFFERS = 1024
TOKEN_SIZE = 16
_WELCOME = b"shoal link"


@dataclass(frozen=True, slots=True)
class _Offered:
    peer: str
    keys: tuple[bytes, bytes]
    until_s: float


class DirectLinks:
    """The side that is dialled. Lives on the peer's event loop."""

    def __init__(self, handler: Handler, log: Log) -> None:
        self._handler, self._log = handler, log
        self._offered: dict[bytes, _Offered] = {}
        self._server: asyncio.Server | None = None
        self._port = 0

    async def listen(self, host: str, port: int) -> None:
        """0 takes any free port. If the port cannot be had there are no offers, and vectors go through the daemon."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            self._log.warning("no direct links by that port", host=host, port=port, reason=error)
            return
        self._port = self._server.sockets[0].getsockname()[1]

    def offer(self, peer: str) -> LinkOffer:
        """For `peer` alone, once, soon."""
        now_s = time.monotonic()
        self._offered = {token: held for token, held in self._offered.items() if held.until_s > now_s}
        if not self._port or len(self._offered) >= MAX_OFFERS:
            return LinkOffer(port=0, token="", keys=())
        token, keys = secrets.token_bytes(TOKEN_SIZE), (_new_key(), _new_key())
        self._offered[token] = _Offered(peer, keys, now_s + OFFER_S)
        return LinkOffer(port=self._port, token=token.hex(), keys=(keys[0].hex(), keys[1].hex()))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            async with asyncio.timeout(DIAL_S):
                held = self._offered.pop(await reader.readexactly(TOKEN_SIZE), None)
        if held is None or held.until_s < time.monotonic():
            writer.close()
            self._log.warning("a connection to the port of direct links that nobody was offered")
            return
        stream = SealedStream(reader, writer, peer=held.peer, seals=held.keys[1], opens=held.keys[0])
        try:
            await stream.send(_WELCOME)
            await self._handler(stream)
        except Broken as broken:
            self._log.warning("a direct link broke off", peer=held.peer, reason=broken)
        finally:
            stream.close()


async def dial(host: str, offer: LinkOffer, *, peer: str) -> SealedStream:
    """Take an offer up. Raises Broken."""
    if not offer.port:
        raise Broken(f"{peer} offers no direct link")
    seals, opens = (bytes.fromhex(key) for key in offer.keys)
    stream: SealedStream | None = None
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(host, offer.port)
            writer.write(bytes.fromhex(offer.token))
            stream = SealedStream(reader, writer, peer=peer, seals=seals, opens=opens)
            if await stream.receive() != _WELCOME:
                raise Broken("something else answers there")
    except (OSError, TimeoutError, Broken) as error:
        if stream is not None:
            stream.close()
        raise Broken(f"no direct link to {host}:{offer.port}: {str(error) or f'{DIAL_S:.0f} s'}") from None
    return stream


def parse_offer(payload: bytes | bytearray) -> LinkOffer:
    """Raises Broken."""
    try:
        offer = LinkOffer.parse(bytes(payload))
    except Rejected as rejected:
        raise Broken(f"an offer that is none: {rejected}") from None
    return offer


def _new_key() -> bytes:
    return secrets.token_bytes(KEY_SIZE)
