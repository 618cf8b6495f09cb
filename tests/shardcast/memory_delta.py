"""Deltas of bytes in memory, made and applied by the functions for files."""

from pathlib import Path
from tempfile import TemporaryDirectory

from blake3 import blake3

from shoal.shardcast.delta import apply_deltas, write_delta


def encode(old: bytes, new: bytes) -> bytes:
    """Returns the delta that turns `old` into `new`."""
    with TemporaryDirectory() as folder:
        before, after, payload = (Path(folder) / name for name in ("before", "after", "payload"))
        before.write_bytes(old)
        after.write_bytes(new)
        digest = blake3(old).hexdigest()
        assert write_delta(before, after, payload, old_blake3=digest, max_bytes=1 << 40)
        return payload.read_bytes()


def apply(old: bytes, payload: bytes) -> bytes:
    """Returns `new` of `encode(old, new)`. Raises CorruptData if the payload is not a delta for a file of this size."""
    with TemporaryDirectory() as folder:
        before, after, delta = (Path(folder) / name for name in ("before", "after", "delta"))
        before.write_bytes(old)
        delta.write_bytes(payload)
        digest = apply_deltas(before, [delta], after)
        new = after.read_bytes()
    assert digest == blake3(new).hexdigest()
    return new
