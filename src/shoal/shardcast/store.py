"""The versions that an origin or a relay serves: one folder each, complete or still arriving.

    FOLDER/v7/         what assembly.py describes
    FOLDER/.deleted-*  a version that a crash left half deleted
    FOLDER/.boot       see manifest_files.py

The store keeps the newest few versions and those that their deltas build on. Everything in it is signed by the run key
for this run, a known version never changes, and no name from the network becomes a path unless a signed manifest lists it.
"""

import asyncio
import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.shardcast.assembly import Assembly
from shoal.shardcast.manifest_files import (
    MANIFEST_FILE,
    mark_boot,
    open_manifest,
    prepare_folder,
    read_manifest,
    same_boot,
    version_folder,
    version_folders,
)
from shoal.wire.codes import Rejected
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.record import Sealed

KEEP_VERSIONS = 5


@dataclass(eq=False, slots=True)
class _AsyncWaiter:
    ready: Callable[[], bool]
    woken: "asyncio.Future[None]"


class ChangeNotifier:
    """Wakes threads and coroutines that wait for a change of the store.

    Writers are threads and HTTP handlers are coroutines of an event loop, so a condition variable alone is not enough. A
    loop tests the conditions of all its waiters once for all notifications since the last test, and wakes only those whose
    condition holds: a thousand waiting handlers cost no thread.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiters: dict[asyncio.AbstractEventLoop, set[_AsyncWaiter]] = {}
        self._scheduled: set[asyncio.AbstractEventLoop] = set()
        """Loops that will test their waiters soon."""
        self._closed = False

    def notify(self) -> None:
        """Makes every waiter test its condition again. Thread-safe."""
        with self._condition:
            self._condition.notify_all()
            for loop in self._waiters.keys() - self._scheduled:
                with contextlib.suppress(RuntimeError):  # the loop was closed while handlers waited
                    loop.call_soon_threadsafe(self._wake_ready, loop)
                    self._scheduled.add(loop)

    def close(self) -> None:
        """Ends every wait, now and later, so that the server can shut down."""
        self._closed = True
        self.notify()

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Waits in a thread until `ready()` holds; returns whether it does. `ready` must not call `notify`."""
        with self._condition:
            return self._condition.wait_for(lambda: self._closed or ready(), timeout_s) and ready()

    async def wait_async(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Waits in an event loop until `ready()` holds; returns whether it does."""
        if ready():  # the usual case: needs no lock
            return True
        loop = asyncio.get_running_loop()
        waiter = _AsyncWaiter(ready, loop.create_future())
        with self._condition:
            self._waiters.setdefault(loop, set()).add(waiter)
        # A future and a timer cost a third less than asyncio.timeout, and a relay waits here for every shard.
        timer = loop.call_later(timeout_s, _wake, waiter)
        try:
            if not (ready() or self._closed):
                await waiter.woken
            return ready()
        finally:
            timer.cancel()
            with self._condition:
                waiters = self._waiters[loop]
                waiters.discard(waiter)
                if not waiters:
                    del self._waiters[loop]

    def _wake_ready(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in the loop. A notification after the first statement schedules another run."""
        with self._condition:
            self._scheduled.discard(loop)
            waiters = tuple(self._waiters.get(loop, ()))
        for waiter in waiters:
            if self._closed or waiter.ready():
                _wake(waiter)


def _wake(waiter: _AsyncWaiter) -> None:
    if not waiter.woken.done():
        waiter.woken.set_result(None)


class StoredVersion:
    """One version in the store: its manifest, and the files it sends."""

    def __init__(self, sealed: Sealed[Manifest], assembly: Assembly) -> None:
        self.sealed, self.assembly = sealed, assembly
        self.files: dict[str, FileEntry] = {entry.name: entry for entry in sealed.body.payloads}
        self.num_writers = 0
        self.only_payloads = False
        """Whether files that are not sent were deleted."""


class VersionStore:
    """Keeps versions on disk. `changed` is notified when a version becomes known, a shard is verified, or a file completes."""

    def __init__(
        self,
        folder: Path,
        keep_versions: int = KEEP_VERSIONS,
        *,
        run: str,
        run_key: str,
        max_bytes: int | None = None,
    ) -> None:
        """Opens the store. With `max_bytes` it keeps fewer versions where they would exceed it; the newest always stays."""
        if keep_versions < 1:
            raise ValueError(f"keep_versions={keep_versions} must be at least 1")
        self.folder, self.run, self.run_key = folder, run, run_key
        self.keep_versions, self._max_bytes = keep_versions, max_bytes
        self.changed = ChangeNotifier()
        # Lock order: the notifier's lock, then this one, because conditions read the store. A thread that notified while it holds this one would deadlock.
        self._lock = threading.Lock()
        self._versions: dict[int, StoredVersion] = {}
        self._begin_lock = threading.Lock()  # two upstreams may announce the same version
        folder.mkdir(parents=True, exist_ok=True)
        self._load(rehash=not same_boot(folder))
        mark_boot(folder)
        self._delete_old()

    # -- what is here -----------------------------------------------------------------------------------

    def path(self, version: int) -> Path:
        """Returns the folder of a version."""
        return version_folder(self.folder, version)

    @property
    def newest(self) -> int | None:
        """Returns the newest known version, complete or not."""
        with self._lock:
            return max(self._versions, default=None)

    def get(self, version: int) -> StoredVersion | None:
        """Returns a known version, complete or not."""
        with self._lock:
            return self._versions.get(version)

    def manifest(self, version: int) -> Manifest | None:
        """Returns the manifest of a known version."""
        stored = self.get(version)
        return None if stored is None else stored.sealed.body

    def known(self) -> tuple[int, ...]:
        """Returns all known versions, oldest first."""
        with self._lock:
            return tuple(sorted(self._versions))

    def complete(self) -> tuple[int, ...]:
        """Returns the versions of which every file is here."""
        with self._lock:
            return tuple(sorted(v for v, stored in self._versions.items() if stored.assembly.complete))

    def incomplete(self) -> tuple[int, ...]:
        """Returns the versions of which files are still missing."""
        with self._lock:
            return tuple(sorted(v for v, stored in self._versions.items() if not stored.assembly.complete))

    def missing_bases(self) -> tuple[int, ...]:
        """Returns versions that those here build on, back to a snapshot, and that are not known here."""
        with self._lock:
            return tuple(sorted(self._bases_of(self._versions) - self._versions.keys()))

    # -- adding versions --------------------------------------------------------------------------------

    def adopt(self, version: int) -> Sealed[Manifest]:
        """Starts to serve what `publish` has just signed in this store's folder for that version."""
        sealed = read_manifest(self.path(version))
        if sealed is None:
            raise ValueError(f"{self.path(version)} has no manifest; call publish on it first")
        self._check(sealed)
        stored = self._open(sealed)
        if not stored.assembly.complete:
            raise ValueError(f"{self.path(version)} lacks files that its manifest lists; publish it again")
        # The publisher may have made this version again after a crash; then the old bytes are gone.
        with self._lock:
            self._versions.pop(version, None)
        self._add(stored)
        return sealed

    def begin(self, sealed: Sealed[Manifest]) -> None:
        """Makes a version known whose files are still to come.

        Raises Rejected if it is of another run, or known with other files. A publisher that lost its old versions may send
        a version whole that it sent as a delta before: that replaces the first manifest unless its files are complete here.
        """
        manifest = self._check(sealed)
        num_bytes = sum(entry.num_bytes for entry in manifest.payloads)
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            raise Rejected(
                "request.too_large",
                f"version {manifest.version} has {num_bytes} bytes, the limit of this store is {self._max_bytes}",
            )
        with self._begin_lock:
            found = self.get(manifest.version)
            if found is None:
                prepare_folder(self.path(manifest.version), sealed)
                self._add(self._open(sealed))
            elif not found.sealed.body.yields_the_same(manifest):
                raise Rejected(
                    "request.conflict",
                    f"version {manifest.version} is known with other files; a version never changes",
                )
            elif not (found.sealed.body.sends_the_same(manifest) or found.assembly.complete):
                found.assembly.close()
                prepare_folder(self.path(manifest.version), sealed)
                with self._lock:
                    self._versions.pop(manifest.version, None)
                self._add(self._open(sealed))

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[Assembly]:
        """Gives the assembly of a version, which is not deleted during the block. Raises KeyError if it is not known."""
        with self._lock:
            stored = self._versions[version]
            stored.num_writers += 1
        try:
            yield stored.assembly
        finally:
            with self._lock:
                stored.num_writers -= 1
            self._delete_old()

    def close(self) -> None:
        """Ends all waits. Call it before closing the server, which would otherwise wait for them."""
        self.changed.close()

    # -- private ----------------------------------------------------------------------------------------

    def _check(self, sealed: Sealed[Manifest]) -> Manifest:
        return open_manifest(sealed, run=self.run, run_key=self.run_key)

    def _open(self, sealed: Sealed[Manifest], *, rehash: bool = False) -> StoredVersion:
        path = self.path(sealed.body.version)
        assembly = Assembly(path, sealed.body, rehash=rehash, on_change=self.changed.notify)
        return StoredVersion(sealed, assembly)

    def _add(self, stored: StoredVersion) -> None:
        with self._lock:
            self._versions.setdefault(stored.sealed.body.version, stored)
        self._delete_old()
        self.changed.notify()

    def _load(self, *, rehash: bool) -> None:
        for half_deleted in self.folder.glob(".deleted-*"):
            shutil.rmtree(half_deleted)
        for path in version_folders(self.folder).values():
            try:
                sealed = read_manifest(path)
            except Rejected:
                if not rehash:
                    raise ValueError(f"{path / MANIFEST_FILE} is not a manifest; delete {path}") from None
                shutil.rmtree(path)  # a power cut came before the manifest was on the disk
                continue
            if sealed is None:
                continue  # the publisher writes the manifest last, so this version is still being published
            try:
                manifest = self._check(sealed)
            except Rejected as rejected:
                raise ValueError(
                    f"{path} is not a version of run {self.run!r}: {rejected.detail}; "
                    "delete it, or use another folder for this run"
                ) from None
            if path != self.path(manifest.version):
                raise ValueError(f"{path} holds the manifest of version {manifest.version}; delete it")
            self._versions[manifest.version] = self._open(sealed, rehash=rehash)

    def _bases_of(self, versions: Iterable[int]) -> set[int]:
        """Returns what these versions build on, back to a snapshot or to a version that is not here."""
        bases: set[int] = set()
        for version in versions:
            stored = self._versions.get(version)
            while stored is not None and not stored.sealed.body.is_snapshot:
                base = stored.sealed.body.base
                assert base is not None, "a manifest that is no snapshot names its base"
                bases.add(base)
                stored = self._versions.get(base)
        return bases

    def _delete_old(self) -> None:
        """Deletes all but the newest versions and their bases. A version that is being written is deleted afterwards."""
        with self._lock:
            newest, bases = self._versions_to_keep()
            for version in bases.intersection(self._versions).difference(newest):
                self._keep_only_payloads(self._versions[version])
            surplus = self._versions.keys() - bases - set(newest)
            deleted = []
            for version in sorted(v for v in surplus if self._versions[v].num_writers == 0):
                self._versions.pop(version).assembly.close()
                # Renamed first: a crash while deleting must not leave half a version under its name.
                renamed = self.folder / f".deleted-v{version}-{secrets.token_hex(4)}"
                self.path(version).rename(renamed)
                deleted.append(renamed)
        for path in deleted:
            shutil.rmtree(path)

    def _versions_to_keep(self) -> tuple[list[int], set[int]]:
        """Returns the newest versions that fit, and their bases."""
        newest, bases = sorted(self._versions)[-self.keep_versions :], set[int]()
        for first in range(len(newest)):
            bases = self._bases_of(newest[first:])
            kept = [
                self._versions[version] for version in bases.union(newest[first:]) & self._versions.keys()
            ]
            num_bytes = sum(entry.num_bytes for stored in kept for entry in stored.files.values())
            if self._max_bytes is None or num_bytes <= self._max_bytes or first == len(newest) - 1:
                return newest[first:], bases
        return newest, bases

    def _keep_only_payloads(self, stored: StoredVersion) -> None:
        """Deletes files that are not sent. A publisher's folder also has the files that its deltas yield, as the base of the
        next version; an older version needs only what it sends."""
        if stored.only_payloads:
            return
        stored.only_payloads = True
        for entry in stored.sealed.body.files:
            if entry.name not in stored.files:
                (self.path(stored.sealed.body.version) / entry.name).unlink(missing_ok=True)
