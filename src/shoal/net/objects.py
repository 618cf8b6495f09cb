"""The object store: uploads under names of our own, written once, complete or absent.

An object's name is the SHA-256 of its bytes. Clients never choose a path.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from pathlib import Path

from shoal.wire.codes import Rejected

LEFTOVER_S = 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


class LocalStore:
    """Objects as files in a folder, two hex digits of fan-out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        # Uploads that a crash cut off. Not the young ones: another coordinator may share the folder.
        for leftover in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if leftover.stat().st_mtime < time.time() - LEFTOVER_S:
                    leftover.unlink()

    def path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise Rejected("request.not_found", f"{sha256[:80]!r} is not a SHA-256 digest")
        return self._folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def read(self, sha256: str) -> bytes:
        path = self.path(sha256)
        if not path.exists():
            raise Rejected("request.not_found", f"no object {sha256}")
        return path.read_bytes()

    def remove(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    def receive(self, token: str, sha256: str, num_bytes: int) -> "Incoming":
        """Begin an upload that must come to exactly these bytes."""
        # A retry can overlap the attempt it replaces: each has a file of its own, so neither can tear the other's.
        partial = self._incoming / f"{token}.{secrets.token_hex(8)}"
        return Incoming(partial, self.path(sha256), sha256, num_bytes)


class Incoming:
    """One upload in flight: counted and hashed as it arrives, refused at the first surplus byte."""

    def __init__(self, partial: Path, final: Path, sha256: str, num_bytes: int) -> None:
        self._partial, self._final = partial, final
        self._sha256, self._num_bytes = sha256, num_bytes
        self._hash, self._received = hashlib.sha256(), 0
        self._file = partial.open("wb")

    def write(self, piece: bytes) -> None:
        self._received += len(piece)
        if self._received > self._num_bytes:
            self.discard()
            raise Rejected("request.too_large", f"upload passed its declared {self._num_bytes} bytes")
        self._hash.update(piece)
        self._file.write(piece)

    def finish(self) -> None:
        if self._received != self._num_bytes:
            self.discard()
            raise Rejected(
                "request.wrong_digest", f"upload ended after {self._received} of {self._num_bytes} bytes"
            )
        if self._hash.hexdigest() != self._sha256:
            self.discard()
            raise Rejected(
                "request.wrong_digest", f"upload hashes to {self._hash.hexdigest()}, declared {self._sha256}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._final.parent.mkdir(exist_ok=True)
        os.replace(self._partial, self._final)
        # A receipt will promise that we hold it: the name must outlast a power cut, too.
        folder = os.open(self._final.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)
