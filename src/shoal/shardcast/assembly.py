"""The files that one version sends, as they arrive in a folder: which shards are verified, and whether all are here.

    v7/manifest.json                    what the folder will contain
    v7/.model.safetensors.partial       verified shards at their offsets, some still missing
    v7/config.json                      complete: it got this name after all of its shards were verified

Only verified bytes are written, so verified shards can be served while the rest is still coming. A file is right when all of
its shards are: one signature covers their digests and that of the whole file, and `publish` computes both from the same
file. After a restart the shards of a partial file are hashed again, and those that match are kept.
"""

import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.files import explain_full_disk
from shoal.shardcast.manifest_files import (
    find_manifest,
    hash_bytes,
    hash_file,
    hash_range,
    partial_path,
    write_at,
)
from shoal.wire.manifest import FileEntry, Manifest

ARRIVED_HEADER = "shoal-arrived"
"""Header of an answer "too early": the bytes of the file that have reached the relay so far, also of shards that are not complete."""


class WrongBytes(Exception):
    """A shard does not have the digest that the manifest lists."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of one file, with the digest that it must have."""

    name: str
    index: int
    start: int
    num_bytes: int
    blake3: str

    @property
    def stop(self) -> int:
        """The offset after its last byte."""
        return self.start + self.num_bytes


def shards_of(entry: FileEntry) -> list[Shard]:
    """Returns the shards of a file, in order."""
    return [
        Shard(entry.name, index, *entry.shard_range(index), digest)
        for index, digest in enumerate(entry.shards)
    ]


