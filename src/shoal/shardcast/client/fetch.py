"""One version on its way into a client's folder: plan, bring, make; and another plan where that fails.

    into/v11/                                    here: its files are where the walk back may end
    into/v12.partial/model.safetensors.delta     brought: verified shard by shard
    into/v13.partial/model.safetensors.delta
    into/v13.partial/.model.safetensors.made     made: v11's with both deltas, under this name until its digest is right
    into/v13.partial/model.safetensors

What is brought stays for the next try, also after a restart; what is made is either right or deleted.
"""

import contextlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client.download import Download, NoRelayLeft
from shoal.shardcast.client.fetch_plan import Payload, Shelf, Way, shortest_way
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.shardcast.delta import apply_deltas
from shoal.shardcast.digest import hash_file
from shoal.shardcast.disk import room_for
from shoal.shardcast.folders import partial_folder, version_folder, version_folders
from shoal.shardcast.manifest_files import MANIFEST_FILE, open_manifest, prepare_folder, read_manifest
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.manifest import DELTA_SUFFIX, FileEntry, Manifest
from shoal.wire.record import Sealed

PATIENCE_S = 10.0
"""Without a shard, or a manifest, that a way needs: then another way is looked for."""
PAUSE_S = 0.5

AskManifest = Callable[[int, float], Sealed[Manifest]]
"""The verified manifest of a version from the relays, within so many seconds, or DeadlinePassed."""


