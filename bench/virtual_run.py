"""A real coordinator in virtual time: its own transactions, rules and database, called directly, with a clock that the caller moves.

economics.py uses it. Nothing is generated or checked here: the caller says how long work takes and which verdict it gets.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.net.object_store import LocalStore
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import Coordinator, Transaction, open_coordinator
from shoal.swarm.coordinator.housekeeping import tick, tidy
from shoal.swarm.coordinator.http.routes import get_batch
from shoal.swarm.coordinator.leases import issue, lifecycle, submissions, uploads, verdicts
from shoal.swarm.coordinator.leases.lease_rows import UPLOADS, expected_upload
from shoal.swarm.coordinator.membership import admin_actions, admission, relays, versions
from shoal.swarm.coordinator.membership.nodes import NODES, open_session
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.delegation import delegate_relay
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Verdict
from shoal.wire.manifest import FileEntry, Manifest
from shoal.wire.messages import (
    Abandon,
    AdminOrder,
    Announce,
    AskClaim,
    AskLease,
    AskUpload,
    Batch,
    Claim,
    Enrol,
    OpenSession,
    RelayReport,
    StepReport,
    Submit,
)
from shoal.wire.record import seal
from shoal.wire.run_spec import PROTOCOL, RunSpec, Sampling, TaskSpec

RELAY_URL = "http://127.0.0.1:9999"
QUIET = Log("bench")


def spec_of(*, samples: int = 4, max_lag: int = 2) -> RunSpec:
    return RunSpec(
        run="virtual",
        task=TaskSpec(name="sort", options={"length": 4}),
        compute_dtype="float32",
        sampling=Sampling(max_new_tokens=8, samples_per_prompt=samples),
        max_lag=max_lag,
        last_version=10**6,
    )


@dataclass
class VirtualNode:
    """An enrolled key with a session."""

    key: Key
    network: str
    epoch: int = 0
    sent: int = 0
    leases: list[Lease] = field(default_factory=list)


class VirtualRun:
    """The run. Requests raise Rejected where a client would get a refusal."""

    def __init__(self, folder: Path, config: CoordinatorConfig, spec: RunSpec) -> None:
        self.now_s = time.time()
        self.folder, self.version = folder, -1
        self.coordinator: Coordinator = open_coordinator(
            config, spec, folder, log=QUIET, clock=lambda: self.now_s
        )
        self.trained: set[str] = set()
        """Ids of the groups in batches."""
        self.publish()

    def close(self) -> None:
        self.coordinator.close()

    def _role(self, name: str) -> str:
        return Key.load(self.folder / "keys" / f"{name}.key").public

    def publish(self) -> None:
        """Announces the next version, which the relay has at once."""
        self.version += 1
        digest = f"{self.version:064x}"
        entry = FileEntry(
            name="model.safetensors", num_bytes=1000, blake3=digest, shard_bytes=1000, shards=(digest,)
        )
        manifest = Manifest(run="virtual", version=self.version, files=(entry,), created_at_s=5.0)
        told = Announce(
            manifest=seal(manifest, self.coordinator.run_key),
            origin_url="http://127.0.0.1:9998",
            report=step_report(self.version) if self.version else None,
        )
        with self.coordinator.transaction(self._role("trainer")) as tx:
            versions.announce(tx, self.coordinator, told)
        operator = Key.load(self.folder / "keys" / "relay.key")
        delegation = delegate_relay(operator, operator.public, RELAY_URL, now_s=self.now_s - 60)
        first = max(0, self.version - self.coordinator.spec.keep_versions + 1)
        report = RelayReport(
            url=RELAY_URL, versions=tuple(range(first, self.version + 1)), delegation=delegation
        )
        with self.coordinator.transaction(operator.public) as tx:
            relays.report(tx, self.coordinator, report)

    def tick(self, *, tidies: bool = False) -> None:
        tick(self.coordinator)
        if tidies:
            tidy(self.coordinator)

    # -- nodes ------------------------------------------------------------------------------------------

    def node(self, network: str = "", *, allow: bool = False) -> VirtualNode:
        """Enrols a new key; with `allow` after the operator listed it."""
        node = VirtualNode(Key.generate(), network)
        if allow:
            with self.coordinator.transaction(self._role("admin")) as tx:
                order = AdminOrder(reason="invited", subject=node.key.public)
                admin_actions.give_order(tx, self.coordinator, "allow", order)
        self._call(node, admission.enrol, Enrol(protocol=PROTOCOL, software="bench"))
        node.epoch = self._call(node, open_session, OpenSession(software="bench")).epoch
        return node

    def prove(self, node: VirtualNode, *, accepted: int, rows_per_s: float) -> None:
        """Makes the node a trusted one, as if so many submissions of it had been accepted."""
        with self.coordinator.transaction() as tx:
            trusted = {"trust": "trusted", "accepted": accepted, "streak": accepted, "rows_per_s": rows_per_s}
            tx.update(NODES, node.key.public, **trusted)

    def _call(self, node: VirtualNode, act: Callable[..., Any], *arguments: Any) -> Any:
        with self.coordinator.transaction(node.key.public) as tx:
            self._admit(tx, node)
            return act(tx, self.coordinator, *arguments)

    def _admit(self, tx: Transaction, node: VirtualNode) -> None:
        tx.node, tx.network = NODES.find(tx.db, node.key.public), node.network
        if tx.node is not None and tx.node.trust == "banned":
            raise Rejected("request.banned", "ejected")

    def lease(self, node: VirtualNode) -> Lease:
        lease: Lease = self._call(node, issue.ask_lease, AskLease(epoch=node.epoch)).body
        return lease

    def give_back(self, node: VirtualNode, lease: Lease) -> None:
        ask = Abandon(epoch=node.epoch, reason="no")
        self._call(node, lifecycle.abandon, lease.lease_id, ask)

    def submit(self, node: VirtualNode, lease: Lease, version: int | None = None) -> None:
        """Uploads and submits a file of a few bytes. Its content says whose it is."""
        node.sent += 1
        data = f"{lease.lease_id} {node.sent}".encode()
        what = {"epoch": node.epoch, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self._call(node, uploads.ask_upload, lease.lease_id, AskUpload.model_validate(what))
        with self.coordinator.database.read() as db:
            declared = UPLOADS.find(db, lease.lease_id)
        assert declared is not None and isinstance(self.coordinator.store, LocalStore)
        expected = expected_upload(declared)
        path = self.coordinator.store.path(expected.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        uploads.mark_stored(self.coordinator, expected)
        made_with = lease.policies[-1].version if version is None else version
        ask = Submit.model_validate(what | {"policy_version": made_with})
        self._call(node, submissions.submit, lease.lease_id, ask)

    # -- validator and trainer ---------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        try:
            with self.coordinator.transaction(self._role("validator")) as tx:
                return verdicts.claim(tx, self.coordinator, AskClaim(validator="one"))
        except Rejected:
            return None

    def verdict(
        self,
        claim: Claim,
        code: str,
        evidence: dict[str, Any] | None = None,
        rewards: tuple[float, ...] | None = None,
    ) -> str:
        """Gives a verdict. Without `rewards`, every group of an accepted submission has signal."""
        accepted, rows = code == "accepted", claim.lease.num_rows
        verdict = Verdict(
            lease_id=claim.lease.lease_id,
            code=code,
            detail="",
            rewards=(rewards or tuple(float(row % 2) for row in range(rows))) if accepted else (),
            output_tokens=8 * rows if accepted else 0,
            checks=claim.checks,
            evidence=evidence or {},
        )
        with self.coordinator.transaction(self._role("validator")) as tx:
            return verdicts.give_verdict(tx, self.coordinator, claim.lease.lease_id, verdict).code or ""

    def batch(self, version: int | None = None) -> Batch | None:
        """Forms the batch of a version, of the newest one if none is given, if there are enough groups."""
        try:
            with self.coordinator.transaction(self._role("trainer")) as tx:
                batch: Batch = get_batch(tx, self.coordinator, self.version if version is None else version)
        except Rejected:
            return None
        self.trained |= {group.group_id for group in batch.groups}
        return batch

    def database_bytes(self) -> int:
        """Returns the size of the database with its log written back."""
        self.coordinator.database.truncate_log()
        return sum(path.stat().st_size for path in self.folder.glob("*.db*"))


def step_report(version: int) -> StepReport:
    return StepReport(
        version=version,
        loss=0.0,
        reward_mean=0.5,
        groups=1,
        dropped_groups=0,
        rollouts=1,
        tokens=1,
        lag_mean=0.0,
        lag_max=0,
        grad_norm=1.0,
        clip_fraction=0.0,
        logprob_gap=0.0,
        learning_rate=1e-4,
        wait_s=1.0,
        train_s=1.0,
        tokens_per_s=1.0,
    )
