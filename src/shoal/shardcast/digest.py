"""BLAKE3 of files and of the shards in them, read in small pieces: a file of any size needs a megabyte of memory."""

import os

from blake3 import blake3

PIECE_BYTES = 1 << 20


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def hash_range(fd: int, start: int, num_bytes: int) -> str:
    """Digest of `num_bytes` from `start`; of fewer where the file ends before that, which then fits nothing."""
    hasher = blake3()
    position, stop = start, start + num_bytes
    while position < stop:
        piece = os.pread(fd, min(PIECE_BYTES, stop - position), position)
        if not piece:
            break
        hasher.update(piece)
        position += len(piece)
    return hasher.hexdigest()


def hash_shards(fd: int, num_bytes: int, shard_bytes: int) -> tuple[str, tuple[str, ...]]:
    """Digest of the whole file and of each shard, in one pass over it."""
    whole = blake3()
    shards = []
    for start in range(0, num_bytes, shard_bytes):
        shard = blake3()
        position, stop = start, min(start + shard_bytes, num_bytes)
        while position < stop:
            piece = os.pread(fd, min(PIECE_BYTES, stop - position), position)
            if not piece:
                raise ValueError(
                    f"the file ended at byte {position} of {num_bytes}; publish only files nobody writes to"
                )
            whole.update(piece)
            shard.update(piece)
            position += len(piece)
        shards.append(shard.hexdigest())
    return whole.hexdigest(), tuple(shards)
