"""Which policy version a lease is worked with: the newest it allows that can be had in time."""

import threading
from pathlib import Path

from shoal.net.client import Refused, Unreachable
from shoal.net.deadline import DeadlinePassed
from shoal.rollout.engine import Engine
from shoal.rollout.session import LeaseLost, Session
from shoal.shardcast import RelayChoice, fetch_version, prune_versions
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, PolicyRef

FETCH_SHARE = 0.5
"""Of the time a lease has left, for one version: what remains must do for an older one, and for the work itself."""


class PolicyShelf:
    """The versions in this worker's folder."""

    def __init__(
        self, folder: Path, session: Session, *, keep_versions: int, stop: threading.Event, log: Log
    ) -> None:
        self._folder, self._session = folder, session
        self._keep_versions, self._stop, self._log = keep_versions, stop, log
        self._relays = RelayChoice(ticket=session.tickets)

    def load_for(self, lease: Lease, engine: Engine) -> int:
        """Have `engine` hold the newest version of the lease that can be had; LeaseLost with every reason if none."""
        reasons = []
        for policy in sorted(lease.policies, key=lambda policy: policy.version, reverse=True):
            try:
                self._load(policy, lease, engine)
            except (DeadlinePassed, Rejected, Refused, Unreachable) as error:
                self._log.warning(f"version {policy.version} cannot be had", reason=error)
                reasons.append(f"version {policy.version}: {error}")
                continue
            return policy.version
        raise LeaseLost(
            "no policy version can be had: " + ("; ".join(reasons) or "none was leased"), still_open=True
        )

    def _load(self, policy: PolicyRef, lease: Lease, engine: Engine) -> None:
        if engine.policy_version == policy.version:
            return
        manifest = self._session.ask_manifest(policy.version)
        if manifest.body.weights_digest != policy.weights_digest:
            raise Rejected(
                "request.conflict",
                f"the lease names weights {policy.weights_digest[:16]}, the manifest {manifest.body.weights_digest[:16]}",
            )
        self._relays.update(lease.relays)
        folder = fetch_version(
            manifest,
            self._relays,
            self._folder,
            run_key=self._session.terms.info.run_key,
            log=self._log,
            stop=self._stop,
            deadline_s=FETCH_SHARE * self._session.time_left_s(lease),
        )
        engine.load(folder, policy.version)
        prune_versions(self._folder, self._keep_versions)
        self._log.info(f"loaded version {policy.version}", bytes=manifest.body.num_bytes)
