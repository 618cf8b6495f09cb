"""A site's checkpoints: one file that is complete or absent, its BLAKE3 in its name; the newest sound one is taken.

checkpoints/step-00000120-<first 16 hex digits of its BLAKE3>.pt     weights, inner and outer state, data position
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from shoal.files import restore_disk_error
from shoal.telemetry import Log

_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})\.pt")


class SiteCheckpoints:
    def __init__(self, folder: Path, *, log: Log, keep: int = 2) -> None:
        self._folder, self._log, self._keep = folder, log, keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, content: dict[str, Any]) -> Path:
        partial = self._folder / "partial.tmp"  # torch refuses a name that begins with a dot
        try:
            with restore_disk_error(partial, RuntimeError):
                torch.save(content, partial)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        except OSError:
            partial.unlink(missing_ok=True)  # of use to nobody, and on a full disk it is in the way
            raise
        path = self._folder / f"step-{step:08d}-{_digest(partial)}.pt"
        os.replace(partial, path)
        for old in self._newest_first()[self._keep :]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> dict[str, Any] | None:
        for path in self._newest_first():
            match = _NAME.fullmatch(path.name)
            assert match is not None
            if _digest(path) == match[2]:
                content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return content
            self._log.warning("checkpoint passed over", checkpoint=path, reason="it does not fit its digest")
        return None

    def _newest_first(self) -> list[Path]:
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.name, reverse=True)


class OfferedRound:
    """The last round that others were offered this site's share of: on disk before they are.

    A site killed between a merge and its next checkpoint comes back as it was before, and would bring the same share again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, round: int) -> None:
        partial = self._path.with_suffix(".tmp")
        with partial.open("w") as file:
            file.write(f"{round}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)

    def read(self) -> int:
        """-1 if there was none."""
        return int(self._path.read_text()) if self._path.exists() else -1


def _digest(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()[:16]
