"""The worker's process.

    lease ──▶ policy ──▶ generate ──▶ upload, submit ──▶ receipt          verdicts are asked for, one a round
      ▲                                                     │
      └─────────────────────────────────────────────────────┘

It dials out only, and keeps nothing that it could not lose: after a crash the coordinator gives the same lease again,
and the same seeds give the same rows.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from shoal.net.client import SignedClient
from shoal.net.deadline import DeadlinePassed, Stopped
from shoal.rollout.conduct import Conduct
from shoal.rollout.engine import Engine
from shoal.rollout.heartbeat import Halt, Heart
from shoal.rollout.lies import make_conduct
from shoal.rollout.policies import PolicyShelf
from shoal.rollout.session import Exit, LeaseLost, Left, Session, join
from shoal.rollout.state import State, open_state
from shoal.rollout.submission import Verdicts, generate, make_requests, make_table
from shoal.rollout.torch_engine import TorchEngine
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable, encode
from shoal.wire.run import RunSpec

GIVE_BACK_S = 3.0
"""How long a worker that ends takes to give its lease back."""
PAUSE_LOOK_S = 1.0
AFTER_LOSS_S = 1.0
"""Pause after a lost lease, so that a worker that cannot deliver does not burn leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    coordinator: str
    """URL."""
    dir: Path
    """Holds the node's key and the versions it fetched; one worker at a time."""
    device: str = "cpu"
    max_rows: int = 64
    """Rows decoded at once. More is faster until memory is full."""
    num_threads: int = 0
    """For torch; 0 leaves torch's own choice."""
    deadline_s: float = 900.0
    """Of each wait for the coordinator, and of the time without a single submission."""
    lie: str | None = None
    """A kind of lies.py, against a coordinator on this machine only."""


def run_worker(config: WorkerConfig, *, stop: threading.Event) -> Exit:
    """Work until the run is finished, the node is ejected or replaced, or `stop` is set.

    Raises ValueError for what its owner must put right, DeadlinePassed for what did not come in time.
    """
    log = Log("worker")
    conduct = make_conduct(config.lie, config.coordinator)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    with open_state(config.dir) as state:
        worker = Worker(config, state, conduct, stop=stop, log=log)
        try:
            worker.startup()
            worker.main_loop()
        except Left as left:
            say = log.info if left.exit in (Exit.FINISHED, Exit.LEFT) else log.error
            say(str(left))
            return left.exit
        except Stopped as stopped:
            log.info("stopped", reason=stopped)
            return Exit.STOPPED
        finally:
            worker.shutdown()


