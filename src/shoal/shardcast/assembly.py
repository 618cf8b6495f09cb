"""What is sent of one version on its way into a folder: which shards are here and verified, and whether it is whole.

    v7/manifest.json                    what it will be
    v7/.model.safetensors.partial       shards at their places, some still missing
    v7/config.json                      complete: its digest was checked before it got this name

Nothing unverified is ever written, so what is verified can be served while the rest still comes. The digest of the whole
grows with the shards, in their order. After a restart the partial file is hashed again, shard by shard, and what fits is
kept.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from shoal.shardcast.digest import hash_bytes, hash_file, hash_range, update_range
from shoal.shardcast.pieces import write_at
from shoal.shardcast.signed import partial_path, read_manifest
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
    have: set[int] = field(default_factory=set)
    whole: bool = False
    hasher: blake3 = field(default_factory=blake3)
    num_hashed: int = 0
    """Shards that the digest of the whole has taken, the first so many."""
    hashing: bool = False
    """A thread is at it."""


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
        check_whole: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`in_doubt`: files are hashed before their names are believed (boot.py). Without `check_whole`, that every shard is
        right is enough: the digest of the whole tells no more, unless the publisher contradicts itself."""
        self.folder, self.manifest = folder, manifest
        self._check_whole = check_whole
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = False
        self._files = {
            entry.name: _File(entry) for entry in manifest.payloads if wanted is None or entry.name in wanted
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
            return os.open(self._final(file) if file.whole else self._partial(file), os.O_RDONLY)

    # -- bringing it here -------------------------------------------------------------------------------

    def write(self, shard: Shard, data: bytes | bytearray | memoryview) -> None:
        """Put a shard in its place, if it is the right one; else WrongBytes. The last one completes the file."""
        if (found := hash_bytes(data)) != shard.blake3 or len(data) != shard.num_bytes:
            raise WrongBytes(
                f"{shard.name} shard {shard.index} of version {self.manifest.version} hashes to {found[:16]}, "
                f"the manifest says {shard.blake3[:16]}"
            )
        file = self._files[shard.name]
        with self._lock:
            if self._closed or shard.index in file.have:
                return  # the other of two requests for it was faster
            # A descriptor of its own: a slow duplicate may still write these same bytes when the file is complete.
            fd = self._open_partial(file)
        try:
            write_at(fd, data, shard.start)
            with self._lock:
                file.have.add(shard.index)
                in_turn = self._check_whole and shard.index == file.num_hashed and not file.hashing
                file.hashing |= in_turn
            self._on_change()  # others may have the shard already
            if in_turn:  # hashed from memory, not from the file
                with self._next_hashed(file):
                    file.hasher.update(data)
            self._hash_on(file, fd)
        finally:
            os.close(fd)

    def link(self, name: str, source: Path) -> bool:
        """Take a whole file from another folder instead of the network, if it is the right one."""
        file = self._files[name]
        if file.whole or not has_digest(source, file.entry):
            return False
        try:
            os.link(source, self._final(file))
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, self._partial(file))
            self._partial(file).replace(self._final(file))
        with self._lock:
            file.have, file.whole = set(range(len(file.entry.shards))), True
        self._partial(file).unlink(missing_ok=True)
        self._on_change()
        return True

    def close(self) -> None:
        """No more writes. What is here stays, for the next start."""
        with self._lock:
            self._closed = True

    # -- inside -----------------------------------------------------------------------------------------

    def _look(self, file: _File, in_doubt: bool) -> None:
        """Find what an earlier process left."""
        final, partial = self._final(file), self._partial(file)
        if final.is_file() and final.stat().st_size == file.entry.num_bytes:
            if not in_doubt:  # it got this name only after its digest was checked
                file.have, file.whole = set(range(len(file.entry.shards))), True
                return
            final.replace(partial)
        fd = self._open_partial(file) if partial.is_file() or not file.entry.shards else None
        if fd is None:
            return
        try:
            file.have = {
                shard.index
                for shard in shards_of(file.entry)
                if hash_range(fd, shard.start, shard.num_bytes) == shard.blake3
            }
            # If the manifest contradicts itself, the download that follows says so; finding out is not its place.
            with contextlib.suppress(Rejected):
                self._hash_on(file, fd)
        finally:
            os.close(fd)

    def _hash_on(self, file: _File, fd: int) -> None:
        """Bring the digest of the whole as far as the shards go, unless another thread does; at the end, the name."""
        num_shards = len(file.entry.shards)
        while True:
            with self._lock:
                index = file.num_hashed if self._check_whole else len(file.have)
                waits = index < num_shards and not (self._check_whole and index in file.have)
                if file.whole or file.hashing or waits:
                    return
                file.hashing = True
            if index == num_shards:
                self._finish(file)
                return
            with self._next_hashed(file):
                update_range(fd, *file.entry.shard_range(index), file.hasher)

    @contextlib.contextmanager
    def _next_hashed(self, file: _File) -> Iterator[None]:
        """By the thread that has set `hashing`."""
        done = False
        try:
            yield
            done = True
        finally:
            with self._lock:
                file.hashing = False
                file.num_hashed += 1
                if not done:  # the disk failed half-way: from the beginning, next time
                    file.hasher, file.num_hashed = blake3(), 0

    def _finish(self, file: _File) -> None:
        """All shards are here: check the whole, give it its name."""
        found = file.hasher.hexdigest() if self._check_whole else file.entry.blake3
        partial = self._partial(file)
        if found != file.entry.blake3:
            with self._lock:
                file.have, file.hasher, file.num_hashed, file.hashing = set(), blake3(), 0, False
                partial.unlink(missing_ok=True)
            raise Rejected(
                "request.wrong_digest",
                f"{file.entry.name} of version {self.manifest.version}: every shard fits, yet the whole hashes to "
                f"{found[:16]} and the manifest says {file.entry.blake3[:16]}; its publisher made an error",
            )
        with self._lock:
            partial.replace(self._final(file))
            file.whole = True
        self._on_change()

    def _open_partial(self, file: _File) -> int:
        fd = os.open(self._partial(file), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, file.entry.num_bytes)
        return fd

    def _final(self, file: _File) -> Path:
        return self.folder / file.entry.name

    def _partial(self, file: _File) -> Path:
        return partial_path(self.folder, file.entry.name)


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
