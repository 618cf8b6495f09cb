"""Bytes that nobody submits do not stay: a node could fill the disk with them, and never be blamed for anything."""

import hashlib
import os
from pathlib import Path

from small_swarm import Node, SmallSwarm, refusal
from test_object_uploads import stored_files

from shoal.net.client import Refused
from shoal.swarm.coordinator.uploads import expected_under, mark_stored
from shoal.wire.lease import Lease
from shoal.wire.messages import Abandon, LeaseStatus


def abandon(node: Node, lease: Lease) -> None:
    ask = Abandon(epoch=node.epoch, reason="no longer")
    node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


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


def test_what_was_submitted_stays(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    node.deliver(data=b"submitted")
    lease = other.lease()
    other.upload(lease, b"submitted")
    other.upload(lease, b"something else")
    abandon(other, lease)
    assert stored_files(swarm) == [hashlib.sha256(b"submitted").hexdigest()]


def test_what_another_is_about_to_submit_stays(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    mine, theirs = node.lease(), other.lease()
    node.upload(mine, b"the same")
    other.upload(theirs, b"the same")
    abandon(other, theirs)
    node.submit(mine, b"the same")


def test_bytes_that_come_in_after_others_were_declared_are_refused(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    token = node.ask_upload(lease, b"first").path.rsplit("/", 1)[1]
    with swarm.coordinator.database.read() as db:
        expected = expected_under(db, token, swarm.clock())
    incoming = swarm.coordinator.store.receive(token, expected.sha256, expected.num_bytes)
    incoming.write(b"first")
    node.ask_upload(lease, b"second")
    incoming.finish()
    assert refusal(late, swarm, expected).code == "request.lease_closed"
    assert stored_files(swarm) == []


def late(swarm: SmallSwarm, expected: object) -> None:
    raise NotImplementedError
