"""BLAKE3 of files and of the shards in them, read in pieces: a file of any size needs two megabytes of memory."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from shoal.shardcast.client.buffer import make_buffer

PIECE_BYTES = 1 << 20
"""Small enough that what was read is still in the processor's cache when it is hashed."""


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def hash_file(fd: int) -> str:
    return hash_range(fd, 0, os.fstat(fd).st_size)


def hash_range(fd: int, start: int, num_bytes: int, buffer: memoryview | None = None) -> str:
    """Digest of `num_bytes` from `start`; of fewer where the file ends before that, which then fits nothing."""
    view = make_buffer(min(PIECE_BYTES, num_bytes)) if buffer is None else buffer
    hasher, stop = blake3(), start + num_bytes
    while start < stop and (count := os.preadv(fd, [view[: stop - start]], start)):
        hasher.update(view[:count])
        start += count
    return hasher.hexdigest()


def hash_shards(path: Path, shard_bytes: int) -> tuple[int, str, tuple[str, ...]]:
    """Size and digest of a file, and the digest of each of its shards.

    Two threads, each of which reads for itself. What one has just read, the other finds in the processor's cache; to read once
    and hand over took a third longer (LOG, 16 November).
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(fd)
        num_bytes = found.st_size
        buffer = make_buffer(min(PIECE_BYTES, shard_bytes, num_bytes))
        with ThreadPoolExecutor(1) as other:
            whole = other.submit(hash_range, fd, 0, num_bytes)
            shards = tuple(
                hash_range(fd, start, min(shard_bytes, num_bytes - start), buffer)
                for start in range(0, num_bytes, shard_bytes)
            )
        left = os.fstat(fd)
    finally:
        os.close(fd)
    if (left.st_size, left.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
        # The digests need not fit each other.
        raise ValueError(f"{path} was written to while it was hashed; publish only files nobody writes to")
    return num_bytes, whole.result(), shards
