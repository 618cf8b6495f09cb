"""The manifest of one policy version: its files, and the digest of every shard that is sent for them.

A version is a folder in the Hugging Face layout (config.json, tokenizer files, model.safetensors). Shards are
byte ranges of the files or of their deltas: no shard is a file of its own, and any web server with range requests can
serve the folder. The run key signs the manifest, so a relay can neither change nor roll back what it serves.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shoal.wire.record import Record, Sealable

Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WEIGHTS_FILE = "model.safetensors"
DELTA_SUFFIX = ".delta"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ALLOWED_SUFFIXES = (".safetensors", ".json", ".txt", ".jinja", ".md")
ALLOWED_NAMES = ("LICENSE", "NOTICE", "README")


def check_file_name(name: str) -> None:
    """Raises ValueError unless a version may have a file of this name.

    Only kinds of files that no program executes are allowed: a library that receives a folder with Python files or pickles may
    run them. A name that is not on the list is refused, even if the file would be harmless.
    """
    _check_plain_name(name)
    if name not in ALLOWED_NAMES and not name.endswith(ALLOWED_SUFFIXES):
        raise ValueError(
            f"file {name!r} is not allowed in a version; allowed are the suffixes {', '.join(ALLOWED_SUFFIXES)} "
            f"and the names {', '.join(ALLOWED_NAMES)}"
        )


def _check_plain_name(name: str) -> None:
    # The name becomes a path on the receiver's disk: no separators, no leading dot.
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(
            f"file name {name!r} is not a plain name: use letters, digits, dots, dashes and underscores"
        )


class Delta(Record):
    """A payload that turns the base version's file of the same name into this version's file (docs/wire/delta.md).

    It is sent under the file's name plus `.delta`, in shards of the file's `shard_bytes`.
    """

    num_bytes: int = Field(gt=0)
    blake3: Blake3
    shards: tuple[Blake3, ...]


class FileEntry(Record):
    """One file of the version, and how it is sent.

    raw     the whole file is sent, in consecutive shards of `shard_bytes` (the last may be shorter). If the entry also has a
            `delta`, a client that has the base may fetch the delta instead.
    delta   only the delta is sent
    same    the file equals the base's file; nothing is sent
    """

    name: str
    num_bytes: int = Field(ge=0)
    blake3: Blake3
    codec: Literal["raw", "delta", "same"] = "raw"
    shard_bytes: int = Field(gt=0)
    shards: tuple[Blake3, ...]
    delta: Delta | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "FileEntry":
        _check_plain_name(self.name)
        _check_shards(
            self.name, self.num_bytes if self.codec == "raw" else 0, self.shard_bytes, len(self.shards)
        )
        if self.delta is not None:
            payload = self.name + DELTA_SUFFIX
            if not _FILE_NAME.fullmatch(payload):
                raise ValueError(
                    f"file name {self.name!r} is too long: it must be short enough to add {DELTA_SUFFIX}"
                )
            _check_shards(payload, self.delta.num_bytes, self.shard_bytes, len(self.delta.shards))
        if self.codec == ("delta" if self.delta is None else "same"):
            raise ValueError(f"{self.name}: codec {self.codec!r} with {'a' if self.delta else 'no'} delta")
        if self.delta is None and "delta" in self.model_fields_set:
            raise ValueError(f"{self.name}: leave the field delta out instead of setting it to null")
        return self

    @model_serializer(mode="wrap")
    def _leave_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if fields.get("delta") is None:
            fields.pop("delta", None)
        return fields

    def shard_range(self, index: int) -> tuple[int, int]:
        """Returns the first byte and the length of shard `index` of a file that is sent whole."""
        start = index * self.shard_bytes
        return start, min(self.shard_bytes, self.num_bytes - start)

    @property
    def payloads(self) -> "tuple[FileEntry, ...]":
        """The files that are sent for this entry: itself, its delta, both, or none. Each has codec `raw`."""
        if self.delta is None:
            return (self,) if self.codec == "raw" else ()
        name = self.name + DELTA_SUFFIX
        delta = FileEntry.copied_from(self.delta, name=name, shard_bytes=self.shard_bytes)
        if self.codec == "delta":
            return (delta,)
        whole = FileEntry(**self.model_dump(exclude={"delta"}))
        return (delta, whole)  # most clients have the base, so the delta comes first


class Manifest(Sealable):
    """All files of one policy version of a run."""

    tag = "shoal/manifest/1"
    run: str
    version: int = Field(ge=0)
    base: int | None = None
    """The version that deltas and `same` files refer to; None if there are none."""
    files: tuple[FileEntry, ...]
    created_at_s: float

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        names = [entry.name for entry in self.files]
        for name in names:
            check_file_name(name)
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate file names: {names}")
        builds = any(entry.codec != "raw" or entry.delta is not None for entry in self.files)
        if builds and self.base is None:
            raise ValueError(f"version {self.version} has deltas or same files, but names no base")
        if self.base is not None and not (builds and 0 <= self.base < self.version):
            raise ValueError(
                f"version {self.version} names base {self.base}: the base must be an earlier version, and a file must use it"
            )
        return self

    def find(self, name: str) -> FileEntry | None:
        """Returns the file of this name; None if there is none."""
        return next((entry for entry in self.files if entry.name == name), None)

    def file(self, name: str) -> FileEntry:
        """Returns the file of this name. Raises KeyError if there is none."""
        if (entry := self.find(name)) is None:
            names = [entry.name for entry in self.files]
            raise KeyError(f"version {self.version} has no file {name!r}; it has {names}")
        return entry

    @property
    def payloads(self) -> tuple[FileEntry, ...]:
        """The files that are sent for the version: what a relay stores of it."""
        return tuple(payload for entry in self.files for payload in entry.payloads)

    @property
    def is_snapshot(self) -> bool:
        """True if the version can be fetched without its base."""
        return all(entry.codec == "raw" for entry in self.files)

    def sends_the_same(self, other: "Manifest") -> bool:
        return (self.base, self.files) == (other.base, other.files)

    def yields_the_same(self, other: "Manifest") -> bool:
        """Returns whether both versions have the same files, however they are sent."""
        return {(entry.name, entry.num_bytes, entry.blake3) for entry in self.files} == {
            (entry.name, entry.num_bytes, entry.blake3) for entry in other.files
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the version."""
        return sum(entry.num_bytes for entry in self.files)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all that is sent for the version: what a relay fetches."""
        return sum(payload.num_bytes for payload in self.payloads)

    @property
    def follow_bytes(self) -> int:
        """Bytes that a client with the base fetches; all bytes if the version has no base."""
        return sum(entry.payloads[0].num_bytes for entry in self.files if entry.payloads)

    @property
    def weights_digest(self) -> str:
        return self.file(WEIGHTS_FILE).blake3


def _check_shards(name: str, num_bytes: int, shard_bytes: int, num_shards: int) -> None:
    expected = -(-num_bytes // shard_bytes)
    if num_shards != expected:
        raise ValueError(
            f"{name}: {num_shards} shards for {num_bytes} bytes in shards of {shard_bytes}, expected {expected}"
        )
