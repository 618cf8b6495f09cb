"""Which policy version a lease is worked with, and having its weights here before they are needed.

have    before the work   a version of the lease is here: waits for the newest, but not where an older one will do
best    at its beginning  the newest of the lease's versions that is here by then
stock   all the time      a version that no lease has named yet
"""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from shoal.net.client import Refused, Unreachable
from shoal.net.deadline import DeadlinePassed, Stopped
from shoal.rollout.engine import Engine
from shoal.rollout.heartbeat import Halt
from shoal.rollout.session import LeaseLost, Session
from shoal.rollout.state import State
from shoal.shardcast import RelayChoice, fetch_version, prune_versions
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, PolicyRef

FETCH_SHARE = 0.5
"""Of the time a lease has left, for one version: what remains must do for an older one, and for the work itself."""
STOCK_S = 600.0
"""For a version that nobody has asked for yet."""


class PolicyShelf:
    """The versions in this worker's folder. From any thread; versions are fetched one at a time."""

    def __init__(self, state: State, session: Session, *, max_lag: int, log: Log) -> None:
        self._state, self._folder, self._session = state, state.versions, session
        self._max_lag, self._log = max_lag, log
        self._fetching = threading.Lock()
        self._choice = RelayChoice(ticket=session.tickets)
        self._relays: tuple[str, ...] = ()
        self._here: dict[PolicyRef, Path] = {}
        self._stocking: tuple[int, Halt] | None = None
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
        reasons = []
        for policy in policies:
            try:
                self._have(policy, lease, stop)
            except (DeadlinePassed, Rejected, Refused, Unreachable) as error:
                self._log.warning(f"version {policy.version} cannot be had", reason=error)
                reasons.append(f"version {policy.version}: {error}")
                continue
            return
        raise LeaseLost(
            "no policy version can be had: " + ("; ".join(reasons) or "none was leased"), still_open=True
        )

    def best(self, lease: Lease) -> PolicyRef:
        """The newest version of the lease that is here. LeaseLost if the run has moved on too far meanwhile."""
        policy = next((policy for policy in _newest_first(lease) if policy in self._here), None)
        assert policy is not None, "`have` comes first"
        if lease.purpose == "train" and self.newest_version - policy.version > self._max_lag:
            raise LeaseLost(
                f"version {policy.version} is {self.newest_version - policy.version} behind version "
                f"{self.newest_version} before the work has begun; at most {self._max_lag} is used",
                still_open=True,
            )
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

    def stock(self, version: int, *, stop: threading.Event) -> None:
        """Have a version here before a lease names it."""
        self.heard_of([version])
        if not self._relays or any(policy.version == version for policy in self._here):
            return
        halt = Halt(stop)
        self._stocking = (version, halt)
        try:
            self._fetch(version, None, stop=halt, deadline_s=STOCK_S)
        except Stopped:
            if stop.is_set():
                raise
        finally:
            self._stocking = None

    def heard_of(self, versions: Iterable[int]) -> None:
        self.newest_version = max(self.newest_version, *versions, -1)

    def _will_do(self, policy: PolicyRef, newest: PolicyRef) -> bool:
        slack = newest.version - policy.version < self._max_lag
        return policy in self._here and (slack or policy == newest)

    def _have(self, policy: PolicyRef, lease: Lease, stop: threading.Event) -> None:
        if policy not in self._here:
            if (stocking := self._stocking) is not None and stocking[0] != policy.version:
                stocking[1].set()  # what a lease needs comes first; what came so far of the other stays
            deadline_s = FETCH_SHARE * self._session.time_left_s(lease)
            self._fetch(policy.version, policy.weights_digest, stop=stop, deadline_s=deadline_s)

    def _fetch(self, version: int, digest: str | None, *, stop: threading.Event, deadline_s: float) -> None:
        give_up_s = time.monotonic() + deadline_s
        if not self._fetching.acquire(timeout=max(0.0, deadline_s)):
            raise DeadlinePassed(f"another version was still on its way after {deadline_s:.0f} s")
        try:
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
                stop=stop,
                deadline_s=give_up_s - time.monotonic(),
            )
        finally:
            self._fetching.release()
        self._here = self._here | {PolicyRef(version=version, weights_digest=found): folder}
        self._log.info(f"version {version} is here", bytes=manifest.body.num_bytes)


def _newest_first(lease: Lease) -> list[PolicyRef]:
    return sorted(lease.policies, key=lambda policy: policy.version, reverse=True)
