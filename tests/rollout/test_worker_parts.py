"""Parts of the worker, each by itself."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shoal.background import BackgroundTask
from shoal.model.tokenizer import CharTokenizer
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, LinkedEvent, Stopped
from shoal.rollout.engine.api import make_requests
from shoal.rollout.worker import version_cache
from shoal.rollout.worker.lease_supply import LeaseSupply
from shoal.rollout.worker.session import CoordinatorSession, JoinedRun, LeaseLost, ServerClock
from shoal.rollout.worker.uploader import MAX_FOLLOWED, VerdictLog
from shoal.rollout.worker.version_cache import VersionCache
from shoal.rollout.worker.worker_folder import PinnedRun, WorkerFolder, open_worker_folder
from shoal.telemetry import Log
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import LeaseStatus, ProblemDetails, Upload
from shoal.wire.run_spec import ProofSpec, Sampling, TaskSpec
from shoal.wire.seeded_draw import sample_seed

LEASE = Lease(
    lease_id="0123456789abcdef" * 2,
    run="demo",
    node="ab" * 32,
    purpose="train",
    epoch=1,
    seed="cd" * 32,
    chunk=0,
    policies=(PolicyRef(version=2, weights_digest="ef" * 32),),
    relays=(),
    task=TaskSpec(name="sort", options={"length": 2}),
    prompts=("21=", "43="),
    sampling=Sampling(temperature=0.5, max_new_tokens=7, samples_per_prompt=3),
    proof=ProofSpec(),
    max_bytes=100_000,
    issued_at_s=10.0,
    deadline_s=70.0,
)


# -- requests -----------------------------------------------------------------------------------------------


def test_a_lease_becomes_one_request_per_sample_with_its_own_seed() -> None:
    tokenizer = CharTokenizer("0123456789=")
    requests = make_requests(LEASE, tokenizer)
    assert [(r.prompt_index, r.sample_index) for r in requests] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    for request in requests:
        assert request.prompt_tokens == tuple(
            tokenizer.encode_prompt(LEASE.prompts[request.prompt_index], chat=False)
        )
        assert request.sample_seed == sample_seed(LEASE.seed, request.prompt_index, request.sample_index)
        assert (request.max_new_tokens, request.temperature) == (7, 0.5)


# -- verdicts -----------------------------------------------------------------------------------------------


class FakeSession:
    """Answers with the code of each lease, by its id; None means that there is no verdict yet."""

    def __init__(self, codes: dict[str, str | None]) -> None:
        self.codes, self.asked = codes, 0

    def ask_status(self, lease_id: str) -> LeaseStatus | None:
        self.asked += 1
        code = self.codes.get(lease_id)
        credit = 40 if code == "accepted" else 0
        state = "checking" if code is None else "ended"
        return LeaseStatus(lease_id=lease_id, state=state, code=code, detail="row (0, 1)", credit=credit)


def follow(codes: dict[str, str | None]) -> tuple[VerdictLog, FakeSession]:
    answers = FakeSession(codes)
    verdicts = VerdictLog(answers, Log("worker"))  # type: ignore[arg-type]
    for lease_id in codes:
        verdicts.follow(lease_id)
    return verdicts, answers


def test_verdicts_are_logged_in_words(caplog: pytest.LogCaptureFixture) -> None:
    verdicts, _ = follow({"0" * 32: "accepted", "1" * 32: "reject.early_stop", "2" * 32: "void.stale"})
    with caplog.at_level(logging.INFO, logger="shoal.worker"):
        verdicts.ask_all()
    accepted, refused, void = caplog.messages
    assert "accepted, credit +40" in accepted
    assert "refused: an answer ends where the model would not have ended it" in refused
    assert "what_to_do=stop at an end token or at max_new_tokens" in refused
    assert "does not count: newer policy versions came before the work was used" in void
    assert verdicts.credit == 40


def test_ask_one_makes_one_request_and_keeps_waiting_submissions_in_the_queue() -> None:
    verdicts, answers = follow({"0" * 32: None, "1" * 32: "accepted"})
    verdicts.ask_one()
    assert (answers.asked, verdicts.credit) == (1, 0)
    verdicts.ask_one()
    assert (answers.asked, verdicts.credit) == (2, 40)
    answers.codes["0" * 32] = "accepted"
    verdicts.ask_one()
    verdicts.ask_one()  # the queue is empty
    assert (answers.asked, verdicts.credit) == (3, 80)


def test_the_oldest_submissions_without_a_verdict_are_dropped() -> None:
    verdicts, answers = follow({f"{number:032x}": None for number in range(MAX_FOLLOWED + 10)})
    verdicts.ask_all()
    assert answers.asked == MAX_FOLLOWED


# -- linked events -------------------------------------------------------------------------------------------


def test_a_linked_event_is_set_by_itself_or_by_its_parent() -> None:
    for who in range(2):
        stop = threading.Event()
        event = LinkedEvent(stop)
        assert not event.is_set()
        assert not event.wait(0)
        assert not event.wait(0.01)
        (event if who else stop).set()
        assert event.is_set()
        assert event.wait()
        assert event.wait(3600)
        assert stop.is_set() == (not who)  # the parent is never set by its child


def test_a_wait_under_way_ends_when_either_is_set() -> None:
    for who in range(2):
        stop = threading.Event()
        event = LinkedEvent(stop)
        waiting = threading.Thread(target=event.wait, args=(3600,))
        waiting.start()
        (event if who else stop).set()
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_wait_lasts_as_long_as_it_was_asked_to() -> None:
    started_s = time.monotonic()
    assert not LinkedEvent(threading.Event()).wait(0.25)
    assert time.monotonic() - started_s >= 0.25


# -- folder -------------------------------------------------------------------------------------------------


def test_the_folder_keeps_key_and_run(tmp_path: Path) -> None:
    shown = PinnedRun(run="demo", run_key="ab" * 32)
    with open_worker_folder(tmp_path / "w") as folder:
        key = folder.key.public
        folder.pin(shown, "http://h")
        folder.pin(shown, "http://elsewhere")  # the run key counts, not the address
    with open_worker_folder(tmp_path / "w") as folder:
        assert folder.key.public == key
        for other in (PinnedRun(run="demo", run_key="cd" * 32), PinnedRun(run="other", run_key="ab" * 32)):
            with pytest.raises(ValueError, match=r"choose another --dir or delete .*run\.json"):
                folder.pin(other, "http://h")


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_worker_folder(tmp_path):
        raise RuntimeError
    with (
        open_worker_folder(tmp_path),
        pytest.raises(ValueError, match="in use"),
        open_worker_folder(tmp_path),
    ):
        pass


def test_files_cut_off_by_a_crash_are_written_again(tmp_path: Path) -> None:
    with open_worker_folder(tmp_path / "node") as folder:
        for name in ("entry_points.json", "work.json", "last/lease.json"):
            (tmp_path / "node" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "node" / name).write_text('{"policy_ver')
        assert (folder.entry_points(), folder.last_submission_versions()) == ([], set())
        folder.store_entry_points(("http://127.0.0.1:1",))
        assert folder.entry_points() == ["http://127.0.0.1:1"]


def test_the_server_clock_does_not_depend_on_the_local_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock = ServerClock(1000.0)
    now_s = 53.0
    assert clock.now_s() == 1003
    clock.update(4600.0)  # this machine slept for an hour
    now_s = 54.0
    assert clock.now_s() == 4601


# -- deadline of a delivery ---------------------------------------------------------------------------------


class FakeTime(threading.Event):
    """A clock that moves only when a wait passes: the stop event of the client under test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return False


