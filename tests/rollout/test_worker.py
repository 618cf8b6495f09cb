"""The worker against a real coordinator, relay and validator: what it delivers and how it ends."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI, Response
from small_run import CONFIG, SPEC, WAIT_S, RunningWorker, SmallRun, eventually, free_port, small_run

from shoal.cli.main import main
from shoal.net.http_client import SignedClient
from shoal.net.http_server import Server, listen
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.rollout.engine.api import Behaviour, Engine, FinishedRow, GenerationRequest
from shoal.rollout.worker.session import CoordinatorSession, WorkerExit, join
from shoal.rollout.worker.worker import WorkerConfig, run_worker, start_worker
from shoal.rollout.worker.worker_folder import PinnedRun, WorkerFolder, open_worker_folder
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.messages import OpenSession, Session
from shoal.wire.rollouts import TableLimits, decode
from shoal.wire.run_spec import AdmittedWeights

LOG = Log("test")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SmallRun]:
    with small_run(tmp_path) as run:
        yield run


@pytest.fixture
def ready(run: SmallRun) -> SmallRun:
    """Returns a run with a policy and a relay to fetch it from."""
    run.publish(0)
    run.serve_from_origin()
    return run


# -- work ---------------------------------------------------------------------------------------------------


def test_work_is_accepted_across_a_swap_until_the_run_is_finished(
    run: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shoal.worker"):
        run.publish(0)
        run.start_relay()
        run.start_validator()
        worker = RunningWorker(run)
        eventually("work with version 0 is accepted", lambda: run.accepted() >= 2)
        run.publish(1)
        eventually(
            "work with version 1 is submitted",
            lambda: any(event.body["policy_version"] == 1 for event in run.events("submission.received")),
        )
        so_far = run.accepted()
        eventually("work is accepted after the swap", lambda: run.accepted() >= so_far + 3)
        run.publish(2)  # the last version: without held-out problems the run is over
        assert worker.join() is WorkerExit.FINISHED
    stats = run.stats()
    assert set(stats.submissions) == {"accepted"}
    node = stats.nodes[0]
    assert node.node == worker.node
    assert node.credit > 0
    assert node.policy_version in (0, 1)
    said = " ".join(caplog.messages)
    for words in (
        "joined run 'small'",
        "loaded version 0",
        "loaded version 1",
        "submitted",
        "accepted, credit +",
    ):
        assert words in said


def test_rounded_weights_earn_their_share_and_held_out_work_is_done_with_the_published_ones(
    tmp_path: Path,
) -> None:
    spec = SPEC.model_copy(update={"admitted_weights": AdmittedWeights(int8=0.5)})
    config = CONFIG.model_copy(update={"eval_prompts": 2, "eval_samples": 2})
    with small_run(tmp_path, config, spec=spec) as run:
        run.publish(0)
        run.start_relay()
        run.start_validator()
        worker = RunningWorker(run, weights="int8")

        def purposes() -> set[str]:
            issued = {event.body["lease_id"]: event.body["purpose"] for event in run.events("lease.issued")}
            return {issued[event.body["lease_id"]] for event in run.events("verdict.given")}

        eventually("work of both kinds is judged", lambda: purposes() == {"train", "eval"})
        worker.stop.set()
        worker.join()
        issued = {event.body["lease_id"]: event.body for event in run.events("lease.issued")}
        for event in run.events("verdict.given"):
            body, train = event.body, issued[event.body["lease_id"]]["purpose"] == "train"
            assert body["code"] == "accepted"
            assert body["evidence"].get("weights") == ("int8" if train else None)
            assert body["evidence"]["made_by"].endswith("/float32-int8" if train else "/float32")
            assert body["credit"] == int(body["output_tokens"] * (0.5 if train else 1))


def test_a_run_that_does_not_admit_the_weights_is_not_worked_for(ready: SmallRun) -> None:
    worker = RunningWorker(ready, weights="fp8")
    worker.join()
    assert isinstance(worker.error, ValueError)
    assert "does not admit fp8 weights" in str(worker.error) and "without --weights" in str(worker.error)
    assert not ready.events("lease.issued")


def test_the_file_has_exactly_the_rows_of_the_lease(ready: SmallRun) -> None:
    worker = RunningWorker(ready)
    eventually("a submission", lambda: bool(ready.events("submission.received")))
    worker.stop.set()
    assert worker.join() is WorkerExit.STOPPED
    received = ready.events("submission.received")[0].body
    validator = SignedClient(ready.url, Key.load(ready.keys / "validator.key"), log=LOG)
    data = validator.send("GET", f"/v1/objects/{received['sha256']}").content
    validator.close()
    limits = TableLimits(max_rows=4, max_prompt_tokens=16, max_output_tokens=8, max_proof_bytes=258)
    table = decode(data, limits)
    assert table.lease_id == received["lease_id"]
    assert table.policy_version == 0
    assert [(row.prompt_index, row.sample_index) for row in table.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


# -- how it ends --------------------------------------------------------------------------------------------


def test_stop_gives_the_open_lease_back(ready: SmallRun, tmp_path: Path) -> None:
    stop = threading.Event()

    class StopsMidway(Behaviour):
        def requests(
            self, requests: Sequence[GenerationRequest], lease: Lease
        ) -> Sequence[GenerationRequest]:
            stop.set()
            return requests

    config = WorkerConfig(coordinator=ready.url, dir=tmp_path / "worker", num_threads=1)
    with open_worker_folder(config.dir) as folder:
        worker = start_worker(config, folder, StopsMidway(), stop=stop, log=LOG)
        with pytest.raises(Stopped, match="while generating"):
            worker.main_loop()
        assert ready.stats().open_leases == 1
        worker.shutdown()
    eventually(
        "no lease is open", lambda: ready.stats().open_leases == 0
    )  # the answer is cached for a moment
    (void,) = ready.events("lease.void")
    assert void.body["code"] == "void.abandoned"
    assert ready.events("submission.received") == []


def test_after_a_crash_the_same_lease_is_worked_on_again(ready: SmallRun, tmp_path: Path) -> None:
    class PowerCut(Exception):
        pass

    class CrashesMidway(Behaviour):
        def requests(
            self, requests: Sequence[GenerationRequest], lease: Lease
        ) -> Sequence[GenerationRequest]:
            raise PowerCut

    config = WorkerConfig(coordinator=ready.url, dir=tmp_path / "worker", num_threads=1)
    with open_worker_folder(config.dir) as folder:
        worker = start_worker(config, folder, CrashesMidway(), stop=threading.Event(), log=LOG)
        with pytest.raises(PowerCut):
            worker.main_loop()
        worker._lease = None  # a power cut gives nothing back
        worker.shutdown()
    (issued,) = ready.events("lease.issued")
    again = RunningWorker(ready)
    eventually("a submission", lambda: bool(ready.events("submission.received")))
    again.stop.set()
    assert again.join() is WorkerExit.STOPPED
    assert ready.events("submission.received")[0].body["lease_id"] == issued.body["lease_id"]


def work_until_a_submission(run: SmallRun, tmp_path: Path, behaviour: Behaviour) -> None:
    """Publishes a version and runs a worker until the coordinator has received a submission."""

    def work() -> None:
        with pytest.raises(Stopped):
            worker.main_loop()

    run.publish(0)
    run.serve_from_origin()
    stop = threading.Event()
    config = WorkerConfig(coordinator=run.url, dir=tmp_path / "worker", num_threads=1)
    with open_worker_folder(config.dir) as folder:
        worker = start_worker(config, folder, behaviour, stop=stop, log=LOG)
        loop = threading.Thread(target=work, daemon=True)
        loop.start()
        eventually("a submission", lambda: bool(run.events("submission.received")))
        stop.set()
        loop.join(30)
        worker.shutdown()


def test_a_lease_past_its_deadline_is_lost_and_the_next_one_is_not(tmp_path: Path) -> None:
    class LateOnce(Behaviour):
        late = True

        def requests(
            self, requests: Sequence[GenerationRequest], lease: Lease
        ) -> Sequence[GenerationRequest]:
            while self.late and time.time() <= lease.deadline_s:
                time.sleep(0.05)
            self.late = False
            return requests

    with small_run(tmp_path, CONFIG.model_copy(update={"lease_s": 5.0})) as run:
        work_until_a_submission(run, tmp_path, LateOnce())
        assert run.events("lease.void")[0].body["code"] in ("void.abandoned", "void.expired")


class SlowEngine:
    """An engine that takes longer to load a version, and for each step."""

    def __init__(self, engine: Engine, *, load_s: float, step_s: float) -> None:
        self._engine, self._load_s, self._step_s = engine, load_s, step_s

    def load(self, folder: Path, version: int) -> None:
        time.sleep(self._load_s)
        self._engine.load(folder, version)

    def step(self) -> list[FinishedRow]:
        time.sleep(self._step_s)
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_a_machine_that_is_too_slow_for_the_leases_gets_longer_ones(tmp_path: Path) -> None:
    """A lost lease ends the engine, so each lease begins with loading: at the same length all would be lost."""

    class Slow(Behaviour):
        def engine(self, engine: Engine) -> Engine:
            return cast("Engine", SlowEngine(engine, load_s=2.0, step_s=0.2))

    with small_run(tmp_path, CONFIG.model_copy(update={"lease_s": 3.0})) as run:
        work_until_a_submission(run, tmp_path, Slow())
        received = run.events("submission.received")[0].seq
        lost = [event.body["code"] for event in run.events("lease.void") if event.seq < received]
        assert lost and set(lost) == {"void.expired"}, (
            "a lease that is given back is no reason for a longer one"
        )


def test_a_liar_is_ejected_and_told_why(run: SmallRun, caplog: pytest.LogCaptureFixture) -> None:
    run.publish(0)
    run.start_relay()
    run.start_validator()
    liar = RunningWorker(run, "liar", lie="wrong-logprobs")
    assert liar.join() is WorkerExit.EJECTED
    stats = run.stats()
    assert set(stats.submissions) <= {"reject.wrong_logprobs", "void.abandoned"}
    assert stats.submissions["reject.wrong_logprobs"] == 2
    assert stats.ready_groups == 0
    said = [message for message in caplog.messages if "ejected from the run" in message]
    assert any("the log-probs are not the model's" in message for message in said)
    # An ejected node cannot come back.
    assert RunningWorker(run, "liar").join() is WorkerExit.EJECTED


def test_a_second_process_with_the_same_key_replaces_the_first(
    ready: SmallRun, caplog: pytest.LogCaptureFixture
) -> None:
    worker = RunningWorker(ready)
    eventually("a submission", lambda: bool(ready.events("submission.received")))
    clone = SignedClient(ready.url, Key.load(worker.config.dir / "node.key"), log=LOG)
    clone.call("POST", "/v1/session", OpenSession(software="a clone"), Session)
    clone.close()
    assert worker.join() is WorkerExit.REPLACED
    assert any("stop the other process that uses this key" in message for message in caplog.messages)


def test_a_worker_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    port = free_port()
    with small_run(tmp_path, port=port) as run:
        run.publish(0)
        run.serve_from_origin()
        worker = RunningWorker(run)
        eventually("a submission", lambda: bool(run.events("submission.received")))
    with small_run(tmp_path, port=port) as run:
        run.serve_from_origin()
        before = len(run.events("submission.received"))
        eventually("another submission", lambda: len(run.events("submission.received")) > before)
        worker.stop.set()
        assert worker.join() is WorkerExit.STOPPED
        assert worker.error is None


# -- waits --------------------------------------------------------------------------------------------------


def test_a_missing_coordinator_ends_the_worker_with_an_error(tmp_path: Path) -> None:
    config = WorkerConfig(coordinator=f"http://127.0.0.1:{free_port()}", dir=tmp_path, deadline_s=0.3)
    with pytest.raises(DeadlinePassed, match=r"for the coordinator at http://127.*Check the URL, and that"):
        run_worker(config, stop=threading.Event())
    stop = threading.Event()
    stop.set()
    assert run_worker(config, stop=stop) is WorkerExit.STOPPED


def test_a_run_without_a_policy_ends_the_worker_with_an_error(run: SmallRun) -> None:
    worker = RunningWorker(run, deadline_s=0.5)
    worker.join()
    assert isinstance(worker.error, DeadlinePassed)
    assert "for a lease: no policy yet: the trainer has not published version 0" in str(worker.error)


def test_a_run_without_a_relay_ends_the_worker_with_an_error(run: SmallRun) -> None:
    run.publish(0)
    worker = RunningWorker(run, deadline_s=0.5)
    worker.join()
    assert isinstance(worker.error, DeadlinePassed)
    assert "for a lease: no relay is live" in str(worker.error)


def test_an_older_version_is_used_where_the_newest_cannot_be_fetched(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"lease_s": 5.0, "heartbeat_s": 5.0})
    with small_run(tmp_path, config) as run:
        run.publish(0)
        run.publish(1, served=False)
        run.serve_from_origin()
        worker = RunningWorker(run)
        eventually("a submission", lambda: bool(run.events("submission.received")))
        worker.stop.set()
        assert worker.join() is WorkerExit.STOPPED
        assert run.events("submission.received")[0].body["policy_version"] == 0


def test_a_lease_is_given_back_with_the_reason_if_no_version_can_be_fetched(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"lease_s": 2.0, "heartbeat_s": 5.0})
    with small_run(tmp_path, config) as run:
        run.publish(0, served=False)
        run.serve_from_origin(claims=(0,))
        worker = RunningWorker(run, deadline_s=0.5)
        worker.join()
        assert isinstance(worker.error, DeadlinePassed)
        assert "Check that the relays can be reached" in str(worker.error)
        (void,) = run.events("lease.void")
        assert void.body["code"] == "void.abandoned"
        assert "no policy version can be fetched: version 0" in void.body["detail"]


class LosesFirstManifest(httpx2.HTTPTransport):
    """A network that loses the first answer to a request for a manifest."""

    lost = 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if not self.lost and request.url.path.startswith("/v1/policies/"):
            self.lost += 1
            response.close()
            raise httpx2.RemoteProtocolError("Server disconnected without sending a response.")
        return response


def test_a_lost_answer_does_not_lose_a_version(ready: SmallRun, tmp_path: Path) -> None:
    network, folder = LosesFirstManifest(), WorkerFolder(tmp_path / "node")
    client = SignedClient(ready.url, folder.key, log=LOG, transport=network)
    session = CoordinatorSession(
        client, join(client, folder, deadline_s=WAIT_S, log=LOG), deadline_s=WAIT_S, log=LOG
    )
    assert session.ask_manifest(0, deadline_s=WAIT_S).body.version == 0
    assert network.lost == 1
    client.close()


# -- its folder ---------------------------------------------------------------------------------------------


def test_a_second_worker_in_the_same_folder_is_refused(ready: SmallRun) -> None:
    worker = RunningWorker(ready)
    eventually("a submission", lambda: bool(ready.events("submission.received")))
    with pytest.raises(ValueError, match=r"is in use by another worker \(process \d+\); stop that one or"):
        run_worker(worker.config, stop=threading.Event())
    worker.stop.set()
    assert worker.join() is WorkerExit.STOPPED
    with open_worker_folder(worker.config.dir) as folder:  # the lock is free again
        assert folder.key.public == worker.node


def test_another_run_under_the_same_address_is_refused(ready: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "worker"
    with open_worker_folder(folder) as worker_folder:
        worker_folder.pin(PinnedRun(run=SPEC.run, run_key="ab" * 32), ready.url)
    worker = RunningWorker(ready)
    worker.join()
    assert isinstance(worker.error, ValueError)
    assert "this folder works for run 'small' with key abababab" in str(worker.error)
    assert ready.stats().nodes == ()
    (folder / "run.json").write_text("not json")
    worker = RunningWorker(ready)
    worker.join()
    assert "delete it to join again" in str(worker.error)


def test_a_coordinator_of_another_protocol_is_refused(tmp_path: Path) -> None:
    with small_run(tmp_path / "run") as run:
        info = httpx2.get(f"{run.url}/v1/info").text.replace('"protocol":1', '"protocol":99')
    app = FastAPI()
    app.add_api_route("/v1/info", lambda: Response(info), methods=["GET"], response_class=Response)
    server = Server(app, listen("127.0.0.1", 0))
    server.start()
    config = WorkerConfig(coordinator=f"http://127.0.0.1:{server.port}", dir=tmp_path / "worker")
    with pytest.raises(ValueError, match="speaks protocol 99"):
        run_worker(config, stop=threading.Event())
    server.close()


def test_a_lie_against_a_remote_coordinator_is_refused_before_anything_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--coordinator",
        "https://swarm.example",
        "--dir",
        str(tmp_path / "worker"),
        "--lie",
        "replay",
    ]
    assert main(["worker", *arguments]) != 0
    assert "allowed only with a coordinator on this machine" in capsys.readouterr().err
    assert not (tmp_path / "worker").exists()
