"""Which submissions get every check. Drawn after receipt from a secret that nobody outside knows yet, so that a worker
cannot tell beforehand; from one the ledger committed to and later reveals, so that anybody can tell afterwards.

    draw = HMAC-SHA256(epoch secret, "check/" lease id "/" SHA-256 of the submission), first 8 bytes, as a share of 2^64
    every check is run if draw < rate
"""

import hashlib
import hmac


def draw(epoch_secret: bytes, lease_id: str, sha256: str) -> float:
    """In [0, 1)."""
    digest = hmac.new(epoch_secret, f"check/{lease_id}/{sha256}".encode(), hashlib.sha256).digest()
    # 53 bits: exactly a float, and so the same everywhere.
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def checks_all(epoch_secret: bytes, lease_id: str, sha256: str, rate: float) -> bool:
    return draw(epoch_secret, lease_id, sha256) < rate
