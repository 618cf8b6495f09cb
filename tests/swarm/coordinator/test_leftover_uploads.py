"""Uploads that are never submitted are deleted: otherwise a node could fill the disk without being blamed."""

import hashlib
import os
import select
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import small_swarm
from small_swarm import Node, SmallSwarm, refusal
from sqlalchemy.exc import OperationalError

from shoal.net.object_store import LocalStore
from shoal.net.s3_store import S3Store
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.housekeeping import tidy
from shoal.swarm.coordinator.http.upload_receiver import UPLOADS_AT_ONCE
from shoal.swarm.coordinator.leases import lifecycle, uploads
from shoal.swarm.coordinator.leases.lifecycle import APPEALED_KEPT_S, REJECTED_KEPT_S
from shoal.swarm.coordinator.leases.uploads import find_expected, find_submitted, mark_stored
from shoal.swarm.coordinator.leases.verdicts import stored_claim
from shoal.swarm.coordinator.membership.revocation import decide
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, AdminOrder, Appeal, Claim, LeaseStatus, Recorded


@pytest.fixture(autouse=True)
def of_the_folder() -> None:
    if small_swarm.STORE_URL:
        pytest.skip("test_both_stores.py has what holds of an object store")


def abandon(node: Node, lease: Lease) -> None:
    ask = Abandon(epoch=node.epoch, reason="no longer")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def stored_files(swarm: SmallSwarm) -> list[str]:
    return sorted(path.name for path in (swarm.dir / "objects").rglob("*") if path.is_file())


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_one_lease_stores_one_file_however_many_it_uploads(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    for _ in range(20):
        node.upload(lease, os.urandom(lease.max_bytes))
    assert stored_bytes(swarm.dir / "objects") == lease.max_bytes


def test_an_upload_goes_with_its_lease(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    given_back = node.lease()
    node.upload(given_back, b"never submitted")
    assert len(stored_files(swarm)) == 1
    abandon(node, given_back)
    assert stored_files(swarm) == []
    ran_out = node.lease()
    node.upload(ran_out, b"never submitted either")
    swarm.clock.ahead_s = swarm.config.lease_s + 1
    swarm.tick()
    assert node.status(ran_out).code == "void.expired"
    assert stored_files(swarm) == []


def test_submitted_bytes_are_kept(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    node.deliver(data=b"submitted")
    lease = other.lease()
    other.upload(lease, b"submitted")
    other.upload(lease, b"something else")
    abandon(other, lease)
    assert stored_files(swarm) == [hashlib.sha256(b"submitted").hexdigest()]


def test_bytes_that_another_lease_uploaded_are_kept(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    mine, theirs = node.lease(), other.lease()
    node.upload(mine, b"the same")
    other.upload(theirs, b"the same")
    abandon(other, theirs)
    node.submit(mine, b"the same")
    assert stored_files(swarm) == [hashlib.sha256(b"the same").hexdigest()]


def test_bytes_that_come_in_after_others_were_declared_are_refused(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    token = node.ask_upload(lease, b"first").path.rsplit("/", 1)[1]
    with swarm.coordinator.database.read() as db:
        expected = find_expected(db, token, swarm.clock())
    store = swarm.coordinator.store
    assert isinstance(store, LocalStore)
    incoming = store.receive(token, expected.sha256, expected.num_bytes)
    incoming.write(b"first")
    node.ask_upload(lease, b"second")
    incoming.finish()
    with pytest.raises(Rejected, match=r"request\.lease_closed"):
        mark_stored(swarm.coordinator, expected)
    assert stored_files(swarm) == []


@pytest.mark.on_socket
def test_an_upload_that_drips_on_ends_with_its_lease(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    path = node.ask_upload(lease, b"drip, drip").path
    swarm.clock.ahead_s = swarm.config.lease_s - 1.0
    with socket.create_connection(("127.0.0.1", int(swarm.authority.split(":")[1])), timeout=20) as raw:
        raw.sendall(
            f"PUT {path} HTTP/1.1\r\nHost: {swarm.authority}\r\nContent-Length: 10\r\n\r\ndrip".encode()
        )
        answer = raw.recv(4096)  # far sooner than the 30 s that any silence is allowed
    # Where the machine is slow the lease has ended before the upload began.
    assert answer.split()[1] in (b"400", b"410")
    assert b"connection: close" in answer.lower()
    assert stored_files(swarm) == []


@pytest.mark.on_socket
def test_one_lease_has_few_uploads_in_progress_however_many_it_declares(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    address = ("127.0.0.1", int(swarm.authority.split(":")[1]))
    body = b"x" * (lease.max_bytes - 1)  # never complete
    with ExitStack() as stack:
        waiting = set()
        for number in range(8):
            path = node.ask_upload(lease, bytes([number]) * lease.max_bytes).path
            raw = stack.enter_context(socket.create_connection(address, timeout=20))
            waiting.add(raw)
            head = (
                f"PUT {path} HTTP/1.1\r\nHost: {swarm.authority}\r\nContent-Length: {lease.max_bytes}\r\n\r\n"
            )
            raw.sendall(head.encode() + body)
        # Replaced uploads are answered far sooner than the 30 s that any silence is allowed.
        while len(waiting) > UPLOADS_AT_ONCE:
            answered, _, _ = select.select(list(waiting), [], [], 10)
            assert answered, f"{len(waiting)} uploads of one lease are in progress"
            waiting -= set(answered)
        assert len(stored_files(swarm)) <= UPLOADS_AT_ONCE


@pytest.mark.parametrize("code", ["void.uncertain", "void.infra", "accepted", "reject.early_stop"])
def test_files_of_void_submissions_are_deleted(swarm: SmallSwarm, code: str) -> None:
    swarm.start()
    swarm.work(swarm.node(), code)
    assert len(stored_files(swarm)) == (0 if code.startswith("void.") else 1)


def audit_refusal(swarm: SmallSwarm, lease: Lease) -> str:
    refused = refusal(swarm.validator.call, "GET", f"/v1/checks/{lease.lease_id}", None, Claim)
    assert refused.code == "request.not_found"
    return refused.problem.detail


@pytest.mark.parametrize("code", ["reject.malformed_file", "reject.oversized_table"])
def test_unreadable_files_are_deleted_at_once(swarm: SmallSwarm, code: str) -> None:
    swarm.start()
    nodes = [swarm.node() for _ in range(2)]
    leases = [node.deliver(data=b"the same junk") for node in nodes]
    for lease, files in zip(leases, (1, 0), strict=True):
        swarm.claim()
        swarm.verdict(lease, code)
        assert len(stored_files(swarm)) == files
        assert audit_refusal(swarm, lease).endswith(f"was rejected ({code}) and is deleted")
    # A node whose receipt was lost still gets it.
    assert nodes[0].submit(leases[0], b"the same junk").body.lease_id == leases[0].lease_id


def test_rejected_files_are_kept_for_an_appeal(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    appealed, silent = swarm.work(node, "reject.early_stop"), swarm.work(other, "reject.early_stop")
    path = f"/v1/leases/{appealed.lease_id}/appeal"
    node.client.call("POST", path, Appeal(text="it did not stop early"), Recorded)
    tidy(swarm.coordinator)
    assert len(stored_files(swarm)) == 2
    swarm.clock.ahead_s += REJECTED_KEPT_S + 1
    tidy(swarm.coordinator)
    assert len(stored_files(swarm)) == 1
    with swarm.coordinator.database.read() as db:
        assert stored_claim(db, appealed.lease_id).lease == appealed
        with pytest.raises(Rejected, match=r"was rejected \(reject.early_stop\) and is deleted"):
            stored_claim(db, silent.lease_id)
    with swarm.coordinator.transaction() as tx:
        order = AdminOrder(subject=appealed.lease_id, reason="it did")
        decide(tx, swarm.coordinator, order, upheld=False)
    tidy(swarm.coordinator)
    assert stored_files(swarm) == []


def appeal(node: Node, lease: Lease) -> None:
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/appeal", Appeal(text="I did it"), Recorded)


def test_an_appeal_that_nobody_decides_does_not_keep_a_file_for_ever(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    appeal(node, swarm.work(node, "reject.wrong_computation"))
    swarm.clock.ahead_s += APPEALED_KEPT_S - 60
    tidy(swarm.coordinator)
    assert len(stored_files(swarm)) == 1
    swarm.clock.ahead_s += 120
    tidy(swarm.coordinator)
    assert stored_files(swarm) == []


def test_junk_under_appeal_has_bounded_size(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and appeals are free. The file of a node with accepted work is kept longer than those of new keys."""
    monkeypatch.setattr(lifecycle, "REJECTED_BYTES", 2500)
    swarm.start()
    honest, files = swarm.proven_node(), {}
    for name, node in (("honest", honest), *((f"junk {count}", swarm.node()) for count in range(4))):
        lease = node.deliver(data=os.urandom(1000))
        swarm.verdict(swarm.claim().lease, "reject.wrong_computation")
        appeal(node, lease)
        files[name] = lease.lease_id
    tidy(swarm.coordinator)
    assert len(stored_files(swarm)) == 2
    with swarm.coordinator.database.read() as db:
        stored_claim(db, files["honest"])
        stored_claim(db, files["junk 3"])
        with pytest.raises(Rejected, match="is deleted"):
            stored_claim(db, files["junk 2"])


def test_junk_submitted_as_stale_work_is_deleted(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    for version in (1, 2):
        swarm.announce(version)
    node.deliver(lease, os.urandom(1000))
    assert (node.status(lease).code, stored_files(swarm)) == ("void.stale", [])


def test_a_file_that_another_lease_has_is_kept(swarm: SmallSwarm) -> None:
    swarm.start()
    first, second = swarm.node(), swarm.node()
    kept = first.deliver(data=b"the same")
    second.deliver(data=b"the same")
    swarm.claim()
    swarm.verdict(swarm.claim().lease, "void.infra")
    assert len(stored_files(swarm)) == 1
    swarm.verdict(kept)
    assert len(stored_files(swarm)) == 1


def test_a_long_reason_for_giving_a_lease_back_is_refused(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    with pytest.raises(ValueError):
        Abandon(epoch=node.epoch, reason="x" * 101)
    long = Abandon.model_construct(epoch=node.epoch, reason="x" * 101)
    refused = refusal(node.client.call, "POST", f"/v1/leases/{lease.lease_id}/abandon", long, LeaseStatus)
    assert refused.code == "request.malformed"
    assert node.status(lease).state == "issued"


def test_bytes_are_read_where_an_accepted_lease_stored_them(swarm: SmallSwarm) -> None:
    """An object store has each upload under a name of its own, and deletes those of void leases.

    A node could otherwise submit its own good file under a lease that ends void, and then under the right one: the trainer would ask
    for the deleted copy for ever.
    """
    swarm.start()
    first, second = swarm.node(), swarm.node()
    data = b"the same bytes"
    lost, kept = first.deliver(data=data), second.deliver(data=data)
    swarm.claim()
    swarm.verdict(lost, "void.infra")
    swarm.claim()
    with swarm.coordinator.database.read() as db:
        found = find_submitted(db, hashlib.sha256(data).hexdigest())
    assert found is not None and found.lease_id == kept.lease_id


def test_sweeping_goes_on_after_the_database_was_away(
    swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, sweeps = threading.Event(), []

    def sweep(coordinator: Coordinator, store: S3Store) -> int:
        sweeps.append(store)
        if len(sweeps) == 1:
            raise OperationalError("SELECT 1", {}, Exception("the server restarts"))
        stop.set()
        return 0

    monkeypatch.setattr(uploads, "sweep", sweep)
    monkeypatch.setattr(uploads, "SWEEP_S", 0.0)
    uploads.keep_sweeping(swarm.coordinator, cast(S3Store, None), stop)
    assert len(sweeps) == 2
