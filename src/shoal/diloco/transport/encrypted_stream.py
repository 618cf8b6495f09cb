"""Frames that only the two ends of a link can read or make: AES-256-GCM, a key for each direction, frames counted.

A seal vouches for every byte of a frame and for its place in the order, so a sealed frame carries no digest. Python's TLS would do,
but passes 16 KiB at a time through two more buffers, at several times the cost (docs/LOG.md).
"""

import asyncio

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.diloco.transport.stream import Broken, Stream

KEY_SIZE = 32
_NO_DIGEST = bytes(32)


class SealedStream(Stream):
    """`seals` is the key of what this side sends, `opens` of what it receives; neither is ever used for another stream."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer: str,
        seals: bytes,
        opens: bytes,
    ) -> None:
        super().__init__(reader, writer, peer=peer)
        self._seals, self._opens = AESGCM(seals), AESGCM(opens)
        self._num_sealed = self._num_opened = 0

    async def send(self, payload: bytes | memoryview | bytearray, digest: bytes | None = None) -> None:
        # The count is the nonce: a frame that is left out, repeated or moved does not open.
        sealed = self._seals.encrypt(self._num_sealed.to_bytes(12), payload, None)
        self._num_sealed += 1
        await self._put(sealed, _NO_DIGEST)

    async def receive(self) -> bytes | bytearray:
        sealed, _ = await self._frames.next()
        try:
            payload = self._opens.decrypt(self._num_opened.to_bytes(12), sealed, None)
        except InvalidTag:
            raise Broken(f"a frame of {len(sealed)} bytes that the other end did not seal") from None
        self._num_opened += 1
        return payload

    async def receive_digested(self) -> tuple[bytes | bytearray, bytes]:
        payload = await self.receive()
        return payload, blake3(payload).digest()
