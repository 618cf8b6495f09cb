"""What is sent of one version on its way into a folder: which shards are here and verified, and whether it is whole.

    v7/manifest.json                    what it will be
    v7/.model.safetensors.partial       shards at their places, some still missing
    v7/config.json                      complete: every shard of it was checked before it got this name

Nothing unverified is ever written, so what is verified can be served while the rest still comes. A file is right when all
its shards are: the same signature covers their digests and that of the whole, and `publish` makes both of the same file,
so hashing it once more would tell nothing. After a restart the partial file is hashed again, shard by shard, and what fits
is kept.
"""

import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.shardcast.client.byte_ranges import write_at
from shoal.shardcast.digest import hash_bytes, hash_file, hash_range
from shoal.shardcast.disk import room_in
from shoal.shardcast.manifest_files import partial_path, read_manifest
from shoal.wire.codes import Rejected
from shoal.wire.manifest import FileEntry, Manifest


class WrongBytes(Exception):
    """A shard does not hash to what the manifest says."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of one file, with the digest it must have."""

    name: str
    index: int
    start: int
    num_bytes: int
    blake3: str

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


def shards_of(entry: FileEntry) -> list[Shard]:
    return [
        Shard(entry.name, index, *entry.shard_range(index), digest)
        for index, digest in enumerate(entry.shards)
    ]


@dataclass(eq=False)
class _File:
    entry: FileEntry
    final: Path
    partial: Path
    have: set[int] = field(default_factory=set)
    whole: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)
    """The kernel lets one thread at a time write to a file, and has the others burn their time in a loop meanwhile."""