@pytest.mark.parametrize("failing", ["/upload", "PUT", "/submit"])
def test_a_delivery_ends_at_the_deadline_of_the_lease(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Each failing step would use all of the lease's time, whatever the steps before it have used."""
    clock = FakeTime(monkeypatch)
    started_s, left_s = clock.now_s, 60.0
    info = SimpleNamespace(run_key="ab" * 32, spec=SimpleNamespace(run="demo"))

    class SlowClient:
        """Every step takes 40 of the lease's 60 seconds; `failing` never succeeds."""

        stop = clock

        def call_until(
            self,
            what: str,
            method: str,
            path: str,
            body: object,
            reply: object,
            *,
            deadline_s: float,
            **_: object,
        ) -> Upload:
            if path.endswith(failing) or deadline_s < 40.0:
                clock.wait(deadline_s)
                raise DeadlinePassed(f"waited {deadline_s:.0f} s for {what}")
            clock.wait(40.0)
            return Upload(path="/v1/objects/1", expires_at_s=0.0)

        def put_upload(self, upload: Upload, data: bytes) -> None:
            if failing == "PUT":
                raise Unreachable("the connection was reset")

    joined = JoinedRun(info=info, epoch=1, heartbeat_s=5.0, clock=ServerClock(10.0))  # type: ignore[arg-type]
    session = CoordinatorSession(SlowClient(), joined, deadline_s=900.0, log=Log("worker"))  # type: ignore[arg-type]
    lease = LEASE.model_copy(update={"deadline_s": 10.0 + left_s})
    with pytest.raises(LeaseLost) as lost:
        session.deliver(lease, b"rows", policy_version=2)
    assert lost.value.still_open
    assert clock.now_s - started_s == pytest.approx(left_s, abs=1.0)


def test_work_of_a_stale_version_is_given_back() -> None:
    """The coordinator keeps the lease open; the worker gives it back, and its next lease has the same work and newer versions."""
    info = SimpleNamespace(run_key="ab" * 32, spec=SimpleNamespace(run="demo"))

    class StrictClient:
        """Takes the upload and refuses the version of the submission."""

        stop = threading.Event()

        def call_until(
            self,
            what: str,
            method: str,
            path: str,
            body: object,
            reply: object,
            *,
            deadline_s: float,
            **_: object,
        ) -> Upload:
            if path.endswith("/submit"):
                problem = ProblemDetails(
                    code="request.conflict",
                    detail="version 2 is stale",
                    fix="use version 3",
                    server_time_s=0.0,
                )
                raise Refused("a receipt", problem)
            return Upload(path="/v1/objects/1", expires_at_s=0.0)

        def put_upload(self, upload: Upload, data: bytes) -> None:
            pass

    joined = JoinedRun(info=info, epoch=1, heartbeat_s=5.0, clock=ServerClock(10.0))  # type: ignore[arg-type]
    session = CoordinatorSession(StrictClient(), joined, deadline_s=900.0, log=Log("worker"))  # type: ignore[arg-type]
    with pytest.raises(LeaseLost, match="version 2 is stale") as lost:
        session.deliver(LEASE.model_copy(update={"deadline_s": 70.0}), b"rows", policy_version=2)
    assert lost.value.still_open


# -- versions -----------------------------------------------------------------------------------------------


def test_a_lease_that_names_no_version_is_lost() -> None:
    """The worker gives it back and goes on."""
    spec = SimpleNamespace(max_lag=1, keep_versions=4)
    joined = SimpleNamespace(info=SimpleNamespace(spec=spec))
    session = SimpleNamespace(joined=joined, tickets=None, ask_newest_version=lambda: 3)
    versions = VersionCache(cast(WorkerFolder, None), cast(CoordinatorSession, session), log=Log("worker"))
    with pytest.raises(LeaseLost, match="the lease names none") as lost:
        versions.ensure(
            LEASE.model_copy(update={"policies": ()}), stop=threading.Event(), wait_for_newest=False
        )
    assert lost.value.still_open


def watched(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[int, threading.Event], int],
    *,
    until: int,
    pause_s: float,
) -> list[int]:
    """Runs `watch` until the coordinator was asked `until` times; returns what the relay was asked for.

    `answer` is the relay's newest version, or raises.
    """

    def fetch_newer(after: int, relays: object, *, stop: threading.Event, **_: object) -> object:
        after_asked.append(after)
        return SimpleNamespace(body=SimpleNamespace(version=answer(after, stop)))

    def ask_newest_version() -> int:
        asked.append(3)
        if len(asked) == until:
            stop.set()
        return 3

    asked: list[int] = []
    after_asked: list[int] = []
    stop = threading.Event()
    monkeypatch.setattr(version_cache, "fetch_newer", fetch_newer)
    monkeypatch.setattr(version_cache, "MIN_ASK_PAUSE_S", pause_s)
    monkeypatch.setattr(version_cache, "MAX_ASK_PAUSE_S", pause_s)
    monkeypatch.setattr(version_cache, "AFTER_NOTICE_S", 0.01)
    info = SimpleNamespace(spec=SimpleNamespace(run="demo", max_lag=1, keep_versions=4), run_key="")
    joined = SimpleNamespace(info=info, heartbeat_s=15.0)
    session = SimpleNamespace(joined=joined, tickets=None, ask_newest_version=ask_newest_version)
    versions = VersionCache(cast(WorkerFolder, None), cast(CoordinatorSession, session), log=Log("worker"))
    versions._relays = ("http://127.0.0.1:9",)
    watch = BackgroundTask("watch", partial(versions.watch, stop, fetch_ahead=False))
    assert watch.wait(30), "the coordinator was not asked"
    watch.result()
    return after_asked


