"""Uploads and submits finished work while the device generates the next, and logs the verdicts."""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from shoal.background import BackgroundTask
from shoal.net.waiting import Stopped
from shoal.rollout.engine.api import Behaviour
from shoal.rollout.worker.lease_supply import LeaseSupply
from shoal.rollout.worker.session import CoordinatorSession, LeaseLost
from shoal.rollout.worker.worker_folder import WorkerFolder
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED, CODES, explain_code
from shoal.wire.lease import Lease
from shoal.wire.messages import LeaseStatus
from shoal.wire.rollouts import RolloutTable, encode

POLL_S = 0.1
MAX_FOLLOWED = 64
"""Submissions whose verdicts are asked for. Older ones are dropped here; the ledger has them."""


class Uploader:
    """Delivers one submission at a time, in a background thread. Its errors are raised by the next `send` or `finish`."""

    def __init__(
        self,
        session: CoordinatorSession,
        folder: WorkerFolder,
        behaviour: Behaviour,
        supply: LeaseSupply,
        *,
        log: Log,
    ) -> None:
        self._session, self._folder, self._behaviour, self._supply = session, folder, behaviour, supply
        self._log = log
        self._delivery: BackgroundTask[None] | None = None
        self.verdicts = VerdictLog(session, log)

    def send(self, lease: Lease, table: RolloutTable, **figures: float) -> None:
        """Starts to deliver a table. The last delivery must be finished. `figures` are logged with the submission."""
        assert self._delivery is None or self._delivery.done, "call finish first: one delivery at a time"
        self.finish()
        self._delivery = BackgroundTask("upload", partial(self._deliver, lease, table, figures))

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Waits for the delivery under way, if any, and raises its error. Calls `on_wait` meanwhile, which may raise."""
        if self._delivery is None:
            return
        while not self._delivery.done:
            on_wait()
            self._delivery.wait(POLL_S)
        delivery, self._delivery = self._delivery, None
        delivery.result()

    def close(self, wait_s: float) -> None:
        """Waits for the delivery under way, but at most `wait_s`: the coordinator would give the lease again."""
        if self._delivery is not None:
            self._delivery.wait(wait_s)

    # -- in the background thread --------------------------------------------------------------------------

    def _deliver(self, lease: Lease, table: RolloutTable, figures: dict[str, float]) -> None:
        try:
            self._submit(lease, table, figures)
        except LeaseLost as error:
            self._supply.lost(lease, error, self._session)
        except Stopped:
            self._session.abandon(lease, "the worker ends")
            raise
        else:
            self._supply.delivered(lease)
        self.verdicts.ask_one()

    def _submit(self, lease: Lease, table: RolloutTable, figures: dict[str, float]) -> None:
        started_s = time.monotonic()
        data = self._behaviour.data(encode(table))
        self._folder.store_last_submission(lease, table.policy_version, data)
        receipt = self._session.deliver(lease, data, policy_version=table.policy_version)
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


class VerdictLog:
    """Asks for the verdicts on submissions, one request at a time, and logs them."""

    def __init__(self, session: CoordinatorSession, log: Log) -> None:
        self._session, self._log = session, log
        self._awaited: deque[str] = deque(maxlen=MAX_FOLLOWED)
        self.credit = 0

    def follow(self, lease_id: str) -> None:
        self._awaited.append(lease_id)

    def ask_one(self) -> None:
        """Asks for the oldest verdict. If there is none yet, the submission goes to the end of the queue."""
        if not self._awaited:
            return
        lease_id = self._awaited.popleft()
        status = self._session.ask_status(lease_id)
        if status is None or status.code is None:
            self._awaited.append(lease_id)
        else:
            self._report(status)

    def ask_all(self) -> None:
        for _ in range(len(self._awaited)):
            self.ask_one()

    def _report(self, status: LeaseStatus) -> None:
        code = status.code or ""
        self.credit += status.credit
        if code == ACCEPTED:
            self._log.info(f"accepted, credit +{status.credit}", lease=status.lease_id, total=self.credit)
        elif code.startswith("void."):
            self._log.info(
                f"does not count: {explain_code(code)}", lease=status.lease_id, detail=status.detail
            )
        else:
            remedy = CODES[code].remedy if code in CODES else "see docs/threats.md"
            self._log.warning(
                f"refused: {explain_code(code)}",
                lease=status.lease_id,
                detail=status.detail,
                what_to_do=remedy,
            )
