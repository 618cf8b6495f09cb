"""A version's folder on disk: its name, its signed manifest, the digests of its files, and whether to trust them.

    v7/              a complete version
    v7.partial/      a version that a client is downloading
    v7/manifest.json the signed manifest; `open_manifest` is the only place that decides whether one is valid
    .boot            the id of the boot during which the files were last written or hashed
    .recycled        a file of a deleted version, for the next one to overwrite

Files are not flushed to disk while a download waits. Names and sizes are right as long as the kernel that wrote them runs,
even if our process is killed; only a power cut can leave a name without its bytes. So the owner of a folder stores the
boot's id in it, and hashes all files before it trusts them when it finds another id.
"""

import contextlib
import mmap
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from shoal.files import DiskFull, explain_full_disk, write_bytes_atomically
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed

MANIFEST_FILE = "manifest.json"
BOOT_MARK = ".boot"
RECYCLED_FILE = ".recycled"
"""A file of a deleted version. Its bytes are never used: the next build overwrites all of them, which takes less time than a new file."""
READ_BYTES = 1 << 20
"""Bytes hashed at once: small enough to stay in the processor's cache between reading and hashing."""
WRITE_BYTES = 128 << 10
"""Bytes written at once. The kernel allocates page-cache memory in blocks of the size of the write; from 1 MiB on it splits large
blocks, which a virtual machine must first get back from its host. Measured, CPU seconds per GB: 0.32 with 16 KiB, 0.23 with 32,
0.19 with 64, 0.16 with 128, 0.15 with 256, 1.0 to 1.2 with 1 MiB; with cold memory 0.38, 0.44 and 0.49 with 32, 128 and 256 KiB."""

_FOLDER_NAME = re.compile(r"v(?P<version>0|[1-9][0-9]{0,17})(?P<partial>\.partial)?")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# -- folder names ---------------------------------------------------------------------------------------


def version_folder(parent: Path, version: int) -> Path:
    """Returns the path of a complete version."""
    return parent / f"v{version}"


def partial_folder(parent: Path, version: int) -> Path:
    """Returns the path of a version that is being downloaded."""
    return parent / f"v{version}.partial"


def version_folders(parent: Path) -> dict[int, Path]:
    """Returns the folders of complete versions, oldest first."""
    return _find_folders(parent, partial=False)


def partial_folders(parent: Path) -> dict[int, Path]:
    """Returns the folders of versions that are being downloaded, oldest first."""
    return _find_folders(parent, partial=True)


def _find_folders(parent: Path, *, partial: bool) -> dict[int, Path]:
    matches = {path: _FOLDER_NAME.fullmatch(path.name) for path in parent.iterdir()}
    found = {
        int(match["version"]): path
        for path, match in matches.items()
        if match and bool(match["partial"]) == partial
    }
    return dict(sorted(found.items()))


def prune_versions(
    into: Path, keep_versions: int, *, spare: Collection[int] = (), recycle: bool = False
) -> list[int]:
    """Deletes all but the newest versions and those to `spare`, and older unfinished downloads; returns what was deleted.

    With `recycle`, the largest file of a deleted version stays as RECYCLED_FILE, and the next file that is built from a delta
    overwrites it. Nobody may be reading the deleted versions then.
    """
    if keep_versions < 1:
        raise ValueError(f"keep_versions={keep_versions} must be at least 1")
    complete, partial = version_folders(into), partial_folders(into)
    oldest_kept = min(list(complete)[-keep_versions:], default=0)
    spared = set(spare) | _far_bases(complete[version] for version in complete if version >= oldest_kept)
    deleted = sorted(v for v in complete.keys() | partial.keys() if v < oldest_kept and v not in spared)
    for version in deleted:
        for folders in (complete, partial):
            if version in folders:
                if recycle and folders is complete:
                    _recycle_largest(folders[version], into / RECYCLED_FILE)
                shutil.rmtree(folders[version])
    return deleted


def _recycle_largest(folder: Path, to: Path) -> None:
    """Moves the largest file of a version to `to`, unless it has a second name: it is part of another version then."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is not None and largest.stat().st_nlink == 1:
        largest.replace(to)


def _far_bases(folders: Iterable[Path]) -> set[int]:
    """Returns the bases of these versions that are not the version before: adapters are always added to the first version."""
    manifests = [manifest for manifest in map(find_manifest, folders) if manifest is not None]
    return {one.base for one in manifests if one.base is not None and one.base != one.version - 1}


# -- manifests ------------------------------------------------------------------------------------------


def open_manifest(sealed: Sealed[Manifest], *, run: str | None, run_key: str) -> Manifest:
    """Returns the manifest if the run key signed it for this run (None: any run of that key); raises Rejected otherwise."""
    manifest = sealed.open(run_key)
    if run is not None and manifest.run != run:
        raise Rejected("request.bad_signature", f"the manifest is for run {manifest.run!r}, expected {run!r}")
    # The receiver stores the manifest itself under this name, beside the files.
    if any(entry.name == MANIFEST_FILE for entry in manifest.files):
        raise Rejected("request.malformed", f"version {manifest.version} lists a file named {MANIFEST_FILE}")
    return manifest


def read_manifest(folder: Path) -> Sealed[Manifest] | None:
    """Returns the manifest in a version's folder, not verified; None if there is none yet."""
    try:
        return Sealed[Manifest].parse((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return None


def find_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest in a version's folder, not verified; None if there is none that can be read."""
    with contextlib.suppress(Rejected):
        sealed = read_manifest(folder)
        return None if sealed is None else sealed.body
    return None


def write_manifest(folder: Path, sealed: Sealed[Manifest]) -> None:
    """Writes the manifest atomically. Not flushed to disk: the boot mark covers power cuts."""
    with explain_full_disk(folder):
        write_bytes_atomically(folder / MANIFEST_FILE, sealed.canonical(), durable=False)


def partial_path(folder: Path, name: str) -> Path:
    """Returns the path of a file that is still incomplete. No name in a manifest begins with a dot."""
    return folder / f".{name}.partial"


def prepare_folder(folder: Path, sealed: Sealed[Manifest]) -> None:
    """Makes `folder` the place for this manifest's files, and keeps what it has of the same files.

    Files are trusted by their names later, so a folder of another manifest is deleted first.
    """
    found = find_manifest(folder)
    if found is not None and found.sends_the_same(sealed.body):
        return
    if folder.exists():
        shutil.rmtree(folder)
    with explain_full_disk(folder):
        folder.mkdir(parents=True)
    write_manifest(folder, sealed)


def mark_incomplete(folder: Path) -> None:
    """Renames the files to the names of incomplete ones, so that their shards are hashed before they are trusted."""
    for path in list(folder.iterdir()):
        if path.name != MANIFEST_FILE and not path.name.startswith("."):
            path.replace(partial_path(folder, path.name))


@contextlib.contextmanager
def remove_if_disk_full(path: Path) -> Iterator[None]:
    """Deletes `path` and raises DiskFull if it does not fit: half of it is useless and takes space that others need."""
    try:
        with explain_full_disk(path.parent):
            yield
    except DiskFull:
        path.unlink(missing_ok=True)
        raise


# -- the boot mark --------------------------------------------------------------------------------------


def same_boot(folder: Path) -> bool:
    """Returns whether the files in `folder` can be trusted by their names: the machine has not restarted since.

    False on a system that does not report a boot id.
    """
    try:
        return (folder / BOOT_MARK).read_bytes() == _boot_id() != b""
    except FileNotFoundError:
        return False


def mark_boot(folder: Path) -> None:
    """Records that all files in `folder` were hashed or written during this boot.

    On a full disk the mark is missing, and the files are hashed again at the next start.
    """
    with contextlib.suppress(DiskFull), explain_full_disk(folder):
        (folder / BOOT_MARK).write_bytes(_boot_id())


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes()
    except OSError:
        return b""


# -- digests and buffers --------------------------------------------------------------------------------


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """Returns the BLAKE3 digest as hex."""
    return blake3(data).hexdigest()


def hash_file(path: Path) -> str:
    """Returns the digest of a whole file."""
    with path.open("rb") as file:
        return hash_range(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def hash_range(fd: int, start: int, num_bytes: int, buffer: memoryview | None = None) -> str:
    """Returns the digest of `num_bytes` from `start`; of fewer bytes, so another digest, if the file ends earlier."""
    view = make_buffer(min(READ_BYTES, num_bytes)) if buffer is None else buffer
    hasher, stop = blake3(), start + num_bytes
    while start < stop and (count := os.preadv(fd, [view[: stop - start]], start)):
        hasher.update(view[:count])
        start += count
    return hasher.hexdigest()


def hash_shards(path: Path, shard_bytes: int) -> tuple[int, str, tuple[str, ...]]:
    """Returns the size and digest of a file, and the digest of each of its shards.

    Two threads read the file independently: what one has just read is still in the processor's cache for the other.
    Reading once and passing the bytes on took a third longer.
    """
    with path.open("rb") as file:
        fd = file.fileno()
        before = os.fstat(fd)
        num_bytes = before.st_size
        buffer = make_buffer(min(READ_BYTES, shard_bytes, num_bytes))
        with ThreadPoolExecutor(1) as other:
            whole = other.submit(hash_range, fd, 0, num_bytes)
            shards = tuple(
                hash_range(fd, start, min(shard_bytes, num_bytes - start), buffer)
                for start in range(0, num_bytes, shard_bytes)
            )
        after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        # The digests of the shards may not match that of the whole file.
        raise ValueError(f"{path} changed while it was hashed; publish only files that no process writes to")
    return num_bytes, whole.result(), shards


def make_buffer(num_bytes: int) -> memoryview:
    """Returns page-aligned memory for reading and writing files.

    A bytearray starts 16 bytes after a page boundary; copying between it and a file's pages took the kernel 0.145 s
    instead of 0.11 s of CPU per GB read, and 0.17 s instead of 0.14 s per GB written.
    """
    return memoryview(mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[
        :num_bytes
    ]


def write_at(fd: int, data: bytes | bytearray | memoryview, start: int) -> None:
    """Writes all of `data` at offset `start`, WRITE_BYTES at a time."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + WRITE_BYTES], start + done)
