"""A TCP proxy with the faults of real networks: delays, resets, truncated answers, duplicates, slow requests."""

import asyncio
import random
import threading
from collections import Counter

FAULTS = ("none", "delay", "reset before", "reset after", "half-close", "twice", "drip")


class FaultProxy:
    """Listens on `port` and forwards to `upstream`. A share of the requests gets a fault, sampled with the seed."""

    def __init__(self, upstream: int, seed: int, share: float) -> None:
        self._upstream, self._rng, self._share = upstream, random.Random(seed), share
        self.met: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            self.port = int(self._server.sockets[0].getsockname()[1])
            ready.set()
            self._loop.run_forever()
            # Before server.close: asyncio leaks the socket of a connection that it accepted last if the server is closed then.
            self._loop.remove_reader(self._server.sockets[0].fileno())
            self._loop.run_until_complete(asyncio.sleep(0.01))
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.05))
            self._loop.close()

        self._thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _draw(self) -> str:
        fault = self._rng.choice(FAULTS[1:]) if self._rng.random() < self._share else "none"
        self.met[fault] += 1
        return fault

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one request and closes the connection, so that each request gets its own fault."""
        try:
            async with asyncio.timeout(20):
                request = await _read_request(reader)
                await self._forward(request, writer, self._draw())
        except (OSError, asyncio.IncompleteReadError, TimeoutError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _forward(self, request: bytes, writer: asyncio.StreamWriter, fault: str) -> None:
        if fault == "reset before":
            writer.transport.abort()
            return
        if fault == "delay":
            await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        answer = await self._ask(request, drip=fault == "drip")
        if fault == "twice":
            await self._ask(request, drip=False)  # a duplicate delivery
        if fault == "reset after":
            writer.transport.abort()
            return
        if fault == "half-close":
            answer = answer[: len(answer) // 2]
        writer.write(answer)
        await writer.drain()

    async def _ask(self, request: bytes, *, drip: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            pieces = [request[at : at + 97] for at in range(0, len(request), 97)] if drip else [request]
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if drip:
                    await asyncio.sleep(0.01)
            return await _read_request(reader)
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """Reads head and body of a request or an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line[15:])
    return head + await reader.readexactly(length)
