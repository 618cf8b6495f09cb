"""Finished work on its way to the coordinator, while the device goes on with the next."""

import time
from collections.abc import Callable

from shoal.net.waiting import Stopped
from shoal.rollout.adversary.behaviour import Conduct
from shoal.rollout.worker.errand import Errand
from shoal.rollout.worker.losses import Losses
from shoal.rollout.worker.session import LeaseLost, Session
from shoal.rollout.worker.submission import Verdicts
from shoal.rollout.worker.worker_folder import State
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable, encode

LOOK_S = 0.1

OnEnd = Callable[[Lease, bool], None]
"""A lease has ended: delivered, or lost."""


class Courier:
    """One submission at a time. What goes wrong with one is raised when the next is brought, or at `finish`."""

    def __init__(
        self, session: Session, state: State, conduct: Conduct, losses: Losses, *, on_end: OnEnd, log: Log
    ) -> None:
        self._session, self._state, self._conduct, self._losses = session, state, conduct, losses
        self._on_end, self._log = on_end, log
        self._errand: Errand[None] | None = None
        self.verdicts = Verdicts(session, log)

    @property
    def idle(self) -> bool:
        return self._errand is None or self._errand.wait(0.0)

    def send(self, lease: Lease, table: RolloutTable, **figures: float) -> None:
        """Take this along; the last one must have arrived. `figures` stand in the log beside it."""
        assert self.idle, "one at a time: finish first"
        self.finish()
        self._errand = Errand("courier", lambda: self._deliver(lease, table, figures))

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until nothing is under way. `on_wait` is called meanwhile, and may raise."""
        if self._errand is None:
            return
        while not self._errand.wait(0.0):
            on_wait()
            self._errand.wait(LOOK_S)
        errand, self._errand = self._errand, None
        errand.result()

    def close(self, wait_s: float) -> None:
        """What is done should arrive, but not hold up the end for long: the coordinator would give it again."""
        if self._errand is not None:
            self._errand.wait(wait_s)

    # -- in a thread of its own --------------------------------------------------------------------------------

    def _deliver(self, lease: Lease, table: RolloutTable, figures: dict[str, float]) -> None:
        delivered = False
        try:
            self._submit(lease, table, figures)
            delivered = True
        except LeaseLost as lost:
            self._losses.lost(lease, lost, self._session)
        except Stopped:
            self._session.abandon(lease, "the worker ends")
            raise
        finally:
            self._on_end(lease, delivered)
        self.verdicts.ask_one()

    def _submit(self, lease: Lease, table: RolloutTable, figures: dict[str, float]) -> None:
        started_s = time.monotonic()
        data = self._conduct.data(encode(table))
        self._state.keep(lease, table.policy_version, data)
        receipt = self._session.deliver(lease, data, policy_version=table.policy_version)
        self._losses.good()
        self.verdicts.follow(lease.lease_id)
        self._log.info(
            "submitted",
            lease=lease.lease_id,
            purpose=lease.purpose,
            version=receipt.policy_version,
            rows=len(table.rows),
            bytes=receipt.num_bytes,
            took_s=round(time.monotonic() - started_s, 3),
            receipt=receipt.seq,
            **figures,
        )
