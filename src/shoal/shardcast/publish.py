"""Publishes a folder as one policy version: hashes its files in place, writes deltas against a base version, signs.

    v8/model.safetensors          the whole file: it is the base of the next version
    v8/model.safetensors.delta    the changes since v7
    v8/manifest.json              lists which of the two are sent; written last

Nothing is copied or split: shards are ranges of these files.

`publish_image` does the same for a version whose largest file is in memory (file_image.py): only its delta is written, and the
whole file where it is sent whole.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from shoal.shardcast.delta import write_delta
from shoal.shardcast.file_image import FileImage
from shoal.shardcast.manifest_files import (
    MANIFEST_FILE,
    hash_shards,
    read_manifest,
    remove_if_disk_full,
    write_manifest,
)
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.manifest import DELTA_SUFFIX, Delta, FileEntry, Manifest, check_file_name
from shoal.wire.record import Sealed, seal

SHARD_BYTES = 2 << 20
MAX_SHARDS = 1 << 15
"""Most shards of a file. Shards of a larger file are larger, so that its manifest, with a delta of half the file, stays below the
4 MiB that a coordinator takes."""
SNAPSHOT_EVERY = 8
MAX_DELTA_SHARE = 0.5
"""A delta larger than this share of its file is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An earlier version, against which deltas are published."""

    folder: Path
    """Its folder: published with the same key, its files unchanged."""
    snapshot_every: int = SNAPSHOT_EVERY
    """Versions divisible by this are also sent whole, for clients that join late or lack a base."""

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
    """Signs all files of `folder` as `version` and returns the manifest, which is written last.

    With a base, files are sent as deltas where that saves at least half. Files named `X.delta` beside a file `X` belong to
    `publish`. Publishing the same files again returns the existing manifest, so a publisher may simply repeat the call
    after a crash or a full disk (DiskFull).
    """
    files = tuple(_describe(path, shard_bytes) for path in _files(folder))
    if not files:
        raise ValueError(f"{folder} holds no files to publish")
    created_at_s = time.time() if now_s is None else now_s
    manifest = Manifest(run=run, version=version, files=files, created_at_s=created_at_s)
    existing = _existing_manifest(folder, manifest, key)
    if existing is not None:
        return existing
    _delete_deltas(folder)
    if base is not None:
        manifest = _with_deltas(manifest, folder, base, _open_base(base.folder, manifest, key))
    sealed = seal(manifest, key)
    write_manifest(folder, sealed)
    return sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """What all versions of a run are signed with."""

    run: str
    key: Key
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True)
class ImageDelta:
    """The changes since an earlier version."""

    before: Manifest
    pieces: Iterable[bytes]
    """The delta that turns the earlier version's file into the image, from FileImage.change."""
    hasher: blake3 | None = None
    """What FileImage.change has updated, so that the file is hashed while it is encoded; None: it is hashed afterwards."""


def publish_image(
    folder: Path,
    name: str,
    image: FileImage,
    *,
    version: int,
    signing: Signing,
    delta: ImageDelta | None = None,
    whole: bool,
) -> Sealed[Manifest]:
    """Signs a version of which the file `name` is `image` and all other files are in `folder`. `name` may be there, too.

    The whole file is written and sent too if `whole` is set, if there is no delta, or if it would not save half of the file.
    """
    others = [_describe(path, signing.shard_bytes) for path in _files(folder) if path.name != name]
    shard_bytes = shard_size(image.num_bytes, signing.shard_bytes)
    payload, sent = folder / (name + DELTA_SUFFIX), None
    if delta is not None:
        sent = _write_pieces(payload, delta.pieces, int(MAX_DELTA_SHARE * image.num_bytes), shard_bytes)
    whole = whole or sent is None
    if whole and not (folder / name).exists():
        image.write(folder / name)
    if not whole and delta is not None:
        others = [_mark_same(entry, delta.before) for entry in others]
    entry = FileEntry(
        name=name,
        num_bytes=image.num_bytes,
        blake3=image.digest() if delta is None or delta.hasher is None else delta.hasher.hexdigest(),
        codec="raw" if whole else "delta",
        shard_bytes=shard_bytes,
        shards=image.shard_digests(shard_bytes) if whole else (),
        **({} if sent is None else {"delta": sent}),
    )
    manifest = Manifest(
        run=signing.run,
        version=version,
        base=delta.before.version if delta is not None and sent is not None else None,
        files=tuple(sorted([*others, entry], key=lambda one: one.name)),
        created_at_s=time.time(),
    )
    sealed = seal(manifest, signing.key)
    write_manifest(folder, sealed)
    return sealed


def _write_pieces(payload: Path, pieces: Iterable[bytes], max_bytes: int, shard_bytes: int) -> Delta | None:
    """Writes a delta and hashes it on the way. If it exceeds `max_bytes`, reads it to its end, writes no file and returns None."""
    total = filled = 0
    whole, shard, shards = blake3(), blake3(), list[str]()
    with remove_if_disk_full(payload), payload.open("wb") as out:
        for piece in pieces:
            total += len(piece)
            if total > max_bytes:
                continue
            out.write(piece)
            whole.update(piece)
            rest = memoryview(piece)
            while rest:
                if filled == shard_bytes:
                    shards.append(shard.hexdigest())
                    shard, filled = blake3(), 0
                part = rest[: shard_bytes - filled]
                shard.update(part)
                filled, rest = filled + len(part), rest[len(part) :]
    if total > max_bytes:
        payload.unlink()
        return None
    shards.append(shard.hexdigest())
    return Delta(num_bytes=total, blake3=whole.hexdigest(), shards=tuple(shards))