class Assembly:
    """What one manifest sends (or those of it that are `wanted`: the file names, the delta's with its suffix) in a folder
    that `prepare_folder` made, or in one that was published.

    All methods may be called from any thread. `on_change` is called after each step forward.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        wanted: Collection[str] | None = None,
        in_doubt: bool = False,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`in_doubt`: files are hashed before their names are believed (boot.py)."""
        self.folder, self.manifest = folder, manifest
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = False
        self._files = {
            entry.name: _File(entry, folder / entry.name, partial_path(folder, entry.name))
            for entry in manifest.payloads
            if wanted is None or entry.name in wanted
        }
        for file in self._files.values():
            self._look(file, in_doubt)

    # -- what is here -----------------------------------------------------------------------------------

    @property
    def entries(self) -> list[FileEntry]:
        return [file.entry for file in self._files.values()]

    @property
    def complete(self) -> bool:
        return all(file.whole for file in self._files.values())

    @property
    def num_bytes_here(self) -> int:
        """Verified so far."""
        total = 0
        with self._lock:
            for file in self._files.values():
                last = len(file.entry.shards) - 1
                total += len(file.have) * file.entry.shard_bytes
                if last in file.have:
                    total -= file.entry.shard_bytes - file.entry.shard_range(last)[1]
        return total

    def missing(self) -> list[Shard]:
        """Shards still to come, in the order of the manifest."""
        with self._lock:
            return [
                shard
                for file in self._files.values()
                for shard in shards_of(file.entry)
                if shard.index not in file.have
            ]

    def verified(self, name: str, start: int, stop: int) -> bool:
        """Whether every byte of the range is here and verified."""
        return self.verified_until(name, start, stop) == stop

    def verified_until(self, name: str, start: int, stop: int) -> int:
        """How far, from `start` and not beyond `stop`, every byte is here and verified."""
        file = self._files[name]
        size = file.entry.shard_bytes
        with self._lock:
            if file.whole:
                return stop
            position = start
            while position < stop and position // size in file.have:
                position = (position // size + 1) * size
            return min(position, stop)

    def open_file(self, name: str) -> int:
        """A descriptor to read from; it stays good when the file gets its final name or is deleted."""
        file = self._files[name]
        with self._lock:  # no rename between choosing the path and opening it
            return os.open(file.final if file.whole else file.partial, os.O_RDONLY)

    # -- bringing it here -------------------------------------------------------------------------------

    def write(self, shard: Shard, data: bytes | bytearray | memoryview) -> None:
        """Put a shard in its place, if it is the right one; else WrongBytes. The last one completes the file."""
        if (found := hash_bytes(data)) != shard.blake3 or len(data) != shard.num_bytes:
            raise WrongBytes(
                f"{shard.name} shard {shard.index} of version {self.manifest.version} hashes to {found[:16]}, "
                f"the manifest says {shard.blake3[:16]}"
            )
        file = self._files[shard.name]
        with room_in(self.folder):
            with self._lock:
                if self._closed or shard.index in file.have:
                    return  # the other of two requests for it was faster
                # A descriptor of its own: a slow duplicate may still write these same bytes when the file is complete.
                fd = _open_partial(file)
            try:
                with file.writing:
                    write_at(fd, data, shard.start)
            finally:
                os.close(fd)
        with self._lock:
            file.have.add(shard.index)
            self._name_if_whole(file)
        self._on_change()

    def link(self, name: str, source: Path) -> bool:
        """Take a whole file from another folder instead of the network, if it is the right one."""
        file = self._files[name]
        if file.whole or not has_digest(source, file.entry):
            return False
        try:
            os.link(source, file.final)
        except OSError:  # another file system, or one without links
            with room_in(self.folder):
                shutil.copyfile(source, file.partial)
                file.partial.replace(file.final)
        with self._lock:
            file.have, file.whole = set(range(len(file.entry.shards))), True
        file.partial.unlink(missing_ok=True)
        self._on_change()
        return True

    def close(self) -> None:
        """No more writes. What is here stays, for the next start."""
        with self._lock:
            self._closed = True

    # -- inside -----------------------------------------------------------------------------------------

    def _look(self, file: _File, in_doubt: bool) -> None:
        """Find what an earlier process left."""
        final, partial = file.final, file.partial
        if final.is_file() and final.stat().st_size == file.entry.num_bytes:
            if not in_doubt:  # it got this name only after its digest was checked
                file.have, file.whole = set(range(len(file.entry.shards))), True
                return
            final.replace(partial)
        if not (partial.is_file() or not file.entry.shards):
            return
        # Nothing is reserved before the first byte comes: what is here can be served on a full disk too.
        fd = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(fd).st_size > file.entry.num_bytes:
                os.ftruncate(fd, file.entry.num_bytes)
            file.have = {
                shard.index
                for shard in shards_of(file.entry)
                if hash_range(fd, shard.start, shard.num_bytes) == shard.blake3
            }
        finally:
            os.close(fd)
        self._name_if_whole(file)

    def _name_if_whole(self, file: _File) -> None:
        """Under the lock. A slow duplicate of a shard may still be written to the file, with these same bytes."""
        if len(file.have) == len(file.entry.shards) and not file.whole:
            file.partial.replace(file.final)
            file.whole = True


def reuse_files(assembly: Assembly, folders: Iterable[Path]) -> list[str]:
    """Take files from folders of other versions; the names taken. Tokenizer files hardly ever change."""
    reused = []
    for folder in folders:
        try:
            other = read_manifest(folder)
        except Rejected:
            continue
        there = {entry.name: entry.blake3 for entry in other.body.files} if other is not None else {}
        for entry in assembly.entries:
            if there.get(entry.name) == entry.blake3 and assembly.link(entry.name, folder / entry.name):
                reused.append(entry.name)
    return reused


def has_digest(path: Path, entry: FileEntry) -> bool:
    """Whether a file is the one that an entry describes, byte for byte."""
    if not path.is_file() or path.stat().st_size != entry.num_bytes:
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        return hash_file(fd) == entry.blake3
    finally:
        os.close(fd)


def _open_partial(file: _File) -> int:
    fd = os.open(file.partial, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not each time: the kernel has it wait for who writes.
        if (size := os.fstat(fd).st_size) != file.entry.num_bytes:
            _reserve(fd, size, file.entry.num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, size: int, num_bytes: int) -> None:
    """A disk that is too small says so now, and writing costs a quarter less: no block is looked for in between."""
    os.ftruncate(fd, num_bytes)
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        # Else it keeps the room there was, which others need, and looks like one that is reserved.
        os.ftruncate(fd, size)
        raise
