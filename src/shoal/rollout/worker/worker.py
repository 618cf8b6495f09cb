"""The worker's process.

    lease search   lease ──▶ weights ──▶ lease ──▶ weights ──▶ ...                  lease_supply.py, version_cache.py
                       ╲                     ╲
    main thread         swap, generate ──────▶ swap, generate ──────▶ ...           the device never waits for the network
                                       ╲                      ╲
    uploads                             upload, submit, receipt ...                 uploader.py
    heartbeat      ... reports what the main thread does ...                        heartbeat.py

A worker opens outgoing connections only. It keeps nothing that it could not lose: after a crash the coordinator gives
the same leases again, and the same seeds give the same rows.
"""

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from shoal.background import BackgroundTask
from shoal.net.http_client import SignedClient
from shoal.net.waiting import LinkedEvent, Stopped
from shoal.rollout.engine.api import Behaviour, Engine, EngineName, FinishedRow, make_requests, make_table
from shoal.rollout.engine.drafting import DraftSettings
from shoal.rollout.engine.selection import (
    AutoEngine,
    compute_class,
    machine_capabilities,
    make_engine,
    replay_terms,
)
from shoal.rollout.worker.heartbeat import Activity, HeartbeatThread, WorkerStatus
from shoal.rollout.worker.lease_supply import PAUSE_AFTER_LOSS_S, LeaseSupply, SessionOpener
from shoal.rollout.worker.limits import ResourceLimits
from shoal.rollout.worker.session import CoordinatorSession, LeaseLost, LeftRun, WorkerExit, join
from shoal.rollout.worker.uploader import Uploader
from shoal.rollout.worker.version_cache import VersionCache
from shoal.rollout.worker.worker_folder import WorkerFolder, open_worker_folder
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.requirements import WeightFormat
from shoal.wire.rollouts import RolloutTable
from shoal.wire.run_spec import RunSpec

SHUTDOWN_S = 3.0
"""How long a worker that ends waits for its leases to be given back and its last upload to arrive."""
PAUSE_POLL_S = 1.0
STATUS_S = 0.5
PROGRESS_S = 0.05
"""Seconds between two updates of the progress that heartbeats report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    coordinator: str
    """URL of the coordinator."""
    dir: Path
    """Holds the node's key and the versions it fetched; one worker at a time."""
    engine: EngineName = "torch"
    device: str = "cpu"
    tensor_parallel: int = 1
    """GPUs that share the model; above 1 for vLLM only."""
    weights: WeightFormat | None = None
    """The format that the layers' weights are rounded to and that is declared; the run must admit it. Held-out work is done with
    the weights as they were published."""
    draft: DraftSettings | None = None
    max_rows: int = 64
    """Rows decoded at once. More is faster until memory is full."""
    num_threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    deadline_s: float = 900.0
    """Deadline of each wait for the coordinator, and longest time without a submission."""
    prefetch: bool = True
    """Get the next lease and weights, and send the last work in, while the device generates."""
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    """What the owner lets it use. The limits of cores and memory are set before the worker starts (limits.py)."""


def run_worker(
    config: WorkerConfig, *, stop: threading.Event, behaviour: Behaviour | None = None
) -> WorkerExit:
    """Works until the run is finished, the node is ejected or replaced, or `stop` is set.

    `behaviour` is for tests and demos with dishonest workers (adversary/lies.py). Raises ValueError for errors that
    the owner must correct, and DeadlinePassed when a wait took too long.
    """
    log = Log("worker")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    with open_worker_folder(config.dir) as folder:
        try:
            worker = start_worker(config, folder, behaviour or Behaviour(), stop=stop, log=log)
            try:
                worker.main_loop()
            finally:
                worker.shutdown()
        except LeftRun as left:
            report = log.info if left.exit in (WorkerExit.FINISHED, WorkerExit.LEFT) else log.error
            report(str(left))
            return left.exit
        except Stopped as stopped:
            log.info("stopped", reason=stopped)
            return WorkerExit.STOPPED


