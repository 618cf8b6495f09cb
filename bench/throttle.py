"""A TCP proxy that gives a link a speed, a latency and losses, with one token bucket for all connections, and can fail on purpose."""

import asyncio
import contextlib
import random
import threading
import time

PIECE_BYTES = 16 << 10
BURST_S = 0.02
"""How much an idle or late proxy may catch up: without this, a busy machine makes the link slower than configured."""
TICK_S = 0.002
LOSS_S = 0.2
"""Least time that TCP waits before it sends a lost packet again."""
MAX_UNDERWAY = 1024
"""Pieces that are on the link at once: more than 590 Mbit/s and 150 ms need."""


class Link:
    """Listens on a free port, forwards to `target_port`, and limits what comes back to `bytes_per_s`.

    After `die_after` bytes all connections are closed, after `stall_after` bytes they hang. One bit in every
    `corrupt_every` bytes is flipped (0: none). Every piece takes `latency_s` in each direction. A share `loss` of the pieces is
    lost and sent again: its connection delivers nothing for LOSS_S and two latencies, as TCP does after a lost packet.
    """

    def __init__(
        self,
        target_port: int,
        *,
        bytes_per_s: float = float("inf"),
        die_after: float = float("inf"),
        stall_after: float = float("inf"),
        corrupt_every: int = 0,
        latency_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        self._latency_s, self._loss, self._rng = latency_s, loss, random.Random(7)
        self._target_port, self._bytes_per_s = target_port, bytes_per_s
        self._die_after, self._stall_after, self._corrupt_every = die_after, stall_after, corrupt_every
        self._free_at_s = 0.0
        self.num_bytes = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started, self._stop = threading.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._run()), daemon=True
        )
        self._thread.start()
        self._started.wait(10)

    def set_rate(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=PIECE_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        # Before server.close: asyncio leaks the socket of a connection that it accepted last if the server is closed then.
        self._loop.remove_reader(server.sockets[0].fileno())
        # A connection that was just accepted registers itself a few iterations later; until then it cannot be cancelled.
        while len(asyncio.all_tasks()) > 1:
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(0)  # aborted transports close their sockets, before the loop ends

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.num_bytes < self._die_after:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(
            "127.0.0.1", self._target_port, limit=PIECE_BYTES
        )
        requests = asyncio.ensure_future(self._copy(reader, up_writer))
        underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_UNDERWAY)
        arrivals = asyncio.ensure_future(_deliver(underway, writer))
        try:
            while piece := await up_reader.read(PIECE_BYTES):
                await self._wait_for_turn(len(piece))
                lost_s = LOSS_S + 2 * self._latency_s if self._rng.random() < self._loss else 0.0
                await underway.put((time.monotonic() + self._latency_s + lost_s, self._corrupt(piece)))
            await underway.put((0.0, b""))
            await arrivals
        finally:
            requests.cancel()
            arrivals.cancel()
            up_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                await asyncio.sleep(self._latency_s)
                writer.write(piece)
                await writer.drain()

    async def _wait_for_turn(self, num_bytes: int) -> None:
        before, self.num_bytes = self.num_bytes, self.num_bytes + num_bytes
        if self.num_bytes >= self._die_after:
            raise ConnectionAbortedError
        if before >= self._stall_after:
            await asyncio.sleep(3600)
        now_s = time.monotonic()
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + num_bytes / self._bytes_per_s
        ahead_s = self._free_at_s - now_s
        await asyncio.sleep(ahead_s if ahead_s > TICK_S else 0)

    def _corrupt(self, piece: bytes) -> bytes:
        every = self._corrupt_every
        if not every or self.num_bytes // every == (self.num_bytes - len(piece)) // every:
            return piece
        return piece[:-1] + bytes([piece[-1] ^ 1])


async def _deliver(underway: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter) -> None:
    """Writes each piece at its time, in order, until an empty one."""
    while True:
        due_s, piece = await underway.get()
        if not piece:
            return
        late_s = due_s - time.monotonic()
        if late_s > 0:
            await asyncio.sleep(late_s)
        writer.write(piece)
        await writer.drain()
