"""The versions that an origin or a relay holds: one folder each, the newest few and what they build on, complete or
still coming.

    FOLDER/v7/      what assembly.py describes
    FOLDER/.gone-*  a deleted version that a crash left half deleted
    FOLDER/.boot    boot.py

Everything in a store is signed by the run key for this run; a version never changes once it is known; no name
that came over the network becomes a path unless a signed manifest lists it.
"""

import contextlib
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.shardcast.assembly import Assembly
from shoal.shardcast.boot import mark_boot, same_boot
from shoal.shardcast.folders import version_folder, version_folders
from shoal.shardcast.manifest_files import MANIFEST_FILE, open_manifest, prepare_folder, read_manifest
from shoal.shardcast.notify import Bell
from shoal.wire.codes import Rejected
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.record import Sealed

KEEP_VERSIONS = 5


class Held:
    """One version in the store."""

    def __init__(self, sealed: Sealed[Manifest], assembly: Assembly) -> None:
        self.sealed, self.assembly = sealed, assembly
        self.files: dict[str, FileEntry] = {entry.name: entry for entry in sealed.body.payloads}
        self.writers = 0
        self.thin = False


class VersionStore:
    """`changed` rings whenever a version becomes known, a shard is verified, or a file completes."""

    def __init__(
        self,
        folder: Path,
        keep_versions: int = KEEP_VERSIONS,
        *,
        run: str,
        run_key: str,
        max_bytes: int | None = None,
    ) -> None:
        """With `max_bytes` it keeps fewer versions where they would take more than that; the newest always stays."""
        if keep_versions < 1:
            raise ValueError(f"keep_versions={keep_versions} must be at least 1")
        self.folder, self.run, self.run_key = folder, run, run_key
        self.keep_versions, self._max_bytes = keep_versions, max_bytes
        self.changed = Bell()
        # Lock order: the bell's, then this one, for what waits looks into the store. Never ring while holding it.
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._one_at_a_time = threading.Lock()  # two upstreams may bring word of the same version
        folder.mkdir(parents=True, exist_ok=True)
        self._scan(in_doubt=not same_boot(folder))
        mark_boot(folder)
        self._evict()

    # -- what is here -----------------------------------------------------------------------------------

    def path(self, version: int) -> Path:
        return version_folder(self.folder, version)

    @property
    def newest(self) -> int | None:
        """The newest version known, complete or not."""
        with self._lock:
            return max(self._held, default=None)

    def get(self, version: int) -> Held | None:
        with self._lock:
            return self._held.get(version)

    def known(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._held))

    def complete(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(version for version, held in self._held.items() if held.assembly.complete))

    def incomplete(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(
                sorted(version for version, held in self._held.items() if not held.assembly.complete)
            )

    def lacking(self) -> tuple[int, ...]:
        """Versions that those here build on, back to a snapshot, and that are not known here."""
        with self._lock:
            return tuple(sorted(self._needed(self._held) - self._held.keys()))

    # -- bringing it here -------------------------------------------------------------------------------

    def adopt(self, version: int) -> Sealed[Manifest]:
        """Serve what `publish` has just signed in this store's folder for that version."""
        sealed = read_manifest(self.path(version))
        if sealed is None:
            raise ValueError(f"{self.path(version)} has no manifest; call publish on it first")
        self._check(sealed)
        held = self._hold(sealed)
        if not held.assembly.complete:
            raise ValueError(f"{self.path(version)} lacks files that its manifest lists; publish it again")
        # Its publisher may have made it anew after a crash, and then the old bytes are gone: this is the version.
        with self._lock:
            self._held.pop(version, None)
        self._register(held)
        return sealed

    def begin(self, sealed: Sealed[Manifest]) -> None:
        """Make a version known whose files are still to come. Rejected if it is not this run's, or not the same.

        A publisher that lost its old versions may send one whole that it sent as a delta before. The files are the same:
        it takes the place of the first unless that is complete here.
        """
        manifest = self._check(sealed)
        num_bytes = sum(entry.num_bytes for entry in manifest.payloads)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise Rejected(
                "request.too_large",
                f"version {manifest.version} has {num_bytes} bytes, this store may hold {self._max_bytes}",
            )
        with self._one_at_a_time:
            standing = self.get(manifest.version)
            if standing is None:
                prepare_folder(self.path(manifest.version), sealed)
                self._register(self._hold(sealed))
            elif not standing.sealed.body.yields_the_same(manifest):
                raise Rejected(
                    "request.conflict",
                    f"version {manifest.version} is known with other files; a version never changes",
                )
            elif not (standing.sealed.body.sends_the_same(manifest) or standing.assembly.complete):
                standing.assembly.close()
                prepare_folder(self.path(manifest.version), sealed)
                with self._lock:
                    self._held.pop(manifest.version, None)
                self._register(self._hold(sealed))

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[Assembly]:
        """The assembly of a version, which is not deleted meanwhile."""
        with self._lock:
            held = self._held[version]
            held.writers += 1
        try:
            yield held.assembly
        finally:
            with self._lock:
                held.writers -= 1
            self._evict()

    def close(self) -> None:
        """End every wait, so that the server need not sit them out. Call it before closing the server."""
        self.changed.silence()

    # -- inside -----------------------------------------------------------------------------------------

    def _check(self, sealed: Sealed[Manifest]) -> Manifest:
        return open_manifest(sealed, run=self.run, run_key=self.run_key)

    def _hold(self, sealed: Sealed[Manifest], *, in_doubt: bool = False) -> Held:
        path = self.path(sealed.body.version)
        assembly = Assembly(path, sealed.body, in_doubt=in_doubt, on_change=self.changed.ring)
        return Held(sealed, assembly)

    def _register(self, held: Held) -> None:
        with self._lock:
            self._held.setdefault(held.sealed.body.version, held)
        self._evict()
        self.changed.ring()

    def _scan(self, *, in_doubt: bool) -> None:
        for leftover in self.folder.glob(".gone-*"):
            shutil.rmtree(leftover)
        for path in version_folders(self.folder).values():
            try:
                sealed = read_manifest(path)
            except Rejected:
                if not in_doubt:
                    raise ValueError(f"{path / MANIFEST_FILE} is no manifest; delete {path}") from None
                shutil.rmtree(path)  # a power cut came before its bytes were on the disk
                continue
            if sealed is None:
                continue  # its publisher has not finished it
            try:
                manifest = self._check(sealed)
            except Rejected as rejected:
                raise ValueError(
                    f"{path} is not a version of run {self.run!r}: {rejected.detail}; "
                    "delete it, or give this run a folder of its own"
                ) from None
            if path != self.path(manifest.version):
                raise ValueError(f"{path} holds the manifest of version {manifest.version}; delete it")
            self._held[manifest.version] = self._hold(sealed, in_doubt=in_doubt)

    def _needed(self, versions: Iterable[int]) -> set[int]:
        """What these versions build on, back to a snapshot or to one that is not here."""
        needed: set[int] = set()
        for version in versions:
            held = self._held.get(version)
            while held is not None and not held.sealed.body.is_snapshot:
                base = held.sealed.body.base
                assert base is not None, "a manifest that is no snapshot names its base"
                needed.add(base)
                held = self._held.get(base)
        return needed

    def _evict(self) -> None:
        """Delete all but the newest versions and what they build on; one that is being written goes when its writer
        is done."""
        with self._lock:
            newest, needed = self._kept()
            for version in needed.intersection(self._held).difference(newest):
                self._thin(self._held[version])
            surplus = self._held.keys() - needed - set(newest)
            gone = [version for version in sorted(surplus) if self._held[version].writers == 0]
            paths = []
            for version in gone:
                self._held.pop(version).assembly.close()
                # Under another name at once: a crash while deleting must not leave half a version behind.
                trash = self.folder / f".gone-v{version}-{secrets.token_hex(4)}"
                self.path(version).rename(trash)
                paths.append(trash)
        for path in paths:
            shutil.rmtree(path)

    def _kept(self) -> tuple[list[int], set[int]]:
        """The newest versions that fit, and what they build on."""
        newest, needed = sorted(self._held)[-self.keep_versions :], set[int]()
        for first in range(len(newest)):
            needed = self._needed(newest[first:])
            held = [self._held[version] for version in needed.union(newest[first:]) & self._held.keys()]
            num_bytes = sum(entry.num_bytes for one in held for entry in one.files.values())
            if self._max_bytes is None or num_bytes <= self._max_bytes or first == len(newest) - 1:
                return newest[first:], needed
        return newest, needed

    def _thin(self, held: Held) -> None:
        """Of a version that is kept only because others build on it, keep what is sent: a publisher's folder also holds
        the files that its deltas yield, as the base for the next."""
        if held.thin:
            return
        held.thin = True
        for entry in held.sealed.body.files:
            if entry.name not in held.files:
                (self.path(held.sealed.body.version) / entry.name).unlink(missing_ok=True)
