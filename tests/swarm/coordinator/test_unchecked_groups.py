"""Nothing unchecked is trained on: groups of spared submissions wait for a full check of a node with many behind it, and have a bounded
share."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_swarm import CONFIG, Node, SmallSwarm, refusal, signed_client, with_signal
from sqlalchemy import select, update

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.leases.batches import usable_groups
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.rules.trust import checks_before_release, is_usable
from shoal.swarm.coordinator.store.schema import submissions
from shoal.wire.codes import CorruptData
from shoal.wire.keys import Key
from shoal.wire.lease import Lease, Verdict
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import AdminOrder, LeaseStatus, Recorded


@pytest.fixture
def sparing(tmp_path: Path) -> Iterator[SmallSwarm]:
    """Returns a swarm that admits by invitation and checks a trusted node as rarely as possible."""
    config = CONFIG.model_copy(update={"check_rate": 0.0, "groups_per_step": 8})
    swarm = SmallSwarm(tmp_path / "run", config)
    swarm.start()
    yield swarm
    swarm.close()


OFTEN = 0.9
"""A rate at which every submission that is spared may be used: fewer are spared than `max_unchecked_share` allows."""


def trusted_node(swarm: SmallSwarm, streak: int = 1000) -> Node:
    """Returns a node that has passed so many checks that its spared work may be used."""
    node = swarm.node()
    for _ in range(2):
        work(swarm, node, "full", rate=1.0)
    with swarm.coordinator.transaction() as tx:
        tx.update(NODES, node.id, streak=streak)
    return node


def work(swarm: SmallSwarm, node: Node, checks: str, code: str = "accepted", rate: float = OFTEN) -> Lease:
    """Delivers one lease, sets what was drawn for it, and gives the verdict."""
    lease = node.deliver()
    drawn: dict[str, object] = {"checks": checks, "draw_rate": rate}
    with swarm.coordinator.transaction() as tx:
        tx.write(update(submissions).where(submissions.c.lease_id == lease.lease_id).values(**drawn))
    swarm.claim()
    accepted = code == "accepted"
    body = Verdict(
        lease_id=lease.lease_id,
        code=code,
        detail="because",
        rewards=with_signal(lease) if accepted else (),
        output_tokens=3 * lease.num_rows if accepted else 0,
        checks=checks,  # type: ignore[arg-type]
    )
    swarm.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", body, LeaseStatus)
    return lease


# -- run files --------------------------------------------------------------------------------------------


def test_every_submission_gets_every_check_by_default(tmp_path: Path) -> None:
    assert CoordinatorConfig().check_rate == 1.0
    swarm = SmallSwarm(tmp_path / "run", CONFIG.model_copy(update={"groups_per_step": 40}))
    swarm.start()
    node = swarm.node()
    for _ in range(8):
        node.deliver()
        claim = swarm.claim()
        assert claim.checks == "full"
        swarm.verdict(claim.lease)
    assert swarm.stats().nodes[0].trust == "trusted"
    swarm.close()


@pytest.mark.parametrize("admission", ["invite", "allow", "work", "stake"])
def test_only_an_open_run_must_check_everything(admission: str) -> None:
    CoordinatorConfig.model_validate({"admission": admission, "check_rate": 0.05})
    with pytest.raises(
        ValueError, match=r'check_rate = 0\.05 with admission = "open".*set admission to "invite"'
    ):
        CoordinatorConfig(check_rate=0.05)


# -- held groups ------------------------------------------------------------------------------------------


def test_spared_groups_are_held_until_the_next_full_check_passes(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    ready = sparing.stats().ready_groups
    spared = work(sparing, node, "rewards")
    assert sparing.stats().groups["held"] == 2 and sparing.stats().ready_groups == ready
    work(sparing, node, "full")
    assert "held" not in sparing.stats().groups
    [event] = sparing.events("group.released")
    assert event.body["group_ids"] == [f"{spared.lease_id}-0", f"{spared.lease_id}-1"]
    replay(sparing.ledger())


def test_spared_groups_of_a_node_with_little_checked_work_are_not_used(sparing: SmallSwarm) -> None:
    """Otherwise a single lie that gets through would be a large share of a short run."""
    node = trusted_node(sparing, streak=665)
    work(sparing, node, "rewards")
    work(sparing, node, "full")  # 666 checks passed, of 666.7
    assert sparing.stats().groups["held"] == 2
    work(sparing, node, "full")
    assert "held" not in sparing.stats().groups


def test_checked_groups_without_signal_are_no_record(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing, streak=800)
    with sparing.coordinator.transaction() as tx:  # 4 of 4: with a prior of 8 groups two thirds have signal
        tx.db.exec_driver_sql("UPDATE groups SET state = 'dropped'")
    work(sparing, node, "rewards")
    work(sparing, node, "full")
    assert sparing.stats().groups["held"] == 2


def test_the_draw_chooses_which_spared_groups_are_used(sparing: SmallSwarm) -> None:
    """At a rate of almost 0 almost none are: otherwise a node could have many lies released by one check."""
    node = trusted_node(sparing)
    work(sparing, node, "rewards", rate=1e-12)
    work(sparing, node, "full", rate=1e-12)
    assert sparing.stats().groups["held"] == 2
    assert sparing.events("group.released") == []


def test_after_one_key_of_an_owner_is_caught_no_other_is_spared(sparing: SmallSwarm) -> None:
    """An owner that is admitted by its key may enrol any number of nodes."""
    node, caught, other = (trusted_node(sparing, streak=10**9) for _ in range(3))
    with sparing.coordinator.transaction() as tx:
        for one in (node, caught):
            tx.update(NODES, one.id, owner="ab" * 32)
        tx.update(NODES, caught.id, rejected=1)
    rates = {}
    for one in (node, other):
        lease = one.deliver()
        with sparing.coordinator.database.read() as db:
            found = db.execute(select(submissions).where(submissions.c.lease_id == lease.lease_id)).one()
        rates[one.id] = (found.draw_rate, found.checks)
    assert rates == {node.id: (1.0, "full"), other.id: (1e-9, "rewards")}


def test_spared_groups_are_withdrawn_if_the_next_full_check_fails(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    work(sparing, node, "rewards")
    ready = sparing.stats().ready_groups
    work(sparing, node, "full", "reject.wrong_computation")
    assert sparing.stats().groups["withdrawn"] == 2
    assert sparing.stats().ready_groups == ready
    replay(sparing.ledger())


def test_held_groups_are_withdrawn_even_if_their_credit_is_final(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"check_rate": 0.0, "groups_per_step": 8, "hold_s": 0.0})
    swarm = SmallSwarm(tmp_path / "run", config)
    swarm.start()
    node = trusted_node(swarm)
    work(swarm, node, "rewards")
    work(swarm, node, "full", "reject.wrong_computation")
    assert swarm.events("credit.revoked") == []
    [event] = swarm.events("group.withdrawn")
    assert len(event.body["group_ids"]) == 2
    replay(swarm.ledger())
    swarm.close()


def test_a_ban_withdraws_held_groups(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    work(sparing, node, "rewards")
    key = Key.load(sparing.dir / "keys" / "admin.key")
    admin = signed_client(sparing.url, key, sparing.transport())
    admin.call("POST", "/v1/admin/ban", AdminOrder(subject=node.id, reason="seen lying"), Recorded)
    admin.close()
    assert sparing.stats().groups["withdrawn"] == 2
    replay(sparing.ledger())


def test_a_check_that_the_node_could_foresee_releases_nothing(sparing: SmallSwarm) -> None:
    """A liar could be honest on held-out work and after void.uncertain, which are always checked, and lie on the rest."""
    node = trusted_node(sparing)
    work(sparing, node, "rewards")
    work(sparing, node, "full", rate=1.0)
    assert sparing.stats().groups["held"] == 2


def test_held_groups_go_stale(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    work(sparing, node, "rewards")
    sparing.announce(1)
    sparing.announce(2)
    assert "held" not in sparing.stats().groups
    work(sparing, node, "full")
    assert sparing.events("group.released") == []


# -- the share of a batch ---------------------------------------------------------------------------------


def test_unchecked_groups_have_a_bounded_share_of_a_batch(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)  # 4 checked groups
    for _ in range(4):
        work(sparing, node, "rewards")  # 8 held
    work(sparing, node, "full")  # 6 checked, 8 released
    assert sparing.stats().groups == {"ready": 14}
    assert sparing.stats().ready_groups == 8
    batch = sparing.batch(0)
    unchecked = {group for event in sparing.events("group.released") for group in event.body["group_ids"]}
    assert sum(group.group_id in unchecked for group in batch.groups) == 2 == 0.25 * len(batch.groups)
    replay(sparing.ledger())


def test_a_batch_waits_for_checked_groups_and_work_for_them_is_leased(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    for _ in range(5):
        work(sparing, node, "rewards")
    with sparing.coordinator.transaction() as tx:
        tx.db.exec_driver_sql("UPDATE groups SET state = 'ready'")
    assert sparing.stats().groups == {"ready": 14}
    assert sparing.stats().ready_groups == 5  # 4 checked and a third of that
    assert refusal(sparing.batch, 0).code == "request.too_early"
    node.lease()


@pytest.mark.parametrize(
    ("checked", "unchecked", "share", "usable"),
    [(0, 9, 0.25, 0), (3, 9, 0.25, 4), (6, 1, 0.25, 7), (2, 9, 0.0, 2), (0, 9, 1.0, 9), (3, 9, 0.1, 3)],
)
def test_usable_groups(checked: int, unchecked: int, share: float, usable: int) -> None:
    assert usable_groups(checked, unchecked, share) == usable


@pytest.mark.parametrize(
    ("rate", "share", "checks"),
    [
        (0.05, 0.25, 667),
        (0.0, 0.25, 667),
        (0.9, 0.25, 223),
        (0.05, 1.0, 38_000),
        (0.5, 0.0, 0),
        (0.0, 1.0, None),
    ],
)
def test_checks_before_release(rate: float, share: float, checks: int | None) -> None:
    needed = checks_before_release(rate, share)
    assert needed == math.inf if checks is None else math.ceil(needed - 1e-6) == checks


def test_lies_that_are_used_are_few_whatever_a_node_does() -> None:
    """Lies of a node that lies always, rarely, or only right after a check that it saw, until it is caught: 1/3 on average."""
    rng, rate, share = random.Random(1), 0.05, 0.25
    for lies_now in (
        lambda since: True,
        lambda since: rng.random() < 0.1,
        lambda since: since == 0,
    ):
        used = [_used_before_caught(rng, rate, share, lies_now) for _ in range(4000)]
        assert sum(used) / len(used) < share / (1 - share) + 0.05


def _used_before_caught(
    rng: random.Random, rate: float, share: float, lies_now: Callable[[int], bool]
) -> int:
    used = held = since = 0
    while True:
        lie, draw = lies_now(since), rng.random()
        since += 1
        if draw >= rate:
            held += lie and is_usable(draw, rate, share)
        elif lie:
            return used
        else:
            used, held, since = used + held, 0, 0


# -- the ledger -------------------------------------------------------------------------------------------


def changed(events: list[LedgerEvent], type: str, **body: object) -> list[LedgerEvent]:
    return [
        event.model_copy(update={"body": event.body | body}) if event.type == type else event
        for event in events
    ]


def test_replay_refuses_an_operator_that_trains_on_held_groups(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    spared = work(sparing, node, "rewards")
    work(sparing, node, "full")
    work(sparing, node, "full")
    sparing.batch(0)
    events = sparing.ledger()
    replay(events)
    with pytest.raises(CorruptData, match="without a full check of its node after it"):
        replay([event for event in events if event.type != "group.released"])
    with pytest.raises(CorruptData, match="did not pass a full check that was drawn for it"):
        replay(changed(events, "group.released", because=spared.lease_id))
    [formed] = [event for event in events if event.type == "batch.formed"]
    few = formed.body["group_ids"][-2:] + [f"{spared.lease_id}-0"]
    with pytest.raises(CorruptData, match="unchecked groups, at most"):
        replay(changed(events, "batch.formed", group_ids=few))


def test_replay_refuses_an_operator_that_leaves_credit_of_a_caught_node(sparing: SmallSwarm) -> None:
    node = trusted_node(sparing)
    work(sparing, node, "rewards")
    work(sparing, node, "full", "reject.forged_proof")
    events = sparing.ledger()
    replay(events)
    with pytest.raises(CorruptData, match="does not revoke the credit given on trust"):
        replay([event for event in events if event.type != "credit.revoked"])