class Fetch:
    """One run per object."""

    def __init__(
        self, sealed: Sealed[Manifest], into: Path, *, run_key: str, log: Log, stop: threading.Event
    ) -> None:
        self._manifest = sealed.body
        self.partial = partial_folder(into, sealed.body.version)
        self._into, self._run_key, self._log, self._stop = into, run_key, log, stop
        self._chain: dict[int, Sealed[Manifest]] = {sealed.body.version: sealed}
        self._refused: set[Way] = set()
        self._unreachable: set[Payload] = set()
        self._failure: DeadlinePassed | Rejected | None = None
        self._used: set[int] = set()
        prepare_folder(self.partial, sealed)

    def run(self, choice: RelayChoice, ask: AskManifest, deadline_s: float) -> None:
        """Return when `partial` is the version's folder: every file of it, each with the right digest, nothing else."""
        self._choice, self._ask = choice, ask
        self._give_up_s = time.monotonic() + deadline_s
        self._shelf = _shelf(self._into)
        while todo := [entry for entry in self._manifest.files if not self._is_made(entry)]:
            plan = self._plan(todo)
            if plan and self._bring(plan):
                for way in plan:
                    self._make(way)
        self._tidy()

    # -- plan -------------------------------------------------------------------------------------------

    def _plan(self, todo: Iterable[FileEntry]) -> list[Way]:
        """A way to each file. None at all when one has no way for now; raises when it will have none."""
        plan = []
        for entry in todo:
            way = shortest_way(
                entry.name,
                self._manifest,
                self._shelf,
                look_up=self._look_up,
                refused=self._refused,
                unreachable=self._unreachable,
            )
            if way is None:
                self._despair(entry.name)
                return []
            plan.append(way)
        return plan

    def _despair(self, name: str) -> None:
        """No way to a file: begin anew with what could not be had, while there is time and hope."""
        if self._left_s() > 0 and self._find_twin():
            return
        if self._failure is None:  # every way was tried, and none gave the right bytes
            raise CorruptData(self._no_way(name))
        if isinstance(self._failure, (NoRelayLeft, Rejected)) or self._left_s() <= 0:
            raise self._failure
        self._unreachable.clear()
        if self._stop.wait(PAUSE_S):
            raise Stopped(f"stopped while fetching version {self._manifest.version}")

    def _find_twin(self) -> bool:
        """Whether a relay has the same version as its publisher sends it now: one that lost its old versions, with what
        its deltas were made of, sends the newest whole."""
        try:
            found = self._ask(self._manifest.version, 0.0)
            twin = open_manifest(found, run=self._manifest.run, run_key=self._run_key)
        except (DeadlinePassed, Rejected):
            return False
        if twin.sends_the_same(self._manifest) or not twin.yields_the_same(self._manifest):
            return False
        self._log.warning(f"version {twin.version} is sent in another way now; that way is taken")
        self._manifest, self._chain = twin, {twin.version: found}
        self._refused.clear()
        self._unreachable.clear()
        self._failure = None
        prepare_folder(self.partial, found)
        return True

    def _no_way(self, name: str) -> str:
        tried = "; ".join(str(way) for way in self._refused) or "none"
        return f"version {self._manifest.version} did not come: no way to {name} is left; tried: {tried}"

    def _look_up(self, version: int, urgent: bool) -> Manifest | None:
        """The manifest of a version further back; None if it cannot be had now."""
        if version not in self._chain:
            found = self._look_here(version)
            if found is None:
                try:
                    found = self._ask(version, min(PATIENCE_S, max(0.0, self._left_s())) if urgent else 0.0)
                    open_manifest(found, run=self._manifest.run, run_key=self._run_key)
                except (DeadlinePassed, Rejected) as reason:
                    self._log.warning(
                        f"version {self._manifest.version} builds on version {version}, whose manifest cannot be had",
                        reason=reason,
                    )
                    self._failure = DeadlinePassed(f"version {self._manifest.version} did not come: {reason}")
                    return None
            self._chain[version] = found
        return self._chain[version].body

    def _look_here(self, version: int) -> Sealed[Manifest] | None:
        for folder in (version_folder(self._into, version), self._partial_of(version)):
            with contextlib.suppress(Rejected):
                sealed = read_manifest(folder)
                if sealed is not None and sealed.body.version == version:
                    open_manifest(sealed, run=self._manifest.run, run_key=self._run_key)
                    return sealed
        return None

    # -- bring ------------------------------------------------------------------------------------------

    def _bring(self, plan: list[Way]) -> bool:
        """Everything the plan needs from the relays; whether all of it came."""
        wanted: defaultdict[int, set[str]] = defaultdict(set)
        for version, name in (payload for way in plan for payload in way.payloads):
            wanted[version].add(name)
        self._say(plan)
        by_delta = any(way.deltas for way in plan)
        # The newest first: deltas come before the snapshot they go with, and are the sooner known to be missing.
        for version in sorted(wanted, reverse=True):
            self._used.add(version)
            try:
                self._download(version, wanted[version], PATIENCE_S if by_delta else None)
            except (DeadlinePassed, Rejected) as reason:
                if not by_delta:
                    raise
                self._failure = reason
                self._unreachable |= {(version, name) for name in wanted[version]}
                self._log.warning(
                    f"version {self._manifest.version}: what version {version} sends cannot be had; is there another way?",
                    reason=reason,
                )
                return False
        return True

    def _download(self, version: int, names: set[str], patience_s: float | None) -> None:
        sealed = self._chain[version]
        prepare_folder(self._partial_of(version), sealed)
        assembly = Assembly(self._partial_of(version), sealed.body, wanted=names)
        try:
            download = Download(assembly, self._choice, log=self._log, stop=self._stop)
            download.run(max(0.0, self._left_s()), patience_s=patience_s)
        finally:
            assembly.close()

    def _say(self, plan: list[Way]) -> None:
        version = self._manifest.version
        if reused := [way.name for way in plan if isinstance(way.start, Path) and not way.deltas]:
            self._log.info(
                f"version {version}: {len(reused)} files are the same as before", files=",".join(reused)
            )
        for way in plan:
            if way.deltas:
                self._log.info(f"version {version} is made of deltas", way=way, bytes=way.num_bytes)

    # -- make -------------------------------------------------------------------------------------------

    def _make(self, way: Way) -> None:
        """Give the file its name if it is right; else the way is not taken again."""
        entry = self._manifest.file(way.name)
        if way.start == self._manifest.version and not way.deltas:
            return  # it was brought to its very place
        made = self.partial / f".{way.name}.made"
        made.unlink(missing_ok=True)
        source = way.start if isinstance(way.start, Path) else self._partial_of(way.start) / way.name
        try:
            with room_for(made):
                found = self._put(source, way, made)
        except CorruptData as error:
            found = error.detail
        if found == entry.blake3:
            made.replace(self.partial / way.name)
            return
        made.unlink(missing_ok=True)
        self._refused.add(way)
        self._log.warning(
            f"version {self._manifest.version}: {way.name} came out wrong and was thrown away; is there another way?",
            way=way,
            found=found[:80],
            expected=entry.blake3,
        )

    def _put(self, source: Path, way: Way, made: Path) -> str:
        """Write or link the file; its digest."""
        if way.deltas:
            payloads = [self._partial_of(version) / (way.name + DELTA_SUFFIX) for version in way.deltas]
            return apply_deltas(source, payloads, made)
        try:
            os.link(source, made)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, made)
        with made.open("rb") as file:
            return hash_file(file.fileno())

    def _is_made(self, entry: FileEntry) -> bool:
        # It got this name only after its digest was checked.
        path = self.partial / entry.name
        return path.is_file() and path.stat().st_size == entry.num_bytes

    def _tidy(self) -> None:
        names = {entry.name for entry in self._manifest.files} | {MANIFEST_FILE}
        for path in list(self.partial.iterdir()):
            if path.name not in names:
                path.unlink()
        for version in self._used - {self._manifest.version}:
            shutil.rmtree(self._partial_of(version), ignore_errors=True)

    def _partial_of(self, version: int) -> Path:
        return partial_folder(self._into, version)

    def _left_s(self) -> float:
        return self._give_up_s - time.monotonic()


def _shelf(into: Path) -> Shelf:
    files: defaultdict[tuple[str, str], tuple[Path, ...]] = defaultdict(tuple)
    versions = []
    for folder in version_folders(into).values():
        try:
            sealed = read_manifest(folder)
        except Rejected:
            continue
        for entry in sealed.body.files if sealed is not None else ():
            if (folder / entry.name).is_file():
                files[entry.name, entry.blake3] += (folder / entry.name,)
                versions.append(sealed.body.version if sealed is not None else 0)
    return Shelf(files=files, oldest=min(versions, default=None))
