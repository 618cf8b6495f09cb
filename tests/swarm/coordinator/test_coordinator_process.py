"""The coordinator as a process: killed in the middle of work and started again; and the folders it refuses."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from small_swarm import CONFIG, LOG, RELAY_URL, SPEC, Node, manifest, signed_client, with_signal

from ledger_reader import read_ledger
from relay_reports import delegated_report
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import NotYet, Stopped, wait_for
from shoal.swarm.coordinator.context import DATABASE_FILE, open_coordinator
from shoal.swarm.coordinator.housekeeping import resume, run_housekeeping
from shoal.swarm.coordinator.http.server import Hosting, hold_run_folder, known_authorities, run_pool
from shoal.swarm.coordinator.leases.issue import check_upload_limit
from shoal.wire.keys import Key
from shoal.wire.lease import Verdict
from shoal.wire.ledger import LedgerHead, verify_ledger
from shoal.wire.messages import (
    Announce,
    Batch,
    Claim,
    HeartbeatReply,
    LeaseStatus,
    Recorded,
    Stats,
)
from shoal.wire.record import Sealed, seal
from shoal.wire.run_spec import EvalSpec

pytestmark = pytest.mark.integration

T = TypeVar("T")

CHILD = """
import signal, sys, threading
from pathlib import Path
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.http.server import Hosting, run_pool
from shoal.wire.run_spec import RunSpec
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
config, spec, dir, port = sys.argv[1:]
run = Hosting(config=CoordinatorConfig.parse(config), spec=RunSpec.parse(spec), dir=Path(dir))
run_pool([run], "127.0.0.1", int(port), stop, lambda url: print(url, flush=True))
"""


def free_port() -> int:
    """Below the range that outgoing connections take their own ports from.

    Within it, a client that tries again and again while nobody listens can be given that very port, connect to
    itself, and keep the coordinator from coming back.
    """
    for _ in range(100):
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 20000 and 30000")


class Process:
    """One coordinator in a process of its own, started again on the same port."""

    def __init__(self, dir: Path) -> None:
        self.dir, self.url, self.port = dir, "", free_port()
        self.start()

    def start(self) -> None:
        spec = SPEC.model_copy(update={"last_version": 99, "max_lag": 9, "keep_versions": 10})
        arguments = [CONFIG.model_dump_json(), spec.model_dump_json(), str(self.dir), str(self.port)]
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self.child.stdout is not None
        self.url = self.child.stdout.readline().strip()
        assert self.url, "the coordinator did not start; its words are above"

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()

    def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        self.child.communicate(timeout=10)
        return self.child.returncode


class Clients:
    """Runs every role against a coordinator that is killed and restarted."""

    def __init__(self, process: Process) -> None:
        self.url, self.done = process.url, threading.Event()
        keys = {
            name: Key.load(process.dir / "keys" / f"{name}.key")
            for name in ("run", "trainer", "validator", "relay")
        }
        self.run_key = keys["run"]
        self.trainer = signed_client(process.url, keys["trainer"])
        self.validator = signed_client(process.url, keys["validator"])
        self.relay = signed_client(process.url, keys["relay"])
        self.receipts: list[int] = []

    def persist(self, action: Callable[..., T], *arguments: Any) -> T:
        """Retries the action while the coordinator is down, as every client does."""

        def attempt() -> T:
            try:
                return action(*arguments)
            except Unreachable as error:
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code != "request.too_early":
                    raise
                raise NotYet(str(refused), 0.02) from None

        return wait_for("the coordinator", attempt, deadline_s=60, log=LOG, stop=self.done)

    def announce(self, version: int) -> None:
        sealed = seal(manifest(version), self.run_key)
        body = Announce(manifest=sealed, origin_url="http://127.0.0.1:1", report=None)
        self.persist(self.trainer.call, "POST", "/v1/policies", body, Recorded)
        told = delegated_report(self.relay.key, RELAY_URL, range(version + 1))
        self.persist(self.relay.call, "POST", "/v1/relays", told, HeartbeatReply)

    def batch(self, version: int) -> Batch:
        batch: Batch = self.persist(self.trainer.call, "GET", f"/v1/batches/{version}", None, Batch)
        return batch

    def work(self) -> None:
        node = Node(self.url, Key.generate())
        with closing(node.client):
            self.persist(node.join)
            while True:
                lease = self.persist(node.lease)
                data = lease.lease_id.encode()
                self.persist(node.upload, lease, data)
                self.receipts.append(self.persist(node.submit, lease, data).open(self.run_key.public).seq)

    def judge(self) -> None:
        while True:
            claim = self.persist(self.validator.call, "POST", "/v1/checks/claim", None, Claim)
            verdict = Verdict(
                lease_id=claim.lease.lease_id,
                code="accepted",
                detail="",
                rewards=with_signal(claim.lease),
                output_tokens=claim.lease.num_rows,
            )
            path = f"/v1/checks/{claim.lease.lease_id}/verdict"
            self.persist(self.validator.call, "POST", path, verdict, LeaseStatus)

    def close(self) -> None:
        for client in (self.trainer, self.validator, self.relay):
            client.close()


def test_killed_in_the_middle_and_started_again(tmp_path: Path) -> None:
    process = Process(tmp_path)
    clients = Clients(process)
    clients.announce(0)
    trained: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        loops = [pool.submit(clients.work), pool.submit(clients.work), pool.submit(clients.judge)]
        for version in range(4):
            batch = clients.batch(version)
            process.kill()
            process.start()
            # Asked again after the crash, the answer is the same.
            assert clients.batch(version) == batch
            trained += [group.group_id for group in batch.groups]
            clients.announce(version + 1)
        clients.done.set()
        # Each went on until it was told to stop: no crash of the coordinator was the end of any of them.
        assert {type(loop.exception(30)) for loop in loops} == {Stopped}
    assert len(trained) == len(set(trained)) == 16

    head = Sealed[LedgerHead].parse(httpx2.get(f"{process.url}/v1/ledger/head").content)
    stats = Stats.parse(httpx2.get(f"{process.url}/v1/stats").content)
    assert process.stop() == 0
    events = read_ledger(tmp_path / DATABASE_FILE)
    assert verify_ledger(events, head, clients.run_key.public) == stats.ledger_seq
    # Every answered request is on disk: each receipt of a worker is in the ledger.
    assert {events[seq - 1].type for seq in clients.receipts} == {"submission.received"}
    tokens = sum(event.body["output_tokens"] for event in events if event.type == "verdict.given")
    assert sum(node.credit for node in stats.nodes) == tokens
    clients.close()


def test_a_folder_belongs_to_one_run_and_one_key(tmp_path: Path) -> None:
    open_coordinator(CONFIG, SPEC, tmp_path, log=LOG).close()
    other = SPEC.model_copy(update={"run": "other"})
    with pytest.raises(ValueError, match="holds run 'small', not 'other'"):
        open_coordinator(CONFIG, other, tmp_path, log=LOG)
    (tmp_path / "keys" / "run.key").rename(tmp_path / "kept.key")
    with pytest.raises(ValueError, match="put the run's own key back"):
        open_coordinator(CONFIG, SPEC, tmp_path, log=LOG)
    (tmp_path / "kept.key").rename(tmp_path / "keys" / "run.key")
    open_coordinator(CONFIG, SPEC, tmp_path, log=LOG).close()
    assert len(read_ledger(tmp_path / DATABASE_FILE)) == 1


def test_two_coordinators_cannot_share_a_folder(tmp_path: Path) -> None:
    with (
        hold_run_folder(tmp_path),
        pytest.raises(ValueError, match="already running"),
        hold_run_folder(tmp_path),
    ):
        pass
    with hold_run_folder(tmp_path):
        pass


def test_keys_are_private(tmp_path: Path) -> None:
    open_coordinator(CONFIG, SPEC, tmp_path, log=LOG).close()
    keys = sorted((tmp_path / "keys").iterdir())
    assert [key.name for key in keys] == ["admin.key", "relay.key", "run.key", "trainer.key", "validator.key"]
    assert {os.stat(key).st_mode & 0o777 for key in keys} == {0o600}


def test_a_lease_must_fit_the_upload_limit(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"max_upload_bytes": 1000})
    coordinator = open_coordinator(config, SPEC, tmp_path, log=LOG)
    with pytest.raises(ValueError, match="max_upload_bytes=1000"):
        check_upload_limit(coordinator)
    coordinator.close()


def test_a_lease_of_an_evaluation_must_fit_the_upload_limit_too(tmp_path: Path) -> None:
    """Its files would be refused as too large, and the evaluation would never be complete."""
    spec = SPEC.model_copy(update={"evals": (EvalSpec(task=SPEC.task, every=1, prompts=2, samples=4096),)})
    coordinator = open_coordinator(
        CONFIG.model_copy(update={"max_upload_bytes": 1 << 20}), spec, tmp_path, log=LOG
    )
    with closing(coordinator), pytest.raises(ValueError, match="a lease of 1 prompt may need"):
        check_upload_limit(coordinator)


def test_it_serves_until_it_is_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def look(url: str) -> None:
        seen.append(httpx2.get(f"{url}/healthz").status_code)
        stop.set()

    run_pool([Hosting(config=CONFIG, spec=SPEC, dir=tmp_path)], "127.0.0.1", 0, stop, look)
    assert seen == [200]


def test_housekeeping_ends_with_the_server(tmp_path: Path) -> None:
    coordinator = open_coordinator(CONFIG, SPEC, tmp_path, log=LOG)
    resume(coordinator)

    def check() -> None:
        raise RuntimeError("the server ended by itself")

    with pytest.raises(RuntimeError, match="by itself"):
        run_housekeeping([coordinator], threading.Event(), check=check)
    coordinator.close()


def test_the_names_a_coordinator_answers_to() -> None:
    assert known_authorities("0.0.0.0", 80, ()) is None
    assert sorted(known_authorities("0.0.0.0", 80, ("Swarm.example:443",)) or ()) == [
        "0.0.0.0:80",
        "127.0.0.1:80",
        "[::1]:80",
        "localhost:80",
        "swarm.example:443",
    ]
    assert "[::1]:9" in (known_authorities("::1", 9, ()) or ())