def start_worker(
    config: WorkerConfig, folder: WorkerFolder, behaviour: Behaviour, *, stop: threading.Event, log: Log
) -> "Worker":
    """Joins the run and returns a worker that sends heartbeats. End it with `shutdown`."""
    if stop.is_set():  # importing torch takes seconds
        raise Stopped("stopped before joining")
    log.info("node", id=folder.key.public, coordinator=config.coordinator)
    worker_stop = LinkedEvent(stop)
    client = SignedClient(config.coordinator, folder.key, log=log, stop=worker_stop)
    try:
        client.add_urls(folder.entry_points())
        joined = join(
            client,
            folder,
            capabilities=machine_capabilities(config.device, memory_gb=config.limits.memory_gb),
            deadline_s=config.deadline_s,
            log=log,
        )
    finally:
        client.close()
    folder.store_entry_points(joined.info.entry_points)
    check_weights(config.weights, joined.info.spec)

    upload_limit = config.limits.upload()

    def open_session(stop: threading.Event) -> CoordinatorSession:
        client = SignedClient(config.coordinator, folder.key, log=log, stop=stop, upload_limit=upload_limit)
        client.add_urls(joined.info.entry_points)
        return CoordinatorSession(client, joined, deadline_s=config.deadline_s, log=log)

    return Worker(config, folder, behaviour, open_session, stop=worker_stop, log=log)


def check_weights(weights: WeightFormat | None, spec: RunSpec) -> None:
    """Raises ValueError if the run does not admit weights of this format."""
    admitted = spec.admitted_weights.formats
    if weights is not None and weights not in admitted:
        raise ValueError(
            f"run {spec.run!r} does not admit {weights} weights, so every submission would be refused; "
            + (f"it admits {', '.join(admitted)}" if admitted else "start the worker without --weights")
        )


