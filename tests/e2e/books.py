"""Checks of a finished run that must hold whatever was killed, and whenever.

The ledger is the source; the coordinator's tables, the trainer's files and the relays' are held against it.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from blake3 import blake3
from sqlalchemy import select
from swarm_processes import Role, Swarm, shoal

from ledger_reader import read_ledger
from shoal.cli.run.runfile import RunFile, load_run_file
from shoal.swarm.coordinator.context import DATABASE_FILE
from shoal.swarm.coordinator.leases.batches import has_signal
from shoal.swarm.coordinator.store.database import read_only
from shoal.swarm.coordinator.store.schema import groups, nodes, policies
from shoal.wire.codes import ACCEPTED
from shoal.wire.keys import Key
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_chain
from shoal.wire.manifest import WEIGHTS_FILE, Manifest
from shoal.wire.messages import StepReport
from shoal.wire.record import Sealed


@dataclass(frozen=True)
class Books:
    file: RunFile
    folder: Path
    events: tuple[LedgerEvent, ...]

    @property
    def database(self) -> Path:
        return self.folder / "coordinator" / DATABASE_FILE

    def of(self, kind: str) -> list[LedgerEvent]:
        return [event for event in self.events if event.type == kind]


def open_books(swarm: Swarm) -> Books:
    folder = swarm.folder
    events = read_ledger(folder / "coordinator" / DATABASE_FILE)
    return Books(load_run_file(swarm.file), folder, tuple(events))


def keep_head(swarm: Swarm) -> Sealed[LedgerHead]:
    """Returns the signed ledger head, as an auditor keeps it during the run."""
    return Sealed[LedgerHead].parse(
        httpx2.get(f"{swarm.url}/v1/ledger/head", timeout=10.0).raise_for_status().content
    )


def check_books(swarm: Swarm, heads: Iterable[Sealed[LedgerHead]] = ()) -> Books:
    """Checks everything that must hold for a finished run."""
    books = open_books(swarm)
    check_ledger(books, heads)
    check_versions(books)
    check_batches(books)
    check_no_group_lost(books)
    check_metrics(books)
    check_credit(books)
    check_files(books)
    check_signed_head(swarm, books)
    return books


def check_ledger(books: Books, heads: Iterable[Sealed[LedgerHead]]) -> None:
    """Checks that no signed ledger head has changed."""
    count, _ = verify_chain(books.events)
    run_key = Key.load(books.folder / "coordinator" / "keys" / "run.key").public
    for sealed in heads:
        head = sealed.open(run_key)
        assert head.seq <= count, f"event {head.seq} was signed, the ledger has {count}"
        assert books.events[head.seq - 1].hash == head.hash, (
            f"event {head.seq} is not the one that was signed"
        )


def check_signed_head(swarm: Swarm, books: Books) -> None:
    """Opens the folder with a new coordinator and runs the audit that anybody can make."""
    arguments = [str(swarm.file), "--dir", str(books.folder / "coordinator"), "--port", "0"]
    with Role(books.folder.parent, "coordinator", *arguments) as coordinator:
        coordinator.wait_for_log("serving")
        url = coordinator.log.split("url=")[1].split()[0]
        audit = shoal("ledger", "verify", url)
    assert (audit.returncode, audit.stderr) == (0, ""), audit.stderr
    # Its housekeeping expires leases that were still open, which adds events.
    count = int(audit.stdout.removeprefix("good: ").split()[0])
    later = open_books(swarm).events
    assert len(books.events) <= count <= len(later)
    assert later[: len(books.events)] == books.events


def check_versions(books: Books) -> None:
    """Checks that every version was published once, in order."""
    published = [event.body["version"] for event in books.of("policy.published")]
    assert published == list(range(books.file.run.last_version + 1))
    assert [event.body["version"] for event in books.of("run.finished")] == [books.file.run.last_version]


def check_batches(books: Books) -> None:
    """Checks that every batch is formed once, is full, has only accepted training work within the lag, and shares no group."""
    issued = {event.body["lease_id"]: event.body for event in books.of("lease.issued")}
    assert len(issued) == len(books.of("lease.issued")), "a lease was issued twice"
    received = {event.body["lease_id"]: event.body for event in books.of("submission.received")}
    given = {event.body["lease_id"]: event for event in books.of("verdict.given")}
    assert len(given) == len(books.of("verdict.given")), "a submission has two verdicts"
    formed = books.of("batch.formed")
    assert [event.body["version"] for event in formed] == list(range(books.file.run.last_version))
    for event in formed:
        version, group_ids = event.body["version"], event.body["group_ids"]
        assert len(group_ids) == books.file.coordinator.groups_per_step
        for lease_id in {lease_of(group_id) for group_id in group_ids}:
            assert issued[lease_id]["purpose"] == "train"
            assert given[lease_id].body["code"] == ACCEPTED
            assert given[lease_id].seq < event.seq
            lag = version - received[lease_id]["policy_version"]
            assert 0 <= lag <= books.file.run.max_lag
    times = Counter(group_id for event in formed for group_id in event.body["group_ids"])
    assert max(times.values()) == 1, f"trained on twice: {[name for name, n in times.items() if n > 1]}"


def check_no_group_lost(books: Books) -> None:
    """Checks that accepted work with a training signal was trained on, became stale, or is still ready."""
    size = books.file.sampling.samples_per_prompt
    purposes = {event.body["lease_id"]: event.body["purpose"] for event in books.of("lease.issued")}
    taught: set[str] = set()
    for event in books.of("verdict.given"):
        lease_id, rewards = event.body["lease_id"], event.body["rewards"]
        if event.body["code"] == ACCEPTED and purposes[lease_id] == "train":
            parts = [tuple(rewards[start : start + size]) for start in range(0, len(rewards), size)]
            taught |= {f"{lease_id}-{index}" for index, part in enumerate(parts) if has_signal(part)}
    batched = {name for event in books.of("batch.formed") for name in event.body["group_ids"]}
    stale = {name for event in books.of("group.stale") for name in event.body["group_ids"]}
    assert batched <= taught
    assert not batched & stale, "trained on, although it had gone stale"
    with read_only(books.database) as db:
        states = {row.group_id: row.state for row in db.execute(select(groups.c.group_id, groups.c.state))}
    ready = {name for name, state in states.items() if state == "ready"}
    withdrawn = {name for event in books.of("credit.revoked") for name in event.body["group_ids"]}
    assert not batched & withdrawn, "trained on, although it was withdrawn"
    assert taught - batched - stale - withdrawn == ready
    assert {name for name, state in states.items() if state == "batched"} == batched


def check_metrics(books: Books) -> None:
    """Checks that there is one line per version, in order, that duplicates are identical, and that each equals the announcement.

    Measurements are left out: a trainer that was killed after an announcement makes the step again and measures it again.
    """
    lines = defaultdict(list)
    for step in read_steps(books.folder):
        lines[step["version"]].append(without_measurements(step))
    assert list(lines) == list(range(1, books.file.run.last_version + 1)), "versions out of order or missing"
    assert all(line == same[0] for same in lines.values() for line in same), "a step was told in two ways"
    with read_only(books.database) as db:
        rows = db.execute(select(policies.c.version, policies.c.report).order_by(policies.c.version)).all()
    announced = {row.version: without_measurements(json.loads(row.report)) for row in rows if row.report}
    for report in announced.values():
        del report["warnings"], report["tasks"]  # events and keys of their own in metrics.jsonl
    assert {version: same[0] for version, same in lines.items()} == announced


def without_measurements(report: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in report.items()
        if not key.endswith("_s") and key not in ("disk_bytes", "waited_on")
    }


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Returns the steps of metrics.jsonl without their timestamps."""
    lines = [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.pop("event") == "step" and line.pop("time_s")]
    assert all(StepReport.parse(json.dumps(step).encode()) for step in steps)
    return steps


