"""One file of the newest version in host memory: the base of the next version's delta and the source of its digests.

    image of v7 ──changed words──▶ image of v8, in place
                        └─────────▶ model.safetensors.delta of v8

A publisher that keeps the file in memory reads and writes only what changed. The whole file is hashed from memory by all
cores, and is written to disk only for versions that are sent whole. Shardcast knows no tensors: the owner of the weights
says which 16-bit words of the file changed.
"""

import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.shardcast.adapter_delta import change_words, decode_adapters, is_adapter_payload
from shoal.shardcast.delta import CHUNK_WORDS, DELTA_HEAD, MAGIC, DeltaReader, Words, encode_changes
from shoal.shardcast.manifest_files import hash_bytes, remove_if_disk_full, write_at
from shoal.wire.codes import CorruptData
from shoal.wire.manifest import DELTA_SUFFIX, Manifest

RANGE_WORDS = 16 * CHUNK_WORDS
"""Words of a range (64 MiB): what a publisher compares at once, a whole number of a delta's chunks."""
MAX_TOGETHER = 4
"""Most ranges that one thread encodes together."""
READ_BYTES = 8 << 20
NUM_THREADS = max(2, min(4, (os.cpu_count() or 2) // 4))
"""Threads that encode, and as many that hash meanwhile. Half the cores at most: the others launch the training's kernels."""


@dataclass(frozen=True, slots=True)
class ChangedWords:
    """The words of one range of a file that changed."""

    start: int
    """The first word of the range; a multiple of RANGE_WORDS."""
    places: npt.NDArray[np.int32] | None
    """Positions in the range, ascending; None if `words` are all words of the range."""
    words: Words
    """The new words at these positions."""


class FileImage:
    """The bytes of one file, as 16-bit words. An odd last byte is padded with a zero."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.words: Words = np.zeros(-(-num_bytes // 2), "<u2")

    @classmethod
    def read(cls, path: Path) -> "FileImage":
        """Reads a file into memory."""
        image = cls(path.stat().st_size)
        view, done = image.view, 0
        with path.open("rb", buffering=0) as file:
            while done < image.num_bytes:
                count = file.readinto(view[done : done + READ_BYTES])
                if not count:
                    raise ValueError(
                        f"{path} was truncated while it was read: {done} of {image.num_bytes} bytes"
                    )
                done += count
        return image

    @property
    def view(self) -> memoryview:
        """The file's bytes."""
        return memoryview(self.words.view(np.uint8))[: self.num_bytes]  # type: ignore[arg-type]

    def digest(self) -> str:
        """Returns the BLAKE3 digest of the file, computed by several threads."""
        hasher = file_hasher()
        hasher.update(self.view)
        return hasher.hexdigest()

    def shard_digests(self, shard_bytes: int) -> tuple[str, ...]:
        """Returns the digest of each of the file's shards."""
        view, starts = self.view, range(0, self.num_bytes, shard_bytes)
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shards") as threads:
            return tuple(threads.map(lambda start: hash_bytes(view[start : start + shard_bytes]), starts))

    def write(self, path: Path) -> None:
        """Writes the file. Raises DiskFull, and leaves no file, if it does not fit."""
        with remove_if_disk_full(path), path.open("wb", buffering=0) as file:
            write_at(file.fileno(), self.view, 0)

    def change(self, changes: Iterable[ChangedWords], hasher: blake3 | None = None) -> Iterator[bytes]:
        """Writes the new words into the image and yields the delta, piece by piece. Updates `hasher` with the bytes of the new file.

        `changes` has every range of the file once, in order. Read to the end: otherwise only some ranges are changed.
        """
        yield DELTA_HEAD.pack(MAGIC, self.num_bytes)
        ranges, done = list(changes), 0
        # Ranges of a large file are encoded together, which takes the interpreter's lock less often. Dense ones would need much memory.
        is_dense = any(change.places is None for change in ranges)
        together = 1 if is_dense else max(1, min(MAX_TOGETHER, len(ranges) // (4 * NUM_THREADS)))
        groups = [ranges[first : first + together] for first in range(0, len(ranges), together)]
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="delta") as threads:
            for piece in threads.map(self._change_ranges, groups):
                if hasher is not None:
                    hasher.update(self.view[done : done + 2 * together * RANGE_WORDS])
                done += 2 * together * RANGE_WORDS
                yield piece
        assert done >= self.num_bytes, "changes must have every range of the file"

    def replace(self, changes: Iterable[ChangedWords]) -> None:
        """Writes the new words into the image, without a delta."""
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="image") as threads:
            deque(threads.map(self._replace_range, changes), maxlen=0)

    def _replace_range(self, change: ChangedWords) -> None:
        words = self.words[change.start : change.start + RANGE_WORDS]
        words[slice(None) if change.places is None else change.places] = change.words

    def _change_ranges(self, changes: Sequence[ChangedWords]) -> bytes:
        """Changes consecutive ranges and returns the delta's chunks of them."""
        first = changes[0].start
        old = self.words[first : first + len(changes) * RANGE_WORDS]
        parts = [self._changed(change) for change in changes]
        places = np.concatenate(
            [np.add(part[0], c.start - first, dtype=np.intp) for part, c in zip(parts, changes, strict=True)]
        )
        words = np.concatenate([part[1] for part in parts])
        steps = words - old[places]  # wraps around modulo 2**16, as the addition of a client does
        old[places] = words
        return encode_changes(places, steps, old.size)

    def _changed(self, change: ChangedWords) -> tuple[npt.NDArray[np.integer[Any]], Words]:
        """Returns the positions in the range that change, and the new words there."""
        if change.places is not None:
            return change.places, change.words
        places = np.flatnonzero(self.words[change.start : change.start + RANGE_WORDS] != change.words)
        return places, change.words[places]

    def apply(self, payload: Path) -> None:
        """Applies a delta file to the image. Raises CorruptData if it is not a delta for a file of this size."""
        if is_adapter_payload(payload):
            change_words(
                decode_adapters(payload.read_bytes(), self.num_bytes),
                lambda start, length: bytes(self.view[start : start + length]),
                self._write_words,
                self.num_bytes,
            )
            return
        with payload.open("rb") as file:
            delta = DeltaReader(file, self.num_bytes)
            for start in range(0, self.words.size, CHUNK_WORDS):
                delta.next_chunk().apply(self.words[start : start + CHUNK_WORDS])
            delta.check_end()

    def _write_words(self, start: int, words: Words) -> None:
        self.view[start : start + words.nbytes] = words.tobytes()


def file_hasher() -> blake3:
    """Returns a hasher that uses several threads."""
    return blake3(max_threads=NUM_THREADS)


class Versions(Protocol):
    """Folders of versions: a store, or an archive."""

    def path(self, version: int) -> Path: ...

    def manifest(self, version: int) -> Manifest | None: ...


def restore_image(store: Versions, version: int, name: str) -> FileImage | None:
    """Returns the file `name` of a version in the store: from its whole file, or from an older one and deltas.

    Returns None if a file on the way is missing or damaged.
    """
    payloads: list[Path] = []
    wanted = store.manifest(version)
    number, manifest = version, wanted
    while manifest is not None and not (store.path(number) / name).is_file():
        entry = manifest.find(name)
        if entry is None or manifest.base is None:
            return None
        if entry.delta is not None:
            payloads.append(store.path(number) / (name + DELTA_SUFFIX))
        elif entry.codec != "same":
            return None
        number = manifest.base
        manifest = store.manifest(number)
    if wanted is None or manifest is None or not all(path.is_file() for path in payloads):
        return None
    try:
        image = FileImage.read(store.path(number) / name)
        for payload in reversed(payloads):
            image.apply(payload)
    except (CorruptData, ValueError, struct.error):
        return None
    return image if image.digest() == wanted.file(name).blake3 else None