@dataclass(eq=False)
class _ArrivingFile:
    entry: FileEntry
    final: Path
    partial: Path
    verified: set[int] = field(default_factory=set)
    complete: bool = False
    write_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while writing. The kernel lets one thread write to a file at a time; the others would spin meanwhile."""

    def set_complete(self) -> None:
        self.verified, self.complete = set(range(len(self.entry.shards))), True


class Assembly:
    """Collects the files that one manifest sends, in a folder made by `prepare_folder` or `publish`.

    All methods are thread-safe. `on_change` is called after every shard or file that was added.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        wanted: Collection[str] | None = None,
        rehash: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Finds what an earlier process left in the folder.

        `wanted` limits it to these names (a delta's name has its suffix). With `rehash`, complete files are hashed
        before they are trusted: the machine may have lost power since they were written.
        """
        self.folder, self.manifest = folder, manifest
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = False
        self._received = Counter[str]()
        self._files = {
            entry.name: _ArrivingFile(entry, folder / entry.name, partial_path(folder, entry.name))
            for entry in manifest.payloads
            if wanted is None or entry.name in wanted
        }
        for file in self._files.values():
            self._find_existing(file, rehash)

    # -- what is here -----------------------------------------------------------------------------------

    @property
    def entries(self) -> list[FileEntry]:
        """The files of this assembly."""
        return [file.entry for file in self._files.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, arrived or not."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def complete(self) -> bool:
        """Whether every file is complete."""
        return all(file.complete for file in self._files.values())

    @property
    def num_bytes_verified(self) -> int:
        """Bytes that are here and verified."""
        total = 0
        with self._lock:
            for file in self._files.values():
                last = len(file.entry.shards) - 1
                total += len(file.verified) * file.entry.shard_bytes
                if last in file.verified:
                    total -= file.entry.shard_bytes - file.entry.shard_range(last)[1]
        return total

    def missing(self) -> list[Shard]:
        """Returns the shards that are not here yet, in the order of the manifest."""
        with self._lock:
            return [
                shard
                for file in self._files.values()
                for shard in shards_of(file.entry)
                if shard.index not in file.verified
            ]

    def has(self, shard: Shard) -> bool:
        """Returns whether a shard is here and verified."""
        return self.verified_until(shard.name, shard.start, shard.stop) == shard.stop

    def verified_until(self, name: str, start: int, stop: int) -> int:
        """Returns the offset, from `start` and at most `stop`, up to which every byte is here and verified."""
        file = self._files[name]
        size = file.entry.shard_bytes
        with self._lock:
            if file.complete:
                return stop
            position = start
            while position < stop and position // size in file.verified:
                position = (position // size + 1) * size
            return min(position, stop)

    def received(self, name: str) -> int:
        """Returns how many bytes of a file have arrived since the start, in complete shards or not. The number only grows."""
        with self._lock:
            return self._received[name]

    def count_received(self, name: str, num_bytes: int) -> None:
        """Counts bytes of a shard that is still arriving, here or at the relay that it comes from."""
        with self._lock:
            self._received[name] += num_bytes

    def open_file(self, name: str) -> int:
        """Returns a descriptor for reading; it stays valid when the file is renamed or deleted."""
        file = self._files[name]
        with self._lock:  # otherwise the file could be renamed between choosing the path and opening it
            return os.open(file.final if file.complete else file.partial, os.O_RDONLY)

    # -- adding to it -----------------------------------------------------------------------------------

    def write(self, shard: Shard, data: bytes | bytearray | memoryview) -> None:
        """Verifies a shard and writes it to its offset; raises WrongBytes otherwise. The last shard completes the file."""
        if (found := hash_bytes(data)) != shard.blake3 or len(data) != shard.num_bytes:
            raise WrongBytes(
                f"{shard.name} shard {shard.index} of version {self.manifest.version} hashes to {found[:16]}, "
                f"the manifest says {shard.blake3[:16]}"
            )
        file = self._files[shard.name]
        with explain_full_disk(self.folder):
            with self._lock:
                if self._closed or shard.index in file.verified:
                    return  # a second request for the same shard was faster
                # Each write has its own descriptor: a slow duplicate may still write when the file is complete.
                fd = _open_partial(file)
            try:
                with file.write_lock:
                    write_at(fd, data, shard.start)
            finally:
                os.close(fd)
        with self._lock:
            file.verified.add(shard.index)
            self._rename_if_complete(file)
        self._on_change()

    def link(self, name: str, source: Path) -> bool:
        """Takes a complete file from another folder instead of the network; returns False if it has another digest."""
        file = self._files[name]
        if file.complete or not has_digest(source, file.entry):
            return False
        try:
            os.link(source, file.final)
        except OSError:  # another file system, or one without hard links
            with explain_full_disk(self.folder):
                shutil.copyfile(source, file.partial)
                file.partial.replace(file.final)
        with self._lock:
            file.set_complete()
        file.partial.unlink(missing_ok=True)
        self._on_change()
        return True

    def reuse_files(self, folders: Iterable[Path]) -> list[str]:
        """Links files with the same digest from folders of other versions; returns their names.

        Tokenizer files, for example, hardly ever change.
        """
        reused = []
        for folder in folders:
            other = find_manifest(folder)
            digests = {entry.name: entry.blake3 for entry in other.files} if other is not None else {}
            for entry in self.entries:
                if digests.get(entry.name) == entry.blake3 and self.link(entry.name, folder / entry.name):
                    reused.append(entry.name)
        return reused

    def close(self) -> None:
        """Ignores all later writes. What is on disk stays, for the next start."""
        with self._lock:
            self._closed = True

    # -- private ----------------------------------------------------------------------------------------

    def _find_existing(self, file: _ArrivingFile, rehash: bool) -> None:
        final, partial = file.final, file.partial
        if has_size(final, file.entry):
            if not rehash:  # it got this name after its shards were verified
                file.set_complete()
                return
            final.replace(partial)
        if not partial.is_file() and file.entry.shards:
            return
        # No space is reserved before the first byte arrives: a relay must start, and serve, on a full disk too.
        with partial.open("ab+") as out:
            if os.fstat(out.fileno()).st_size > file.entry.num_bytes:
                out.truncate(file.entry.num_bytes)
            file.verified = {
                shard.index
                for shard in shards_of(file.entry)
                if hash_range(out.fileno(), shard.start, shard.num_bytes) == shard.blake3
            }
        self._rename_if_complete(file)

    def _rename_if_complete(self, file: _ArrivingFile) -> None:
        """Gives a complete file its final name. Call it with the lock held.

        A slow duplicate of a shard may still be written to the file afterwards, with the same bytes.
        """
        if len(file.verified) == len(file.entry.shards) and not file.complete:
            file.partial.replace(file.final)
            file.complete = True


def has_size(path: Path, entry: FileEntry) -> bool:
    """Returns whether there is a file with the size of an entry."""
    return path.is_file() and path.stat().st_size == entry.num_bytes


def has_digest(path: Path, entry: FileEntry) -> bool:
    """Returns whether a file has the size and digest of an entry."""
    return has_size(path, entry) and hash_file(path) == entry.blake3


def _open_partial(file: _ArrivingFile) -> int:
    fd = os.open(file.partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Only the first time: fallocate waits for threads that write to the file.
        if (size := os.fstat(fd).st_size) != file.entry.num_bytes:
            _reserve_space(fd, size, file.entry.num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _reserve_space(fd: int, size: int, num_bytes: int) -> None:
    """Reserves disk space: a disk that is too small fails now, and writing costs a quarter less CPU."""
    os.ftruncate(fd, num_bytes)
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        # Otherwise the file would keep the space it got, and look as if all of it were reserved.
        os.ftruncate(fd, size)
        raise
