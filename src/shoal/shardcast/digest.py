"""BLAKE3 of files and of the shards in them, read in small pieces: a file of any size needs a megabyte of memory."""

import os
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

PIECE_BYTES = 256 << 10
"""Small enough that what was read is still in the processor's cache when it is hashed."""


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def hash_file(fd: int) -> str:
    return hash_range(fd, 0, os.fstat(fd).st_size)


def hash_range(fd: int, start: int, num_bytes: int) -> str:
    """Digest of `num_bytes` from `start`; of fewer where the file ends before that, which then fits nothing."""
    hasher = blake3()
    update_range(fd, start, num_bytes, hasher)
    return hasher.hexdigest()


def hash_shards(fd: int, num_bytes: int, shard_bytes: int) -> tuple[str, tuple[str, ...]]:
    """Digest of the whole file and of each shard; at the same time, since everybody waits for both."""
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(hash_range, fd, 0, num_bytes)
        shards = []
        for start in range(0, num_bytes, shard_bytes):
            hasher, expected = blake3(), min(shard_bytes, num_bytes - start)
            found = update_range(fd, start, expected, hasher)
            if found < expected:
                raise ValueError(
                    f"the file ended at byte {start + found} of {num_bytes}; publish only files nobody writes to"
                )
            shards.append(hasher.hexdigest())
        return whole.result(), tuple(shards)


def update_range(fd: int, start: int, num_bytes: int, hasher: blake3) -> int:
    """Have the hasher take a range of the file; how many bytes of it there were."""
    room = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
    position = 0
    while position < num_bytes:
        count = os.preadv(fd, [room[: num_bytes - position]], start + position)
        if not count:
            break
        hasher.update(room[:count])
        position += count
    return position
