"""Signed manifests on disk, and the one place that decides whether a manifest is to be believed."""

import shutil
from pathlib import Path

from shoal.shardcast.disk import room_for, room_in
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.record import Sealed

MANIFEST_FILE = "manifest.json"
PARTIAL_MANIFEST = f".{MANIFEST_FILE}.partial"


def open_manifest(sealed: Sealed[Manifest], *, run: str | None, run_key: str) -> Manifest:
    """The manifest, if the run key signed it and it is for this run (None: any run of that key); else Rejected."""
    manifest = sealed.open(run_key)
    if run is not None and manifest.run != run:
        raise Rejected("request.bad_signature", f"the manifest is for run {manifest.run!r}, expected {run!r}")
    # The receiver keeps the manifest itself under this name, beside the files.
    if any(entry.name == MANIFEST_FILE for entry in manifest.files):
        raise Rejected("request.malformed", f"version {manifest.version} lists a file named {MANIFEST_FILE}")
    return manifest


def read_manifest(folder: Path) -> Sealed[Manifest] | None:
    """The manifest in a version's folder, unverified; None where there is none yet."""
    try:
        return Sealed[Manifest].parse((folder / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        return None


def write_manifest(folder: Path, sealed: Sealed[Manifest]) -> None:
    """Complete or absent, as long as the machine runs; boot.py has the rest."""
    partial = folder / PARTIAL_MANIFEST
    with room_for(partial):
        partial.write_bytes(sealed.canonical())
        partial.replace(folder / MANIFEST_FILE)


def partial_path(folder: Path, name: str) -> Path:
    """Where a file lies that is still coming. No name in a manifest begins with a dot, so this one is nobody else's."""
    return folder / f".{name}.partial"


def prepare_folder(folder: Path, sealed: Sealed[Manifest]) -> None:
    """Make `folder` the place where this manifest's files come together; what lies there of the same files stays.

    Files found there later are believed by their names, so what another manifest left must go first.
    """
    try:
        standing = read_manifest(folder)
    except Rejected:
        standing = None
    if standing is not None and standing.body.sends_the_same(sealed.body):
        return
    if folder.exists():
        shutil.rmtree(folder)
    with room_in(folder):
        folder.mkdir(parents=True)
    write_manifest(folder, sealed)


def doubt_files(folder: Path) -> None:
    """Give files the names of those that are still coming, so that they are hashed before they are believed."""
    for path in list(folder.iterdir()):
        if path.name != MANIFEST_FILE and not path.name.startswith("."):
            path.replace(partial_path(folder, path.name))
