"""Frames over one connection: length, BLAKE3 digest, bytes. A damaged frame is never delivered.

The event loop reads bytes straight into the frame they belong to and writes slices that fit the socket's buffer. asyncio's
own streams would copy every byte three times, and moving bytes is most of an exchange. For this `Stream` takes over a
connection that asyncio's streams opened; tests/diloco/test_stream.py states what that needs of asyncio.
"""

import asyncio
import contextlib
import struct
from collections import deque
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_FRAME = 16 << 20
SLICE = 1 << 18
"""Bytes written to the socket at once: about the size of its buffer."""
STALL_S = 60.0
"""A peer that reads nothing for this long counts as gone, even if its connection is open."""
MAX_QUEUED_FRAMES = 4
"""Received frames that may wait for `receive` before reading pauses."""
KEY_SIZE = 32
_HEAD = struct.Struct("<I32s")
_NO_DIGEST = bytes(32)


class StreamBroken(Exception):
    """A stream ended, could not be opened, or carried a damaged frame. The message says which."""


class _FrameProtocol(asyncio.BufferedProtocol):
    """Receives frames, and tracks whether the transport accepts more bytes."""

    def __init__(self, transport: Any, previous: Any, buffered: bytes) -> None:
        self._transport, self._previous = transport, previous
        self.frames: deque[tuple[bytearray, bytes]] = deque()
        self.ended = ""
        """Why no more frames will come; empty while the connection is open."""
        self.discarding = False
        self._head = bytearray(_HEAD.size)
        self._payload: bytearray | None = None
        self._digest = b""
        self._filled = 0
        self._paused = False
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._feed(buffered)

    # -- reading ------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> Any:
        if self.discarding:
            return memoryview(bytearray(1 << 16))
        return memoryview(self._head if self._payload is None else self._payload)[self._filled :]

    def buffer_updated(self, num: int) -> None:
        if self.discarding:
            return
        self._filled += num
        if self._payload is None and self._filled == len(self._head):
            length, self._digest = _HEAD.unpack(self._head)
            if length > MAX_FRAME:
                self._end(f"frame of {length} bytes exceeds the limit of {MAX_FRAME}")
                self._transport.abort()
                return
            self._payload, self._filled = bytearray(length), 0
        if self._payload is not None and self._filled == len(self._payload):
            self.frames.append((self._payload, self._digest))
            self._payload, self._filled = None, 0
            self._changed.set()
            if len(self.frames) >= MAX_QUEUED_FRAMES and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def _feed(self, buffered: bytes) -> None:
        """Processes the bytes that asyncio's reader had received before the takeover."""
        at = 0
        while at < len(buffered) and not self.ended:
            into = self.get_buffer(-1)
            part = buffered[at : at + len(into)]
            into[: len(part)] = part
            at += len(part)
            self.buffer_updated(len(part))

    def start(self) -> None:
        """Resumes reading, which asyncio's reader pauses when its buffer is full."""
        if not self._paused:
            self._transport.resume_reading()

    async def next(self) -> tuple[bytearray, bytes]:
        """Returns the next frame and the digest sent with it. Raises StreamBroken after the last one."""
        while not self.frames:
            if self.ended:
                raise StreamBroken(self.ended)
            self._changed.clear()
            await self._changed.wait()
        frame = self.frames.popleft()
        if self._paused and len(self.frames) < MAX_QUEUED_FRAMES:
            self._resume()
        return frame

    async def wait_ended(self) -> None:
        """Waits until the other side closes, discarding what it still sends."""
        self.discarding = True
        self._resume()
        while not self.ended:
            self._changed.clear()
            await self._changed.wait()

    def _resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    # -- writing ------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def writable(self) -> None:
        """Waits until the transport accepts more bytes. Raises StreamBroken."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._writable.wait()
        except TimeoutError:
            raise StreamBroken(f"the peer has read nothing for {STALL_S:.0f} s") from None
        if self.ended and self._transport.is_closing():
            raise StreamBroken(f"the peer disconnected: {self.ended}")

    # -- the end ------------------------------------------------------------------------------------------

    def eof_received(self) -> bool:
        self._end("the stream ended")
        return True  # keeps this side open: the peer may still read what is sent to it

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the stream ended: {error}" if error else "the stream ended")
        self._writable.set()
        self._previous.connection_lost(error)  # asyncio's writer waits for this

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._changed.set()


class Stream:
    """Sends and receives frames over a connection that asyncio opened. `peer`: the other end's id, where it is known."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, peer: str = "") -> None:
        self.peer = peer
        self._writer: asyncio.StreamWriter = writer
        transport = writer.transport
        received: bytearray = reader._buffer  # type: ignore[attr-defined]
        buffered = bytes(received)
        received.clear()  # with an empty buffer `at_eof` says whether the other side has closed
        self._frames = _FrameProtocol(transport, transport.get_protocol(), buffered)
        transport.set_protocol(self._frames)
        if reader.at_eof():
            self._frames.eof_received()
        elif not transport.is_closing():
            self._frames.start()
        transport.set_write_buffer_limits(high=SLICE, low=SLICE // 4)
        self.num_sent = 0

    async def send(self, payload: bytes | memoryview | bytearray, digest: bytes | None = None) -> None:
        """Sends one frame. `digest`: the payload's BLAKE3, if it is known already. Raises StreamBroken."""
        await self._write_frame(payload, blake3(payload).digest() if digest is None else digest)

    async def _write_frame(self, payload: bytes | memoryview | bytearray, digest: bytes) -> None:
        transport, view = self._writer.transport, memoryview(payload)
        if transport.is_closing():
            raise StreamBroken(f"the peer disconnected: {self._frames.ended or 'closed'}")
        transport.write(_HEAD.pack(len(payload), digest))
        for at in range(0, len(payload), SLICE):
            await self._frames.writable()
            transport.write(view[at : at + SLICE])
        await self._frames.writable()
        self.num_sent += _HEAD.size + len(payload)

    async def receive(self) -> bytes | bytearray:
        """Returns the next frame. Raises StreamBroken."""
        payload, _ = await self.receive_with_digest()
        return payload

    async def receive_with_digest(self) -> tuple[bytes | bytearray, bytes]:
        """Returns the next frame and its verified digest. Raises StreamBroken."""
        payload, digest = await self._frames.next()
        if blake3(payload).digest() != digest:
            raise StreamBroken(f"frame of {len(payload)} bytes does not match its digest")
        return payload, digest

    async def wait_closed_by_peer(self, deadline_s: float) -> None:
        """Waits until the other side closes, at most `deadline_s`.

        The last sender must wait: a libp2p daemon drops bytes in flight when the sender closes.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._frames.wait_ended()

    def close(self) -> None:
        self._writer.close()


class EncryptedStream(Stream):
    """A stream whose frames are encrypted with AES-256-GCM: one key for each direction, numbered frames.

    The authentication tag covers every byte of a frame and its number, so an encrypted frame carries no digest. Python's
    TLS passes 16 KiB at a time through two more buffers, at several times the cost (bench/log/2026-11-diloco-links.md).
    Neither `send_key` nor `receive_key` may ever be used for another stream, since the nonces start at 0.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer: str,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        super().__init__(reader, writer, peer=peer)
        self._send_cipher, self._receive_cipher = AESGCM(send_key), AESGCM(receive_key)
        self._num_encrypted = self._num_decrypted = 0

    async def send(self, payload: bytes | memoryview | bytearray, digest: bytes | None = None) -> None:
        # The frame's number is the nonce: a frame that is missing, repeated or reordered fails to decrypt.
        encrypted = self._send_cipher.encrypt(self._num_encrypted.to_bytes(12), payload, None)
        self._num_encrypted += 1
        await self._write_frame(encrypted, _NO_DIGEST)

    async def receive(self) -> bytes | bytearray:
        encrypted, _ = await self._frames.next()
        try:
            payload = self._receive_cipher.decrypt(self._num_decrypted.to_bytes(12), encrypted, None)
        except InvalidTag:
            raise StreamBroken(f"frame of {len(encrypted)} bytes fails authentication") from None
        self._num_decrypted += 1
        return payload

    async def receive_with_digest(self) -> tuple[bytes | bytearray, bytes]:
        payload = await self.receive()
        return payload, blake3(payload).digest()