def test_a_relay_with_a_new_version_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the coordinator, which announces it a moment later, is asked again soon."""

    def answer(after: int, stop: threading.Event) -> int:
        if after < 4:
            return 4
        stop.wait()
        raise Stopped("stopped")

    assert watched(monkeypatch, answer, until=4, pause_s=3600.0) == [-1, 4]


def test_a_version_that_is_never_announced_does_not_keep_the_questions_frequent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer failed in between: after a few early questions the coordinator is asked at its usual pace."""

    def answer(after: int, stop: threading.Event) -> int:
        if after < 4:
            return 4
        stop.wait()
        raise Stopped("stopped")

    began_s = time.monotonic()
    watched(monkeypatch, answer, until=10, pause_s=0.3)
    assert time.monotonic() - began_s > 4 * 0.3, "the last questions are 0.3 s apart"


def test_a_relay_that_does_not_answer_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(after: int, stop: threading.Event) -> int:
        stop.wait()
        raise Stopped("stopped")

    assert watched(monkeypatch, answer, until=5, pause_s=0.01) == [-1], "one question at a time"


def test_a_relay_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(after: int, stop: threading.Event) -> int:
        raise ValueError("URL scheme ftp is not http or https")

    assert watched(monkeypatch, answer, until=3, pause_s=0.1)