def check_credit(books: Books) -> None:
    """Checks that a node's credit equals the sum of its accepted work."""
    earned: Counter[str] = Counter()
    revoked = {id for event in books.of("credit.revoked") for id in event.body["lease_ids"]}
    for event in books.of("verdict.given"):
        if event.body["code"] == ACCEPTED and event.body["lease_id"] not in revoked:
            earned[event.body["node"]] += event.body["output_tokens"]
    with read_only(books.database) as db:
        credit = {row.node: row.credit for row in db.execute(select(nodes.c.node, nodes.c.credit))}
    assert credit == {node: earned[node] for node in credit}


def check_files(books: Books) -> None:
    """Checks that every stored version has the weights that the ledger names, and that every batch's objects exist."""
    digests = {event.body["version"]: event.body["weights_digest"] for event in books.of("policy.published")}
    stores = [books.folder / "trainer" / "versions", *books.folder.glob("relay-*")]
    for manifest in (path for store in stores for path in store.glob("v*/manifest.json")):
        named = Sealed[Manifest].parse(manifest.read_bytes()).body
        assert named.weights_digest == digests[named.version], manifest
        if manifest.is_relative_to(books.folder / "trainer"):
            for sent in named.payloads:
                assert blake3((manifest.parent / sent.name).read_bytes()).hexdigest() == sent.blake3, manifest
            if named.version == books.file.run.last_version:
                # Sent as a delta, but kept whole: it is the run's result.
                weights = (manifest.parent / WEIGHTS_FILE).read_bytes()
                assert blake3(weights).hexdigest() == digests[named.version], manifest
    trained = {lease_of(name) for event in books.of("batch.formed") for name in event.body["group_ids"]}
    for event in books.of("submission.received"):
        if event.body["lease_id"] in trained:
            sha256 = event.body["sha256"]
            if books.file.coordinator.store:  # the folder holds no uploads then
                continue
            data = (books.folder / "coordinator" / "objects" / sha256[:2] / sha256).read_bytes()
            assert hashlib.sha256(data).hexdigest() == sha256


def lease_of(group_id: str) -> str:
    return group_id.rsplit("-", 1)[0]
