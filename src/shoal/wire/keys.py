"""Ed25519 keys. A node's id is its public key in hex."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.files import write_bytes_atomically

PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
Role = Literal["trainer", "validator", "relay", "admin"]
"""The roles that have a key of the operator."""


class Key:
    """A private key. `public` is the public key in hex, by which others know it."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "Key":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Key":
        """Returns the key of 32 given bytes, for test vectors."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "Key":
        if not path.exists():
            raise FileNotFoundError(
                f"no key at {path}; copy this role's key from the coordinator's keys folder"
            )
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None  # not PEM, or encrypted: reported below
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError(f"{path}: not an Ed25519 private key; copy it again from where it was created")
        return cls(private)

    @classmethod
    def load_or_create(cls, path: Path) -> "Key":
        """Loads the key at `path`. Creates it first if the file does not exist, readable by its owner only."""
        if not path.exists():
            fresh = Ed25519PrivateKey.generate().private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            write_bytes_atomically(path, fresh, mode=0o600)
        return cls.load(path)

    def sign(self, message: bytes) -> str:
        """Returns the signature of `message` in hex."""
        return self._private.sign(message).hex()


@lru_cache(maxsize=16384)
def _public_key(public: str) -> Ed25519PublicKey:
    """Returns the key object for a public key. Cached: creating it takes a third of the time of one verification."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))


def verify(public: str, message: bytes, signature: str) -> bool:
    """Returns whether `signature` (hex) is the signature of `message` by `public` (hex). Malformed input gives False."""
    # bytes.fromhex accepts upper case and blanks: without this check one signature could be written in many ways.
    if not PUBLIC_KEY.fullmatch(public) or not _SIGNATURE.fullmatch(signature):
        return False
    try:
        _public_key(public).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
