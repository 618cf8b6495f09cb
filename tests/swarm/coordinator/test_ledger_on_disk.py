"""The ledger that the coordinator stores: it is complete, it verifies, and changed rows are detected."""

import hashlib
import json
from pathlib import Path

import pytest
from small_swarm import CONFIG, SmallSwarm

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.wire.codes import CorruptData
from shoal.wire.lease import Lease
from shoal.wire.ledger import LedgerEvent, LedgerHead, verify_chain, verify_ledger
from shoal.wire.record import Sealed
from shoal.wire.seeded_draw import lease_seed


def lived(swarm: SmallSwarm) -> SmallSwarm:
    """Makes a run with nearly every type of event."""
    swarm.start()
    node, liar = swarm.node(), swarm.node()
    swarm.work(liar, "reject.copied")
    swarm.work(liar, "reject.copied")
    swarm.fill(node)
    swarm.batch(0)
    swarm.work(node)
    swarm.announce(1)
    swarm.announce(2)
    node.lease()
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    swarm.tick()
    return swarm


def head(swarm: SmallSwarm) -> Sealed[LedgerHead]:
    return Sealed[LedgerHead].parse(swarm.public.get("/v1/ledger/head").content)


def test_every_transition_is_recorded_and_the_chain_verifies(swarm: SmallSwarm) -> None:
    lived(swarm)
    events = swarm.ledger()
    assert verify_ledger(events, head(swarm), swarm.run_key.public) == len(events)
    assert {event.type for event in events} == {
        "run.opened",
        "policy.published",
        "relay.delegated",
        "node.enrolled",
        "session.opened",
        "epoch.committed",
        "lease.issued",
        "submission.received",
        "verdict.given",
        "node.quarantined",
        "node.banned",
        "node.trusted",
        "batch.formed",
        "group.stale",
        "lease.void",
    }


def test_it_is_served_in_pages(swarm: SmallSwarm) -> None:
    lived(swarm)
    served: list[LedgerEvent] = []
    while page := swarm.public.get(f"/v1/ledger?from_seq={len(served) + 1}&limit=7").json():
        assert len(page) <= 7
        served += [LedgerEvent.parse(json.dumps(event)) for event in page]
    assert served == swarm.ledger()
    assert swarm.public.get("/v1/ledger?limit=x").status_code == 422
    assert swarm.public.get("/v1/ledger?from_seq=99999999999999999999").status_code == 422


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE ledger SET body = replace(body, 'reject.copied', 'accepted') WHERE type = 'verdict.given'",
        "UPDATE ledger SET time_s = time_s + 1 WHERE seq = 5",
        "UPDATE ledger SET actor = prev WHERE seq = 5",
        "DELETE FROM ledger WHERE seq = 5",
        "DELETE FROM ledger WHERE seq = (SELECT max(seq) FROM ledger)",
    ],
)
def test_a_changed_row_is_found(swarm: SmallSwarm, change: str) -> None:
    lived(swarm)
    kept = head(swarm)
    with swarm.coordinator.database.group() as group:
        group.db.exec_driver_sql(change)
    with pytest.raises(CorruptData):
        verify_ledger(swarm.ledger(), kept, swarm.run_key.public)


def test_a_head_signed_by_another_key_is_refused(swarm: SmallSwarm) -> None:
    with pytest.raises(CorruptData):
        verify_ledger(swarm.ledger(), head(swarm), "0" * 64)


def test_replay_names_the_event_that_contradicts_the_others(swarm: SmallSwarm) -> None:
    lived(swarm)
    events = swarm.ledger()
    issued = next(event for event in events if event.type == "lease.issued")
    with pytest.raises(
        CorruptData, match=f"event {issued.seq} \\(lease.issued\\), or one before it, lacks a field"
    ):
        replay([event.model_copy(update={"body": {}}) if event is issued else event for event in events])
    with pytest.raises(CorruptData, match="was never issued"):
        replay([event for event in events if event is not issued])


def test_secrets_are_committed_before_and_revealed_after(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"leases_per_epoch": 2}))
    swarm.start()
    node = swarm.node()
    leases: list[Lease] = [swarm.work(node) for _ in range(3)]
    swarm.batch(0)
    leases.append(node.lease())
    assert [lease.epoch for lease in leases] == [1, 1, 2, 2]
    order = [event.type for event in swarm.ledger() if event.type.startswith(("epoch.", "lease."))]
    assert order == [
        "epoch.committed",
        "lease.issued",
        "lease.issued",
        "epoch.revealed",
        "epoch.committed",
        "lease.issued",
        "lease.issued",
    ]
    commitments = {event.body["epoch"]: event.body["commitment"] for event in swarm.events("epoch.committed")}
    (revealed,) = swarm.events("epoch.revealed")
    secret = bytes.fromhex(revealed.body["secret"])
    assert hashlib.sha256(secret).hexdigest() == commitments[1]
    for lease in leases[:2]:
        assert lease.seed == lease_seed(secret, lease.lease_id, node.id)
    # The last lease of the second epoch is still open. Its secret is revealed when its work is judged, not when it expires.
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    swarm.tick()
    assert [event.body["epoch"] for event in swarm.events("epoch.revealed")] == [1]
    swarm.relay_up()
    assert swarm.work(node).unit == leases[-1].lease_id
    assert [event.body["epoch"] for event in swarm.events("epoch.revealed")] == [1, 2]
    swarm.close()


def test_a_refused_request_leaves_no_event(swarm: SmallSwarm) -> None:
    before = len(swarm.ledger())
    node = swarm.stranger()
    for call in (node.beat, node.lease, swarm.claim, lambda: swarm.batch(0), lambda: swarm.announce(3)):
        with pytest.raises(Exception, match=r"request\."):
            call()
    assert len(swarm.ledger()) == before
    verify_chain(swarm.ledger())
