"""Fetches a version from relays that need not be trusted: the signed manifest says what is right, the digests check it.

    into/v11/                                    a complete version, whose files deltas can be applied to
    into/v12.partial/model.safetensors.delta     downloaded, verified shard by shard
    into/v13.partial/model.safetensors.delta
    into/v13.partial/.model.safetensors.made     v11's file with both deltas applied; renamed when its digest is right
    into/v13.partial/model.safetensors
    into/v13/                                    v13.partial, renamed when every file in it is right

What was downloaded stays for the next attempt, also after a restart. A built file is either right or deleted; when one is wrong,
or a delta cannot be had, another plan is made.
"""

import contextlib
import math
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from shoal.files import DiskFull, link_or_copy
from shoal.net.waiting import DeadlinePassed, NotYet, Stopped, wait_for
from shoal.shardcast.assembly import Assembly, has_digest, has_size
from shoal.shardcast.client.download import Download, NoRelayLeft
from shoal.shardcast.client.fetch_plan import FilePlan, LocalFiles, PayloadName, cheapest_plan
from shoal.shardcast.client.http_source import Connections, NotOnRelay, RelayFailed, ask_latest, ask_manifest
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.shardcast.delta import apply_deltas
from shoal.shardcast.manifest_files import (
    MANIFEST_FILE,
    RECYCLED_FILE,
    find_manifest,
    hash_file,
    mark_boot,
    mark_incomplete,
    open_manifest,
    partial_folder,
    partial_folders,
    prepare_folder,
    read_manifest,
    remove_if_disk_full,
    same_boot,
    version_folder,
    version_folders,
)
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.manifest import DELTA_SUFFIX, FileEntry, Manifest
from shoal.wire.record import Sealed

POLL_S, POLL_PAUSE_S = 5.0, 0.2
"""How long a relay may hold a request for a newer version, and the pause between two requests."""
STALL_S = 10.0
"""Time without a shard, or without a manifest that a plan needs, after which another plan is tried."""
RETRY_S = 0.5
MIN_ATTEMPT_S = 0.1
"""With less time left no new attempt is made: its timeout would hide that the disk was full."""


def fetch_version(  # noqa: PLR0913 - what a fetch needs, by name
    manifest: Sealed[Manifest],
    relays: Sequence[str] | RelayChoice,
    into: Path,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
    while_growing: bool = False,
) -> Path:
    """Downloads and verifies a version; returns its folder, `into/v{version}`.

    With an earlier version in `into`, only the changes since then are downloaded, if the publisher sends them. Pass a
    RelayChoice instead of URLs to keep relay statistics over several calls, and to show relays a ticket. With
    `while_growing`, `deadline_s` is the time without progress: a large version over a slow link takes as long as it needs.

    Raises Rejected for a manifest that the run key did not sign, CorruptData if every plan gave wrong bytes, DeadlinePassed
    with the last failure of every relay or with the folder that is full, Stopped, and OSError when the disk fails.
    """
    body = open_manifest(manifest, run=None, run_key=run_key)
    final = version_folder(into, body.version)
    if not same_boot(into):
        _rehash_all(into, log)
    if _is_complete(final, body):
        return final
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)
    end_s, disk_full = time.monotonic() + deadline_s, ""

    def attempt() -> Path:
        nonlocal disk_full
        left_s = end_s - time.monotonic()
        if disk_full and left_s < MIN_ATTEMPT_S:
            raise NotYet(disk_full)
        try:
            fetch = Fetch(
                manifest,
                into,
                choice,
                run_key=run_key,
                log=log,
                stop=stop,
                deadline_s=left_s,
                while_growing=while_growing,
            )
            fetch.run()
        except DiskFull as reason:
            # A version that is not built from deltas does not overwrite it, so it only takes space.
            (into / RECYCLED_FILE).unlink(missing_ok=True)
            disk_full = str(reason)
            raise NotYet(disk_full) from None
        return fetch.partial

    what = f"disk space for version {body.version}"
    partial = wait_for(what, attempt, deadline_s=deadline_s, log=log, stop=stop)
    if final.exists():  # an earlier download of this version number had other files
        shutil.rmtree(final)
    partial.rename(final)
    return final


