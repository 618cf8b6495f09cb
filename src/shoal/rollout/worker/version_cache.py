"""Which policy version a lease is worked with, and having its weights here before they are needed.

have    before the work   a version of the lease is here: waits for the newest, but not where an older one will do
best    at its beginning  the newest of the lease's versions that is here by then
stock   all the time      a version that no lease has named yet
heard_of                  ends the fetch of one that relays hold no longer: of a fast run a lease names such after a minute
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.rollout.engine.api import Engine
from shoal.rollout.worker.heartbeat import Halt
from shoal.rollout.worker.session import LeaseLost, Session
from shoal.rollout.worker.worker_folder import State
from shoal.shardcast import RelayChoice, fetch_version, prune_versions
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.lease import Lease, PolicyRef

FETCH_SHARE = 0.5
"""Of the time a lease has left, for one version: what remains must do for an older one, and for the work itself."""
STOCK_S = 600.0
"""For a version that nobody has asked for yet."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Coming:
    version: int
    halt: Halt


class PolicyShelf:
    """The versions in this worker's folder. From any thread; versions are fetched one at a time."""

    def __init__(self, state: State, session: Session, *, max_lag: int, log: Log) -> None:
        self._state, self._folder, self._session = state, state.versions, session
        self._max_lag, self._log = max_lag, log
        self._fetching = threading.Lock()
        self._choice = RelayChoice(ticket=session.tickets)
        self._relays: tuple[str, ...] = ()
        self._keep_versions = session.terms.info.spec.keep_versions
        self._here: dict[PolicyRef, Path] = {}
        """Changed by whoever holds `_fetching` only."""
        self._coming: _Coming | None = None
        self.newest_version = -1
        """The newest that anybody told us of."""

    def have(self, lease: Lease, *, stop: threading.Event, patient: bool) -> None:
        """Have a version of the lease here; LeaseLost with every reason if none can be had.

        Not `patient`: while the newest is still on its way, an older one will do that is here and would not be stale
        with one version more. `stock` is what brings the newest then.
        """
        self._relays = lease.relays
        policies = _newest_first(lease)
        self.heard_of(policy.version for policy in policies)
        if not patient and any(self._will_do(policy, policies[0]) for policy in policies):
            return
        self._ask_newest()
        self._check_age(lease, policies[0])
        reasons = []
        for policy in policies:
            try:
                self._have(policy, lease, stop)
            except (CorruptData, DeadlinePassed, Rejected, Refused, Unreachable) as error:
                self._log.warning(f"version {policy.version} cannot be had", reason=error)
                reasons.append(f"version {policy.version}: {error}")
                continue
            return
        raise LeaseLost(
            "no policy version can be had: " + ("; ".join(reasons) or "none was leased"), still_open=True
        )

    def best(self, lease: Lease) -> PolicyRef:
        """The newest version of the lease that is here. LeaseLost if the run has moved on too far meanwhile."""
        policy = next((policy for policy in _newest_first(lease) if self._is_here(policy)), None)
        if policy is None:
            raise LeaseLost("the version that was here for it has been thrown away since", still_open=True)
        self._check_age(lease, policy)
        return policy

    def load(self, policy: PolicyRef, engine: Engine) -> None:
        """Have the engine hold this version, which is here; then drop those that no lease will name any more.

        Not the one that made the last file, which its owner may want to check; nor this, which may be an old one's evaluation.
        """
        engine.load(self._here[policy], policy.version)
        self._log.info(f"loaded version {policy.version}")
        if self._fetching.acquire(blocking=False):  # a version on its way may build on one of these
            try:
                spare = {policy.version} | self._state.kept_versions()
                gone = prune_versions(self._folder, self._max_lag + 2, spare=spare)
                self._here = {ref: path for ref, path in self._here.items() if ref.version not in gone}
            finally:
                self._fetching.release()

    def lacks(self, version: int) -> bool:
        """Whether it is worth having before a lease names it: not before the first lease has named relays."""
        return bool(self._relays) and all(policy.version != version for policy in self._here)

    def stock(self, version: int, *, stop: threading.Event) -> None:
        """Have a version here before a lease names it. Nothing where another is on its way: by its end there is a newer."""
        if not self._fetching.acquire(blocking=False):
            return
        try:
            self._bring(version, None, stop=stop, deadline_s=STOCK_S)
        except Stopped:
            if stop.is_set():
                raise
        finally:
            self._fetching.release()

    def heard_of(self, versions: Iterable[int]) -> None:
        """Of versions that are out. What is on its way and no relay holds any more is given up."""
        self.newest_version = max(self.newest_version, *versions, -1)
        if (coming := self._coming) is not None and self._is_gone(coming.version):
            coming.halt.set()

    def _is_gone(self, version: int) -> bool:
        return self.newest_version - version >= self._keep_versions

    def _ask_newest(self) -> None:
        """A lease that a crash interrupted may be as old as a lease can be."""
        try:
            newest = self._session.ask_newest_version()
        except (Unreachable, Refused) as error:
            self._log.info("the newest version cannot be asked for", reason=error)
        else:
            self.heard_of([] if newest is None else [newest])

    def _check_age(self, lease: Lease, policy: PolicyRef) -> None:
        lag = self.newest_version - policy.version
        if lease.purpose == "train" and lag > self._max_lag:
            raise LeaseLost(
                f"version {policy.version} is {lag} behind version {self.newest_version} before the work has begun; "
                f"at most {self._max_lag} is used",
                still_open=True,
            )

    def _will_do(self, policy: PolicyRef, newest: PolicyRef) -> bool:
        slack = newest.version - policy.version < self._max_lag
        return self._is_here(policy) and (slack or policy == newest)

    def _is_here(self, policy: PolicyRef) -> bool:
        """Its owner may delete what was fetched at any time."""
        folder = self._here.get(policy)
        return folder is not None and folder.is_dir()

    def _have(self, policy: PolicyRef, lease: Lease, stop: threading.Event) -> None:
        if self._is_here(policy):
            return
        give_up_s = time.monotonic() + FETCH_SHARE * self._session.time_left_s(lease)
        self._take_turn(policy.version, give_up_s, stop)
        try:
            deadline_s = give_up_s - time.monotonic()
            self._bring(policy.version, policy.weights_digest, stop=stop, deadline_s=deadline_s)
        finally:
            self._fetching.release()

    def _take_turn(self, version: int, give_up_s: float, stop: threading.Event) -> None:
        """What a lease needs comes first: another version is given up, and what came so far of it stays."""
        while not self._fetching.acquire(timeout=LOOK_S):
            if (coming := self._coming) is not None and coming.version != version:
                coming.halt.set()
            if stop.is_set():
                raise Stopped(f"stopped before version {version} was fetched")
            if time.monotonic() >= give_up_s:
                raise DeadlinePassed("another version was still on its way")

    def _bring(self, version: int, digest: str | None, *, stop: threading.Event, deadline_s: float) -> None:
        """By whoever holds `_fetching`."""
        self._coming = coming = _Coming(version, Halt(stop))
        give_up_s = time.monotonic() + deadline_s
        try:
            self.heard_of([])  # it may be gone already
            manifest = self._session.ask_manifest(version)
            found = manifest.body.weights_digest
            if digest is not None and found != digest:
                raise Rejected(
                    "request.conflict", f"the lease names weights {digest[:16]}, the manifest {found[:16]}"
                )
            self._choice.update(self._relays)
            folder = fetch_version(
                manifest,
                self._choice,
                self._folder,
                run_key=self._session.terms.info.run_key,
                log=self._log,
                stop=coming.halt,
                deadline_s=give_up_s - time.monotonic(),
            )
        except Stopped:
            if stop.is_set() or not self._is_gone(version):
                raise
            raise DeadlinePassed(
                f"no relay holds version {version} any more: version {self.newest_version} is out"
            ) from None
        finally:
            self._coming = None
        self._here = self._here | {PolicyRef(version=version, weights_digest=found): folder}
        self._log.info(f"version {version} is here", bytes=manifest.body.num_bytes)


def _newest_first(lease: Lease) -> list[PolicyRef]:
    return sorted(lease.policies, key=lambda policy: policy.version, reverse=True)
