"""Lossless deltas between two files of one size: which 16-bit words changed, and by how much.

    old words  3f80 3f81 bc00 3f80        gaps   1 0     words left out before each change
    new words  3f80 3f82 bbff 3f80        steps  2 1     zigzag of the difference of the bit patterns: +1, -1

A step of training moves a bfloat16 weight by one unit in the last place, if at all, so both streams are small numbers,
as varints, then zstd. Nothing here knows tensors: any two files of equal size work, others' deltas are merely large.
docs/wire/delta.md has the format byte by byte.

Files are read, changed, hashed and written one chunk at a time, so memory does not grow with them, and a chain of deltas
is applied in one pass. A payload is bytes from a stranger: whatever it says is checked before it is believed.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from shoal.shardcast.client.byte_ranges import write_at
from shoal.wire.codes import CorruptData

MAGIC = b"SHDELTA1"
CHUNK_WORDS = 1 << 21
"""Part of the format: 4 MiB of a file. Memory is a few times that, and positions in it take 3 varint bytes at most."""
LEVEL = 1
NUM_MAKERS = 2
"""Threads that make chunks while one hashes them: hashing sets the pace then, on three cores."""
_HEAD = struct.Struct("<8sQ")
_CHUNK = struct.Struct("<5I")
_MAX_VARINT = 3
_DENSE = 4
"""Above one changed lane in this many, looking at words one by one is faster than looking into lanes."""

D = TypeVar("D", bytes, range)
R = TypeVar("R")
T = TypeVar("T")
Words = npt.NDArray[np.uint16]
Read = Callable[[int, int], "bytes | memoryview"]
"""From which byte, how many."""
ReadWords = Callable[[int, int], Words]
"""The same; an odd byte at the end is a word with a zero behind it. They are the caller's to change until the next call."""


def encode(old: bytes | memoryview, new: bytes | memoryview) -> bytes:
    """What makes `new` of `old`; they must be of one size."""
    read_old, read_new = _word_reader(old), _word_reader(new)
    pieces = [_HEAD.pack(MAGIC, _one_size(len(old), len(new)))]
    pieces += [_encode_chunk(read_old(*where), read_new(*where)) for where in _chunks(len(new))]
    return b"".join(pieces)


