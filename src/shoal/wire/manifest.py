"""The manifest of one policy version: which files it yields and the digest of every shard of them.

A version is a folder in the Hugging Face layout (config.json, tokenizer files, model.safetensors). Shards are
ranges of the files themselves: nothing is cut up on disk, and a plain web server with range requests can
serve the folder. Signed by the run key, so a relay can neither change nor roll back what it serves.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.wire.record import Record, Sealable

Blake3 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WEIGHTS_FILE = "model.safetensors"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class FileEntry(Record):
    """One file of the version, sent as consecutive shards of `shard_bytes` (the last may be shorter).

    `codec` says how the payload becomes the file: "raw" is the file itself.
    """

    name: str
    num_bytes: int = Field(ge=0)
    blake3: Blake3
    codec: Literal["raw"] = "raw"
    shard_bytes: int = Field(gt=0)
    shards: tuple[Blake3, ...]

    @model_validator(mode="after")
    def _consistent(self) -> "FileEntry":
        # The name becomes a path on the receiver's disk: no separators, no leading dot.
        if not _FILE_NAME.fullmatch(self.name):
            raise ValueError(f"file name {self.name!r} is not a plain name")
        expected = -(-self.num_bytes // self.shard_bytes)
        if len(self.shards) != expected:
            raise ValueError(
                f"{self.name}: {len(self.shards)} shards for {self.num_bytes} bytes of {self.shard_bytes}, expected {expected}"
            )
        return self

    def shard_range(self, index: int) -> tuple[int, int]:
        """First byte and length of shard `index`."""
        start = index * self.shard_bytes
        return start, min(self.shard_bytes, self.num_bytes - start)


class Manifest(Sealable):
    run: str
    version: int = Field(ge=0)
    base: int | None = None
    """The version a delta builds on; None for a full snapshot."""
    files: tuple[FileEntry, ...]
    created_at_s: float

    @classmethod
    def tag(cls) -> str:
        return "shoal/manifest/1"

    @model_validator(mode="after")
    def _names_differ(self) -> "Manifest":
        names = [entry.name for entry in self.files]
        if len(set(names)) != len(names):
            raise ValueError(f"file names repeat: {names}")
        return self

    def file(self, name: str) -> FileEntry:
        for entry in self.files:
            if entry.name == name:
                return entry
        raise KeyError(
            f"version {self.version} has no file {name!r}; it has {[entry.name for entry in self.files]}"
        )

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files)

    @property
    def weights_digest(self) -> str:
        return self.file(WEIGHTS_FILE).blake3
