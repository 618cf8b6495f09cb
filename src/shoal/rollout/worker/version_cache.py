"""The policy versions in a worker's folder, and fetching them before they are needed.

ensure   before the work       fetches a version of the lease; does not wait for the newest where an older one is allowed
choose   when the work begins  returns the newest of the lease's versions that is here by then
load     after that            loads it into the engine, and deletes versions that no lease will name any more
watch    all the time          asks for the newest version, at once when a relay has it, and fetches it before a lease names it
"""

import random
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.background import BackgroundTask
from shoal.files import folder_bytes
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, LinkedEvent, Stopped
from shoal.rollout.engine.api import Engine
from shoal.rollout.worker.limits import ResourceLimits
from shoal.rollout.worker.session import CoordinatorSession, LeaseLost
from shoal.rollout.worker.worker_folder import WorkerFolder
from shoal.shardcast import ProgressReceiver, RelayChoice, fetch_newer, fetch_version, prune_versions
from shoal.shardcast.manifest_files import RECYCLED_FILE, partial_folder, partial_folders, version_folder
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.manifest import Manifest

FETCH_SHARE = 0.5
"""Share of a lease's remaining time that one version may take. The rest is for an older version and for the work."""
FETCH_AHEAD_S = 600.0
"""Time without progress after which the fetch of a version that no lease has named yet is given up."""
MANIFEST_S = 10.0
"""Time for the coordinator to answer with a manifest. A lease must not be lost because one answer was."""
POLL_S = 0.1
ASKS_PER_HEARTBEAT = 3
"""How often the newest version is asked for: the coordinator chooses its heartbeat interval by what it can answer."""
MIN_ASK_PAUSE_S, MAX_ASK_PAUSE_S = 0.5, 5.0
NOTICE_POLL_S, AFTER_NOTICE_S = 0.02, 0.1
"""How often `watch` looks whether a relay has a new version, and its first pause while the coordinator has not announced it yet."""


class DiskLimit(ValueError):
    """The owner's limit of disk space is too small for the run."""


@dataclass(frozen=True, slots=True)
class FetchInProgress:
    """The fetch that holds the lock. Setting `stop` ends it; what was fetched so far stays on the disk."""

    version: int
    stop: LinkedEvent