def apply(old: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    """Returns `new` of `encode(old, new)`. Raises CorruptData if the payload is not a delta for a file of this size."""
    delta, read = DeltaReader(_reader(payload), len(payload), len(old)), _word_reader(old)
    pieces = []
    for start, length in _chunks(len(old)):
        words = read(start, length)
        delta.next_chunk().apply(words)
        pieces.append(bytes(_bytes(words, length)))
    delta.check_end()
    return b"".join(pieces)


def write_delta(old: Path, new: Path, into: Path, *, old_blake3: str, max_bytes: int) -> bool:
    """Write the payload to `into`. Chunks are read and compared by two threads, the old ones hashed by this one in order.

    False, and no file, if it exceeds `max_bytes` or `old` has not the digest it should have.
    """
    hasher = blake3()
    with old.open("rb") as old_file, new.open("rb") as new_file, into.open("wb") as out:
        fds = old_file.fileno(), new_file.fileno()
        num_bytes = _one_size(_size(fds[0]), _size(fds[1]))
        rooms = [(_word_file_reader(fds[0]), _word_file_reader(fds[1])) for _ in range(NUM_MAKERS + 1)]
        total = out.write(_HEAD.pack(MAGIC, num_bytes))
        jobs = (partial(_compare_chunk, where) for where in _chunks(num_bytes))
        with closing(_by_threads(jobs, rooms)) as made:
            for before, piece in made:
                hasher.update(before)
                total += out.write(piece)
                if total > max_bytes:
                    break
    good = total <= max_bytes and hasher.hexdigest() == old_blake3
    if not good:
        into.unlink()
    return good


def _compare_chunk(where: tuple[int, int], readers: tuple[ReadWords, ReadWords]) -> tuple[memoryview, bytes]:
    """The old bytes, and what makes the new ones of them."""
    old, new = (read(*where) for read in readers)
    return _bytes(old, where[1]), _encode_chunk(old, new)


def apply_deltas(old: Path, payloads: Sequence[Path], into: Path) -> str:
    """Write to `into` what the payloads, one after the other, make of `old`; its BLAKE3.

    Chunks are read, changed and written by two threads, and hashed by this one in order.
    """
    hasher = blake3()
    with ExitStack() as files:
        old_fd = files.enter_context(old.open("rb")).fileno()
        out = files.enter_context(into.open("wb", buffering=0)).fileno()
        deltas = []
        for path in payloads:
            fd = files.enter_context(path.open("rb")).fileno()
            deltas.append(DeltaReader(_file_reader(fd), _size(fd), _size(old_fd)))
        rooms = [_word_file_reader(old_fd) for _ in range(NUM_MAKERS + 1)]
        jobs = (
            partial(_make_chunk, out, where, [delta.next_chunk() for delta in deltas])
            for where in _chunks(_size(old_fd))
        )
        for made in files.enter_context(closing(_by_threads(jobs, rooms))):
            hasher.update(made)
        for delta in deltas:
            delta.check_end()
    return hasher.hexdigest()


def _make_chunk(out: int, where: tuple[int, int], changes: list["Changes"], read: ReadWords) -> memoryview:
    start, length = where
    words = read(start, length)
    for change in changes:
        change.apply(words)
    made = _bytes(words, length)
    write_at(out, made, start)
    return made


def _by_threads(jobs: Iterable[Callable[[R], T]], rooms: Sequence[R]) -> Generator[T, None, None]:
    """What each job makes in a room that it has for itself, in order; good until the next is asked for."""
    waiting, making = deque(rooms), deque[Future[T]]()
    with ThreadPoolExecutor(NUM_MAKERS, thread_name_prefix="delta") as makers:
        for job in jobs:
            if len(making) == len(rooms):  # the room that comes next must be free again
                yield making.popleft().result()
            waiting.rotate(-1)
            making.append(makers.submit(job, waiting[-1]))
        while making:
            yield making.popleft().result()


# -- chunks ---------------------------------------------------------------------------------------------


def _one_size(old_bytes: int, new_bytes: int) -> int:
    if old_bytes != new_bytes:
        raise ValueError(f"a delta needs files of one size, these have {old_bytes} and {new_bytes} bytes")
    return new_bytes


def _encode_chunk(old: Words, new: Words) -> bytes:
    places = _changed(old, new)
    if places.size == 0:
        return _CHUNK.pack(0, 0, 0, 0, 0)
    gaps = np.diff(places, prepend=-1) - 1
    steps = (new[places] - old[places]).view(np.int16)  # the difference wraps around, and so does adding it
    zigzag = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    streams = [_to_varints(gaps.astype(np.uint32)), _to_varints(zigzag.astype(np.uint32))]
    compressor = zstandard.ZstdCompressor(level=LEVEL)  # one for each: they are not for several threads
    frames = [compressor.compress(stream) for stream in streams]
    sizes = [len(one) for one in (*streams, *frames)]
    return b"".join([_CHUNK.pack(places.size, *sizes), *frames])


def _changed(old: Words, new: Words) -> npt.NDArray[np.int64]:
    """Places of the words that differ. Four words are compared as one: few of those differ."""
    whole = old.size // 4 * 4
    lanes = np.flatnonzero(old[:whole].view(np.uint64) != new[:whole].view(np.uint64))
    if lanes.size * _DENSE > whole // 4:
        return np.flatnonzero(old != new)
    near = (lanes[:, None] * 4 + np.arange(4)).ravel()
    rest = np.arange(whole, old.size)
    near = np.concatenate([near, rest]) if rest.size else near
    places: npt.NDArray[np.int64] = near[old[near] != new[near]]
    return places


class DeltaReader:
    """A delta, read from its beginning to its end."""

    def __init__(self, read: Read, payload_bytes: int, num_bytes: int) -> None:
        self._read, self._left, self._position = read, payload_bytes, 0
        magic, made_for = _HEAD.unpack(self._take(_HEAD.size))
        if magic != MAGIC:
            raise _refusal(f"it begins with {magic!r}, not {MAGIC!r}")
        if made_for != num_bytes:
            raise _refusal(f"it is for a file of {made_for} bytes, this one has {num_bytes}")

    def next_chunk(self) -> "Changes":
        num, gaps_bytes, steps_bytes, gaps_frame, steps_frame = _CHUNK.unpack(self._take(_CHUNK.size))
        # Before it is read into memory.
        if max(gaps_frame, steps_frame) > 1024 + 2 * _MAX_VARINT * CHUNK_WORDS:
            raise _refusal(
                f"frames of {gaps_frame} and {steps_frame} bytes for a chunk of {CHUNK_WORDS} words"
            )
        return Changes(
            num=num,
            sizes=(gaps_bytes, steps_bytes),
            gaps=self._take(gaps_frame),
            steps=self._take(steps_frame),
        )

    def check_end(self) -> None:
        if self._left:
            raise _refusal(f"{self._left} bytes follow its end")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._left:
            raise _refusal(f"it ends {num_bytes - self._left} bytes early")
        data = bytes(self._read(self._position, num_bytes))
        self._position += num_bytes
        self._left -= num_bytes
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Of one chunk, as they came: not looked at yet."""

    num: int
    sizes: tuple[int, int]
    gaps: bytes
    steps: bytes

    def apply(self, words: Words) -> None:
        """Changes the words of the chunk in place. Raises CorruptData on invalid data, before any word is changed."""
        if self.num > words.size:
            raise _refusal(f"{self.num} changes in a chunk of {words.size} words")
        if self.num == 0:
            if any(self.sizes) or self.gaps or self.steps:
                raise _refusal("streams in a chunk without changes")
            return
        unpack = zstandard.ZstdDecompressor(max_window_size=1 << 23)
        places = np.cumsum(self._numbers(self.gaps, self.sizes[0], unpack), dtype=np.intp)
        places += np.arange(self.num)
        if places[-1] >= words.size:
            raise _refusal(f"a change at word {places[-1]} of a chunk of {words.size}")
        zigzag = self._numbers(self.steps, self.sizes[1], unpack)
        if zigzag.max() > 0xFFFF:
            raise _refusal(f"a step of {zigzag.max()}, which is no 16-bit difference")
        zigzag = zigzag.astype(np.uint16)
        steps = (zigzag >> 1) ^ (0 - (zigzag & 1))
        # None is clipped; said so, NumPy need not look at each again.
        words[places] = words.take(places, mode="clip") + steps

    def _numbers(
        self, frame: bytes, stream_bytes: int, unpack: zstandard.ZstdDecompressor
    ) -> npt.NDArray[np.integer[Any]]:
        if not self.num <= stream_bytes <= _MAX_VARINT * self.num:
            raise _refusal(f"a stream of {stream_bytes} bytes for {self.num} numbers")
        try:
            # The size is asked first: the decompressor would make room for whatever the frame says of itself.
            said = zstandard.get_frame_parameters(frame).content_size
            if said != stream_bytes:
                raise _refusal(f"a zstd frame of {said} bytes where {stream_bytes} belong")
            stream = unpack.decompress(frame, max_output_size=stream_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _refusal(f"no zstd frame: {error}") from None
        return _from_varints(np.frombuffer(stream, np.uint8), self.num)


# -- varints --------------------------------------------------------------------------------------------


def _to_varints(numbers: npt.NDArray[np.uint32]) -> bytes:
    """LEB128: 7 bits a byte, the lowest first, the top bit set on all but a number's last byte."""
    lengths = 1 + (numbers >= 1 << 7).astype(np.int64) + (numbers >= 1 << 14)
    ends = np.cumsum(lengths)
    out = np.empty(ends[-1], np.uint8)
    starts = ends - lengths
    out[starts] = numbers & 0x7F
    for index in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > index)
        at = starts[longer] + index
        out[at - 1] |= 0x80
        out[at] = (numbers[longer] >> (7 * index)) & 0x7F
    return out.tobytes()


