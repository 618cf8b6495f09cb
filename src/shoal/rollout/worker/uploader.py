"""Uploads and submits finished work while the device generates the next, and logs the verdicts."""

import threading
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
MAX_DELIVERIES = 2
"""Deliveries at once. Each is mostly round trips; with only one, a short lease would wait for the upload of the one before."""
MAX_FOLLOWED = 64
"""Submissions whose verdicts are asked for. Older ones are dropped here; the ledger has them."""


class Uploader:
    """Delivers submissions, each in a background thread. Their errors are raised by the next `wait_for_room` or `finish`."""

    def __init__(
        self,
        session: CoordinatorSession,
        folder: WorkerFolder,
        behaviour: Behaviour,
        supply: LeaseSupply,
        *,
        on_wait: Callable[[], None],
        log: Log,
    ) -> None:
        """`on_wait` is called again and again while the main thread waits, and may raise."""
        self._session, self._folder, self._behaviour, self._supply = session, folder, behaviour, supply
        self._on_wait, self._log = on_wait, log
        self._deliveries: list[BackgroundTask[None]] = []
        self._folder_lock = threading.Lock()
        self.verdicts = VerdictLog(session, log)

    def send(self, lease: Lease, table: RolloutTable, **figures: float) -> None:
        """Starts to deliver a table. Call `wait_for_room` first. `figures` are logged with the submission."""
        assert len(self._deliveries) < MAX_DELIVERIES, "call wait_for_room first"
        self._deliveries.append(BackgroundTask("upload", partial(self._deliver, lease, table, figures)))

    def wait_for_room(self, limit: int = MAX_DELIVERIES) -> None:
        """Waits until fewer than `limit` deliveries are under way, and raises the error of one that ended."""
        while True:
            ended = [delivery for delivery in self._deliveries if delivery.done]
            self._deliveries = [delivery for delivery in self._deliveries if delivery not in ended]
            for delivery in ended:
                delivery.result()
            if len(self._deliveries) < limit:
                return
            self._on_wait()
            self._deliveries[0].wait(POLL_S)

    def finish(self) -> None:
        """Waits for all deliveries, and raises the error of the first that failed."""
        self.wait_for_room(1)

    def close(self, wait_s: float) -> None:
        """Waits for the deliveries under way, but at most `wait_s`: the coordinator would give the leases again."""
        end_s = time.monotonic() + wait_s
        for delivery in self._deliveries:
            delivery.wait(max(0.0, end_s - time.monotonic()))

    # -- in the background threads -------------------------------------------------------------------------

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
        with self._folder_lock:
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
    """Asks for the verdicts on submissions, one request at a time, and logs them. Every method may be called from any thread."""

    def __init__(self, session: CoordinatorSession, log: Log) -> None:
        self._session, self._log = session, log
        self._lock = threading.Lock()
        self._awaited: deque[str] = deque(maxlen=MAX_FOLLOWED)
        self.credit = 0

    def follow(self, lease_id: str) -> None:
        self._awaited.append(lease_id)

    def ask_one(self) -> None:
        """Asks for the oldest verdict. If there is none yet, the submission goes to the end of the queue."""
        with self._lock:
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
            self._log.info(
                f"accepted, credit +{status.credit}", lease=status.lease_id, this_session=self.credit
            )
        elif code.startswith("void."):
            self._log.info(
                f"does not count: {explain_code(code)}", lease=status.lease_id, detail=status.detail
            )
        else:
            remedy = CODES[code].remedy if code in CODES else "see `shoal docs threats`"
            self._log.warning(
                f"refused: {explain_code(code)}",
                lease=status.lease_id,
                detail=status.detail,
                what_to_do=remedy,
            )
