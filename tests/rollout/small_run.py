"""A run small enough for a test: a real coordinator and origin and, where asked for, a real relay and validator.

All of them run in threads of this process, over HTTP on loopback. The test is the trainer: it calls `publish`.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from relay_reports import delegated_report
from running_coordinator import running_coordinator
from shoal.model.builtin import create_model
from shoal.net.http_client import SignedClient
from shoal.net.http_server import listen
from shoal.rollout.adversary.lies import make_behaviour
from shoal.rollout.worker.session import WorkerExit
from shoal.rollout.worker.worker import WorkerConfig, run_worker
from shoal.shardcast import RelayConfig, RelayServer, VersionStore, publish, run_relay
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.validator.claim_loop import ValidatorConfig, run_validator
from shoal.telemetry import Log
from shoal.wire.delegation import read_relay_delegation, write_relay_key
from shoal.wire.keys import Key
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import Announce, Recorded, Stats, StepReport
from shoal.wire.run_spec import RunSpec, Sampling, TaskSpec

WAIT_S = 60.0
"""Much longer than anything here takes: only a hang reaches it."""

SPEC = RunSpec(
    run="small",
    task=TaskSpec(name="sort", options={"length": 3}),
    compute_dtype="float32",
    sampling=Sampling(max_new_tokens=8, samples_per_prompt=2),
    last_version=2,
)
CONFIG = CoordinatorConfig(
    groups_per_step=64,
    prompts_per_lease=2,
    heartbeat_s=0.5,
    eval_prompts=0,
    retry_s=0.05,
    try_relays=False,
)


def eventually(what: str, look: Callable[[], bool]) -> None:
    """Waits until `look` returns true."""
    end_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < end_s, f"this did not happen within {WAIT_S:.0f} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    sock = listen("127.0.0.1", 0)
    port = int(sock.getsockname()[1])
    sock.close()
    return port


def step_report(version: int) -> StepReport:
    zeros = dict.fromkeys(("groups", "dropped_groups", "rollouts", "tokens", "lag_max"), 0)
    required = {name for name, field in StepReport.model_fields.items() if field.is_required()}
    names = required - set(zeros) - {"version"}
    return StepReport(version=version, **zeros, **dict.fromkeys(names, 0.0))  # type: ignore[arg-type]


class SmallRun:
    """The coordinator, origin and other roles of one run. `small_run` makes it."""

    def __init__(self, folder: Path, url: str, log: Log) -> None:
        self.folder, self.url, self.keys = folder, url, folder / "coordinator" / "keys"
        self.run_key = Key.load(self.keys / "run.key")
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []
        self.log = log
        self._trainer = SignedClient(url, Key.load(self.keys / "trainer.key"), log=log)
        self._store = VersionStore(folder / "origin", run=SPEC.run, run_key=self.run_key.public)
        self._server = RelayServer(self._store, listen("127.0.0.1", 0), log=log)
        self._server.start()
        self.origin_url = f"http://127.0.0.1:{self._server.port}"

    # -- what the trainer does ------------------------------------------------------------------------------

    def publish(self, version: int, *, served: bool = True) -> None:
        """Publishes a new random model as `version`; if not `served`, its bytes cannot be fetched anywhere."""
        folder = self._store.path(version)
        create_model("tiny", folder, seed=version)
        sealed = publish(folder, run=SPEC.run, version=version, key=self.run_key)
        if served:
            self._store.adopt(version)
        else:
            shutil.rmtree(folder)
        report = step_report(version) if version else None
        body = Announce(manifest=sealed, origin_url=self.origin_url, report=report)
        self._trainer.call("POST", "/v1/policies", body, Recorded)

    # -- other roles ----------------------------------------------------------------------------------------

    def start_relay(self) -> None:
        port = free_port()
        path = write_relay_key(
            Key.load(self.keys / "relay.key"), f"http://127.0.0.1:{port}", self.folder / "relay-key"
        )
        config = RelayConfig(
            folder=self.folder / "relay",
            coordinator=self.url,
            port=port,
            delegation=read_relay_delegation(path),
        )
        key = Key.load(path)
        self._start(lambda: run_relay(config, key=key, log=Log("relay"), stop=self.stop))

    def serve_from_origin(self, claims: tuple[int, ...] = ()) -> None:
        """Lets workers fetch from the origin itself, as if it were a relay. `claims` may name versions that it does not have."""

        def report() -> None:
            body = delegated_report(client.key, self.origin_url, claims or self._store.complete())
            client.send("POST", "/v1/relays", body.model_dump_json().encode())

        def keep_reporting() -> None:
            while not self.stop.wait(0.5):
                report()
            client.close()

        client = SignedClient(self.url, Key.load(self.keys / "relay.key"), log=self.log)
        report()
        self._start(keep_reporting)

    def start_validator(self) -> None:
        config = ValidatorConfig(
            coordinator=self.url, key=self.keys / "validator.key", dir=self.folder / "validator"
        )
        self._start(lambda: run_validator(config, stop=self.stop))

    # -- public state ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        while (answer := httpx2.get(f"{self.url}/v1/stats")).status_code == 429:
            time.sleep(0.1)  # a slow start asks often enough to reach the limit of requests
        return Stats.parse(answer.content)

    def events(self, type: str) -> list[LedgerEvent]:
        events = httpx2.get(f"{self.url}/v1/ledger").json()
        return [LedgerEvent.model_validate(event) for event in events if event["type"] == type]

    def accepted(self) -> int:
        return self.stats().submissions.get("accepted", 0)

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(WAIT_S)
        self._store.close()
        self._server.close()
        self._trainer.close()

    def _start(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self.threads.append(thread)
        thread.start()


@contextmanager
def small_run(
    folder: Path, config: CoordinatorConfig = CONFIG, *, spec: RunSpec = SPEC, port: int = 0
) -> Iterator[SmallRun]:
    with running_coordinator(folder / "coordinator", spec, config, port=port) as url:
        run = SmallRun(folder, url, Log("test"))
        try:
            yield run
        finally:
            run.close()


class RunningWorker:
    """`run_worker` in a thread, with its result or its error."""

    def __init__(self, run: SmallRun, name: str = "worker", *, lie: str = "", **options: object) -> None:
        fields: dict[str, object] = {"coordinator": run.url, "dir": run.folder / name, "num_threads": 1}
        self.config = WorkerConfig(**(fields | options))  # type: ignore[arg-type]
        self._behaviour = make_behaviour(lie, run.url) if lie else None
        self.stop = threading.Event()
        self.exit: WorkerExit | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def node(self) -> str:
        return Key.load(self.config.dir / "node.key").public

    def join(self) -> WorkerExit | None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker did not end"
        return self.exit

    def _run(self) -> None:
        try:
            self.exit = run_worker(self.config, stop=self.stop, behaviour=self._behaviour)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