def _from_varints(stream: npt.NDArray[np.uint8], num: int) -> npt.NDArray[np.integer[Any]]:
    """Without a look at single numbers, and without a branch: every byte is taken together with those before it that go on into
    it, then the last ones are kept."""
    more = stream >> 7
    ends = np.flatnonzero(more == 0)
    if ends.size != num or more[-1]:
        raise _refusal(f"{ends.size} numbers in a stream of {num}")
    if num == stream.size:
        return stream
    low = (stream & 0x7F).astype(np.int32)
    numbers = low.copy()
    numbers[1:] += more[:-1] * (low[1:] * 127 + low[:-1])  # n << 7 | the byte before, where that goes on
    third = more[1:-1] & more[:-2]
    if third.any():
        if (third[1:] & more[:-3]).any():
            raise _refusal(f"a number of over {_MAX_VARINT} bytes")
        numbers[2:] += third * (numbers[2:] * 127 + low[:-2])
    return numbers.take(ends, mode="clip")


# -- bytes ----------------------------------------------------------------------------------------------


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_bytes, 2 * CHUNK_WORDS):
        yield start, min(2 * CHUNK_WORDS, num_bytes - start)


def _words(data: bytes | memoryview) -> Words:
    """A copy, aligned and writable; a file of odd size has a zero byte more in its last word."""
    words = np.zeros(-(-len(data) // 2), "<u2")
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return words


def _reader(data: bytes | memoryview) -> Read:
    view = memoryview(data).cast("B")
    return lambda start, length: view[start : start + length]


def _word_reader(data: bytes | memoryview) -> ReadWords:
    read = _reader(data)
    return lambda start, length: _words(read(start, length))


def _file_reader(fd: int) -> Read:
    def read(start: int, length: int) -> bytes:
        return _complete(os.pread(fd, length, start), length, start)

    return read


def _word_file_reader(fd: int) -> ReadWords:
    """Into the same memory each time: new memory would cost more than reading into it."""
    room = np.zeros(CHUNK_WORDS, "<u2")

    def read(start: int, length: int) -> Words:
        words = room[: -(-length // 2)]
        words[-1:] = 0
        count = os.preadv(fd, [_bytes(words, length)], start)
        _complete(range(count), length, start)
        return words

    return read


def _complete(data: D, length: int, start: int) -> D:
    if len(data) != length:
        raise ValueError(
            f"a file lost its end while a delta was made or applied: {len(data)} bytes at {start}"
        )
    return data


def _bytes(words: Words, length: int) -> memoryview:
    return memoryview(words.view(np.uint8))[:length]  # type: ignore[arg-type]


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


def _refusal(reason: str) -> CorruptData:
    return CorruptData(f"not a delta: {reason}")