class Worker:
    """A worker that has joined a run: `main_loop`, then `shutdown`."""

    def __init__(
        self,
        config: WorkerConfig,
        folder: WorkerFolder,
        behaviour: Behaviour,
        open_session: SessionOpener,
        *,
        stop: LinkedEvent,
        log: Log,
    ) -> None:
        self._config, self._folder, self._behaviour, self._log = config, folder, behaviour, log
        self._stop = stop
        """Set by the heartbeat thread too, when the coordinator ends the session."""
        self._session = open_session(stop)
        self.status = WorkerStatus()
        self._heartbeat = HeartbeatThread(open_session(stop), self.status, log=log)
        self._versions = VersionCache(
            folder, self._session, log=log, limits=config.limits, on_progress=self.status.note_fetched
        )
        self._status_writer = BackgroundTask("status", self._write_status)
        self._supply = LeaseSupply(
            open_session,
            self._versions,
            stop=stop,
            prefetch=config.prefetch,
            deadline_s=config.deadline_s,
            log=log,
        )
        on_wait = partial(self._on_wait, Activity.DELIVERING)
        self._uploader = Uploader(self._session, folder, behaviour, self._supply, on_wait=on_wait, log=log)
        self._engine = self._new_engine()
        self._lease: Lease | None = None
        """The lease that is being worked on; given back at shutdown."""
        self._seconds_per_row = 0.0
        """Mean time for a row of the last lease."""
        self._has_left = False
        self._heartbeat.start()

    def main_loop(self) -> NoReturn:
        """Works on one lease after the other. Ends with LeftRun, Stopped or an error."""
        try:
            while True:
                self._obey_owner()
                self._lease = self._next_lease()
                self._work_on(self._lease)
                self._lease = None
        except LeftRun:
            self._has_left = True
            raise
        except Stopped:
            self._raise_heartbeat_result()
            raise

    def shutdown(self) -> None:
        """Gives open leases back and waits for the last upload, both at most SHUTDOWN_S, and stops the heartbeats."""
        utilisation = self.status.utilisation
        if utilisation.busy_share:
            busy = f"{utilisation.busy_share_of_work:.1%}"
            self._log.info(
                "time since the first row", spent=utilisation.describe(), busy_while_there_was_work=busy
            )
        end_s = time.monotonic() + SHUTDOWN_S
        giving_back = BackgroundTask("give back", self._give_back)
        # After the node has left the run, the coordinator refuses to take leases back.
        reason = None if self._has_left else "the worker ends"
        self._supply.stop(end_s - time.monotonic(), give_back=reason)
        self._uploader.close(max(0.0, end_s - time.monotonic()))
        giving_back.wait(max(0.0, end_s - time.monotonic()))
        self._heartbeat.close()
        self._status_writer.wait(max(0.0, end_s - time.monotonic()))
        self._session.close()

    def _write_status(self) -> None:
        """Writes the owner's view of the worker to its folder, a few times a second, until the worker stops."""
        written: dict[str, object] = {}
        while not self._stop.wait(STATUS_S):
            if (now := self.status.describe()) != written:
                written = now
                self._folder.store_status(now)

    def _give_back(self) -> None:
        if self._lease is not None and not self._has_left:
            self._session.abandon(self._lease, "the worker ends")

    # -- between two leases --------------------------------------------------------------------------------

    def _obey_owner(self) -> None:
        """Pauses or leaves if the owner asked for it with `shoal pause` or `shoal leave`."""
        if not self._owner_wants_machine():
            return
        self._supply.stop(SHUTDOWN_S, give_back="its owner pauses or leaves")
        self._uploader.finish()
        while self._folder.is_paused() and not self._folder.is_leaving():
            self.status.begin(Activity.PAUSED, "paused by its owner")
            self._supply.excuse_pause()
            if self._stop.wait(PAUSE_POLL_S):
                raise Stopped("stopped while paused")
        if self._folder.is_leaving():
            self._session.leave()
            self._folder.clear_leaving()
            raise LeftRun(WorkerExit.LEFT, "its owner asked for it")

    def _owner_wants_machine(self) -> bool:
        return self._folder.is_paused() or self._folder.is_leaving()

    def _next_lease(self) -> Lease:
        if not self._config.prefetch:
            self._uploader.finish()
        self.status.begin(Activity.WAITING)
        return self._supply.take(self._on_wait)

    def _on_wait(self, activity: Activity) -> None:
        self.status.begin(activity)
        if self._stop.is_set():
            raise Stopped(f"stopped while {activity.value}")

    def _raise_heartbeat_result(self) -> None:
        """Raises why the heartbeat thread ended the waits, if it did: the session is over, or the thread failed."""
        if self._heartbeat.left is not None:
            self._has_left = True
            if self._heartbeat.left.exit is WorkerExit.FINISHED:
                self._uploader.close(SHUTDOWN_S)
                self._uploader.verdicts.ask_all()
            raise self._heartbeat.left from None
        if not self._stop.parent.is_set():
            raise RuntimeError("the heartbeat thread ended with an error; its traceback is above") from None

    # -- on a lease ----------------------------------------------------------------------------------------

    def _work_on(self, lease: Lease) -> None:
        try:
            version = self._load_version(lease)
            table = self._generate(lease, version)
            self._uploader.wait_for_room()
            self._uploader.send(
                lease,
                table,
                tokens_per_s=self.status.tokens_per_s,
                busy=round(self.status.utilisation.busy_share, 4),
            )
        except LeaseLost as error:
            self._lose(lease, error)

    def _load_version(self, lease: Lease) -> int:
        policy = self._versions.choose(lease)
        if self._choose_weights(lease) or self._engine.policy_version != policy.version:
            self.status.begin(Activity.SWAPPING, f"loading version {policy.version}")
            self._versions.load(policy, self._engine)
        self.status.policy_version = policy.version
        return policy.version

    def _choose_weights(self, lease: Lease) -> bool:
        """Sets the format of the weights for a lease: as published for held-out work. Returns whether it has changed."""
        weights = None if lease.purpose == "eval" else self._config.weights
        if self._rounding is None or self._rounding.weights == weights:
            return False
        self._rounding.weights = weights
        return True

    def _generate(self, lease: Lease, version: int) -> RolloutTable:
        """Generates all rows of the lease, and orders the next lease in time."""
        requests = self._behaviour.requests(make_requests(lease, self._engine.tokenizer), lease)
        self.status.begin(Activity.GENERATING)
        started_s, reported_s, ordered = time.monotonic(), 0.0, False
        self._engine.submit(requests)
        finished: list[FinishedRow] = []
        while self._engine.has_work:
            self._check_may_continue(lease, len(finished), len(requests))
            now_s = time.monotonic()
            if now_s - reported_s >= PROGRESS_S:
                reported_s = now_s
                if self._folder.must_pause_now():
                    raise LeaseLost("its owner asked to give it back at once", still_open=True)
                self._report_progress(version, len(finished), len(requests))
            if not ordered and self._is_time_to_order(now_s - started_s, len(finished), len(requests)):
                ordered = True
                if self._config.prefetch and not self._owner_wants_machine():
                    self._supply.order()
            finished += self._engine.step()
        took_s = max(time.monotonic() - started_s, 1e-3)
        self.status.begin(Activity.PACKING)
        self.status.tokens_per_s = sum(len(row.output_tokens) for row in finished) / took_s
        self._seconds_per_row = took_s / max(1, len(finished))
        table = make_table(
            lease,
            version,
            finished,
            made_by=str(self._compute_class()),
            replay=str(self._replay_terms() or ""),
        )
        return self._behaviour.table(table, lease)

    def _check_may_continue(self, lease: Lease, num_done: int, num_rows: int) -> None:
        if self._stop.is_set():
            raise Stopped("stopped while generating")
        if self._session.time_left_s(lease) <= 0:
            # It is not given back: after a lease that ran out, the coordinator allows more time for the same work.
            raise LeaseLost(f"{num_done} of {num_rows} rows were done at the deadline", still_open=False)

    def _report_progress(self, version: int, num_done: int, num_rows: int) -> None:
        busy = self.status.utilisation.busy_share
        self.status.phase = (
            f"generating with version {version}: {num_done} of {num_rows} rows; busy {busy:.1%} of the time"
        )

    def _is_time_to_order(self, spent_s: float, num_done: int, num_rows: int) -> bool:
        """Returns whether to order the next lease now.

        It must be early enough that the lease is here in time, and late enough that its versions are not old when its
        work begins; never before half of the work is done.
        """
        whole_s = self._seconds_per_row * num_rows
        rest_s = whole_s - spent_s
        if num_done:
            rest_s = min(rest_s, spent_s * (num_rows - num_done) / num_done)
        return rest_s <= min(self._supply.lead_s, whole_s / 2)

    def _lose(self, lease: Lease, error: LeaseLost) -> None:
        self._lease = None
        if self._engine.has_work:
            # A new engine cannot hold rows of the lost lease.
            self._engine = self._new_engine()
        self._supply.lost(lease, error, self._session)
        if self._stop.wait(PAUSE_AFTER_LOSS_S):
            raise Stopped("stopped after a lost lease")

    def _new_engine(self) -> Engine:
        config, spec = self._config, self._session.joined.info.spec
        engine = make_engine(
            config.engine,
            compute_dtype=self._behaviour.compute_dtype(spec.compute_dtype),
            proof=spec.proof,
            max_rows=config.max_rows,
            device=config.device,
            tensor_parallel=config.tensor_parallel,
            draft=config.draft,
        )
        self._rounding = engine if isinstance(engine, AutoEngine) else None
        dtype = spec.compute_dtype
        self._compute_class = partial(compute_class, engine, device=config.device, compute_dtype=dtype)
        self._replay_terms = partial(replay_terms, engine, device=config.device, max_rows=config.max_rows)
        return self._behaviour.engine(engine)