class Fetch:
    """One attempt to fetch a version into `partial`; `run` once per object."""

    def __init__(  # noqa: PLR0913 - as `fetch_version`
        self,
        sealed: Sealed[Manifest],
        into: Path,
        choice: RelayChoice,
        *,
        run_key: str,
        log: Log,
        stop: threading.Event,
        deadline_s: float,
        while_growing: bool = False,
    ) -> None:
        self._deadline_s, self._while_growing = deadline_s, while_growing
        self._manifest = sealed.body
        self.partial = partial_folder(into, sealed.body.version)
        self._into, self._choice, self._run_key, self._log, self._stop = into, choice, run_key, log, stop
        self._ask_manifest = partial(
            fetch_manifest, relays=choice, run_key=run_key, log=log, stop=stop, run=sealed.body.run
        )
        self._end_s = time.monotonic() + deadline_s
        self._manifests: dict[int, Sealed[Manifest]] = {sealed.body.version: sealed}
        self._local = _find_local_files(into)
        self._failed: set[FilePlan] = set()
        self._unavailable: set[PayloadName] = set()
        self._last_error: DeadlinePassed | Rejected | None = None
        self._used_versions: set[int] = set()
        prepare_folder(self.partial, sealed)

    def run(self) -> None:
        """Returns when `partial` has every file of the version, each with the right digest, and nothing else."""
        while missing := [entry for entry in self._manifest.files if not self._is_built(entry)]:
            plans = self._plan(missing)
            if plans and self._download_all(plans):
                for plan in plans:
                    self._build(plan)
        self._delete_other_files()

    # -- plan -------------------------------------------------------------------------------------------

    def _plan(self, entries: Iterable[FileEntry]) -> list[FilePlan]:
        """Returns a plan for each file; [] if one has none at the moment. Raises if it will never have one."""
        plans = []
        for entry in entries:
            plan = cheapest_plan(
                entry.name,
                self._manifest,
                self._local,
                look_up=self._look_up,
                failed=self._failed,
                unavailable=self._unavailable,
            )
            if plan is None:
                self._prepare_retry(entry.name)
                return []
            plans.append(plan)
        return plans

    def _prepare_retry(self, name: str) -> None:
        """Makes what was unavailable available again, for the next plan; raises the last error if a retry is useless."""
        if self._left_s() > 0 and self._use_new_manifest():
            return
        if self._last_error is None:  # every plan was tried, and each gave wrong bytes
            tried = "; ".join(str(plan) for plan in self._failed) or "none"
            raise CorruptData(
                f"cannot fetch version {self._manifest.version}: every plan for {name} gave wrong bytes; tried: {tried}"
            )
        if isinstance(self._last_error, (NoRelayLeft, Rejected)) or self._left_s() <= 0:
            raise self._last_error
        self._unavailable.clear()
        if self._stop.wait(RETRY_S):
            raise Stopped(f"stopped while fetching version {self._manifest.version}")

    def _use_new_manifest(self) -> bool:
        """Switches to another manifest of the same files, if a relay has one; returns whether it does.

        A publisher that lost its old versions, which its deltas were made against, sends the newest version whole.
        """
        try:
            found = self._ask_manifest(self._manifest.version, deadline_s=0.0)
        except (DeadlinePassed, Rejected):
            return False
        other = found.body
        if other.sends_the_same(self._manifest) or not other.yields_the_same(self._manifest):
            return False
        self._log.warning(f"version {other.version} was published again in another form; using that")
        self._manifest, self._manifests = other, {other.version: found}
        self._failed.clear()
        self._unavailable.clear()
        self._last_error = None
        prepare_folder(self.partial, found)
        return True

    def _look_up(self, version: int, required: bool) -> Manifest | None:
        """Returns the manifest of an older version, from disk or from relays; None if it cannot be had now."""
        if version not in self._manifests:
            found = self._read_local_manifest(version)
            if found is None:
                timeout_s = min(STALL_S, max(0.0, self._left_s())) if required else 0.0
                try:
                    found = self._ask_manifest(version, deadline_s=timeout_s)
                except (DeadlinePassed, Rejected) as reason:
                    self._log.warning(
                        f"version {self._manifest.version} builds on version {version}, whose manifest is not available",
                        reason=reason,
                    )
                    self._last_error = DeadlinePassed(
                        f"cannot fetch version {self._manifest.version}: {reason}"
                    )
                    return None
            self._manifests[version] = found
        return self._manifests[version].body

    def _read_local_manifest(self, version: int) -> Sealed[Manifest] | None:
        for folder in (version_folder(self._into, version), partial_folder(self._into, version)):
            with contextlib.suppress(Rejected):
                sealed = read_manifest(folder)
                if sealed is not None and sealed.body.version == version:
                    open_manifest(sealed, run=self._manifest.run, run_key=self._run_key)
                    return sealed
        return None

    # -- download ---------------------------------------------------------------------------------------

    def _download_all(self, plans: list[FilePlan]) -> bool:
        """Downloads everything that the plans need; returns False if something is not available."""
        wanted: defaultdict[int, set[str]] = defaultdict(set)
        for version, name in (payload for plan in plans for payload in plan.payloads):
            wanted[version].add(name)
        self._log_plans(plans)
        has_deltas = any(plan.deltas for plan in plans)
        # The newest first: if a delta is missing, that is known before the large snapshot is downloaded.
        for version in sorted(wanted, reverse=True):
            self._used_versions.add(version)
            try:
                self._download(version, wanted[version], STALL_S if has_deltas else None)
            except (DeadlinePassed, Rejected) as reason:
                if not has_deltas:
                    raise
                self._last_error = reason
                self._unavailable |= {(version, name) for name in wanted[version]}
                self._log.warning(
                    f"version {self._manifest.version}: files of version {version} are not available; "
                    "looking for another plan",
                    reason=reason,
                )
                return False
        return True

    def _download(self, version: int, names: set[str], stall_s: float | None) -> None:
        sealed, folder = self._manifests[version], partial_folder(self._into, version)
        prepare_folder(folder, sealed)
        assembly = Assembly(folder, sealed.body, wanted=names)
        try:
            download = Download(assembly, self._choice, log=self._log, stop=self._stop)
            if not self._while_growing:
                download.run(max(0.0, self._left_s()), stall_s=stall_s)
            else:
                left_s = max(0.0, self._left_s())
                download.run(math.inf, stall_s=left_s if stall_s is None else min(stall_s, left_s))
                self._end_s = time.monotonic() + self._deadline_s
        finally:
            assembly.close()

    def _log_plans(self, plans: list[FilePlan]) -> None:
        version = self._manifest.version
        if unchanged := [plan.name for plan in plans if isinstance(plan.start, Path) and not plan.deltas]:
            self._log.info(
                f"version {version}: {len(unchanged)} files are unchanged", files=",".join(unchanged)
            )
        for plan in plans:
            if plan.deltas:
                self._log.info(f"version {version} is built from deltas", plan=plan, bytes=plan.num_bytes)

    # -- build ------------------------------------------------------------------------------------------

    def _build(self, plan: FilePlan) -> None:
        """Builds one file and gives it its name if its digest is right; otherwise the plan is not used again."""
        entry = self._manifest.file(plan.name)
        if plan.start == self._manifest.version and not plan.deltas:
            return  # the file was downloaded under its own name
        made = self.partial / f".{plan.name}.made"
        made.unlink(missing_ok=True)
        try:
            with remove_if_disk_full(made):
                found = self._write_file(plan, made)
        except CorruptData as error:
            found = error.detail
        if found == entry.blake3:
            made.replace(self.partial / plan.name)
            return
        made.unlink(missing_ok=True)
        self._failed.add(plan)
        self._log.warning(
            f"version {self._manifest.version}: {plan.name} has a wrong digest and was deleted; "
            "looking for another plan",
            plan=plan,
            found=found[:80],
            expected=entry.blake3,
        )

    def _write_file(self, plan: FilePlan, made: Path) -> str:
        """Writes or links the file of a plan to `made`; returns its digest."""
        start = plan.start
        source = start if isinstance(start, Path) else partial_folder(self._into, start) / plan.name
        if plan.deltas:
            name = plan.name + DELTA_SUFFIX
            payloads = [partial_folder(self._into, version) / name for version in plan.deltas]
            return apply_deltas(source, payloads, made, reuse=self._into / RECYCLED_FILE)
        link_or_copy(source, made)
        return hash_file(made)

    def _is_built(self, entry: FileEntry) -> bool:
        # A file gets its name only after its digest was checked.
        return has_size(self.partial / entry.name, entry)

    def _delete_other_files(self) -> None:
        names = {entry.name for entry in self._manifest.files} | {MANIFEST_FILE}
        for path in list(self.partial.iterdir()):
            if path.name not in names:
                path.unlink()
        for version in self._used_versions - {self._manifest.version}:
            shutil.rmtree(partial_folder(self._into, version), ignore_errors=True)

    def _left_s(self) -> float:
        return self._end_s - time.monotonic()


