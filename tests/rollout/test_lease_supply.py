"""A worker that fetches ahead: what it holds, what it gives back, and what it does when new versions appear."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from small_run import CONFIG, SPEC, RunningWorker, SmallRun, eventually, small_run

from shoal.background import BackgroundTask
from shoal.net.waiting import Stopped
from shoal.rollout.engine.api import Behaviour, GenerationRequest
from shoal.rollout.worker.heartbeat import Activity, Utilisation
from shoal.rollout.worker.lease_supply import LEAD_EXTRA_S
from shoal.rollout.worker.session import WorkerExit
from shoal.rollout.worker.worker import Worker, WorkerConfig, run_worker, start_worker
from shoal.rollout.worker.worker_folder import open_worker_folder
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable

LOG = Log("test")


@pytest.fixture
def trusting(tmp_path: Path) -> Iterator[SmallRun]:
    """A run that trusts a node after one accepted submission, so that the node may hold two leases from then on."""
    with small_run(tmp_path, CONFIG.model_copy(update={"trusted_after": 1})) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        yield run


class HoldsLease(Behaviour):
    """Waits with one lease done and the next one ready, until the test sets `proceed`."""

    def __init__(self, run: SmallRun) -> None:
        self._run, self.proceed, self.holding = run, threading.Event(), threading.Event()
        self.worker: Worker | None = None

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        if self._run.accepted() and not self.proceed.is_set():
            self.get_next_lease()
            self.holding.set()
            assert self.proceed.wait(60)
        return table

    def get_next_lease(self) -> None:
        assert self.worker is not None
        supply, uploads = self.worker._supply, self.worker._uploader._deliveries
        eventually("earlier uploads have ended", lambda: all(upload.done for upload in uploads))
        supply.order()
        eventually("the next lease is here", lambda: bool(supply._held))


class VisibleWorker:
    """A worker in a thread, whose parts the test can access."""

    def __init__(self, run: SmallRun, folder: Path, behaviour: HoldsLease) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._config = WorkerConfig(coordinator=run.url, dir=folder, num_threads=1)
        self._behaviour = behaviour
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the worker did not end"

    def _run(self) -> None:
        with open_worker_folder(self._config.dir) as folder:
            worker = start_worker(self._config, folder, self._behaviour, stop=self.stop, log=LOG)
            self._behaviour.worker = worker
            try:
                worker.main_loop()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.error = error
            finally:
                worker.shutdown()


def test_a_stopped_worker_gives_back_the_lease_that_it_fetched_ahead(
    trusting: SmallRun, tmp_path: Path
) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60), "no lease was ever fetched ahead"
    running.stop.set()
    behaviour.proceed.set()
    running.join()
    assert isinstance(running.error, Stopped)
    eventually("no lease is left open", lambda: trusting.stats().open_leases == 0)
    reasons = {event.body["detail"] for event in trusting.events("lease.void")}
    assert reasons <= {"the worker ends"}
    assert set(trusting.stats().submissions) <= {"accepted", "void.abandoned"}


def test_leaving_delivers_finished_work_and_gives_back_the_next_lease(
    trusting: SmallRun, tmp_path: Path
) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    before = len(trusting.events("submission.received"))
    (tmp_path / "worker" / "leaving").touch()
    behaviour.proceed.set()
    running.join()
    assert "left the run" in str(running.error)
    assert len(trusting.events("submission.received")) == before + 1
    (void,) = trusting.events("lease.void")
    assert void.body["detail"] == "its owner pauses or leaves"
    assert not (tmp_path / "worker" / "leaving").exists()


def test_a_pause_gives_back_the_next_lease_and_can_end(trusting: SmallRun, tmp_path: Path) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    (tmp_path / "worker" / "paused").touch()
    behaviour.proceed.set()
    eventually("nothing is held", lambda: trusting.stats().open_leases == 0)
    before = len(trusting.events("submission.received"))
    (tmp_path / "worker" / "paused").unlink()
    eventually("work goes on", lambda: len(trusting.events("submission.received")) > before)
    running.stop.set()
    running.join()
    # The returned lease is issued again, with the same seed.
    (given_back, *_) = trusting.events("lease.void")
    units = [event.body["unit"] for event in trusting.events("lease.issued")]
    assert units.count(given_back.body["lease_id"]) == 2


def test_after_a_crash_both_leases_are_worked_on_again(trusting: SmallRun, tmp_path: Path) -> None:
    class PowerCut(Exception):
        pass

    class CrashesHoldingTwo(HoldsLease):
        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            if self._run.accepted():
                self.get_next_lease()
                assert self.worker is not None
                self.worker._lease = None  # a power cut gives nothing back
                self.worker._supply._held.clear()
                raise PowerCut
            return table

    running = VisibleWorker(trusting, tmp_path / "worker", CrashesHoldingTwo(trusting))
    running.join()
    assert isinstance(running.error, PowerCut)
    ended = {event.body["lease_id"] for event in trusting.events("submission.received")}
    left_open = {event.body["lease_id"] for event in trusting.events("lease.issued")} - ended
    assert len(left_open) == 2
    again = RunningWorker(trusting)
    eventually(
        "both are delivered",
        lambda: left_open <= {event.body["lease_id"] for event in trusting.events("submission.received")},
    )
    again.stop.set()
    assert again.join() is WorkerExit.STOPPED


def test_a_lease_whose_versions_became_stale_before_it_began_is_given_back(
    trusting: SmallRun, tmp_path: Path
) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    assert behaviour.worker is not None
    behaviour.worker._versions.note_published([9])  # max_lag is 2
    behaviour.proceed.set()
    eventually("it was given back", lambda: len(trusting.events("lease.void")) > 0)
    running.stop.set()
    running.join()
    assert "version 0 is 9 behind version 9" in trusting.events("lease.void")[0].body["detail"]


def test_new_weights_are_fetched_before_a_lease_names_them(trusting: SmallRun, tmp_path: Path) -> None:
    class BusyUntilFetched(HoldsLease):
        """Keeps the device busy with version 0 until version 1 is here."""

        def requests(
            self, requests: Sequence[GenerationRequest], lease: Lease
        ) -> Sequence[GenerationRequest]:
            if self._run.accepted() and not self.proceed.is_set():
                self._run.publish(1)
                eventually("version 1 is here", lambda: (tmp_path / "worker/versions/v1").is_dir())
                self.proceed.set()
            return requests

        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            return table

    behaviour = BusyUntilFetched(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    eventually(
        "it is used",
        lambda: any(event.body["policy_version"] == 1 for event in trusting.events("submission.received")),
    )
    running.stop.set()
    running.join()
    assert behaviour.proceed.is_set()
    assert isinstance(running.error, Stopped)


def test_an_older_version_is_used_while_the_newest_is_fetched(tmp_path: Path) -> None:
    with small_run(tmp_path) as run:
        run.publish(0)
        run.serve_from_origin(claims=(0, 1))
        worker = RunningWorker(run)
        eventually("work with version 0", lambda: bool(run.events("submission.received")))
        run.publish(1, served=False)
        before = len(run.events("submission.received"))
        # A wait for the newest would take half of the lease's time, which is a minute here.
        eventually("work goes on", lambda: len(run.events("submission.received")) >= before + 4)
        worker.stop.set()
        assert worker.join() is WorkerExit.STOPPED
        assert {event.body["policy_version"] for event in run.events("submission.received")} == {0}


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[SmallRun]:
    """A run with more versions than relays keep. A lease has ten minutes, half of them for a fetch: longer than a test waits."""
    spec = SPEC.model_copy(update={"last_version": 50})
    with small_run(tmp_path, CONFIG.model_copy(update={"lease_s": 600.0}), spec=spec) as run:
        yield run


def test_after_a_crash_a_lease_of_dropped_versions_is_given_back_at_once(
    long_run: SmallRun, tmp_path: Path
) -> None:
    class PowerCut(Exception):
        pass

    class Crashes(HoldsLease):
        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            assert self.worker is not None
            self.worker._lease = None
            raise PowerCut

    long_run.publish(0)
    long_run.serve_from_origin()
    running = VisibleWorker(long_run, tmp_path / "worker", Crashes(long_run))
    running.join()
    assert isinstance(running.error, PowerCut)
    shutil.rmtree(
        tmp_path / "worker" / "versions"
    )  # as if it had worked with an older version that no lease names
    for version in range(1, 10):
        long_run.publish(version)
    again = RunningWorker(long_run)
    eventually("work goes on", lambda: bool(long_run.events("submission.received")))
    again.stop.set()
    assert again.join() is WorkerExit.STOPPED
    (void, *_) = long_run.events("lease.void")
    assert "version 0 is 9 behind version 9" in void.body["detail"]


def test_the_fetch_of_a_version_that_relays_drop_is_stopped(
    long_run: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    long_run.publish(0, served=False)
    long_run.serve_from_origin(claims=tuple(range(20)))
    with caplog.at_level("INFO", logger="shoal.worker"):
        worker = RunningWorker(long_run)
        eventually("the fetch begins", lambda: "fetching version 0" in caplog.text)
        for version in range(1, 10):
            long_run.publish(version)
        eventually("work goes on", lambda: bool(long_run.events("submission.received")))
        worker.stop.set()
        assert worker.join() is WorkerExit.STOPPED
    (void, *_) = long_run.events("lease.void")
    assert "no relay holds version 0 any more: version" in void.body["detail"]


def test_fetched_versions_may_be_deleted_at_any_time(trusting: SmallRun, tmp_path: Path) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    trusting.publish(1)
    eventually("version 1 is here", lambda: (tmp_path / "worker/versions/v1").is_dir())
    for folder in (tmp_path / "worker/versions").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    behaviour.proceed.set()
    eventually(
        "version 1 is used all the same",
        lambda: any(event.body["policy_version"] == 1 for event in trusting.events("submission.received")),
    )
    running.stop.set()
    running.join()
    assert isinstance(running.error, Stopped)


def test_a_lease_ends_the_fetch_of_a_version_that_it_does_not_need(
    long_run: SmallRun, tmp_path: Path
) -> None:
    """The fetch ahead of a version that cannot be fetched may take ten minutes; a lease does not wait for it."""
    long_run.publish(0)
    long_run.serve_from_origin(claims=(0, 1, 2, 3))
    long_run.start_validator()  # a new node may have few submissions without a verdict
    worker = RunningWorker(long_run)
    eventually("work with version 0", lambda: long_run.accepted() > 0)
    long_run.publish(1, served=False)
    eventually("the fetch of version 1 begins", lambda: (tmp_path / "worker/versions/v1.partial").is_dir())
    long_run.publish(2)
    long_run.publish(3)
    eventually(
        "version 3 is used",
        lambda: any(event.body["policy_version"] == 3 for event in long_run.events("submission.received")),
    )
    worker.stop.set()
    assert worker.join() is WorkerExit.STOPPED


def test_an_error_in_the_version_watch_ends_the_worker(trusting: SmallRun, tmp_path: Path) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    assert behaviour.worker is not None

    def broken(versions: object) -> None:
        raise RuntimeError("the watch broke")

    behaviour.worker._versions.note_published = broken  # type: ignore[method-assign]
    watch = behaviour.worker._supply._watch
    assert watch is not None
    eventually("the watch has ended", lambda: watch.done)
    behaviour.proceed.set()
    running.join()
    assert "the watch broke" in str(running.error)


def test_two_leases_are_generated_while_one_is_uploaded(trusting: SmallRun, tmp_path: Path) -> None:
    """One upload, one lease generated and one fetched ahead: a node that has earned three leases never waits for an upload."""

    class HoldsUpload(Behaviour):
        def __init__(self) -> None:
            self.holding, self.num_since, self.two_more = False, 0, threading.Event()
            self.lock = threading.Lock()

        def data(self, data: bytes) -> bytes:
            with self.lock:  # two uploads may run at once, and only one is to be held
                hold = not self.holding and trusting.accepted() >= 2
                self.holding |= hold
            if hold:
                assert self.two_more.wait(60), (
                    f"only {self.num_since} leases were generated during the upload"
                )
            return data

        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            self.num_since += self.holding
            if self.num_since == 2:
                self.two_more.set()
            return table

    behaviour, stop = HoldsUpload(), threading.Event()
    config = WorkerConfig(coordinator=trusting.url, dir=tmp_path / "worker", num_threads=1)
    running = BackgroundTask("worker", lambda: run_worker(config, stop=stop, behaviour=behaviour))
    eventually("the held upload goes on", behaviour.two_more.is_set)
    stop.set()
    assert running.wait(60)
    assert running.result() is WorkerExit.STOPPED


# -- parts --------------------------------------------------------------------------------------------------


def test_utilisation_counts_from_the_first_row_and_without_pauses() -> None:
    now_s = 100.0
    use = Utilisation(clock=lambda: now_s)
    assert (use.busy_share, use.describe()) == (0.0, "nothing generated")
    use.begin(Activity.WAITING)  # still starting
    steps = [
        (130.0, Activity.GENERATING),
        (220.0, Activity.WAITING),
        (225.0, Activity.PAUSED),
        (400.0, Activity.SWAPPING),
    ]
    for at_s, doing in steps:
        now_s = at_s
        use.begin(doing)
    now_s = 405.0
    assert use.spent_s()[Activity.STARTING] == 30
    assert use.busy_share == 0.9
    assert use.describe() == "generating 90.0%, waiting for a lease 5.0%, swapping weights 5.0%"


def test_time_without_work_does_not_count_against_the_worker() -> None:
    now_s = 0.0
    use = Utilisation(clock=lambda: now_s)
    for at_s, doing in [(0.0, Activity.GENERATING), (19.0, Activity.LIMITED), (20.0, Activity.WITHOUT_WORK)]:
        now_s = at_s
        use.begin(doing)
    now_s = 100.0
    assert use.busy_share == 0.19
    assert use.busy_share_of_work == 0.95
    assert use.describe() == "generating 19.0%, without work 80.0%, holding all leases it may 1.0%"


@pytest.mark.parametrize(
    ("lead_s", "spent_s", "done", "due"),
    [
        (1.0, 0.0, 0, False),  # a lease that should take 10 s
        (1.0, 8.9, 0, False),
        (1.0, 9.0, 0, True),  # the rest takes as long as the next search
        (1.0, 4.0, 18, True),  # faster than expected: by its rows 0.4 s are left
        (30.0, 4.9, 5, False),  # never before half of the work is done
        (30.0, 5.0, 5, True),
    ],
)
def test_the_next_lease_is_ordered_just_in_time(lead_s: float, spent_s: float, done: int, due: bool) -> None:
    worker = SimpleNamespace(_seconds_per_row=0.5, _supply=SimpleNamespace(lead_s=lead_s))
    assert Worker._is_time_to_order(cast(Worker, worker), spent_s, done, 20) is due


def test_the_time_of_a_search_is_measured(trusting: SmallRun, tmp_path: Path) -> None:
    behaviour = HoldsLease(trusting)
    running = VisibleWorker(trusting, tmp_path / "worker", behaviour)
    assert behaviour.holding.wait(60)
    assert behaviour.worker is not None
    supply = behaviour.worker._supply
    assert LEAD_EXTRA_S < supply.lead_s < 120
    running.stop.set()
    behaviour.proceed.set()
    running.join()
