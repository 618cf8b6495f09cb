"""A worker that fetches ahead: what it holds, what it gives back, and what it does when the policy moves on."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import small_run as small
from small_run import CONFIG, SPEC, RunningWorker, SmallRun, eventually, small_run

from shoal.net.waiting import Stopped
from shoal.rollout.adversary.behaviour import Conduct
from shoal.rollout.engine.api import Request
from shoal.rollout.worker.errand import Errand
from shoal.rollout.worker.lease_supply import LEAD_MORE_S
from shoal.rollout.worker.session import Exit
from shoal.rollout.worker.utilisation import Doing, TimeUse
from shoal.rollout.worker.worker import Worker, WorkerConfig
from shoal.rollout.worker.worker_folder import open_state
from shoal.telemetry import Log
from shoal.wire.lease import Lease
from shoal.wire.rollouts import RolloutTable

LOG = Log("test")


@pytest.fixture
def trusting(tmp_path: Path) -> Iterator[SmallRun]:
    """A run that trusts a node after its first accepted submission, so that it may hold two leases from then on."""
    with small_run(tmp_path, CONFIG.model_copy(update={"trusted_after": 1})) as run:
        run.publish(0)
        run.serve_from_origin()
        run.start_validator()
        yield run


class Held(Conduct):
    """Keeps the device busy with one lease until it is let go, once another is waiting beside it."""

    def __init__(self, run: SmallRun) -> None:
        self._run, self.let_go, self.holding = run, threading.Event(), threading.Event()
        self.worker: Worker | None = None

    def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
        if self._run.accepted() and not self.let_go.is_set():
            self.have_next()
            self.holding.set()
            assert self.let_go.wait(60)
        return table

    def have_next(self) -> None:
        assert self.worker is not None
        supply = self.worker._supply
        assert supply is not None
        supply.order()
        eventually("the next lease is here", lambda: bool(supply._held))


class Running:
    """A worker in a thread, whose parts the test can see."""

    def __init__(self, run: SmallRun, folder: Path, conduct: Held) -> None:
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._config = WorkerConfig(coordinator=run.url, dir=folder, num_threads=1)
        self._conduct = conduct
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the worker did not end"

    def _run(self) -> None:
        with open_state(self._config.dir) as state:
            worker = Worker(self._config, state, self._conduct, stop=self.stop, log=LOG)
            self._conduct.worker = worker
            try:
                worker.startup()
                worker.main_loop()
            except Exception as error:  # noqa: BLE001 - handed to the test, which looks at it
                self.error = error
            finally:
                worker.shutdown()


def test_a_trusted_node_has_the_next_lease_before_the_last_is_done_and_gives_it_back_when_stopped(
    trusting: SmallRun, tmp_path: Path
) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60), "no lease was ever fetched ahead"
    running.stop.set()
    conduct.let_go.set()
    running.join()
    assert isinstance(running.error, Stopped)
    eventually("no lease is left open", lambda: trusting.stats().open_leases == 0)
    reasons = {event.body["detail"] for event in trusting.events("lease.void")}
    assert reasons <= {"the worker ends"}
    assert set(trusting.stats().submissions) <= {"accepted", "void.abandoned"}


def test_leaving_delivers_what_is_done_and_gives_back_what_was_not_begun(
    trusting: SmallRun, tmp_path: Path
) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    before = len(trusting.events("submission.received"))
    (tmp_path / "worker" / "leaving").touch()
    conduct.let_go.set()
    running.join()
    assert "left the run" in str(running.error)
    assert len(trusting.events("submission.received")) == before + 1
    (void,) = trusting.events("lease.void")
    assert void.body["detail"] == "its owner wants the machine"
    assert not (tmp_path / "worker" / "leaving").exists()


def test_a_pause_gives_back_what_was_not_begun_and_ends(trusting: SmallRun, tmp_path: Path) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    (tmp_path / "worker" / "paused").touch()
    conduct.let_go.set()
    eventually("nothing is held", lambda: trusting.stats().open_leases == 0)
    before = len(trusting.events("submission.received"))
    (tmp_path / "worker" / "paused").unlink()
    eventually("work goes on", lambda: len(trusting.events("submission.received")) > before)
    running.stop.set()
    running.join()
    # What was given back came again, with the same seed.
    (given_back, *_) = trusting.events("lease.void")
    units = [event.body["unit"] for event in trusting.events("lease.issued")]
    assert units.count(given_back.body["lease_id"]) == 2


def test_after_a_crash_both_leases_are_taken_up_again(trusting: SmallRun, tmp_path: Path) -> None:
    class PowerCut(Exception):
        pass

    class CrashesHoldingTwo(Held):
        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            if self._run.accepted():
                self.have_next()
                assert self.worker is not None
                assert self.worker._supply is not None
                self.worker._open = None  # a power cut gives nothing back
                self.worker._supply._held.clear()
                raise PowerCut
            return table

    running = Running(trusting, tmp_path / "worker", CrashesHoldingTwo(trusting))
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
    assert again.join() is Exit.STOPPED


def test_a_lease_whose_versions_went_stale_before_it_began_is_given_back(
    trusting: SmallRun, tmp_path: Path
) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    assert conduct.worker is not None
    conduct.worker._shelf.heard_of([9])  # as if the watch had heard of it; max_lag is 2
    conduct.let_go.set()
    eventually("it was given back", lambda: len(trusting.events("lease.void")) > 0)
    running.stop.set()
    running.join()
    assert "version 0 is 9 behind version 9" in trusting.events("lease.void")[0].body["detail"]


def test_new_weights_are_here_before_a_lease_names_them(trusting: SmallRun, tmp_path: Path) -> None:
    class BusyUntilThen(Held):
        """The device is busy with version 0 until version 1 is here."""

        def requests(self, requests: Sequence[Request], lease: Lease) -> Sequence[Request]:
            if self._run.accepted() and not self.let_go.is_set():
                self._run.publish(1)
                eventually("version 1 is here", lambda: (tmp_path / "worker/versions/v1").is_dir())
                self.let_go.set()
            return requests

        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            return table

    conduct = BusyUntilThen(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    eventually(
        "it is used",
        lambda: any(event.body["policy_version"] == 1 for event in trusting.events("submission.received")),
    )
    running.stop.set()
    running.join()
    assert conduct.let_go.is_set()
    assert isinstance(running.error, Stopped)


def test_an_older_version_serves_while_the_newest_is_on_its_way(tmp_path: Path) -> None:
    with small_run(tmp_path) as run:
        run.publish(0)
        run.serve_from_origin(claims=(0, 1))
        worker = RunningWorker(run)
        eventually("work with version 0", lambda: bool(run.events("submission.received")))
        run.publish(1, served=False)
        before = len(run.events("submission.received"))
        # Half of a lease's time, which is what the newest would be waited for, is a minute here.
        eventually("work goes on", lambda: len(run.events("submission.received")) >= before + 4)
        worker.stop.set()
        assert worker.join() is Exit.STOPPED
        assert {event.body["policy_version"] for event in run.events("submission.received")} == {0}


@pytest.fixture
def long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallRun]:
    """Of more versions than relays keep. A lease has ten minutes, of which half are for a fetch: longer than a test waits."""
    monkeypatch.setattr(small, "SPEC", SPEC.model_copy(update={"last_version": 50}))
    with small_run(tmp_path, CONFIG.model_copy(update={"lease_s": 600.0})) as run:
        yield run


def test_a_lease_from_before_a_crash_whose_versions_are_long_gone_is_given_back_at_once(
    long_run: SmallRun, tmp_path: Path
) -> None:
    class PowerCut(Exception):
        pass

    class Crashes(Held):
        def table(self, table: RolloutTable, lease: Lease) -> RolloutTable:
            assert self.worker is not None
            self.worker._open = None
            raise PowerCut

    long_run.publish(0)
    long_run.serve_from_origin()
    running = Running(long_run, tmp_path / "worker", Crashes(long_run))
    running.join()
    assert isinstance(running.error, PowerCut)
    shutil.rmtree(tmp_path / "worker" / "versions")  # it had worked with an older one that is named no more
    for version in range(1, 10):
        long_run.publish(version)
    again = RunningWorker(long_run)
    eventually("work goes on", lambda: bool(long_run.events("submission.received")))
    again.stop.set()
    assert again.join() is Exit.STOPPED
    (void, *_) = long_run.events("lease.void")
    assert "version 0 is 9 behind version 9" in void.body["detail"]


def test_a_version_that_relays_drop_while_it_is_fetched_is_given_up(
    long_run: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    long_run.publish(0, served=False)
    long_run.serve_from_origin(claims=tuple(range(20)))
    with caplog.at_level("INFO", logger="shoal.worker"):
        worker = RunningWorker(long_run)
        eventually("it is looked for", lambda: "fetching version 0" in caplog.text)
        for version in range(1, 10):
            long_run.publish(version)
        eventually("work goes on", lambda: bool(long_run.events("submission.received")))
        worker.stop.set()
        assert worker.join() is Exit.STOPPED
    (void, *_) = long_run.events("lease.void")
    assert "no relay holds version 0 any more: version" in void.body["detail"]


def test_what_was_fetched_may_be_deleted_at_any_time(trusting: SmallRun, tmp_path: Path) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    trusting.publish(1)
    eventually("version 1 is here", lambda: (tmp_path / "worker/versions/v1").is_dir())
    for folder in (tmp_path / "worker/versions").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    conduct.let_go.set()
    eventually(
        "version 1 is used all the same",
        lambda: any(event.body["policy_version"] == 1 for event in trusting.events("submission.received")),
    )
    running.stop.set()
    running.join()
    assert isinstance(running.error, Stopped)


def test_what_a_lease_needs_ends_the_fetch_of_another(long_run: SmallRun, tmp_path: Path) -> None:
    """A version that nobody has is on its way ahead of time, for ten minutes at most: a lease does not wait for that."""
    long_run.publish(0)
    long_run.serve_from_origin(claims=(0, 1, 2, 3))
    worker = RunningWorker(long_run)
    eventually("work with version 0", lambda: bool(long_run.events("submission.received")))
    long_run.publish(1, served=False)
    eventually("version 1 is looked for", lambda: (tmp_path / "worker/versions/v1.partial").is_dir())
    long_run.publish(2)
    long_run.publish(3)
    eventually(
        "version 3 is used",
        lambda: any(event.body["policy_version"] == 3 for event in long_run.events("submission.received")),
    )
    worker.stop.set()
    assert worker.join() is Exit.STOPPED


def test_an_error_that_ends_the_watch_ends_the_worker(trusting: SmallRun, tmp_path: Path) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    assert conduct.worker is not None

    def broken(versions: object) -> None:
        raise RuntimeError("the watch broke")

    conduct.worker._shelf.heard_of = broken  # type: ignore[method-assign]
    supply = conduct.worker._supply
    assert supply is not None
    assert supply._watch is not None
    eventually("the watch is over", lambda: supply._watch is not None and supply._watch.wait(0.0))
    conduct.let_go.set()
    running.join()
    assert "the watch broke" in str(running.error)


# -- parts --------------------------------------------------------------------------------------------------


def test_an_errand_brings_what_it_found_or_raises_what_it_met() -> None:
    found = Errand("one", lambda: 7)
    assert found.wait(30)
    assert found.result() == 7

    def fail() -> int:
        raise ValueError("it went wrong")

    failed = Errand("two", fail)
    assert failed.wait(30)
    with pytest.raises(ValueError, match="it went wrong"):
        failed.result()


def test_time_use_counts_from_the_first_row_and_leaves_pauses_out() -> None:
    now_s = 100.0
    use = TimeUse(clock=lambda: now_s)
    assert (use.busy_share, use.in_words()) == (0.0, "nothing generated")
    use.begin(Doing.WAITING)  # still starting
    steps = [
        (130.0, Doing.GENERATING),
        (220.0, Doing.WAITING),
        (225.0, Doing.PAUSED),
        (400.0, Doing.SWAPPING),
    ]
    for at_s, doing in steps:
        now_s = at_s
        use.begin(doing)
    now_s = 405.0
    assert use.spent_s()[Doing.STARTING] == 30
    assert use.busy_share == 0.9
    assert use.in_words() == "generating 90.0%, waiting for a lease 5.0%, swapping weights 5.0%"


@pytest.mark.parametrize(
    ("lead_s", "spent_s", "done", "due"),
    [
        (1.0, 0.0, 0, False),  # of a lease that should take 10 s
        (1.0, 8.9, 0, False),
        (1.0, 9.0, 0, True),  # as much is left as it takes to have the next
        (1.0, 4.0, 18, True),  # faster than thought: by its rows 0.4 s are left
        (30.0, 4.9, 5, False),  # never before half of it is done
        (30.0, 5.0, 5, True),
    ],
)
def test_the_next_lease_is_ordered_just_in_time(lead_s: float, spent_s: float, done: int, due: bool) -> None:
    worker = SimpleNamespace(_s_per_row=0.5, _supply=SimpleNamespace(lead_s=lead_s))
    assert Worker._is_time_for_next(cast(Worker, worker), spent_s, done, 20) is due


def test_how_long_an_order_takes_is_measured(trusting: SmallRun, tmp_path: Path) -> None:
    conduct = Held(trusting)
    running = Running(trusting, tmp_path / "worker", conduct)
    assert conduct.holding.wait(60)
    assert conduct.worker is not None
    supply = conduct.worker._supply
    assert supply is not None
    assert LEAD_MORE_S < supply.lead_s < 120
    running.stop.set()
    conduct.let_go.set()
    running.join()
