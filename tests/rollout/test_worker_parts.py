"""The worker's smaller parts, each by itself."""

import logging
import threading
import time
from pathlib import Path

import pytest

from shoal.model.tokenizer import CharTokenizer
from shoal.rollout.worker.heartbeat import Halt
from shoal.rollout.worker.session import ServerClock
from shoal.rollout.worker.submission import FOLLOWED, Verdicts, make_requests
from shoal.rollout.worker.worker_folder import PinnedRun, open_state
from shoal.telemetry import Log
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import LeaseStatus
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


def test_a_lease_becomes_one_request_per_sample_with_the_seed_of_its_place() -> None:
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


class Answers:
    """What the coordinator would say of each lease, by its id; None: nothing right now."""

    def __init__(self, codes: dict[str, str | None]) -> None:
        self.codes, self.asked = codes, 0

    def ask_status(self, lease_id: str) -> LeaseStatus | None:
        self.asked += 1
        code = self.codes.get(lease_id)
        credit = 40 if code == "accepted" else 0
        state = "checking" if code is None else "ended"
        return LeaseStatus(lease_id=lease_id, state=state, code=code, detail="row (0, 1)", credit=credit)


def follow(codes: dict[str, str | None]) -> tuple[Verdicts, Answers]:
    answers = Answers(codes)
    verdicts = Verdicts(answers, Log("worker"))  # type: ignore[arg-type]
    for lease_id in codes:
        verdicts.follow(lease_id)
    return verdicts, answers


def test_verdicts_are_said_in_words(caplog: pytest.LogCaptureFixture) -> None:
    verdicts, _ = follow({"0" * 32: "accepted", "1" * 32: "reject.early_stop", "2" * 32: "void.stale"})
    with caplog.at_level(logging.INFO, logger="shoal.worker"):
        verdicts.ask_all()
    accepted, refused, void = caplog.messages
    assert "accepted, credit +40" in accepted
    assert "refused: an answer ends where the model would not have ended it" in refused
    assert "what_to_do=stop at an end token or at max_new_tokens" in refused
    assert "does not count: newer policy versions came before the work was used" in void
    assert verdicts.credit == 40


def test_a_round_asks_at_most_once_and_waiting_ones_stay_in_line() -> None:
    verdicts, answers = follow({"0" * 32: None, "1" * 32: "accepted"})
    verdicts.ask_one()
    assert (answers.asked, verdicts.credit) == (1, 0)
    verdicts.ask_one()
    assert (answers.asked, verdicts.credit) == (2, 40)
    answers.codes["0" * 32] = "accepted"
    verdicts.ask_one()
    verdicts.ask_one()  # nobody left to ask about
    assert (answers.asked, verdicts.credit) == (3, 80)


def test_what_never_gets_a_verdict_is_forgotten_in_the_end() -> None:
    verdicts, answers = follow({f"{number:032x}": None for number in range(FOLLOWED + 10)})
    verdicts.ask_all()
    assert answers.asked == FOLLOWED


# -- halt ---------------------------------------------------------------------------------------------------


def test_halt_is_set_by_itself_or_by_the_stop_it_follows() -> None:
    for who in range(2):
        stop = threading.Event()
        halt = Halt(stop)
        assert not halt.is_set()
        assert not halt.wait(0)
        assert not halt.wait(0.01)
        (halt if who else stop).set()
        assert halt.is_set()
        assert halt.wait()
        assert halt.wait(3600)
        assert stop.is_set() == (not who)  # the process's stop is not ours to set


def test_a_wait_under_way_ends_when_either_is_set() -> None:
    for who in range(2):
        stop = threading.Event()
        halt = Halt(stop)
        waiting = threading.Thread(target=halt.wait, args=(3600,))
        waiting.start()
        (halt if who else stop).set()
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_wait_lasts_as_long_as_it_was_asked_to() -> None:
    started_s = time.monotonic()
    assert not Halt(threading.Event()).wait(0.25)
    assert time.monotonic() - started_s >= 0.25


# -- state --------------------------------------------------------------------------------------------------


def test_the_folder_remembers_key_and_run(tmp_path: Path) -> None:
    shown = PinnedRun(run="demo", run_key="ab" * 32)
    with open_state(tmp_path / "w") as state:
        key = state.key.public
        state.pin(shown, "http://h")
        state.pin(shown, "http://elsewhere")  # the run is its key, not its address
    with open_state(tmp_path / "w") as state:
        assert state.key.public == key
        for other in (PinnedRun(run="demo", run_key="cd" * 32), PinnedRun(run="other", run_key="ab" * 32)):
            with pytest.raises(ValueError, match=r"choose another --dir or delete .*run\.json"):
                state.pin(other, "http://h")


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_state(tmp_path):
        raise RuntimeError
    with open_state(tmp_path), pytest.raises(ValueError, match="in use"), open_state(tmp_path):
        pass


def test_what_a_crash_cut_off_is_made_again(tmp_path: Path) -> None:
    with open_state(tmp_path / "node") as state:
        for name in ("entry_points.json", "work.json", "last/lease.json"):
            (tmp_path / "node" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "node" / name).write_text('{"policy_ver')
        assert (state.entry_points(), state.kept_versions()) == ([], set())
        state.remember_entry_points(("http://127.0.0.1:1",))
        assert state.entry_points() == ["http://127.0.0.1:1"]


def test_the_servers_time_is_told_by_the_server_and_not_by_a_clock_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    clock = ServerClock(1000.0)
    now_s = 53.0
    assert clock.now_s() == 1003
    clock.heard(4600.0)  # this machine slept for an hour
    now_s = 54.0
    assert clock.now_s() == 4601
