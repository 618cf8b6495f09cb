"""What is sent of one version on its way into a folder: which shards are here and verified, and whether it is whole.

    v7/manifest.json                    what it will be
    v7/.model.safetensors.partial       shards at their places, some still missing
    v7/config.json                      complete: its digest was checked before it got this name

Nothing unverified is ever written, so what is verified can be served while the rest still comes. After a restart
the partial file is hashed again, shard by shard, and what fits is kept.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.shardcast.digest import hash_bytes, hash_range
from shoal.shardcast.signed import read_manifest, sync_folder
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


@dataclass
class _File:
    entry: FileEntry
    have: set[int] = field(default_factory=set)
    whole: bool = False
    finishing: bool = False


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
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self._on_change = on_change
        self._lock = threading.Lock()
        self._closed = False
        self._files = {
            entry.name: _File(entry) for entry in manifest.payloads if wanted is None or entry.name in wanted
        }
        for file in self._files.values():
            self._look(file)

    # -- what is here -----------------------------------------------------------------------------------

    @property
    def entries(self) -> list[FileEntry]:
        return [file.entry for file in self._files.values()]

    @property
    def complete(self) -> bool:
        return all(file.whole for file in self._files.values())

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
        file = self._files[name]
        size = file.entry.shard_bytes
        with self._lock:
            return file.whole or all(index in file.have for index in range(start // size, -(-stop // size)))

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
            _write_at(fd, data, shard.start)
        finally:
            os.close(fd)
        with self._lock:
            file.have.add(shard.index)
            last = len(file.have) == len(file.entry.shards) and not file.finishing
            file.finishing |= last
        if last:
            self._finish(file)
        self._on_change()

    def link(self, name: str, source: Path) -> bool:
        """Take a whole file from another folder instead of the network, if it is the right one."""
        file = self._files[name]
        if file.whole or not source.is_file() or not _fits(source, file.entry):
            return False
        try:
            os.link(source, self._final(file))
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, self._partial(file))
            self._finish(file)
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

    def _look(self, file: _File) -> None:
        """Find what an earlier process left."""
        final, partial = self._final(file), self._partial(file)
        if final.is_file() and final.stat().st_size == file.entry.num_bytes:
            # It got this name only after its digest was checked and its bytes were on the disk.
            file.have, file.whole = set(range(len(file.entry.shards))), True
            return
        if partial.is_file():
            fd = os.open(partial, os.O_RDONLY)
            try:
                file.have = {
                    shard.index
                    for shard in shards_of(file.entry)
                    if hash_range(fd, shard.start, shard.num_bytes) == shard.blake3
                }
            finally:
                os.close(fd)
        if len(file.have) == len(file.entry.shards):
            os.close(self._open_partial(file))  # an empty file has no shard that would create it
            # If the manifest contradicts itself, the download that follows says so; finding out is not its place.
            with contextlib.suppress(Rejected):
                self._finish(file)

    def _finish(self, file: _File) -> None:
        """All shards are here: check the whole, make it last, give it its name."""
        partial = self._partial(file)
        fd = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(fd)
            found = hash_range(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        if found != file.entry.blake3:
            with self._lock:
                file.have, file.finishing = set(), False
                partial.unlink(missing_ok=True)
            raise Rejected(
                "request.wrong_digest",
                f"{file.entry.name} of version {self.manifest.version}: every shard fits, yet the whole hashes to "
                f"{found[:16]} and the manifest says {file.entry.blake3[:16]}; its publisher made an error",
            )
        with self._lock:
            partial.replace(self._final(file))
            file.whole = True
        sync_folder(self.folder)

    def _open_partial(self, file: _File) -> int:
        fd = os.open(self._partial(file), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, file.entry.num_bytes)
        return fd

    def _final(self, file: _File) -> Path:
        return self.folder / file.entry.name

    def _partial(self, file: _File) -> Path:
        # File names of a manifest never begin with a dot, so this name is nobody else's.
        return self.folder / f".{file.entry.name}.partial"


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


def _fits(path: Path, entry: FileEntry) -> bool:
    if path.stat().st_size != entry.num_bytes:
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        return hash_range(fd, 0, entry.num_bytes) == entry.blake3
    finally:
        os.close(fd)


def _write_at(fd: int, data: bytes | bytearray | memoryview, start: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, start)
        view, start = view[written:], start + written
