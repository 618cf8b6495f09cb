"""A coordinator in this process or on a real socket, with one client per role, a clock that can be moved, and helpers that do work."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from in_process import PORT, InProcessTransport

from ledger_reader import read_ledger
from relay_reports import delegated_report
from s3_stores import CREDENTIALS
from shoal.net.http_client import Refused, SignedClient
from shoal.net.http_server import Server, listen
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import DATABASE_FILE, open_coordinator
from shoal.swarm.coordinator.housekeeping import resume, tick
from shoal.swarm.coordinator.http.server import RunApp
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Receipt, Verdict
from shoal.wire.ledger import LedgerEvent
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.messages import (
    Announce,
    AskLease,
    AskUpload,
    Batch,
    Claim,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    History,
    Info,
    LeaseStatus,
    OpenSession,
    Recorded,
    Session,
    Stats,
    StepReport,
    Submit,
    Upload,
)
from shoal.wire.record import Sealed, seal
from shoal.wire.run_spec import PROTOCOL, RunSpec, Sampling, TaskSpec

LOG = Log("test")
FRESH_DATABASE: Callable[[], str] | None = None
"""Makes the URL of an empty PostgreSQL database; None: SQLite is used."""
STORE_URL = ""
"""The URL of an S3-compatible store; empty: the coordinator's folder is used."""
RELAY_URL = "http://127.0.0.1:9999"

SPEC = RunSpec(
    run="small",
    task=TaskSpec(name="sort", options={"length": 4}),
    compute_dtype="float32",
    sampling=Sampling(temperature=1.0, max_new_tokens=8, samples_per_prompt=2),
    max_lag=1,
    last_version=4,
)
CONFIG = CoordinatorConfig(
    groups_per_step=4,
    prompts_per_lease=2,
    lease_s=100,
    claim_s=30,
    trusted_after=2,
    eval_prompts=0,
    try_relays=False,
)


