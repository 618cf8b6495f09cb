"""Object stores: uploads under names of our own, written once, complete or absent. Clients never choose a name.

The folder's name for an object is the SHA-256 of its bytes; net.s3 has the other store there is.
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.wire.codes import Rejected

LEFTOVER_S = 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An object as a node announced it: exactly these bytes, under a name that we gave it."""

    token: str
    sha256: str
    num_bytes: int
    asked_at_s: float
    expires_at_s: float
    """Nothing is taken under this name after that."""


def check_digest(sha256: str) -> str:
    """The same, if it can be a name; else Rejected."""
    if not _SHA256.fullmatch(sha256):
        raise Rejected("request.not_found", f"{sha256[:80]!r} is not a SHA-256 digest")
    return sha256


class ObjectStore(Protocol):
    """What a coordinator needs of a store. An object is there when all of its declared bytes are, and never before."""

    def upload_url(self, declared: Declared) -> str:
        """Where to send the bytes; empty: to the coordinator."""
        ...

    def read_url(self, declared: Declared, now_s: float) -> str:
        """Where to read them; empty: at the coordinator."""
        ...

    def holds(self, declared: Declared) -> bool: ...

    def remove(self, declared: Declared) -> None:
        """Nobody will submit it."""
        ...

    def close(self) -> None: ...


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
        return self._folder / check_digest(sha256)[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def read(self, sha256: str) -> bytes:
        path = self.path(sha256)
        if not path.exists():
            raise Rejected("request.not_found", f"no object {sha256}")
        return path.read_bytes()

    def upload_url(self, declared: Declared) -> str:
        return ""

    def read_url(self, declared: Declared, now_s: float) -> str:
        return ""

    def holds(self, declared: Declared) -> bool:
        return self.has(declared.sha256)

    def remove(self, declared: Declared) -> None:
        self.path(declared.sha256).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""

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
        # Closing writes what is left; on a full disk that fails again, and must not keep the rest of it there.
        with contextlib.suppress(OSError):
            self._file.close()
        self._partial.unlink(missing_ok=True)
