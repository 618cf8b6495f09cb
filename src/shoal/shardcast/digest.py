"""BLAKE3 of files and of the shards in them, read in small pieces: a file of any size needs a megabyte of memory."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from blake3 import blake3

PIECE_BYTES = 256 << 10
"""Small enough that what was read is still in the processor's cache when it is hashed."""

SHARED_BYTES = 1 << 20
"""What two threads look at together: less would cost more in handing over than it saves in reading once."""


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
    """Digest of the whole file and of each shard, of the same bytes: read once, and hashed by two threads."""
    whole, shards = blake3(), []
    rooms = [memoryview(bytearray(min(SHARED_BYTES, shard_bytes, num_bytes))) for _ in range(3)]
    taken: deque[Future[blake3]] = deque()
    with ThreadPoolExecutor(1) as other:
        for start in range(0, num_bytes, shard_bytes):
            shard, stop = blake3(), min(start + shard_bytes, num_bytes)
            while start < stop:
                if len(taken) == len(rooms) - 1:  # the room that comes next must be free again
                    taken.popleft().result()
                rooms.append(room := rooms.pop(0))
                count = os.preadv(fd, [room[: stop - start]], start)
                if not count:
                    raise ValueError(
                        f"the file ended at byte {start} of {num_bytes}; publish only files nobody writes to"
                    )
                taken.append(other.submit(whole.update, room[:count]))
                shard.update(room[:count])
                start += count
            shards.append(shard.hexdigest())
    return whole.hexdigest(), tuple(shards)


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