class Clock:
    """Real time plus whatever a test adds. Signatures are made with real time, and bear some 300 s of difference."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def socket_transport() -> httpx2.BaseTransport:
    # Reading the list of certificate authorities costs more than all a test does, and nothing here is https.
    return httpx2.HTTPTransport(verify=False)


def signed_client(url: str, key: Key, transport: httpx2.BaseTransport | None = None) -> SignedClient:
    return SignedClient(url, key, log=LOG, transport=transport or socket_transport())


class Node:
    """A worker's client, as honest as the test makes it."""

    def __init__(self, url: str, key: Key, transport: httpx2.BaseTransport | None = None) -> None:
        self.client = signed_client(url, key, transport)
        self.id = key.public
        self.epoch = 0

    def join(self) -> "Node":
        ask = Enrol(protocol=PROTOCOL, software="test")
        assert self.client.call("POST", "/v1/enrol", ask, Enrolled).node == self.id
        self.epoch = self.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
        return self

    def beat(self, **values: Any) -> HeartbeatReply:
        beat = Heartbeat(epoch=self.epoch, phase="testing", **values)
        return self.client.call("POST", "/v1/heartbeat", beat, HeartbeatReply)

    def sealed_lease(self) -> Sealed[Lease]:
        return self.client.call("POST", "/v1/leases", AskLease(epoch=self.epoch), Sealed[Lease])

    def lease(self) -> Lease:
        return self.sealed_lease().body

    def ask_upload(self, lease: Lease, data: bytes) -> Upload:
        ask = AskUpload(epoch=self.epoch, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        return self.client.call("POST", f"/v1/leases/{lease.lease_id}/upload", ask, Upload)

    def upload(self, lease: Lease, data: bytes) -> None:
        self.client.put_upload(self.ask_upload(lease, data), data)

    def submit(self, lease: Lease, data: bytes, version: int | None = None) -> Sealed[Receipt]:
        ask = Submit(
            epoch=self.epoch,
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            policy_version=lease.policies[-1].version if version is None else version,
        )
        return self.client.call("POST", f"/v1/leases/{lease.lease_id}/submit", ask, Sealed[Receipt])

    def deliver(self, lease: Lease | None = None, data: bytes | None = None) -> Lease:
        """Takes one lease from issue to receipt."""
        lease = lease or self.lease()
        data = data or f"rollouts of {lease.lease_id}".encode()
        self.upload(lease, data)
        self.submit(lease, data)
        return lease

    def status(self, lease: Lease) -> LeaseStatus:
        return self.client.call("GET", f"/v1/leases/{lease.lease_id}", None, LeaseStatus)


class SmallSwarm:
    def __init__(
        self,
        dir: Path,
        config: CoordinatorConfig = CONFIG,
        spec: RunSpec = SPEC,
        clock: Clock | None = None,
        *,
        any_name: bool = False,
        on_socket: bool = False,
    ) -> None:
        """Opens a coordinator; with `on_socket` behind a real server, otherwise called in this process."""
        self.any_name, self.on_socket = any_name, on_socket
        self.dir, self.config, self.spec, self.clock = dir, config, spec, clock or Clock()
        self._nodes: list[Node] = []
        if FRESH_DATABASE and not config.database:
            self.config = config.model_copy(update={"database": FRESH_DATABASE()})
        if STORE_URL and not config.store:
            self.config = self.config.model_copy(update={"store": STORE_URL})
        self._open(port=0)

    def _open(self, port: int) -> None:
        self.coordinator = open_coordinator(
            self.config, self.spec, self.dir, log=LOG, clock=self.clock, credentials=CREDENTIALS
        )
        resume(self.coordinator)
        sock = listen("127.0.0.1", port) if self.on_socket else None
        self.authority = f"127.0.0.1:{sock.getsockname()[1] if sock else PORT}"
        self.url = f"http://{self.authority}"
        names = None if self.any_name else frozenset({self.authority})
        self.app = app = RunApp(self.coordinator, authorities=names, cache_s=0.0)
        self._server = Server(app, sock, on_close=app.feed.close) if sock else None
        if self._server:
            self._server.start()
        self.run_key = Key.load(self.dir / "keys" / "run.key")
        self.trainer, self.validator, self.relay = (
            signed_client(self.url, Key.load(self.dir / "keys" / f"{role}.key"), self.transport())
            for role in ("trainer", "validator", "relay")
        )
        self.public = httpx2.Client(base_url=self.url, transport=self.transport())

    def transport(self, address: str = "127.0.0.1") -> httpx2.BaseTransport:
        """Returns a transport for a client: straight to the app, which sees `address` as the client's, or over a socket."""
        return socket_transport() if self.on_socket else InProcessTransport(lambda: self.app, address)

    def close(self) -> None:
        for client in (self.trainer, self.validator, self.relay, *(node.client for node in self._nodes)):
            client.close()
        self.public.close()
        self._close_app()

    def stop_server(self) -> None:
        """Closes the socket, as a coordinator does that is told to stop; only with `on_socket`."""
        assert self._server is not None
        self._server.close()

    def _close_app(self) -> None:
        if self._server:
            self._server.close()
        else:
            self.app.feed.close()
            self.app.close()
        self.coordinator.close()

    def reopen(self) -> None:
        """Starts the coordinator again, as after a crash: the old one is only closed."""
        port = int(self.url.rsplit(":", 1)[1])
        for client in (self.trainer, self.validator, self.relay):
            client.close()
        self.public.close()
        self._close_app()
        self._open(port)

    def node(self, address: str = "127.0.0.1") -> Node:
        node = Node(self.url, Key.generate(), self.transport(address)).join()
        self._nodes.append(node)
        return node

    def proven_node(self) -> Node:
        """Returns a node that counts as one with an accepted submission."""
        node = self.node()
        with self.coordinator.transaction() as tx:
            tx.update(NODES, node.id, accepted=1)
        return node

    def stranger(self, key: Key | None = None) -> Node:
        node = Node(self.url, key or Key.generate(), self.transport())
        self._nodes.append(node)
        return node

    def tick(self) -> None:
        tick(self.coordinator)

    # -- roles ------------------------------------------------------------------------------------------

    def announce(self, version: int, *, weights: str | None = None) -> Recorded:
        body = Announce(
            manifest=seal(manifest(version, run=self.spec.run, weights=weights), self.run_key),
            origin_url="http://127.0.0.1:9998",
            report=report(version) if version else None,
        )
        return self.trainer.call("POST", "/v1/policies", body, Recorded)

    def relay_up(self) -> HeartbeatReply:
        told = delegated_report(self.relay.key, RELAY_URL, range(SPEC.last_version + 1), bytes_sent=7)
        return self.relay.call("POST", "/v1/relays", told, HeartbeatReply)

    def start(self) -> None:
        """Publishes version 0 and registers a relay that serves it."""
        self.announce(0)
        self.relay_up()

    def claim(self) -> Claim:
        return self.validator.call("POST", "/v1/checks/claim", None, Claim)

    def verdict(
        self,
        lease: Lease,
        code: str = "accepted",
        rewards: tuple[float, ...] = (),
        evidence: Mapping[str, float | int | str] | None = None,
    ) -> LeaseStatus:
        accepted = code == "accepted"
        body = Verdict(
            lease_id=lease.lease_id,
            code=code,
            detail="because",
            rewards=(rewards or with_signal(lease)) if accepted else (),
            output_tokens=3 * lease.num_rows if accepted else 0,
            evidence={**(evidence or {})},
        )
        return self.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", body, LeaseStatus)

    def work(self, node: Node, code: str = "accepted", rewards: tuple[float, ...] = ()) -> Lease:
        """Takes one lease from issue to verdict."""
        lease = node.deliver()
        assert self.claim().lease == lease
        self.verdict(lease, code, rewards)
        return lease

    def batch(self, version: int) -> Batch:
        return self.trainer.call("GET", f"/v1/batches/{version}", None, Batch)

    def fill(self, node: Node) -> None:
        """Has the node deliver accepted work until a batch is ready."""
        for _ in range(self.config.groups_per_step // self.config.prompts_per_lease):
            self.work(node)

    # -- views ------------------------------------------------------------------------------------------

    def info(self) -> Info:
        return Info.parse(self.public.get("/v1/info").raise_for_status().content)

    def stats(self) -> Stats:
        return Stats.parse(self.public.get("/v1/stats").raise_for_status().content)

    def history(self) -> History:
        return History.parse(self.public.get("/v1/history").raise_for_status().content)

    def ledger(self) -> list[LedgerEvent]:
        return read_ledger(self.config.database or self.dir / DATABASE_FILE)

    def events(self, type: str) -> list[LedgerEvent]:
        return [event for event in self.ledger() if event.type == type]


def with_signal(lease: Lease) -> tuple[float, ...]:
    return tuple(float(row % 2) for row in range(lease.num_rows))


def without_signal(lease: Lease) -> tuple[float, ...]:
    return (1.0,) * lease.num_rows


def manifest(version: int, *, run: str = "small", weights: str | None = None) -> Manifest:
    digest = weights or f"{version:064x}"
    entry = FileEntry(
        name="model.safetensors", num_bytes=1000, blake3=digest, shard_bytes=1000, shards=(digest,)
    )
    return Manifest(run=run, version=version, files=(entry,), created_at_s=5.0)


def report(version: int) -> StepReport:
    return StepReport(
        version=version,
        loss=0.1,
        reward_mean=0.5,
        groups=4,
        dropped_groups=0,
        rollouts=8,
        tokens=100,
        lag_mean=0.0,
        lag_max=0,
        grad_norm=1.0,
        clip_fraction=0.0,
        logprob_gap=0.0,
        learning_rate=1e-4,
        wait_s=1.0,
        train_s=1.0,
        tokens_per_s=100.0,
        disk_bytes=5_000_000,
        train_passes=4,
    )


def refusal(call: Any, *arguments: Any, **named: Any) -> Refused:
    """Makes a call that must be refused and returns the refusal."""
    try:
        answer = call(*arguments, **named)
    except Refused as refused:
        return refused
    raise AssertionError(f"not refused, but answered {answer!r}")


def at_once(call: Any, times: int) -> list[Any]:
    """Makes the same call from several threads at once and returns the outcomes."""
    gate = threading.Barrier(times)
    outcomes: list[Any] = []

    def attempt() -> None:
        gate.wait(10)
        try:
            outcomes.append(call())
        except Refused as refused:
            outcomes.append(refused)

    threads = [threading.Thread(target=attempt) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes
