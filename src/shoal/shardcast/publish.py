"""Publish a folder as one policy version: hash its files where they lie, then sign.

Nothing is copied or cut up: shards are ranges of the files themselves.
"""

import os
import time
from pathlib import Path

from shoal.shardcast.digest import hash_shards
from shoal.shardcast.signed import MANIFEST_FILE, PARTIAL_MANIFEST, read_manifest, write_manifest
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.record import Sealed, seal

SHARD_BYTES = 4 << 20


def publish(
    folder: Path,
    *,
    run: str,
    version: int,
    key: Key,
    shard_bytes: int = SHARD_BYTES,
    now_s: float | None = None,
) -> Sealed[Manifest]:
    """Sign all files of `folder` as `version`. The manifest is written last: a folder that has one is complete.

    Publishing the same files again gives the manifest that is there already, so that a publisher that crashed
    right after may simply repeat it.
    """
    files = tuple(_describe(path, shard_bytes) for path in _files(folder))
    standing = _standing(folder, key)
    if standing is not None and (standing.body.run, standing.body.version, standing.body.files) == (
        run,
        version,
        files,
    ):
        return standing
    created_at_s = time.time() if now_s is None else now_s
    sealed = seal(Manifest(run=run, version=version, files=files, created_at_s=created_at_s), key)
    write_manifest(folder, sealed)
    return sealed


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.name not in (MANIFEST_FILE, PARTIAL_MANIFEST))
    if not paths:
        raise ValueError(f"{folder} holds no files to publish")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a plain file; a version is a flat folder, move it elsewhere")
    return paths


def _describe(path: Path, shard_bytes: int) -> FileEntry:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # the manifest must not outlive the bytes it vouches for
        num_bytes = os.fstat(fd).st_size
        whole, shards = hash_shards(fd, num_bytes, shard_bytes)
    finally:
        os.close(fd)
    return FileEntry(
        name=path.name, num_bytes=num_bytes, blake3=whole, shard_bytes=shard_bytes, shards=shards
    )


def _standing(folder: Path, key: Key) -> Sealed[Manifest] | None:
    try:
        sealed = read_manifest(folder)
        if sealed is not None:
            sealed.open(key.public)
    except Rejected:
        return None
    return sealed
