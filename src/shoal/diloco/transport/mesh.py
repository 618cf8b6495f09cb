"""The mesh: streams between peers, and a directory in which they find each other.

`LocalMesh` connects the peers of one process by socket pairs; `hivemind_mesh.HivemindMesh` connects peers over the
internet. Everything above the mesh is the same for both, so tests on one hold for the other.

Direct links carry vectors past the libp2p daemons, through which every byte passes two more processes and four more
sockets. The keys are exchanged over the daemon's stream, which is encrypted and authenticates both ends:

 member ── daemon's stream: request a link ──▶ owner
        ◀── offer: port, token, two keys ──
        ── TCP to that port, at the host of the daemon's stream: token ──▶ owner looks the token up, once
        ◀── one encrypted frame ── from here on encrypted frames both ways

A link that cannot be made costs at most CONNECT_S; the member then uses the daemon's stream.
"""

import asyncio
import contextlib
import itertools
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Protocol, Self

from pydantic import Field, model_validator

from shoal.diloco.transport.stream import KEY_SIZE, EncryptedStream, Stream, StreamBroken
from shoal.telemetry import Log
from shoal.wire.record import Record

CONNECT_S = 5.0
"""Timeout from the connection's first packet to the first encrypted frame."""
OFFER_S = 30.0
"""Seconds after which an unused offer expires."""
MAX_OFFERS = 1024
TOKEN_SIZE = 16
_FIRST_FRAME = b"shoal link"

Handler = Callable[[Stream], Awaitable[None]]


class Mesh(Protocol):
    """What the peer-to-peer engine needs from a network."""

    peer: str
    reachable: bool
    """Whether others can open streams to this peer; if not, it leads no round and owns no part."""
    addresses: tuple[str, ...]
    """Addresses that others can join by."""

    async def start(self, handler: Handler) -> None:
        """Joins the network and passes every stream from another peer to `handler`."""

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        """Opens a stream to a peer. `bulk`: for megabytes, which may be worth a direct link. Raises StreamBroken."""

    def mark_broken(self, peer: str) -> None:
        """Records that a bulk stream to a peer broke, so that the next one takes another route if there is one."""

    async def announce(self, card: bytes, *, for_s: float) -> None:
        """Publishes `card` in the directory under this peer's id."""

    async def cards(self) -> dict[str, bytes]:
        """Returns the unexpired cards of all peers."""

    async def stop(self) -> None:
        """Removes the card and closes all streams."""


# -- peers of one process -----------------------------------------------------------------------------------


class LocalHub:
    """The directory of the local meshes of one process."""

    def __init__(self) -> None:
        self.meshes: dict[str, LocalMesh] = {}
        """The peers that have started, by id. Each operation on it is atomic: peers have threads of their own."""
        self._numbers = itertools.count(1)

    def mesh(self, *, reachable: bool = True) -> "LocalMesh":
        """Creates a new peer."""
        return LocalMesh(self, f"local-{next(self._numbers):03d}", reachable=reachable)


class LocalMesh:
    """A peer in this process. Every peer has its own event loop; streams are socket pairs between two loops."""

    def __init__(self, hub: LocalHub, peer: str, *, reachable: bool) -> None:
        self._hub = hub
        self.peer = peer
        self.reachable = reachable
        self.addresses: tuple[str, ...] = ()
        self.card = b""
        self._handler: Handler | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, handler: Handler) -> None:
        self._handler, self._loop = handler, asyncio.get_running_loop()
        self._hub.meshes[self.peer] = self

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        other = self._hub.meshes.get(peer)
        if other is None or not other.reachable:
            raise StreamBroken(f"no reachable peer {peer}")
        ours, theirs = socket.socketpair()
        other._accept(theirs, self.peer)
        reader, writer = await asyncio.open_connection(sock=ours)
        return self._register(Stream(reader, writer, peer=peer))

    def mark_broken(self, peer: str) -> None:
        """Does nothing: there is only one route."""

    async def announce(self, card: bytes, *, for_s: float) -> None:
        self.card = card

    async def cards(self) -> dict[str, bytes]:
        return {mesh.peer: mesh.card for mesh in list(self._hub.meshes.values()) if mesh.card}

    async def stop(self) -> None:
        self._hub.meshes.pop(self.peer, None)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams):
            stream.close()

    def _register(self, stream: Stream) -> Stream:
        self._streams.add(stream)
        return stream

    def _accept(self, end: socket.socket, peer: str) -> None:
        """Serves one stream on this peer's event loop. Called from the other peer's thread."""
        assert self._loop is not None

        taken = threading.Event()

        async def serve() -> None:
            assert self._handler is not None
            try:
                reader, writer = await asyncio.open_connection(sock=end)
                taken.set()
                with contextlib.closing(self._register(Stream(reader, writer, peer=peer))) as stream:
                    await self._handler(stream)
            except asyncio.CancelledError:
                end.close()
                raise

        def begin() -> None:
            task = asyncio.ensure_future(serve())
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            # The task may have been cancelled before it began; then `serve` could not close the socket.
            if not taken.is_set():
                end.close()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the event loop is closed: this peer has left
            end.close()