# -- manifests ------------------------------------------------------------------------------------------


def fetch_manifest(
    version: int | None,
    relays: Sequence[str] | RelayChoice,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
    run: str | None = None,
) -> Sealed[Manifest]:
    """Returns the verified manifest of a version, or of the newest version that any of the relays knows (None)."""
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)
    what = f"the manifest of version {version}" if version is not None else "the newest manifest"

    def attempt() -> Sealed[Manifest]:
        found: list[Sealed[Manifest]] = []
        reasons = []
        for url in choice.in_random_order():
            try:
                if version is not None:
                    sealed: Sealed[Manifest] | None = ask_manifest(connections, url, version)
                else:
                    sealed = ask_latest(connections, url)
                if sealed is None:
                    raise NotOnRelay("no version yet")
                open_manifest(sealed, run=run, run_key=run_key)
            except (NotOnRelay, RelayFailed, Rejected) as reason:
                reasons.append(f"{url}: {reason}")
                continue
            if version is not None:
                return sealed
            found.append(sealed)
        if not found:
            raise NotYet("; ".join(reasons) or "no relay known")
        return max(found, key=lambda sealed: sealed.body.version)

    with Connections(choice.ticket) as connections:
        return wait_for(what, attempt, deadline_s=deadline_s, log=log, stop=stop)