class Worker:
    """One process's life: startup, main_loop, shutdown."""

    def __init__(
        self, config: WorkerConfig, state: State, conduct: Conduct, *, stop: threading.Event, log: Log
    ) -> None:
        self._config, self._state, self._conduct, self._log = config, state, conduct, log
        self._stop = stop
        self._halt = Halt(stop)
        self._client, self._heart_client = (
            SignedClient(config.coordinator, state.key, log=log, stop=self._halt) for _ in range(2)
        )
        self._heart: Heart | None = None
        self._open: Lease | None = None

    def startup(self) -> None:
        """Join the run, and be seen alive."""
        self._log.info("node", id=self._state.key.public, coordinator=self._config.coordinator)
        self._client.also(self._state.entry_points())
        terms = join(self._client, self._state, deadline_s=self._config.deadline_s, log=self._log)
        self._state.remember_entry_points(terms.info.entry_points)
        for client in (self._client, self._heart_client):
            client.also((self._config.coordinator, *terms.info.entry_points))
        self._spec: RunSpec = terms.info.spec
        self._session = Session(self._client, terms, deadline_s=self._config.deadline_s, log=self._log)
        self._shelf = PolicyShelf(
            self._state.versions,
            self._session,
            keep_versions=self._spec.max_lag + 2,
            stop=self._halt,
            log=self._log,
        )
        self._verdicts = Verdicts(self._session, self._log)
        self._engine = self._new_engine()
        self._delivered_s = time.monotonic()
        self._heart = Heart(self._heart_client, terms, halt=self._halt, log=self._log)
        self._pulse = self._heart.pulse
        self._heart.start()

    def main_loop(self) -> NoReturn:
        """Ends by Left, by Stopped, or by an error."""
        try:
            while True:
                self._heed_its_owner()
                self._pulse.phase = "waiting for a lease"
                self._open = self._session.ask_lease()
                self._work(self._open)
                self._open = None
                self._verdicts.ask_one()
        except Left:
            self._open = None  # there is nobody to give it back to
            raise
        except Stopped:
            self._raise_what_the_heart_heard()
            raise

    def shutdown(self) -> None:
        """Give back what is open, but never hang on it; then fall silent."""
        if self._open is not None:
            giving = threading.Thread(
                target=self._session.abandon, args=(self._open, "the worker ends"), daemon=True
            )
            giving.start()
            giving.join(GIVE_BACK_S)
        if self._heart is not None:
            self._heart.close()
        self._client.close()
        self._heart_client.close()

    def _heed_its_owner(self) -> None:
        """`shoal pause` and `shoal leave` speak by files in the folder, between two leases."""
        while self._state.paused() and not self._state.leaving():
            self._pulse.phase = "paused by its owner"
            self._delivered_s = time.monotonic()
            if self._halt.wait(PAUSE_LOOK_S):
                raise Stopped("stopped while paused")
        if self._state.leaving():
            self._session.leave()
            self._state.has_left()
            raise Left(Exit.LEFT, "its owner asked for it")

    def _raise_what_the_heart_heard(self) -> None:
        """Waits also end when the heart hears that the run is over, or dies."""
        assert self._heart is not None
        if self._heart.left is not None:
            self._open = None
            if self._heart.left.exit is Exit.FINISHED:
                self._verdicts.ask_all()
            raise self._heart.left from None
        if not self._stop.is_set():
            raise RuntimeError("the heartbeat thread ended by an error; its traceback is above") from None

    def _work(self, lease: Lease) -> None:
        try:
            self._pulse.phase = "fetching a policy version"
            version = self._shelf.load_for(lease, self._engine)
            self._pulse.policy_version = version
            self._deliver(lease, self._generate(lease, version))
        except LeaseLost as lost:
            self._lose(lease, lost)

    def _generate(self, lease: Lease, version: int) -> RolloutTable:
        requests = self._conduct.requests(make_requests(lease, self._engine.tokenizer), lease)
        started_s = time.monotonic()

        def on_step(num_done: int, num_rows: int) -> None:
            self._pulse.phase = f"generating with version {version}: {num_done} of {num_rows} rows"
            if self._halt.is_set():
                raise Stopped("stopped while generating")
            if self._session.time_left_s(lease) <= 0:
                raise LeaseLost(f"{num_done} of {num_rows} rows were done at the deadline", still_open=True)

        finished = generate(self._engine, requests, on_step)
        num_tokens = sum(len(row.output_tokens) for row in finished)
        self._pulse.tokens_per_s = num_tokens / max(time.monotonic() - started_s, 1e-3)
        return self._conduct.table(make_table(lease, version, finished), lease)

    def _deliver(self, lease: Lease, table: RolloutTable) -> None:
        self._pulse.phase = "submitting"
        data = self._conduct.data(encode(table))
        self._state.keep(lease, table.policy_version, data)
        receipt = self._session.deliver(lease, data, policy_version=table.policy_version)
        self._delivered_s = time.monotonic()
        self._verdicts.follow(lease.lease_id)
        self._log.info(
            "submitted",
            lease=lease.lease_id,
            purpose=lease.purpose,
            version=receipt.policy_version,
            rows=len(table.rows),
            bytes=receipt.num_bytes,
            tokens_per_s=self._pulse.tokens_per_s,
            receipt=receipt.seq,
        )

    def _lose(self, lease: Lease, lost: LeaseLost) -> None:
        self._log.warning("the lease is lost", lease=lease.lease_id, reason=lost)
        self._open = None
        if lost.still_open:
            self._session.abandon(lease, str(lost))
        if self._engine.has_work:
            # Rows of the lost lease: a new engine is easier to trust than one that was told to forget.
            self._engine = self._new_engine()
        idle_s = time.monotonic() - self._delivered_s
        if idle_s >= self._config.deadline_s:
            raise DeadlinePassed(
                f"{idle_s:.0f} s without a single submission; the last lease was lost because {lost}. See that the relays "
                "can be reached from here, and that this machine is fast enough for the run's leases"
            )
        if self._halt.wait(AFTER_LOSS_S):
            raise Stopped("stopped after a lost lease")

    def _new_engine(self) -> Engine:
        engine = TorchEngine(
            device=self._config.device,
            compute_dtype=self._conduct.compute_dtype(self._spec.compute_dtype),
            max_rows=self._config.max_rows,
            proof=self._spec.proof,
        )
        return self._conduct.engine(engine)