# -- direct links -------------------------------------------------------------------------------------------


class LinkOffer(Record):
    """An offer of a direct link: the TCP port, a token to present there, and the two keys of the stream."""

    port: int = Field(ge=0, le=65535)
    """0: no direct link is offered."""
    token: str = Field(pattern=r"^([0-9a-f]{32})?$")
    keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(max_length=2)
    """The keys of what the member sends and of what it receives."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.port and not (self.token and len(self.keys) == 2):
            raise ValueError("an offer needs a token of 16 bytes and two keys of 32 bytes, in hex")
        return self


@dataclass(frozen=True, slots=True)
class _PendingOffer:
    peer: str
    keys: tuple[bytes, bytes]
    until_s: float


class DirectLinks:
    """Makes offers of direct links and accepts the connections that use them, on the peer's event loop."""

    def __init__(self, handler: Handler, log: Log) -> None:
        self._handler, self._log = handler, log
        self._offers: dict[bytes, _PendingOffer] = {}
        self._server: asyncio.Server | None = None
        self._port = 0

    async def listen(self, host: str, port: int) -> None:
        """Listens on a port; 0 takes any free one. If that fails, no links are offered and the daemon carries vectors."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            self._log.warning(
                "cannot listen for direct links; vectors go through the daemon",
                host=host,
                port=port,
                reason=error,
            )
            return
        self._port = self._server.sockets[0].getsockname()[1]

    def offer(self, peer: str) -> LinkOffer:
        """Returns an offer that `peer` can use once, within OFFER_S."""
        now_s = time.monotonic()
        self._offers = {token: offer for token, offer in self._offers.items() if offer.until_s > now_s}
        if not self._port or len(self._offers) >= MAX_OFFERS:
            return LinkOffer(port=0, token="", keys=())
        token = secrets.token_bytes(TOKEN_SIZE)
        keys = secrets.token_bytes(KEY_SIZE), secrets.token_bytes(KEY_SIZE)
        self._offers[token] = _PendingOffer(peer, keys, now_s + OFFER_S)
        return LinkOffer(port=self._port, token=token.hex(), keys=(keys[0].hex(), keys[1].hex()))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offer = None
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, OSError):
            async with asyncio.timeout(CONNECT_S):
                offer = self._offers.pop(await reader.readexactly(TOKEN_SIZE), None)
        if offer is None or offer.until_s < time.monotonic():
            writer.close()
            self._log.warning("direct link refused: no valid token")
            return
        stream = EncryptedStream(
            reader, writer, peer=offer.peer, send_key=offer.keys[1], receive_key=offer.keys[0]
        )
        try:
            await stream.send(_FIRST_FRAME)
            await self._handler(stream)
        except StreamBroken as broken:
            self._log.warning("direct link broken", peer=offer.peer, reason=broken)
        finally:
            stream.close()


async def connect_direct(host: str, offer: LinkOffer, *, peer: str) -> EncryptedStream:
    """Uses an offer. Raises StreamBroken."""
    if not offer.port:
        raise StreamBroken(f"{peer} offers no direct link")
    send_key, receive_key = (bytes.fromhex(key) for key in offer.keys)
    stream: EncryptedStream | None = None
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, offer.port)
            writer.write(bytes.fromhex(offer.token))
            stream = EncryptedStream(reader, writer, peer=peer, send_key=send_key, receive_key=receive_key)
            if await stream.receive() != _FIRST_FRAME:
                raise StreamBroken("unexpected first frame: another program answers at that port")
    except (OSError, TimeoutError, StreamBroken) as error:
        if stream is not None:
            stream.close()
        reason = str(error) or f"timed out after {CONNECT_S:.0f} s"
        raise StreamBroken(f"no direct link to {host}:{offer.port}: {reason}") from None
    return stream
