"""The archive of a publisher: every version of a run in a few bytes, so that each can be restored and audited later.

    FOLDER/v0/   whole files
    FOLDER/v7/   the signed manifest, and the deltas to version 6

Files are hard links to those that the publisher serves, so they take space only once the store has deleted its own. The whole
file of a snapshot is not kept: its delta restores it.
"""

import shutil
from pathlib import Path

from shoal.files import link_or_copy
from shoal.shardcast.file_image import restore_image
from shoal.shardcast.manifest_files import (
    MANIFEST_FILE,
    find_manifest,
    open_manifest,
    read_manifest,
    version_folder,
    version_folders,
)
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.manifest import Manifest


class VersionArchive:
    """The versions in one folder. Versions of the folders `others` are found too, but never written."""

    def __init__(self, folder: Path, *others: Path) -> None:
        self._folders = [one for one in (folder, *others) if one.is_dir()] or [folder]
        self.folder = folder

    def add(self, source: Path, version: int) -> None:
        """Adds the version in the folder `source`. A version that is here already is replaced."""
        sealed = read_manifest(source)
        assert sealed is not None, f"{source} has no manifest"
        final = version_folder(self.folder, version)
        partial = final.with_name(f".{final.name}.partial")
        for old in (partial, final):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in (
            MANIFEST_FILE,
            *(entry.payloads[0].name for entry in sealed.body.files if entry.payloads),
        ):
            link_or_copy(source / name, partial / name)
        partial.rename(final)

    def versions(self) -> list[int]:
        """Returns the versions whose manifest is here, oldest first."""
        return sorted(
            {version for folder in self._folders if folder.is_dir() for version in version_folders(folder)}
        )

    def path(self, version: int) -> Path:
        """Returns the folder of a version: the one with the whole weights if there are several."""
        found = [version_folder(folder, version) for folder in self._folders]
        here = [path for path in found if (path / MANIFEST_FILE).exists()]
        return max(here, key=_num_bytes, default=found[0])

    def manifest(self, version: int) -> Manifest | None:
        """Returns the manifest of a version, not verified; None if there is none that can be read."""
        return find_manifest(self.path(version))

    def restore(self, version: int, out: Path, *, run_key: str) -> Manifest:
        """Writes all files of a version to the folder `out`, verified with the run's key. Raises ValueError if that is not possible."""
        sealed = read_manifest(self.path(version))
        if sealed is None:
            known = self.versions()
            kept = f"versions {known[0]} to {known[-1]}" if known else "no version"
            raise ValueError(f"version {version} is not in {self.folder}; choose one that is: {kept}")
        try:
            manifest = open_manifest(sealed, run=None, run_key=run_key)
        except Rejected as rejected:
            raise CorruptData(f"{self.path(version)}: {rejected.detail}") from None
        out.mkdir(parents=True, exist_ok=True)
        for entry in manifest.files:
            image = restore_image(self, version, entry.name)
            if image is None:
                raise CorruptData(
                    f"{entry.name} of version {version} cannot be restored: a file in {self.folder} is lost or damaged"
                )
            image.write(out / entry.name)
        return manifest


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
