"""Ed25519 keys. A node's id is its public key in hex; there is no other name for it."""

import os
import re
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


class Key:
    """A private key. `public` is the hex id that others know it by."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "Key":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Key":
        """The key of 32 given bytes; for golden vectors."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "Key":
        if not path.exists():
            raise FileNotFoundError(
                f"no key at {path}; the coordinator writes the run's keys into its keys folder, copy the one for this role"
            )
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None  # not PEM, or encrypted
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError(f"{path}: not an Ed25519 private key; copy it anew from where it was made")
        return cls(private)

    @classmethod
    def load_or_create(cls, path: Path) -> "Key":
        """The key at `path`, made there first if need be (mode 0600, complete or absent)."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(fresh)
                os.fsync(file.fileno())
            partial.rename(path)
        return cls.load(path)

    def sign(self, message: bytes) -> str:
        return self._private.sign(message).hex()


@lru_cache(maxsize=16384)
def _public_key(public: str) -> Ed25519PublicKey:
    """Kept: a node signs every request with the same one, and making it costs a third of using it."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))


def verify(public: str, message: bytes, signature: str) -> bool:
    """Whether `signature` (hex) of `message` is by `public` (hex). Malformed input is simply not a signature."""
    # One spelling per signature: no upper case, no blanks, which bytes.fromhex would let pass.
    if not PUBLIC_KEY.fullmatch(public) or not _SIGNATURE.fullmatch(signature):
        return False
    try:
        _public_key(public).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
