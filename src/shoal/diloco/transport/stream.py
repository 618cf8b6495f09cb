"""Frames over one connection: length, BLAKE3 digest, bytes. A damaged frame is never delivered.

Bytes are read by the loop straight into the frame they belong to and written in slices that the socket takes: asyncio's own
streams would copy each of them three times, and moving bytes is most of what an exchange does.
"""

import asyncio
import struct
from collections import deque
from typing import Any

from blake3 import blake3

MAX_FRAME = 16 << 20
SLICE = 1 << 18
"""Bytes handed to the socket at once: about what its buffer takes."""
STALL_S = 60.0
"""A side that takes nothing for so long is gone, whatever its connection says."""
AHEAD = 4
"""Frames that may wait to be asked for before reading pauses."""
_HEAD = struct.Struct("<I32s")


class Broken(Exception):
    """A stream ended, or a frame in it is not what its digest says. The message says which."""


class _Frames(asyncio.BufferedProtocol):
    """The receiving side, and the flow control of the sending side."""

    def __init__(self, transport: Any, before: Any, began: bytes) -> None:
        self._transport, self._before = transport, before
        self.frames: deque[tuple[bytearray, bytes]] = deque()
        self.ended = ""
        self.discards = False
        self._head = bytearray(_HEAD.size)
        self._payload: bytearray | None = None
        self._digest = b""
        self._filled = 0
        self._paused = False
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._take(began)

    # -- reading ------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> Any:
        if self.discards:
            return memoryview(bytearray(1 << 16))
        return memoryview(self._head if self._payload is None else self._payload)[self._filled :]

    def buffer_updated(self, num: int) -> None:
        if self.discards:
            return
        self._filled += num
        if self._payload is None and self._filled == len(self._head):
            length, self._digest = _HEAD.unpack(self._head)
            if length > MAX_FRAME:
                self._end(f"a frame of {length} bytes; at most {MAX_FRAME}")
                self._transport.abort()
                return
            self._payload, self._filled = bytearray(length), 0
        if self._payload is not None and self._filled == len(self._payload):
            self.frames.append((self._payload, self._digest))
            self._payload, self._filled = None, 0
            self._news.set()
            if len(self.frames) >= AHEAD and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def _take(self, began: bytes) -> None:
        """What asyncio's reader had already read."""
        at = 0
        while at < len(began) and not self.ended:
            into = self.get_buffer(-1)
            part = began[at : at + len(into)]
            into[: len(part)] = part
            at += len(part)
            self.buffer_updated(len(part))

    def start(self) -> None:
        """Asyncio's reader may have paused the transport."""
        if not self._paused:
            self._transport.resume_reading()

    async def next(self) -> tuple[bytearray, bytes]:
        while not self.frames:
            if self.ended:
                raise Broken(self.ended)
            self._news.clear()
            await self._news.wait()
        frame = self.frames.popleft()
        if self._paused and len(self.frames) < AHEAD:
            self._go_on()
        return frame

    async def end(self) -> None:
        """The other side's; whatever else comes is thrown away."""
        self.discards = True
        self._go_on()
        while not self.ended:
            self._news.clear()
            await self._news.wait()

    def _go_on(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- writing ------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def writable(self) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self._writable.wait()
        except TimeoutError:
            raise Broken(f"the other side has taken nothing for {STALL_S:.0f} s") from None
        if self.ended and self._transport.is_closing():
            raise Broken(f"the other side hung up: {self.ended}")

    # -- the end ------------------------------------------------------------------------------------------

    def eof_received(self) -> bool:
        self._end("the stream ended")
        return True  # our side stays open: what we have to say may still be read

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the stream ended: {error}" if error else "the stream ended")
        self._writable.set()
        self._before.connection_lost(error)  # asyncio's own side of it

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._news.set()


class Stream:
    """Takes over a connection that asyncio opened, at the moment it is made. `peer`: who is at the other end, where that is known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer: str = "") -> None:
        self.peer = peer
        self._writer: asyncio.StreamWriter = writer
        transport = writer.transport
        began = bytes(reader._buffer)  # type: ignore[attr-defined]
        self._frames = _Frames(transport, transport.get_protocol(), began)
        transport.set_protocol(self._frames)
        if reader.at_eof():
            self._frames.eof_received()
        elif not transport.is_closing():
            self._frames.start()
        transport.set_write_buffer_limits(high=SLICE, low=SLICE // 4)
        self.num_sent = 0

    async def send(self, payload: bytes | memoryview | bytearray, digest: bytes | None = None) -> None:
        await self._put(payload, blake3(payload).digest() if digest is None else digest)

    async def _put(self, payload: bytes | memoryview | bytearray, digest: bytes) -> None:
        transport, view = self._writer.transport, memoryview(payload)
        if transport.is_closing():
            raise Broken(f"the other side hung up: {self._frames.ended or 'closed'}")
        transport.write(_HEAD.pack(len(payload), digest))
        for at in range(0, len(payload), SLICE):
            await self._frames.writable()
            transport.write(view[at : at + SLICE])
        await self._frames.writable()
        self.num_sent += _HEAD.size + len(payload)

    async def receive(self) -> bytes | bytearray:
        """The next frame."""
        payload, _ = await self.receive_digested()
        return payload

    async def receive_digested(self) -> tuple[bytes | bytearray, bytes]:
        """The next frame and the digest of what arrived."""
        payload, digest = await self._frames.next()
        if blake3(payload).digest() != digest:
            raise Broken(f"a frame of {len(payload)} bytes does not fit its digest")
        return payload, digest

    async def closed_by_peer(self, deadline_s: float) -> None:
        """Wait for the other side's end. Whoever sent last waits: a daemon drops what is in flight when we close."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._frames.end()
        except TimeoutError:
            pass

    def close(self) -> None:
        self._writer.close()
