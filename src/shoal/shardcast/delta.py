"""Lossless deltas between two files of equal size: which 16-bit words changed, and by how much.

    old words  3f80 3f81 bc00 3f80        gaps   1 0     unchanged words before each change
    new words  3f80 3f82 bbff 3f80        steps  2 1     zigzag of the difference of the bit patterns: +1, -1

A training step changes a bfloat16 weight by one unit in the last place, if at all, so both streams are small numbers:
varints, compressed by zstd. The format is our own because for bfloat16 weights it is 88 to 241 times smaller than the file;
general tools (zstd patch-from, bsdiff) stay far from that. It knows nothing about tensors: any two
files of equal size work. docs/wire/delta.md has the format byte by byte.

Files are read, changed, hashed and written one chunk at a time, so memory use does not depend on their size, and a chain
of deltas is applied in one pass. A payload comes from an untrusted peer: every value is checked before it is used.
"""

import contextlib
import itertools
import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from shoal.shardcast.adapter_delta import apply_adapters, is_adapter_payload
from shoal.shardcast.manifest_files import write_at
from shoal.wire.codes import CorruptData

MAGIC = b"SHDELTA1"
CHUNK_WORDS = 1 << 21
"""Words in a chunk (4 MiB). Part of the format: positions in a chunk fit 3 varint bytes. Memory use is a few chunks."""
ZSTD_LEVEL = 1
NUM_THREADS = max(2, min(4, (os.cpu_count() or 2) // 4))
"""Threads that compute chunks while another hashes them: a quarter of the cores, but two to four. With two, hashing is the bottleneck on
three cores."""
DELTA_HEAD = struct.Struct("<8sQ")
"""Magic and size of the file that the delta is for; chunks follow."""
_CHUNK = struct.Struct("<5I")
_MAX_VARINT = 3
_DENSE = 4
"""If more than one in this many lanes changed, comparing all words is faster than comparing the changed lanes."""

R = TypeVar("R")
T = TypeVar("T")
Words = npt.NDArray[np.uint16]
ReadWords = Callable[[int, int], Words]
"""Reads (start, number of bytes) as words; an odd last byte is padded with a zero. The caller may change them until the next call."""


def write_delta(old: Path, new: Path, into: Path, *, old_blake3: str, max_bytes: int) -> bool:
    """Writes the delta to `into` and returns True.

    Returns False, and writes no file, if it exceeds `max_bytes` or `old` has another digest. Two threads read and compare
    chunks; this one hashes the old chunks in order.
    """
    hasher = blake3()
    with old.open("rb") as old_file, new.open("rb") as new_file, into.open("wb") as out:
        fds = old_file.fileno(), new_file.fileno()
        old_bytes, num_bytes = _size(fds[0]), _size(fds[1])
        if old_bytes != num_bytes:
            raise ValueError(
                f"a delta needs files of equal size, these have {old_bytes} and {num_bytes} bytes"
            )
        readers = [(_word_file_reader(fds[0]), _word_file_reader(fds[1])) for _ in range(NUM_THREADS + 1)]
        total = out.write(DELTA_HEAD.pack(MAGIC, num_bytes))
        jobs = (partial(_compare_chunk, chunk) for chunk in _chunks(num_bytes))
        with closing(_in_threads(jobs, readers)) as chunks:
            for before, piece in chunks:
                hasher.update(before)
                total += out.write(piece)
                if total > max_bytes:
                    break
    good = total <= max_bytes and hasher.hexdigest() == old_blake3
    if not good:
        into.unlink()
    return good


def _compare_chunk(chunk: tuple[int, int], readers: tuple[ReadWords, ReadWords]) -> tuple[memoryview, bytes]:
    """Returns the old bytes of a chunk, and its delta."""
    old, new = (read(*chunk) for read in readers)
    return _bytes(old, chunk[1]), encode_chunk(old, new)


def apply_deltas(old: Path, payloads: Sequence[Path], into: Path, *, reuse: Path | None = None) -> str:
    """Applies the payloads to `old`, one after the other, writes the result to `into` and returns its BLAKE3 digest.

    Threads read, change and write chunks; this one hashes them in order. A file `reuse` that nobody reads any more becomes `into`
    and is overwritten, which needs no new pages of memory. Raises CorruptData on an invalid payload.
    """
    if any(is_adapter_payload(path) for path in payloads):
        return _apply_one_by_one(old, payloads, into)
    hasher, mode = blake3(), "wb"
    with contextlib.suppress(FileNotFoundError):
        # Overwriting a file with a second name would change another version.
        if reuse is not None and reuse.stat().st_nlink == 1:
            reuse.replace(into)
            mode = "r+b"
    with ExitStack() as files:
        old_fd = files.enter_context(old.open("rb")).fileno()
        out = files.enter_context(into.open(mode, buffering=0)).fileno()
        os.ftruncate(out, min(_size(out), _size(old_fd)))
        deltas = []
        for path in payloads:
            deltas.append(DeltaReader(files.enter_context(path.open("rb")), _size(old_fd)))
        readers = [_word_file_reader(old_fd) for _ in range(NUM_THREADS + 1)]
        jobs = (
            partial(_patch_chunk, out, chunk, [delta.next_chunk() for delta in deltas])
            for chunk in _chunks(_size(old_fd))
        )
        for patched in files.enter_context(closing(_in_threads(jobs, readers))):
            hasher.update(patched)
        for delta in deltas:
            delta.check_end()
    return hasher.hexdigest()


def _apply_one_by_one(old: Path, payloads: Sequence[Path], into: Path) -> str:
    """Applies payloads of which some have adapters: each to a whole file, which is deleted after the next one is written."""
    source, digest = old, ""
    for index, payload in enumerate(payloads):
        made = into if index == len(payloads) - 1 else into.with_name(f"{into.name}-{index}")
        try:
            if is_adapter_payload(payload):
                digest = apply_adapters(source, payload, made)
            else:
                digest = apply_deltas(source, [payload], made)
        finally:
            if source != old:
                source.unlink()
        source = made
    return digest


def _patch_chunk(
    out: int, chunk: tuple[int, int], changes: list["ChunkChanges"], read: ReadWords
) -> memoryview:
    """Applies changes to a chunk, writes it to `out` and returns its bytes."""
    start, length = chunk
    words = read(start, length)
    for change in changes:
        change.apply(words)
    patched = _bytes(words, length)
    write_at(out, patched, start)
    return patched


def _in_threads(jobs: Iterable[Callable[[R], T]], readers: Sequence[R]) -> Generator[T, None, None]:
    """Yields the results of the jobs in order. Each job gets a reader, whose buffer is reused after the next result."""
    unused, running = deque(readers), deque[Future[T]]()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="delta") as threads:
        for job in jobs:
            # Otherwise the next job would overwrite a buffer that is still in use.
            if len(running) == len(readers):
                yield running.popleft().result()
            unused.rotate(-1)
            running.append(threads.submit(job, unused[-1]))
        while running:
            yield running.popleft().result()


# -- chunks ---------------------------------------------------------------------------------------------


def encode_chunk(old: Words, new: Words) -> bytes:
    """Returns the delta of one chunk."""
    places = _changed(old, new)
    return encode_changes(places, new[places] - old[places], old.size)


def encode_changes(places: npt.NDArray[np.integer[Any]], differences: Words, num_words: int) -> bytes:
    """Encodes the chunks of `num_words` words: the positions that changed, ascending, and new minus old word at each, modulo 2**16.

    Array operations take all chunks at once: each needs the interpreter's lock for a moment, which a trainer's next step needs, too.
    """
    starts = np.arange(0, num_words, CHUNK_WORDS, dtype=places.dtype)
    firsts = np.searchsorted(places, starts)
    bounds = np.append(firsts, places.size)
    gaps = np.empty_like(places)
    np.subtract(places[1:], places[:-1], out=gaps[1:])
    gaps -= 1
    filled = np.flatnonzero(
        bounds[1:] > firsts
    )  # chunks with changes; the first gap of each begins at the chunk
    gaps[firsts[filled]] = places[firsts[filled]] - starts[filled]
    steps = differences.view(np.int16)
    zigzag = ((steps << 1) ^ (steps >> 15)).view(np.uint16)
    streams = [_to_varints(gaps, bounds), _to_varints(zigzag, bounds)]
    frames = iter(_compress([stream[chunk] for chunk in filled for stream in streams]))
    pieces: list[Any] = []
    for chunk, num_changes in enumerate(np.diff(bounds)):
        sizes = [len(stream[chunk]) for stream in streams]
        gap_frame, step_frame = (next(frames), next(frames)) if num_changes else (b"", b"")
        head = _CHUNK.pack(num_changes, *sizes, len(gap_frame), len(step_frame))
        pieces += [head, gap_frame, step_frame]
    return b"".join(pieces)


def _compress(streams: Sequence[npt.NDArray[np.uint8]]) -> list[Any]:
    """Returns a zstd frame of each stream, none of which is empty."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)  # one per call: compressors are not thread-safe
    buffers: list[Any] = list(streams)
    if not buffers or "multi_compress_to_buffer" not in zstandard.backend_features:
        return [compressor.compress(one) for one in buffers]
    frames = compressor.multi_compress_to_buffer(buffers, threads=0)
    return [frames[index] for index in range(len(frames))]


def _changed(old: Words, new: Words) -> npt.NDArray[np.int64]:
    """Returns the positions of the words that differ. Compares lanes of four words first, of which few differ."""
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
    """Reads a delta from its start to its end, and checks its structure."""

    def __init__(self, payload: IO[bytes], num_bytes: int) -> None:
        self._payload = payload
        magic, made_for = DELTA_HEAD.unpack(self._take(DELTA_HEAD.size))
        if magic != MAGIC:
            raise _corrupt(f"starts with {magic!r}, not {MAGIC!r}")
        if made_for != num_bytes:
            raise _corrupt(f"made for a file of {made_for} bytes, this one has {num_bytes}")

    def next_chunk(self) -> "ChunkChanges":
        """Returns the changes of the next chunk."""
        num, gaps_bytes, steps_bytes, gaps_frame, steps_frame = _CHUNK.unpack(self._take(_CHUNK.size))
        # Checked before the frames are read into memory.
        if max(gaps_frame, steps_frame) > 1024 + 2 * _MAX_VARINT * CHUNK_WORDS:
            raise _corrupt(
                f"frames of {gaps_frame} and {steps_frame} bytes for a chunk of {CHUNK_WORDS} words"
            )
        return ChunkChanges(
            num=num,
            sizes=(gaps_bytes, steps_bytes),
            gaps=self._take(gaps_frame),
            steps=self._take(steps_frame),
        )

    def check_end(self) -> None:
        """Raises CorruptData if bytes follow the last chunk."""
        position = self._payload.tell()
        if surplus := self._payload.seek(0, os.SEEK_END) - position:
            raise _corrupt(f"{surplus} surplus bytes at its end")

    def _take(self, num_bytes: int) -> bytes:
        data = self._payload.read(num_bytes)
        if len(data) < num_bytes:
            raise _corrupt(f"ends {num_bytes - len(data)} bytes too early")
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChanges:
    """The changes of one chunk, as received: not decompressed or checked yet."""

    num: int
    sizes: tuple[int, int]
    gaps: bytes
    steps: bytes

    def apply(self, words: Words) -> None:
        """Changes the words of the chunk in place. Raises CorruptData on invalid data, before any word is changed."""
        if self.num > words.size:
            raise _corrupt(f"{self.num} changes in a chunk of {words.size} words")
        if self.num == 0:
            if any(self.sizes) or self.gaps or self.steps:
                raise _corrupt("streams in a chunk without changes")
            return
        unpack = zstandard.ZstdDecompressor(max_window_size=1 << 23)
        places = np.cumsum(self._numbers(self.gaps, self.sizes[0], unpack), dtype=np.intp)
        places += np.arange(self.num)
        if places[-1] >= words.size:
            raise _corrupt(f"a change at word {places[-1]} of a chunk of {words.size}")
        zigzag = self._numbers(self.steps, self.sizes[1], unpack)
        if zigzag.max() > 0xFFFF:
            raise _corrupt(f"a step of {zigzag.max()} exceeds 16 bits")
        zigzag = zigzag.astype(np.uint16)
        steps = (zigzag >> 1) ^ (0 - (zigzag & 1))
        # mode="clip" skips NumPy's bounds check; the last and largest position was checked above.
        words[places] = words.take(places, mode="clip") + steps

    def _numbers(
        self, frame: bytes, stream_bytes: int, unpack: zstandard.ZstdDecompressor
    ) -> npt.NDArray[np.integer[Any]]:
        if not self.num <= stream_bytes <= _MAX_VARINT * self.num:
            raise _corrupt(f"a stream of {stream_bytes} bytes for {self.num} numbers")
        try:
            # Checked first: the decompressor would allocate whatever size the frame declares.
            declared = zstandard.get_frame_parameters(frame).content_size
            if declared != stream_bytes:
                raise _corrupt(f"a zstd frame of {declared} bytes, expected {stream_bytes}")
            stream = unpack.decompress(frame, max_output_size=stream_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _corrupt(f"not a zstd frame: {error}") from None
        return _from_varints(np.frombuffer(stream, np.uint8), self.num)


# -- varints --------------------------------------------------------------------------------------------


def _to_varints(
    numbers: npt.NDArray[np.integer[Any]], bounds: npt.NDArray[np.intp]
) -> list[npt.NDArray[np.uint8]]:
    """Encodes as LEB128: 7 bits per byte, lowest first, the top bit set on all but a number's last byte.

    Returns a stream of the numbers between each two bounds. Most numbers take one byte; the few longer ones are inserted.
    """
    out = numbers.astype(np.uint8)
    longer = np.flatnonzero(numbers >= 1 << 7)
    if longer.size:
        high = numbers[longer] >> 7
        out[longer] |= 0x80
        two_more = high >= 1 << 7
        added = np.cumsum(1 + two_more)
        at = longer + added - two_more  # of the second byte
        first_bytes, out = out, np.empty(numbers.size + added[-1], np.uint8)
        is_first = np.ones(out.size, np.bool_)
        is_first[at] = is_first[at[two_more] + 1] = False
        out[is_first] = first_bytes
        out[at] = high & 0x7F | two_more.astype(high.dtype) << 7
        out[at[two_more] + 1] = high[two_more] >> 7
        bounds = bounds + np.append(0, added)[np.searchsorted(longer, bounds)]
    return [out[first:last] for first, last in itertools.pairwise(bounds.tolist())]


def _from_varints(stream: npt.NDArray[np.uint8], num: int) -> npt.NDArray[np.integer[Any]]:
    """Decodes `num` LEB128 numbers with array operations: every byte is combined with the bytes before it that belong to
    the same number, then the values at the last bytes are kept."""
    more = stream >> 7
    ends = np.flatnonzero(more == 0)
    if ends.size != num or more[-1]:
        raise _corrupt(f"{ends.size} numbers in a stream that should have {num}")
    if num == stream.size:
        return stream
    low = (stream & 0x7F).astype(np.int32)
    numbers = low.copy()
    # value << 7 | previous byte, where the previous byte continues
    numbers[1:] += more[:-1] * (low[1:] * 127 + low[:-1])
    third = more[1:-1] & more[:-2]
    if third.any():
        if (third[1:] & more[:-3]).any():
            raise _corrupt(f"a number of more than {_MAX_VARINT} bytes")
        numbers[2:] += third * (numbers[2:] * 127 + low[:-2])
    return numbers.take(ends, mode="clip")


# -- bytes ----------------------------------------------------------------------------------------------


def _chunks(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (start, number of bytes) of each chunk of a file."""
    for start in range(0, num_bytes, 2 * CHUNK_WORDS):
        yield start, min(2 * CHUNK_WORDS, num_bytes - start)


def _word_file_reader(fd: int) -> ReadWords:
    """Returns a reader that uses one buffer: allocating new memory would cost more than reading into it."""
    buffer = np.zeros(CHUNK_WORDS, "<u2")

    def read(start: int, length: int) -> Words:
        words = buffer[: -(-length // 2)]
        words[-1:] = 0
        count = os.preadv(fd, [_bytes(words, length)], start)
        if count != length:
            raise ValueError(
                f"a file was truncated while a delta was made or applied: only {count} bytes at {start}"
            )
        return words

    return read


def _bytes(words: Words, length: int) -> memoryview:
    return memoryview(words.view(np.uint8))[:length]  # type: ignore[arg-type]


def _size(fd: int) -> int:
    return os.fstat(fd).st_size


def _corrupt(reason: str) -> CorruptData:
    return CorruptData(f"not a delta: {reason}")
