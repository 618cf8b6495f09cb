"""Publish a folder as one policy version: hash its files where they lie, write what changed since its base, sign.

    v8/model.safetensors          whole, in every version here: it is the base of the next
    v8/model.safetensors.delta    what makes it of v7's
    v8/manifest.json              which of the two are sent; written last

Nothing is copied or cut up: shards are ranges of these files themselves.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from shoal.shardcast.delta import write_delta
from shoal.shardcast.digest import hash_shards
from shoal.shardcast.disk import room_for
from shoal.shardcast.manifest_files import MANIFEST_FILE, PARTIAL_MANIFEST, read_manifest, write_manifest
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import DELTA_SUFFIX, Delta, FileEntry, Manifest
from shoal.wire.record import Sealed, seal

SHARD_BYTES = 2 << 20
SNAPSHOT_EVERY = 8
WORTH = 0.5
"""A delta larger than this share of its file is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An earlier version to publish the changes since."""

    folder: Path
    """Published with the same key, its files still there."""
    snapshot_every: int = SNAPSHOT_EVERY
    """A version divisible by this is sent whole as well, for those who come late or lost their way."""

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise ValueError(f"snapshot_every={self.snapshot_every} must be at least 1")


def publish(
    folder: Path,
    *,
    run: str,
    version: int,
    key: Key,
    shard_bytes: int = SHARD_BYTES,
    base: Base | None = None,
    now_s: float | None = None,
) -> Sealed[Manifest]:
    """Sign all files of `folder` as `version`. The manifest is written last: a folder that has one is complete.

    With a base, only what changed since is sent, where that saves half or more. Files named `X.delta` beside an `X` are
    publish's own.

    Publishing the same files again gives the manifest that is there already, so that a publisher that crashed
    right after, or had no room (NoRoom), may simply repeat it.
    """
    files = tuple(_describe(path, shard_bytes) for path in _files(folder))
    created_at_s = time.time() if now_s is None else now_s
    manifest = Manifest(run=run, version=version, files=files, created_at_s=created_at_s)
    standing = _standing(folder, manifest, key)
    if standing is not None:
        return standing
    _drop_deltas(folder)
    if base is not None:
        manifest = _shortened(manifest, folder, base, _open_base(base.folder, manifest, key))
    sealed = seal(manifest, key)
    write_manifest(folder, sealed)
    return sealed


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if path.name not in (MANIFEST_FILE, PARTIAL_MANIFEST))
    paths = [path for path in paths if not _is_delta(path)]
    if not paths:
        raise ValueError(f"{folder} holds no files to publish")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a plain file; a version is a flat folder, move it elsewhere")
    return paths


def _is_delta(path: Path) -> bool:
    return path.name.endswith(DELTA_SUFFIX) and path.with_name(path.name.removesuffix(DELTA_SUFFIX)).is_file()


def _describe(path: Path, shard_bytes: int) -> FileEntry:
    num_bytes, whole, shards = hash_shards(path, shard_bytes)
    return FileEntry(
        name=path.name, num_bytes=num_bytes, blake3=whole, shard_bytes=shard_bytes, shards=shards
    )


def _standing(folder: Path, manifest: Manifest, key: Key) -> Sealed[Manifest] | None:
    """The manifest that an earlier call left, if it is one for these very files and its deltas are still there."""
    try:
        sealed = read_manifest(folder)
        if sealed is None:
            return None
        body = sealed.open(key.public)
    except Rejected:
        return None
    asked = {entry.name: entry.shard_bytes for entry in manifest.files}
    if (
        (body.run, body.version) != (manifest.run, manifest.version)
        or not body.yields_the_same(manifest)
        or any(entry.shard_bytes != asked[entry.name] for entry in body.files)
    ):
        return None
    deltas = [payload for payload in body.payloads if payload.name not in asked]
    found = [_describe(folder / one.name, one.shard_bytes) for one in deltas if (folder / one.name).is_file()]
    return sealed if found == deltas else None


def _drop_deltas(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if _is_delta(path):
            path.unlink()


# -- what changed ---------------------------------------------------------------------------------------


def _open_base(folder: Path, manifest: Manifest, key: Key) -> Manifest:
    """Clients know the base by its manifest too: what is not published there, they cannot have."""
    try:
        sealed = read_manifest(folder)
        before = sealed.open(key.public) if sealed is not None else None
    except Rejected as rejected:
        raise ValueError(f"the base {folder} is not published with this key: {rejected.detail}") from None
    if before is None:
        raise ValueError(f"the base {folder} has no manifest; publish it first, or publish without a base")
    if before.run != manifest.run or before.version >= manifest.version:
        raise ValueError(
            f"the base {folder} is version {before.version} of run {before.run!r}; version {manifest.version} of run "
            f"{manifest.run!r} needs an earlier one of the same run"
        )
    return before


def _shortened(whole: Manifest, folder: Path, base: Base, before: Manifest) -> Manifest:
    """The same version, sent as what changed since its base; as it was, if that saves little."""
    short = [_short_entry(entry, folder, base.folder, before) for entry in whole.files]
    num_bytes = sum(payload.num_bytes for entry in short for payload in entry.payloads)
    if num_bytes > WORTH * whole.num_bytes:
        _drop_deltas(folder)
        return whole
    if whole.version % base.snapshot_every == 0:
        # What is the same needs no mark here: a client finds it by its digest.
        short = [
            FileEntry(**(entry.model_dump() | {"delta": changed.delta}))
            if changed.delta is not None
            else entry
            for entry, changed in zip(whole.files, short, strict=True)
        ]
    if all(entry.codec == "raw" and entry.delta is None for entry in short):
        return whole
    return Manifest(
        run=whole.run,
        version=whole.version,
        base=before.version,
        files=tuple(short),
        created_at_s=whole.created_at_s,
    )


def _short_entry(entry: FileEntry, folder: Path, base: Path, before: Manifest) -> FileEntry:
    old = next((one for one in before.files if one.name == entry.name), None)
    if old is None:
        return entry
    fields = entry.model_dump() | {"shards": ()}
    if old.blake3 == entry.blake3:
        return FileEntry(**(fields | {"codec": "same"}))
    old_path, payload = base / entry.name, folder / (entry.name + DELTA_SUFFIX)
    if old.num_bytes != entry.num_bytes or not old_path.is_file():
        return entry
    max_bytes = int(WORTH * entry.num_bytes)
    with room_for(payload):
        if not write_delta(
            old_path, folder / entry.name, payload, old_blake3=old.blake3, max_bytes=max_bytes
        ):
            return entry
    sent = _describe(payload, entry.shard_bytes)
    delta = Delta(num_bytes=sent.num_bytes, blake3=sent.blake3, shards=sent.shards)
    return FileEntry(**(fields | {"codec": "delta", "delta": delta}))
