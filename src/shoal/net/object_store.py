"""Object stores: uploads under names that the coordinator chooses, written once, complete or absent.

`LocalStore` names an object by the SHA-256 of its bytes, in a folder; s3_store.py has the store outside of this machine.
"""

import base64
import contextlib
import hashlib
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from shoal.files import flush_folder
from shoal.wire.codes import Rejected

ABANDONED_S = 3600.0
"""Age at which an unfinished upload in a LocalStore is deleted when the store is opened."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An object that a node announced: exactly these bytes, under a name that the coordinator chose."""

    token: str
    sha256: str
    num_bytes: int
    asked_at_s: float
    expires_at_s: float
    """No bytes are accepted under this name after that time."""


def check_digest(sha256: str) -> str:
    """Returns `sha256` if it has the form of a SHA-256 digest; raises Rejected otherwise."""
    if not _SHA256.fullmatch(sha256):
        raise Rejected("request.not_found", f"{sha256[:80]!r} is not a SHA-256 digest")
    return sha256


def upload_headers(sha256: str, num_bytes: int) -> dict[str, str]:
    """Returns the headers of an upload to an S3 store, which its URL is signed over: size, digest, and create only."""
    digest = base64.b64encode(bytes.fromhex(sha256)).decode("ascii")
    return {"content-length": str(num_bytes), "if-none-match": "*", "x-amz-checksum-sha256": digest}


class ObjectStore(Protocol):
    """What a coordinator needs of a store. A store has an object when it has all of its declared bytes, never before."""

    def upload_url(self, declared: Declared) -> str:
        """Returns where to upload the bytes; "" means to the coordinator."""

    def read_url(self, declared: Declared) -> str:
        """Returns where to read the bytes; "" means from the coordinator."""

    def holds(self, declared: Declared) -> bool:
        """Returns whether the store has the object, complete."""

    def remove(self, declared: Declared) -> None:
        """Deletes an object that will not be submitted."""

    def close(self) -> None:
        """Closes connections."""


class LocalStore:
    """Objects as files in a folder, with subfolders named by the first two hex digits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        # Delete uploads that a crash interrupted, except recent ones: another coordinator may share the folder.
        for path in self._incoming.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - ABANDONED_S:
                    path.unlink()

    def path(self, sha256: str) -> Path:
        """Returns the path of an object; raises Rejected if `sha256` is not a digest."""
        return self._folder / check_digest(sha256)[:2] / sha256

    def upload_url(self, declared: Declared) -> str:
        """Returns "": nodes upload to the coordinator."""
        return ""

    def read_url(self, declared: Declared) -> str:
        """Returns "": services read from the coordinator."""
        return ""

    def holds(self, declared: Declared) -> bool:
        """Returns whether the object is stored."""
        return self.path(declared.sha256).exists()

    def remove(self, declared: Declared) -> None:
        """Deletes the object if it is stored."""
        self.path(declared.sha256).unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing: a folder needs no connection."""

    def receive(self, token: str, sha256: str, num_bytes: int) -> "Incoming":
        """Begins an upload that must have exactly these bytes."""
        # A retry can overlap the attempt it replaces: with one file each, neither can damage the other's.
        partial = self._incoming / f"{token}.{secrets.token_hex(8)}"
        return Incoming(partial, self.path(sha256), sha256, num_bytes)


class Incoming:
    """One upload in progress: counted and hashed as it arrives, rejected at the first surplus byte.

    The first write creates the file, so that a request without a body leaves none.
    """

    def __init__(self, partial: Path, final: Path, sha256: str, num_bytes: int) -> None:
        self._partial, self._final = partial, final
        self._sha256, self._num_bytes = sha256, num_bytes
        self._hash, self._received = hashlib.sha256(), 0
        self._file: IO[bytes] | None = None

    def write(self, piece: bytes) -> None:
        """Appends bytes; raises Rejected if there are more than declared."""
        self._received += len(piece)
        if self._received > self._num_bytes:
            self.discard()
            raise Rejected("request.too_large", f"upload exceeds its declared {self._num_bytes} bytes")
        self._hash.update(piece)
        if self._file is None:
            self._file = self._partial.open("wb")
        self._file.write(piece)

    def finish(self, last: bytes = b"") -> None:
        """Appends the last bytes, checks size and digest and gives the object its name, durably; raises Rejected if they differ."""
        self.write(last)
        if self._received != self._num_bytes:
            self.discard()
            raise Rejected(
                "request.incomplete", f"upload ended after {self._received} of {self._num_bytes} bytes"
            )
        if self._hash.hexdigest() != self._sha256:
            self.discard()
            raise Rejected(
                "request.wrong_digest", f"upload hashes to {self._hash.hexdigest()}, declared {self._sha256}"
            )
        assert self._file is not None, "`write` opened it"
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        self._final.parent.mkdir(exist_ok=True)
        os.replace(self._partial, self._final)
        # The coordinator's receipt promises that the object is stored, so its name must survive a power cut too.
        flush_folder(self._final.parent)

    def discard(self) -> None:
        """Deletes what has arrived."""
        # Closing flushes the buffer, which fails again on a full disk; the file must be deleted all the same.
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._partial.unlink(missing_ok=True)
