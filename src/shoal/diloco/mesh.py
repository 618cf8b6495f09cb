"""The mesh: byte streams between peers, and a place to be found. What the peer-to-peer engine stands on.

`LocalMesh` connects peers of one process by socket pairs; `hivemind_mesh.HivemindMesh` is the open internet. Above the
mesh everything is the same, so what is tested on one holds on the other.
"""

import asyncio
import socket
import struct
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Protocol

from blake3 import blake3

MAX_FRAME = 16 << 20
_HEAD = struct.Struct("<I32s")


class Broken(Exception):
    """A stream ended, or a frame in it is not what its digest says. The message says which."""


class Stream:
    """Frames over a pair of byte streams: length, BLAKE3 digest, bytes. A damaged frame is never delivered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # Without this a writer waits for the other side after every 64 kB.
        writer.transport.set_write_buffer_limits(4 << 20)
        self.num_sent = 0

    async def send(self, payload: bytes, digest: bytes | None = None) -> None:
        digest = blake3(payload).digest() if digest is None else digest
        try:
            self._writer.write(_HEAD.pack(len(payload), digest))
            self._writer.write(payload)
            await self._writer.drain()
        except OSError as error:
            raise Broken(f"the other side hung up: {error}") from None
        self.num_sent += _HEAD.size + len(payload)

    async def receive(self) -> tuple[bytes, bytes]:
        """The next frame and its digest."""
        try:
            length, digest = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            if length > MAX_FRAME:
                raise Broken(f"a frame of {length} bytes; at most {MAX_FRAME}")
            payload = await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Broken(f"the stream ended: {error}") from None
        if blake3(payload).digest() != digest:
            raise Broken(f"a frame of {length} bytes does not fit its digest")
        return payload, digest

    async def closed_by_peer(self, deadline_s: float) -> None:
        """Wait for the other side's end. Whoever sent last waits: a daemon drops what is in flight when we close."""
        try:
            async with asyncio.timeout(deadline_s):
                while await self._reader.read(1 << 16):
                    pass
        except (OSError, TimeoutError):
            pass

    def close(self) -> None:
        self._writer.close()


Handler = Callable[[Stream], Awaitable[None]]


class Mesh(Protocol):
    peer: str
    reachable: bool
    """Whether others can open streams to this peer; if not, it leads nobody and sums nothing."""
    addresses: tuple[str, ...]
    """What others may join by."""

    async def start(self, handler: Handler) -> None:
        """Come up, find the swarm, and give every stream from another peer to `handler`."""

    async def open(self, peer: str) -> Stream:
        """A stream to a peer. Raises Broken."""

    async def announce(self, card: bytes, *, for_s: float) -> None:
        """Make `card` known under this peer's id."""

    async def cards(self) -> dict[str, bytes]:
        """The cards of all peers that announced one and did not let it expire."""

    async def stop(self) -> None:
        """Forget the card, close everything."""


class LocalHub:
    """Where the local meshes of one process find each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._meshes: dict[str, LocalMesh] = {}
        self._num = 0

    def mesh(self, *, reachable: bool = True) -> "LocalMesh":
        with self._lock:
            self._num += 1
            return LocalMesh(self, f"local-{self._num:03d}", reachable=reachable)

    def enter(self, mesh: "LocalMesh") -> None:
        with self._lock:
            self._meshes[mesh.peer] = mesh

    def leave(self, mesh: "LocalMesh") -> None:
        with self._lock:
            self._meshes.pop(mesh.peer, None)

    def find(self, peer: str) -> "LocalMesh | None":
        with self._lock:
            return self._meshes.get(peer)

    def all(self) -> "list[LocalMesh]":
        with self._lock:
            return list(self._meshes.values())


class LocalMesh:
    """A peer of this process. Every peer has an event loop of its own; streams are socket pairs between two loops."""

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
        self._hub.enter(self)

    async def open(self, peer: str) -> Stream:
        other = self._hub.find(peer)
        if other is None or not other.reachable:
            raise Broken(f"{peer} is not there")
        ours, theirs = socket.socketpair()
        other._accept(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        return self._keep(Stream(reader, writer))

    async def announce(self, card: bytes, *, for_s: float) -> None:
        self.card = card

    async def cards(self) -> dict[str, bytes]:
        return {mesh.peer: mesh.card for mesh in self._hub.all() if mesh.card}

    async def stop(self) -> None:
        self._hub.leave(self)
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams):
            stream.close()

    def _keep(self, stream: Stream) -> Stream:
        self._streams.add(stream)
        return stream

    def _accept(self, end: socket.socket) -> None:
        assert self._loop is not None

        async def serve() -> None:
            assert self._handler is not None
            try:
                reader, writer = await asyncio.open_connection(sock=end)
                stream = self._keep(Stream(reader, writer))
                try:
                    await self._handler(stream)
                finally:
                    stream.close()
            except asyncio.CancelledError:
                end.close()
                raise

        def begin() -> None:
            task = asyncio.ensure_future(serve())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop is closed: that peer is gone
            end.close()
