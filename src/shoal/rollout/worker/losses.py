"""Leases that will not be delivered on, and how long a worker goes on with nothing else."""

import time

from shoal.net.waiting import DeadlinePassed
from shoal.rollout.worker.session import LeaseLost, Session
from shoal.telemetry import Log
from shoal.wire.lease import Lease


class Losses:
    """Counted from the first lease after the last submission: a worker that had nothing to do has lost nothing."""

    def __init__(self, deadline_s: float, log: Log) -> None:
        self._deadline_s, self._log = deadline_s, log
        self._since_s: float | None = None

    def good(self) -> None:
        """A submission was received, or there is a good reason why there is none."""
        self._since_s = None

    def began(self) -> None:
        """There is a lease to work on."""
        if self._since_s is None:
            self._since_s = time.monotonic()

    def lost(self, lease: Lease, lost: LeaseLost, session: Session) -> None:
        """Say so and give it back. DeadlinePassed if there has been no submission for too long."""
        self.began()
        self._log.warning("the lease is lost", lease=lease.lease_id, reason=lost)
        if lost.still_open:
            session.abandon(lease, str(lost))
        since_s = self._since_s
        idle_s = 0.0 if since_s is None else time.monotonic() - since_s
        if idle_s >= self._deadline_s:
            raise DeadlinePassed(
                f"{idle_s:.0f} s without a single submission; the last lease was lost because {lost}. See that the relays "
                "can be reached from here, and that this machine is fast enough for the run's leases"
            )