def _mark_same(entry: FileEntry, before: Manifest) -> FileEntry:
    """Returns the entry without shards if the version before has the same file."""
    if any((old.name, old.blake3) == (entry.name, entry.blake3) for old in before.files):
        return FileEntry(**(entry.model_dump() | {"codec": "same", "shards": ()}))
    return entry


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.iterdir() if not _is_own_file(path))
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file; a version is a flat folder, move it elsewhere")
        try:
            check_file_name(path.name)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}; move it elsewhere") from None
    return paths


def _is_own_file(path: Path) -> bool:
    """Returns whether publish itself wrote the file: a manifest, also one that a crash left unfinished, or a delta."""
    is_unfinished_manifest = path.name.startswith(f".{MANIFEST_FILE}.") and path.name.endswith(".partial")
    return path.name == MANIFEST_FILE or is_unfinished_manifest or _is_delta(path)


def _is_delta(path: Path) -> bool:
    return path.name.endswith(DELTA_SUFFIX) and path.with_name(path.name.removesuffix(DELTA_SUFFIX)).is_file()


def shard_size(num_bytes: int, shard_bytes: int) -> int:
    """Returns the size of a file's shards: `shard_bytes`, doubled until there are at most MAX_SHARDS."""
    while num_bytes > MAX_SHARDS * shard_bytes:
        shard_bytes *= 2
    return shard_bytes


def _describe(path: Path, shard_bytes: int) -> FileEntry:
    shard_bytes = shard_size(path.stat().st_size, shard_bytes)
    num_bytes, whole, shards = hash_shards(path, shard_bytes)
    return FileEntry(
        name=path.name, num_bytes=num_bytes, blake3=whole, shard_bytes=shard_bytes, shards=shards
    )


def _existing_manifest(folder: Path, manifest: Manifest, key: Key) -> Sealed[Manifest] | None:
    """Returns the manifest of an earlier call, if it is for the same files and its deltas still exist."""
    try:
        sealed = read_manifest(folder)
        if sealed is None:
            return None
        body = sealed.open(key.public)
    except Rejected:
        return None
    wanted = {entry.name: entry.shard_bytes for entry in manifest.files}
    if (
        (body.run, body.version) != (manifest.run, manifest.version)
        or not body.yields_the_same(manifest)
        or any(entry.shard_bytes != wanted[entry.name] for entry in body.files)
    ):
        return None
    deltas = [payload for payload in body.payloads if payload.name not in wanted]
    found = [
        _describe(folder / delta.name, delta.shard_bytes)
        for delta in deltas
        if (folder / delta.name).is_file()
    ]
    return sealed if found == deltas else None


def _delete_deltas(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if _is_delta(path):
            path.unlink()


# -- deltas --------------------------------------------------------------------------------------------


def _open_base(folder: Path, manifest: Manifest, key: Key) -> Manifest:
    """Returns the manifest of the base. Clients can only have a base that was published with this key."""
    try:
        sealed = read_manifest(folder)
        before = sealed.open(key.public) if sealed is not None else None
    except Rejected as rejected:
        raise ValueError(f"the base {folder} was not published with this key: {rejected.detail}") from None
    if before is None:
        raise ValueError(f"the base {folder} has no manifest; publish it first, or publish without a base")
    if before.run != manifest.run or before.version >= manifest.version:
        raise ValueError(
            f"the base {folder} is version {before.version} of run {before.run!r}; version {manifest.version} of run "
            f"{manifest.run!r} needs an earlier one of the same run"
        )
    return before


def _with_deltas(whole: Manifest, folder: Path, base: Base, before: Manifest) -> Manifest:
    """Returns the manifest that sends deltas against the base; `whole` itself if that saves too little."""
    short = [_delta_entry(entry, folder, base.folder, before) for entry in whole.files]
    num_bytes = sum(payload.num_bytes for entry in short for payload in entry.payloads)
    if num_bytes > MAX_DELTA_SHARE * whole.num_bytes:
        _delete_deltas(folder)
        return whole
    if whole.version % base.snapshot_every == 0:
        # Unchanged files need no mark in a snapshot: a client finds them by their digests.
        short = [
            FileEntry(**(entry.model_dump() | {"delta": changed.delta}))
            if changed.delta is not None
            else entry
            for entry, changed in zip(whole.files, short, strict=True)
        ]
    if all(entry.codec == "raw" and entry.delta is None for entry in short):
        return whole
    return Manifest.copied_from(whole, base=before.version, files=tuple(short))


def _delta_entry(entry: FileEntry, folder: Path, base: Path, before: Manifest) -> FileEntry:
    old = before.find(entry.name)
    if old is None:
        return entry
    fields = entry.model_dump() | {"shards": ()}
    if old.blake3 == entry.blake3:
        return FileEntry(**(fields | {"codec": "same"}))
    old_path, payload = base / entry.name, folder / (entry.name + DELTA_SUFFIX)
    if old.num_bytes != entry.num_bytes or not old_path.is_file():
        return entry
    max_bytes = int(MAX_DELTA_SHARE * entry.num_bytes)
    with remove_if_disk_full(payload):
        if not write_delta(
            old_path, folder / entry.name, payload, old_blake3=old.blake3, max_bytes=max_bytes
        ):
            return entry
    delta = Delta.copied_from(_describe(payload, entry.shard_bytes))
    return FileEntry(**(fields | {"codec": "delta", "delta": delta}))