def fetch_newer(
    after: int,
    relays: Sequence[str] | RelayChoice,
    *,
    run_key: str,
    log: Log,
    stop: threading.Event,
    deadline_s: float,
    run: str | None = None,
) -> Sealed[Manifest]:
    """Returns the verified manifest of a version newer than `after`, as soon as a relay knows one (long polling)."""
    choice = relays if isinstance(relays, RelayChoice) else RelayChoice(relays)

    def attempt() -> Sealed[Manifest]:
        reasons = []
        urls = choice.in_random_order()
        for url in urls:
            try:
                # All relays are asked; the last one, each time another, may hold the request.
                wait_s = min(POLL_S, deadline_s) if url == urls[-1] else 0.0
                sealed = ask_latest(connections, url, after=after, wait_s=wait_s)
                if sealed is not None and open_manifest(sealed, run=run, run_key=run_key).version > after:
                    return sealed
                reasons.append(f"{url}: nothing newer")
            except (NotOnRelay, RelayFailed, Rejected) as reason:
                reasons.append(f"{url}: {reason}")
        raise NotYet("; ".join(reasons) or "no relay known", POLL_PAUSE_S)

    with Connections(choice.ticket) as connections:
        return wait_for(
            f"a version after {after}", attempt, deadline_s=deadline_s, log=log, stop=stop, say_every_s=60.0
        )


# -- the client's folder --------------------------------------------------------------------------------


def _find_local_files(into: Path) -> LocalFiles:
    files: defaultdict[tuple[str, str], tuple[Path, ...]] = defaultdict(tuple)
    versions = []
    for folder in version_folders(into).values():
        if (manifest := find_manifest(folder)) is None:
            continue
        for entry in manifest.files:
            if (folder / entry.name).is_file():
                files[entry.name, entry.blake3] += (folder / entry.name,)
                versions.append(manifest.version)
    return LocalFiles(files=files, oldest_version=min(versions, default=None))


def _rehash_all(into: Path, log: Log) -> None:
    """Hashes all versions after a restart of the machine, because a power cut may have damaged them."""
    into.mkdir(parents=True, exist_ok=True)
    for path in partial_folders(into).values():
        mark_incomplete(path)  # their shards are hashed when the download continues
    for path in version_folders(into).values():
        manifest = find_manifest(path)
        if manifest is None or not all(has_digest(path / entry.name, entry) for entry in manifest.files):
            log.warning(f"{path} does not match its manifest; it will be fetched again")
            shutil.rmtree(path)
    mark_boot(into)


def _is_complete(folder: Path, manifest: Manifest) -> bool:
    """Returns whether an earlier call fetched the same files. The folder got its name only after every check."""
    found = find_manifest(folder)
    return (
        found is not None
        and found.yields_the_same(manifest)
        and all(has_size(folder / entry.name, entry) for entry in manifest.files)
    )
