"""The worker's process.

    supply     lease ──▶ weights ──▶ lease ──▶ weights ──▶ ...                      each in a thread of its own
                   ╲                     ╲
    worker          swap, generate ──────▶ swap, generate ──────▶ ...               the device's time: nobody waits here
                                   ╲                      ╲
    courier                         upload, submit, receipt ...                     verdicts are asked for, one a round

It dials out only, and keeps nothing that it could not lose: after a crash the coordinator gives the same leases again,
and the same seeds give the same rows.
"""

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from shoal.net.http_client import SignedClient
from shoal.net.waiting import Stopped
from shoal.rollout.adversary.behaviour import Conduct
from shoal.rollout.adversary.lies import make_conduct
from shoal.rollout.engine.api import Engine
from shoal.rollout.engine.factory import EngineName, make_engine
from shoal.rollout.worker.capabilities import capabilities
from shoal.rollout.worker.errand import Errand
from shoal.rollout.worker.heartbeat import Halt, Heart
from shoal.rollout.worker.lease_supply import AFTER_LOSS_S, Supply
from shoal.rollout.worker.losses import Losses
from shoal.rollout.worker.session import Exit, LeaseLost, Left, Session, join
from shoal.rollout.worker.submission import generate, make_requests, make_table
from shoal.rollout.worker.uploader import Courier
from shoal.rollout.worker.utilisation import Doing, TimeUse
from shoal.rollout.worker.version_cache import PolicyShelf
from shoal.rollout.worker.worker_folder import State, open_state
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable

