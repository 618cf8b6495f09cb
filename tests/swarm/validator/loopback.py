"""A coordinator, an origin and one node, all on loopback: what a validator meets."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from honest_work import make_spec

from relay_reports import delegated_report
from running_coordinator import running_coordinator
from shoal.model.builtin import create_model
from shoal.model.load_model import load_decoder
from shoal.model.tokenizer import load_tokenizer
from shoal.net.http_client import SignedClient
from shoal.net.http_server import listen
from shoal.shardcast import RelayServer, VersionStore, publish
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.validator.claim_loop import ValidatorConfig
from shoal.swarm.validator.prefill import LoadedPolicy
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Receipt
from shoal.wire.messages import (
    Announce,
    AskLease,
    AskUpload,
    Enrol,
    Enrolled,
    HeartbeatReply,
    LeaseStatus,
    OpenSession,
    Recorded,
    Session,
    StepReport,
    Submit,
    Upload,
)
from shoal.wire.proof_noise import LaterNoise
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL, TaskSpec

LOG = Log("test")
DEADLINE_S = 60.0
T = TypeVar("T")
_ZEROS = {
    name: field.annotation(0)
    for name, field in StepReport.model_fields.items()
    if field.annotation and field.is_required()
}


class Swarm:
    """A coordinator with version 0 published, and one node."""

    def __init__(self, dir: Path, url: str) -> None:
        self.dir, self.url = dir, url
        self._clients: list[SignedClient] = []
        self.node = self.client_of(Key.generate())
        self.store = VersionStore(dir / "origin", run="small", run_key=self.key("run").public)

    def key(self, role: str) -> Key:
        return Key.load(self.dir / "keys" / f"{role}.key")

    def client_of(self, key: Key) -> SignedClient:
        self._clients.append(SignedClient(self.url, key, log=LOG))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def publish(self, version: int, origin_url: str, *, noise: LaterNoise | None = None) -> LoadedPolicy:
        folder = self.store.path(version)
        report = StepReport(**(_ZEROS | {"version": version})) if version else None
        create_model("tiny", folder, seed=version)
        manifest = publish(folder, run="small", version=version, key=self.key("run"))
        self.store.adopt(version)
        told = Announce(manifest=manifest, origin_url=origin_url, report=report, noise=noise)
        self.client_of(self.key("trainer")).call("POST", "/v1/policies", told, Recorded)
        return LoadedPolicy(version, load_decoder(folder), load_tokenizer(folder))

    def report_relay(self, url: str, *versions: int) -> None:
        report = delegated_report(self.key("relay"), url, versions)
        self.client_of(self.key("relay")).call("POST", "/v1/relays", report, HeartbeatReply)

    def join(self) -> None:
        self.node.call("POST", "/v1/enrol", Enrol(protocol=PROTOCOL, software="test"), Enrolled)
        self.epoch = self.node.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch

    def lease(self) -> Lease:
        return self.node.call("POST", "/v1/leases", AskLease(epoch=self.epoch), Sealed[Lease]).body

    def submit(self, lease: Lease, data: bytes, version: int = 0) -> None:
        what: dict[str, Any] = {
            "epoch": self.epoch,
            "num_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        upload = self.node.call("POST", f"/v1/leases/{lease.lease_id}/upload", AskUpload(**what), Upload)
        self.node.put_bytes(upload.path, data)
        body = Submit(**what, policy_version=version)
        self.node.call("POST", f"/v1/leases/{lease.lease_id}/submit", body, Sealed[Receipt])

    def verdict_on(self, lease: Lease) -> LeaseStatus:
        give_up_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up_s:
            status = self.node.call("GET", f"/v1/leases/{lease.lease_id}", None, LeaseStatus)
            if status.code is not None:
                return status
            time.sleep(0.05)
        raise AssertionError(f"no verdict on {lease.lease_id} within {DEADLINE_S:.0f} s")

    def config(self, **changes: object) -> ValidatorConfig:
        config = ValidatorConfig(
            coordinator=self.url,
            key=self.dir / "keys" / "validator.key",
            dir=self.dir / "validator",
            deadline_s=30,
        )
        return replace(config, **changes)  # type: ignore[arg-type]


@contextmanager
def in_thread(target: Callable[[threading.Event], T]) -> Iterator["Future[T]"]:
    """Run until the block ends. Its own error fails the test."""
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(target, stop)
        try:
            yield future
        finally:
            stop.set()
        future.result(DEADLINE_S)


@contextmanager
def running_swarm(folder: Path, task: TaskSpec | None = None) -> Iterator[Swarm]:
    """Runs a coordinator without work yet, for the small run on its usual task or on `task`."""
    config = CoordinatorConfig(
        groups_per_step=4, prompts_per_lease=2, eval_prompts=0, retry_s=0.05, try_relays=False
    )
    spec = make_spec() if task is None else make_spec(task=task)
    with running_coordinator(folder, spec, config) as url:
        swarm = Swarm(folder, url)
        yield swarm
        swarm.close()


@contextmanager
def origin_of(swarm: Swarm) -> Iterator[str]:
    server = RelayServer(swarm.store, listen("127.0.0.1", 0))
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        swarm.store.close()
        server.close()


@contextmanager
def published(swarm: Swarm) -> Iterator[LoadedPolicy]:
    """Publishes version 0, which an origin serves, and joins as a worker; yields the policy."""
    with origin_of(swarm) as url:
        policy = swarm.publish(0, url)
        swarm.report_relay(url, 0)
        swarm.join()
        yield policy
