"""The mesh: byte streams between peers, and a place to be found. What the peer-to-peer engine stands on.

`LocalMesh` connects peers of one process by socket pairs; `hivemind_mesh.HivemindMesh` is the open internet. Above the
mesh everything is the same, so what is tested on one holds on the other.
"""

import asyncio
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Protocol

from shoal.diloco.transport.stream import Broken, Stream

__all__ = ["Broken", "Handler", "LocalHub", "LocalMesh", "Mesh", "Stream"]

Handler = Callable[[Stream], Awaitable[None]]


class Mesh(Protocol):
    peer: str
    reachable: bool
    """Whether others can open streams to this peer; if not, it leads nobody and sums nothing."""
    addresses: tuple[str, ...]
    """What others may join by."""

    async def start(self, handler: Handler) -> None:
        """Come up, find the swarm, and give every stream from another peer to `handler`."""

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        """A stream to a peer; `bulk`: for megabytes, which may be worth another way there. Raises Broken."""

    def broke(self, peer: str) -> None:
        """A bulk stream to that peer broke off: if there is another way, take it the next time."""

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

    async def open(self, peer: str, *, bulk: bool = False) -> Stream:
        other = self._hub.find(peer)
        if other is None or not other.reachable:
            raise Broken(f"{peer} is not there")
        ours, theirs = socket.socketpair()
        other._accept(theirs, self.peer)
        reader, writer = await asyncio.open_connection(sock=ours)
        return self._keep(Stream(reader, writer, peer=peer))

    def broke(self, peer: str) -> None:
        """There is but one way."""

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

    def _accept(self, end: socket.socket, peer: str) -> None:
        assert self._loop is not None

        taken = threading.Event()

        async def serve() -> None:
            assert self._handler is not None
            try:
                reader, writer = await asyncio.open_connection(sock=end)
                taken.set()
                stream = self._keep(Stream(reader, writer, peer=peer))
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
            task.add_done_callback(over)

        def over(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not taken.is_set():  # cancelled before it began: nobody else would close it
                end.close()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop is closed: that peer is gone
            end.close()