# -- the supply of leases ------------------------------------------------------------------------------------


class SlowCoordinator:
    """Gives leases, and takes them back, when the test says so: as over a connection that hangs."""

    def __init__(self) -> None:
        self.gives, self.takes_back = threading.Event(), threading.Event()
        self.asked: list[tuple[str, ...]] = []
        self.abandoned: list[str] = []
        versions = SimpleNamespace(
            watch=lambda stop, *, fetch_ahead: stop.wait(60), ensure=lambda *_, **__: None
        )
        self.supply = LeaseSupply(
            self.open_session,
            cast("VersionCache", versions),
            stop=threading.Event(),
            prefetch=True,
            deadline_s=60.0,
            log=Log("worker"),
        )

    def open_session(self, stop: threading.Event) -> CoordinatorSession:
        session = SimpleNamespace(
            stop=stop, ask_lease=self.ask_lease, abandon=self.abandon, close=lambda: None
        )
        return cast("CoordinatorSession", session)

    def ask_lease(self, heard: object, *, holds: list[str]) -> Lease:
        self.asked.append(tuple(holds))
        assert self.gives.wait(60)
        return LEASE.model_copy(update={"lease_id": f"{len(self.asked):032x}"})

    def abandon(self, lease: Lease, reason: str) -> None:
        assert self.takes_back.wait(60)
        self.abandoned.append(lease.lease_id)


def ordered(supply: LeaseSupply) -> BackgroundTask[Lease]:
    """Orders a lease and returns the search for it."""
    supply.order()
    assert supply._search is not None
    return supply._search


def test_a_lease_that_arrives_after_the_search_was_stopped_is_given_back() -> None:
    coordinator = SlowCoordinator()
    supply, search = coordinator.supply, ordered(coordinator.supply)
    supply.stop(0.0, give_back="its owner pauses")
    coordinator.takes_back.set()
    coordinator.gives.set()
    assert search.wait(60)
    assert coordinator.abandoned == [f"{1:032x}"]
    assert supply.take(lambda activity: None).lease_id == f"{2:032x}"
    assert coordinator.asked == [(), ()], "a lease that nobody works on was named as held"
    supply.stop(60.0, give_back=None)


def test_giving_back_slowly_does_not_forget_leases_that_came_meanwhile() -> None:
    coordinator = SlowCoordinator()
    supply = coordinator.supply
    coordinator.gives.set()
    assert ordered(supply).wait(60)
    supply.stop(0.5, give_back="its owner pauses")
    assert ordered(supply).wait(60)
    coordinator.takes_back.set()
    for thread in threading.enumerate():
        if thread.name == "give back":
            thread.join(60)
    assert coordinator.abandoned == [f"{1:032x}"]
    assert supply.take(lambda activity: None).lease_id == f"{2:032x}"
    supply.stop(60.0, give_back=None)