GIVE_BACK_S = 3.0
"""How long a worker that ends takes to give its leases back."""
PAUSE_LOOK_S = 1.0
SAY_S = 0.05
"""Between two notes for the heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    coordinator: str
    """URL."""
    dir: Path
    """Holds the node's key and the versions it fetched; one worker at a time."""
    engine: EngineName = "torch"
    device: str = "cpu"
    tensor_parallel: int = 1
    """GPUs that share the model; above 1 for vLLM only."""
    max_rows: int = 64
    """Rows decoded at once. More is faster until memory is full."""
    num_threads: int = 0
    """For torch; 0 leaves torch's own choice."""
    deadline_s: float = 900.0
    """Of each wait for the coordinator, and of the time without a single submission."""
    prefetch: bool = True
    """Have the next lease and weights ready, and send the last work in, while the device generates."""
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
        self._client, self._heart_client = (self._new_client(self._halt) for _ in range(2))
        self._losses = Losses(config.deadline_s, log)
        self._heart: Heart | None = None
        self._open: Lease | None = None
        self._supply: Supply | None = None
        self._has_left = False
        self._s_per_row = 0.0
        self.time_use = TimeUse()

    def startup(self) -> None:
        """Join the run, and be seen alive."""
        if self._stop.is_set():  # torch takes its time to be imported
            raise Stopped("stopped before joining")
        self._log.info("node", id=self._state.key.public, coordinator=self._config.coordinator)
        self._client.add_urls(self._state.entry_points())
        brings = capabilities(self._config.device)
        terms = join(
            self._client, self._state, brings=brings, deadline_s=self._config.deadline_s, log=self._log
        )
        self._state.remember_entry_points(terms.info.entry_points)
        self._terms, self._spec = terms, terms.info.spec
        for client in (self._client, self._heart_client):
            self._tell_ways(client)
        self._session = self._new_session(self._client)
        self._shelf = PolicyShelf(self._state, self._session, max_lag=self._spec.max_lag, log=self._log)
        self._courier = Courier(
            self._session, self._state, self._conduct, self._losses, on_end=self._on_end, log=self._log
        )
        self._engine = self._new_engine()
        self._heart = Heart(self._heart_client, terms, halt=self._halt, log=self._log)
        self._pulse = self._heart.pulse
        self._heart.start()

    def main_loop(self) -> NoReturn:
        """Ends by Left, by Stopped, or by an error."""
        try:
            while True:
                self._heed_its_owner()
                self._open = self._next_lease()
                self._work(self._open)
                self._open = None
        except Left:
            self._has_left = True  # there is nobody to give anything back to
            raise
        except Stopped:
            self._raise_what_the_heart_heard()
            raise

    def shutdown(self) -> None:
        """Give back what is open and let what is done arrive, but never hang on it; then fall silent."""
        if self.time_use.busy_share:
            self._log.info("time since the first row", spent=self.time_use.in_words())
        give_up_s = time.monotonic() + GIVE_BACK_S
        giving = Errand("giving back", self._give_back)
        if self._supply is not None:
            reason = None if self._has_left else "the worker ends"
            self._supply.close(give_up_s - time.monotonic(), give_back=reason)
            self._courier.close(max(0.0, give_up_s - time.monotonic()))
        giving.wait(max(0.0, give_up_s - time.monotonic()))
        if self._heart is not None:
            self._heart.close()
        self._client.close()
        self._heart_client.close()

    def _give_back(self) -> None:
        if self._open is not None and not self._has_left:
            self._session.abandon(self._open, "the worker ends")

    # -- between two leases --------------------------------------------------------------------------------

    def _heed_its_owner(self) -> None:
        """`shoal pause` and `shoal leave` speak by files in the folder, between two leases."""
        if not (self._state.paused() or self._state.leaving()):
            return
        self._stop_supply("its owner wants the machine")
        self._finish_deliveries()
        while self._state.paused() and not self._state.leaving():
            self._pulse.phase = "paused by its owner"
            self.time_use.begin(Doing.PAUSED)
            self._losses.good()
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
            self._has_left = True
            if self._heart.left.exit is Exit.FINISHED:
                self._courier.close(GIVE_BACK_S)
                self._courier.verdicts.ask_all()
            raise self._heart.left from None
        if not self._stop.is_set():
            raise RuntimeError("the heartbeat thread ended by an error; its traceback is above") from None

    def _next_lease(self) -> Lease:
        if not self._config.prefetch:
            self._finish_deliveries()
        if self._supply is None:
            self._supply = self._new_supply()
        self.time_use.begin(Doing.WAITING)
        return self._supply.take(self._on_wait)

    def _on_wait(self, doing: Doing) -> None:
        self._pulse.phase = doing.value
        self.time_use.begin(doing)
        if self._halt.is_set():
            raise Stopped(f"stopped while {doing.value}")

    def _finish_deliveries(self) -> None:
        self._courier.finish(lambda: self._on_wait(Doing.DELIVERING))

    def _on_end(self, lease: Lease, delivered: bool) -> None:
        """In the courier's thread."""
        if self._supply is not None:
            self._supply.ended(lease, delivered=delivered)

    def _new_supply(self) -> Supply:
        client = self._new_client(Halt(self._halt))
        self._tell_ways(client)
        return Supply(
            self._new_session(client),
            self._shelf,
            self._losses,
            ahead=self._config.prefetch,
            deadline_s=self._config.deadline_s,
            log=self._log,
        )

    def _stop_supply(self, reason: str) -> None:
        if self._supply is not None:
            self._supply.close(GIVE_BACK_S, give_back=reason)
            self._supply = None

    def _new_client(self, stop: threading.Event) -> SignedClient:
        return SignedClient(self._config.coordinator, self._state.key, log=self._log, stop=stop)

    def _tell_ways(self, client: SignedClient) -> None:
        client.add_urls((self._config.coordinator, *self._terms.info.entry_points))

    def _new_session(self, client: SignedClient) -> Session:
        return Session(client, self._terms, deadline_s=self._config.deadline_s, log=self._log)

    # -- on a lease ----------------------------------------------------------------------------------------

    def _work(self, lease: Lease) -> None:
        try:
            version = self._load(lease)
            table = self._generate(lease, version)
            self._finish_deliveries()
            self._courier.send(
                lease,
                table,
                tokens_per_s=self._pulse.tokens_per_s,
                busy=round(self.time_use.busy_share, 4),
            )
        except LeaseLost as lost:
            self._lose(lease, lost)

    def _load(self, lease: Lease) -> int:
        policy = self._shelf.best(lease)
        if self._engine.policy_version != policy.version:
            self._pulse.phase = f"loading version {policy.version}"
            self.time_use.begin(Doing.SWAPPING)
            self._shelf.load(policy, self._engine)
        self._pulse.policy_version = policy.version
        return policy.version

    def _generate(self, lease: Lease, version: int) -> RolloutTable:
        requests = self._conduct.requests(make_requests(lease, self._engine.tokenizer), lease)
        started_s = time.monotonic()
        self.time_use.begin(Doing.GENERATING)
        said_s, ordered = 0.0, False

        def on_step(num_done: int, num_rows: int) -> None:
            nonlocal said_s, ordered
            if self._halt.is_set():
                raise Stopped("stopped while generating")
            if self._session.time_left_s(lease) <= 0:
                raise LeaseLost(f"{num_done} of {num_rows} rows were done at the deadline", still_open=True)
            now_s = time.monotonic()
            if now_s - said_s >= SAY_S:
                said_s = now_s
                self._say_progress(version, num_done, num_rows)
            if not ordered and self._is_time_for_next(now_s - started_s, num_done, num_rows):
                ordered = True
                self._order_next()

        finished = generate(self._engine, requests, on_step)
        took_s = max(time.monotonic() - started_s, 1e-3)
        self.time_use.begin(Doing.DELIVERING)
        self._s_per_row = took_s / max(1, len(finished))
        self._pulse.tokens_per_s = sum(len(row.output_tokens) for row in finished) / took_s
        return self._conduct.table(make_table(lease, version, finished), lease)

    def _say_progress(self, version: int, num_done: int, num_rows: int) -> None:
        busy = self.time_use.busy_share
        self._pulse.phase = (
            f"generating with version {version}: {num_done} of {num_rows} rows; busy {busy:.1%} of the time"
        )

    def _is_time_for_next(self, spent_s: float, num_done: int, num_rows: int) -> bool:
        """Early enough to have it in time, half-way at most; late enough that its versions are not old when it begins."""
        whole_s = self._s_per_row * num_rows
        rest_s = whole_s - spent_s
        if num_done:
            rest_s = min(rest_s, spent_s * (num_rows - num_done) / num_done)
        lead_s = self._supply.lead_s if self._supply is not None else math.inf
        return rest_s <= min(lead_s, whole_s / 2)

    def _order_next(self) -> None:
        wanted = not (self._state.paused() or self._state.leaving())
        if self._config.prefetch and wanted and self._supply is not None:
            self._supply.order()

    def _lose(self, lease: Lease, lost: LeaseLost) -> None:
        self._open = None
        if self._engine.has_work:
            # Rows of the lost lease: a new engine is easier to trust than one that was told to forget.
            self._engine = self._new_engine()
        try:
            self._losses.lost(lease, lost, self._session)
        finally:
            self._on_end(lease, False)
        if self._halt.wait(AFTER_LOSS_S):
            raise Stopped("stopped after a lost lease")

    def _new_engine(self) -> Engine:
        config = self._config
        engine = make_engine(
            config.engine,
            compute_dtype=self._conduct.compute_dtype(self._spec.compute_dtype),
            proof=self._spec.proof,
            max_rows=config.max_rows,
            device=config.device,
            tensor_parallel=config.tensor_parallel,
        )
        return self._conduct.engine(engine)