class VersionCache:
    """Fetches and loads policy versions. Every method may be called from any thread.

    Versions are fetched one at a time: `_fetch_lock` is held during a fetch and while versions are deleted. Only its
    holder replaces `_folders` and `_fetch_in_progress`; other threads read them without a lock.
    """

    def __init__(
        self,
        folder: WorkerFolder,
        session: CoordinatorSession,
        *,
        log: Log,
        limits: ResourceLimits | None = None,
        on_progress: ProgressReceiver | None = None,
    ) -> None:
        """`on_progress` is called a few times a second while a version is fetched."""
        limits = limits or ResourceLimits()
        self._max_bytes = limits.disk_bytes
        spec = session.joined.info.spec
        self._worker_folder, self._session, self._log = folder, session, log
        self._max_lag, self._keep_versions = spec.max_lag, spec.keep_versions
        self._relays: tuple[str, ...] = ()
        self._origin = ""
        """Relays and origin that the newest lease names."""
        self._relay_choice = RelayChoice(
            ticket=session.tickets, limit=limits.download(), on_progress=on_progress
        )
        self._fetch_lock = threading.Lock()
        self._folders: dict[PolicyRef, Path] = {}
        self._fetch_in_progress: FetchInProgress | None = None
        self._newest_version = -1
        """The newest version that a lease or the coordinator has named."""
        self._heard_version = -1
        """The newest version that `watch` has heard of from a relay."""
        self._fetch_ahead_error = ""
        """Why the last fetch ahead failed, so that the same reason is logged once."""

    # -- for a lease ---------------------------------------------------------------------------------------

    def ensure(self, lease: Lease, *, stop: threading.Event, wait_for_newest: bool) -> None:
        """Fetches a version of the lease. Raises LeaseLost with every reason if none can be fetched.

        Without `wait_for_newest`, an older version that is here is enough if it would still count after one more
        version was published; `watch` fetches the newest then.
        """
        self._relays, self._origin = lease.relays, lease.origin
        policies = _newest_first(lease)
        if not policies:
            raise LeaseLost("no policy version can be fetched: the lease names none", still_open=True)
        self.note_published(policy.version for policy in policies)
        oldest = policies[0].version - self._max_lag
        good = (policy for policy in policies if policy == policies[0] or policy.version > oldest)
        if not wait_for_newest and any(map(self._is_here, good)):
            return
        self._ask_newest()  # a lease that a crash interrupted may be old
        self._check_age(lease, policies[0])
        reasons = []
        for policy in policies:
            try:
                self._ensure_version(policy, lease, stop)
                return
            except (CorruptData, DeadlinePassed, Rejected, Refused, Unreachable) as error:
                self._log.warning(f"version {policy.version} cannot be fetched", reason=error)
                reasons.append(f"version {policy.version}: {error}")
        raise LeaseLost("no policy version can be fetched: " + "; ".join(reasons), still_open=True)

    def choose(self, lease: Lease) -> PolicyRef:
        """Returns the newest version of the lease that is here. Raises LeaseLost if it would be too old to count."""
        policy = next((policy for policy in _newest_first(lease) if self._is_here(policy)), None)
        if policy is None:
            raise LeaseLost(
                "the version that was fetched for the lease has been deleted since", still_open=True
            )
        self._check_age(lease, policy)
        return policy

    def load(self, policy: PolicyRef, engine: Engine) -> None:
        """Loads a version that is here into the engine, then deletes versions that no lease will name any more.

        Keeps the loaded one, which may be an old version under evaluation, and the one that produced the last file,
        which the owner may want to check. Raises LeaseLost if the version is deleted meanwhile.
        """
        try:
            engine.load(self._folders[policy], policy.version)
        except (KeyError, FileNotFoundError) as error:
            if self._is_here(policy):
                raise
            raise LeaseLost(
                f"version {policy.version} was deleted while it was loaded ({error})", still_open=True
            ) from None
        self._log.info(f"loaded version {policy.version}")
        # A fetch in progress may build on one of the old versions.
        if self._fetch_lock.acquire(blocking=False):
            try:
                keep = {policy.version} | self._worker_folder.last_submission_versions()
                # Only this thread reads the weights of old versions, so it may let the next one overwrite them.
                self._prune(self._max_lag + 2, keep, recycle=True)
            finally:
                self._fetch_lock.release()

    def _prune(self, keep_versions: int, spare: set[int], *, recycle: bool = False) -> None:
        folder = self._worker_folder.versions
        deleted = prune_versions(folder, keep_versions, spare=spare, recycle=recycle)
        self._folders = {ref: path for ref, path in self._folders.items() if ref.version not in deleted}

    def _make_room(self, manifest: Manifest) -> None:
        """Deletes older versions until the new one fits into the limit of disk space. The caller holds the fetch lock.

        The newest version that is here stays: it may be loaded, and the new one is built from it. Unfinished downloads of other
        versions are deleted last, because a delta among them may be needed. Raises DiskLimit if nothing helps.
        """
        if self._max_bytes is None:
            return
        folder = self._worker_folder.versions
        # What is here of the new version counts once: an interrupted download, or all of it after a restart.
        own = (partial_folder(folder, manifest.version), version_folder(folder, manifest.version))

        def fits() -> bool:
            assert self._max_bytes is not None
            others = folder_bytes(folder) - sum(map(folder_bytes, own))
            return others + manifest.num_bytes <= self._max_bytes

        if not fits():
            (folder / RECYCLED_FILE).unlink(missing_ok=True)
        for keep_versions in range(self._max_lag + 2, 0, -1):
            if fits():
                return
            self._prune(keep_versions, {manifest.version})
        for unfinished in partial_folders(folder).values():
            if unfinished not in own and not fits():
                shutil.rmtree(unfinished)
        if not fits():
            raise DiskLimit(
                f"version {manifest.version} has {manifest.num_bytes / 1e9:.2f} GB, and two versions do not fit into "
                f"--disk-gb {self._max_bytes / 1e9:g}; join again with at least --disk-gb {2.2 * manifest.num_bytes / 1e9:.2g}"
            )

    # -- ahead of leases -----------------------------------------------------------------------------------

    def watch(self, stop: threading.Event, *, fetch_ahead: bool) -> None:
        """Asks for the newest version until `stop` is set; with `fetch_ahead`, fetches it before a lease names it."""
        fetch: BackgroundTask[None] | None = None
        reachable = True
        heartbeat_s = self._session.joined.heartbeat_s
        pause_s = min(MAX_ASK_PAUSE_S, max(MIN_ASK_PAUSE_S, heartbeat_s / ASKS_PER_HEARTBEAT))
        notice: BackgroundTask[int] | None = None
        wait_s, heard = pause_s, self._heard_version
        while True:
            # A relay has a version a moment before the coordinator announces it, or long before if the trainer failed in between.
            is_early = self._heard_version > self._newest_version
            early_s = AFTER_NOTICE_S if self._heard_version > heard else 2 * wait_s
            wait_s, heard = min(pause_s, early_s) if is_early else pause_s, self._heard_version
            notice = self._wait_for_notice(notice, wait_s, stop)
            if stop.is_set():
                return
            try:
                newest = self._session.ask_newest_version()
                reachable = True
            except (Refused, Unreachable) as error:
                if reachable:
                    self._log.warning("cannot ask for the newest version; continuing", reason=error)
                reachable, newest = False, None
            if newest is None:
                continue
            self.note_published([newest])
            if fetch is not None and fetch.done:
                fetch.result()
                fetch = None
            # Before the first lease no relay is known.
            missing = (self._relays or self._origin) and newest not in {ref.version for ref in self._folders}
            # In a thread of its own, so that a newer answer can end the fetch of a version that relays have dropped.
            if fetch_ahead and fetch is None and missing:
                fetch = BackgroundTask("fetch ahead", partial(self._fetch_ahead, newest, stop))

    def _wait_for_notice(
        self, notice: BackgroundTask[int] | None, pause_s: float, stop: threading.Event
    ) -> BackgroundTask[int] | None:
        """Waits for `pause_s`, or until a relay has a newer version; returns the question to the relay if it is not answered yet.

        A relay can only shorten the wait: the coordinator is asked in any case.
        """
        end_s = time.monotonic() + pause_s
        if notice is None and (urls := self._relays):
            url = random.choice(urls)
            notice = BackgroundTask("version notice", partial(self._ask_relay, url, stop))
        while not stop.is_set() and (left_s := end_s - time.monotonic()) > 0:
            if notice is None or not notice.done:
                stop.wait(min(NOTICE_POLL_S, left_s))
                continue
            heard, notice = notice.result(), None
            if heard > self._heard_version:
                self._heard_version = heard
                break
        return notice

    def _ask_relay(self, url: str, stop: threading.Event) -> int:
        """Returns a newer version as soon as a relay has one, or -1 if there is none for a while."""
        info = self._session.joined.info
        relay = RelayChoice((url,), ticket=self._session.tickets)
        after = max(self._newest_version, self._heard_version)
        try:
            return fetch_newer(
                after,
                relay,
                run=info.spec.run,
                run_key=info.run_key,
                log=self._log,
                stop=stop,
                deadline_s=MAX_ASK_PAUSE_S,
            ).body.version
        except (DeadlinePassed, Stopped, OSError, ValueError):
            return -1

    def note_published(self, versions: Iterable[int]) -> None:
        """Records that versions were published, and stops the fetch of one that relays do not hold any more."""
        self._newest_version = max(self._newest_version, *versions, -1)
        if (fetch := self._fetch_in_progress) is not None and self._is_dropped(fetch.version):
            fetch.stop.set()

    def _fetch_ahead(self, version: int, stop: threading.Event) -> None:
        """Fetches a version unless another fetch is in progress: when that ends there will be a newer version."""
        if not self._fetch_lock.acquire(blocking=False):
            return
        try:
            self._fetch(version, None, stop=stop, deadline_s=FETCH_AHEAD_S)
            self._fetch_ahead_error = ""
        except (CorruptData, DeadlinePassed, Rejected, Refused, Unreachable, OSError) as error:
            if str(error) != self._fetch_ahead_error:
                self._fetch_ahead_error = str(error)
                self._log.warning("a new version cannot be fetched ahead of time", reason=error)
        except Stopped:
            pass  # the worker stops, or a lease needs another version
        finally:
            self._fetch_lock.release()

    # -- one version ---------------------------------------------------------------------------------------

    def _ensure_version(self, policy: PolicyRef, lease: Lease, stop: threading.Event) -> None:
        if self._is_here(policy):
            return
        end_s = time.monotonic() + FETCH_SHARE * self._session.time_left_s(lease)
        self._acquire_lock_for_lease(policy.version, end_s, stop)
        try:
            left_s = end_s - time.monotonic()
            self._fetch(policy.version, policy.weights_digest, stop=stop, deadline_s=left_s)
        finally:
            self._fetch_lock.release()

    def _acquire_lock_for_lease(self, version: int, end_s: float, stop: threading.Event) -> None:
        """Acquires the fetch lock, and stops the fetch of any other version: leases come first."""
        while not self._fetch_lock.acquire(timeout=POLL_S):
            if (fetch := self._fetch_in_progress) is not None and fetch.version != version:
                fetch.stop.set()
            if stop.is_set():
                raise Stopped(f"stopped before version {version} was fetched")
            if time.monotonic() >= end_s:
                raise DeadlinePassed("another version was still being fetched")

    def _fetch(self, version: int, digest: str | None, *, stop: threading.Event, deadline_s: float) -> None:
        """Fetches a version, with the weights of `digest` if given. The caller holds the fetch lock."""
        self._fetch_in_progress = fetch = FetchInProgress(version, LinkedEvent(stop))
        end_s = time.monotonic() + deadline_s
        try:
            self.note_published([])  # ends this fetch at once if the relays have dropped the version already
            manifest = self._session.ask_manifest(version, deadline_s=min(MANIFEST_S, deadline_s))
            found = manifest.body.weights_digest
            if digest is not None and found != digest:
                raise Rejected(
                    "request.conflict", f"the lease names weights {digest[:16]}, the manifest {found[:16]}"
                )
            self._make_room(manifest.body)
            self._relay_choice.update(self._relays, last=self._origin)
            folder = fetch_version(
                manifest,
                self._relay_choice,
                self._worker_folder.versions,
                run_key=self._session.joined.info.run_key,
                log=self._log,
                stop=fetch.stop,
                deadline_s=end_s - time.monotonic(),
                # A worker without any version must get one, however long it takes: later ones are small.
                while_growing=digest is None or not self._folders,
            )
        except Stopped:
            if stop.is_set() or not self._is_dropped(version):
                raise
            raise DeadlinePassed(
                f"no relay holds version {version} any more: version {self._newest_version} was published"
            ) from None
        finally:
            self._fetch_in_progress = None
        self._folders = self._folders | {PolicyRef(version=version, weights_digest=found): folder}
        self._log.info(f"version {version} is here", bytes=manifest.body.num_bytes)

    def _ask_newest(self) -> None:
        try:
            newest = self._session.ask_newest_version()
        except (Unreachable, Refused) as error:
            self._log.info("cannot ask for the newest version", reason=error)
        else:
            self.note_published([] if newest is None else [newest])

    def _check_age(self, lease: Lease, policy: PolicyRef) -> None:
        lag = self._newest_version - policy.version
        if lease.purpose == "train" and lag > self._max_lag:
            raise LeaseLost(
                f"version {policy.version} is {lag} behind version {self._newest_version} before the work has begun; "
                f"at most {self._max_lag} is used",
                still_open=True,
            )

    def _is_dropped(self, version: int) -> bool:
        return self._newest_version - version >= self._keep_versions

    def _is_here(self, policy: PolicyRef) -> bool:
        """Looks at the disk too: the owner may delete fetched versions at any time."""
        folder = self._folders.get(policy)
        return folder is not None and folder.is_dir()


def _newest_first(lease: Lease) -> list[PolicyRef]:
    return sorted(lease.policies, key=lambda policy: policy.version, reverse=True)
