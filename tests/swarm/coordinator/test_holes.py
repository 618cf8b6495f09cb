"""Attacks by clients: hoarding leases, abandoning seeds, dead relays and abused trust."""

from pathlib import Path

import pytest
from small_swarm import CONFIG, Node, SmallSwarm, refusal
from sqlalchemy import select, update

from relay_reports import delegated_report
from shoal.net.http_client import Refused
from shoal.swarm.coordinator.leases.issue import groups_in_flight
from shoal.swarm.coordinator.leases.verdicts import UNRELIABLE_CLAIMS
from shoal.swarm.coordinator.ledger_replay import replay, seed_of
from shoal.swarm.coordinator.membership.nodes import NODES
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import submissions
from shoal.wire.codes import CorruptData
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Abandon, HeartbeatReply, LeaseStatus, NodeView
from shoal.wire.seeded_draw import lease_seed


def abandon(node: Node, lease: Lease) -> LeaseStatus:
    ask = Abandon(epoch=node.epoch, reason="I do not like these")
    return node.client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", ask, LeaseStatus)


def view_of(swarm: SmallSwarm, node: Node) -> NodeView:
    return NodeView.parse(swarm.public.get(f"/v1/nodes/{node.id}").content)


# -- hoarding ---------------------------------------------------------------------------------------------


def test_idle_keys_cannot_take_work_away_from_proven_nodes(swarm: SmallSwarm) -> None:
    swarm.start()
    worker = swarm.node()
    swarm.work(worker)
    # Add fake nodes until there is no work for one more of them.
    fakes = [swarm.node() for _ in range(20)]
    taken = 0
    for fake in fakes:
        try:
            fake.lease()
            taken += 1
        except Exception as error:  # noqa: BLE001 - whatever refusal it is, it is looked at below
            assert "enough work in flight" in str(error)
            break
    assert 4 <= taken < 20
    for _ in range(2):
        swarm.work(worker)  # not a moment's wait
    assert swarm.stats().ready_groups == 6


def submit_junk(swarm: SmallSwarm, node: Node) -> list[Lease]:
    """Lets a node submit junk until it gets no more leases."""
    submitted: list[Lease] = []
    while True:
        try:
            submitted.append(node.deliver(data=f"junk {len(submitted)}".encode()))
        except Refused as refused:
            assert refused.code == "request.too_early"
            return submitted


def test_submitted_junk_of_a_new_key_does_not_keep_out_or_delay_who_does_the_work(swarm: SmallSwarm) -> None:
    swarm.start()
    worker = swarm.node()
    swarm.work(worker)
    assert len(submit_junk(swarm, swarm.node())) > 3
    for _ in range(2):
        swarm.work(worker)  # claims its submission next, before the junk


def test_new_nodes_are_checked_while_others_submit_more_than_can_be_checked(swarm: SmallSwarm) -> None:
    swarm.start()
    newcomer = swarm.node().deliver()
    others = []
    for _ in range(UNRELIABLE_CLAIMS):
        worker = swarm.node()
        others.append(worker.deliver())
        set_node(swarm, worker, accepted=30)
    claimed = [swarm.claim().lease for _ in range(UNRELIABLE_CLAIMS)]
    assert claimed == [*others[: UNRELIABLE_CLAIMS - 1], newcomer]


def take_all(swarm: SmallSwarm, nodes: list[Node]) -> int:
    """Lets every node take as many leases as it gets and returns how many."""
    taken = 0
    for node in nodes:
        held: set[str] = set()
        while True:
            try:
                lease = node.lease()
            except Refused as refused:
                assert refused.code == "request.too_early"
                break
            if lease.lease_id in held:
                break
            held.add(lease.lease_id)
            taken += 1
    return taken


def set_node(swarm: SmallSwarm, node: Node, **values: object) -> None:
    with swarm.coordinator.transaction() as tx:
        tx.update(NODES, node.id, **values)


def test_trusted_keys_with_little_work_behind_them_do_not_keep_out_who_does_the_work(
    swarm: SmallSwarm,
) -> None:
    """They take every lease that they get and keep it. A worker with four times their record does not wait for them; a worker with
    their record does."""
    swarm.start()
    worker, equal = swarm.node(), swarm.node()
    hoarders = [swarm.node() for _ in range(12)]
    for node in hoarders:
        set_node(swarm, node, trust="trusted", accepted=3, streak=3)
    set_node(swarm, worker, trust="trusted", accepted=16, streak=16)
    set_node(swarm, equal, trust="trusted", accepted=3, streak=3)
    assert take_all(swarm, hoarders) >= 2
    assert refusal(equal.lease).code == "request.too_early"
    for _ in range(2):
        swarm.work(worker)


def test_junk_of_a_key_with_little_work_behind_it_does_not_keep_out_who_does_the_work(
    swarm: SmallSwarm,
) -> None:
    """One accepted submission costs little. Until a validator rejects its junk, only nodes with as little behind them wait for it."""
    swarm.start()
    worker, equal, key = swarm.node(), swarm.node(), swarm.node()
    set_node(swarm, worker, trust="trusted", accepted=100, streak=100)
    set_node(swarm, equal, accepted=1)
    set_node(swarm, key, accepted=1)
    assert len(submit_junk(swarm, key)) > 3
    assert refusal(equal.lease).code == "request.too_early"
    assert worker.lease().purpose == "train"


def test_a_lease_that_is_overdue_by_its_nodes_own_pace_is_not_counted_on(swarm: SmallSwarm) -> None:
    swarm.start()
    slow, worker = swarm.node(), swarm.node()
    for node in (slow, worker):
        set_node(swarm, node, trust="trusted", accepted=30, streak=30, rows_per_s=1.0)
    assert take_all(swarm, [slow]) >= 1
    rows = 4
    with swarm.coordinator.database.read() as db:
        now_s = swarm.clock()
        counted = groups_in_flight(db, 0, now_s)
        assert counted[0] > 0 and counted[1] == 0
        late_s = now_s + 3 * rows / 1.0 + 0.05 * CONFIG.lease_s + 1
        assert groups_in_flight(db, 0, late_s) == (0, counted[0])


def test_a_quarantined_nodes_leases_are_not_counted_on(swarm: SmallSwarm) -> None:
    swarm.start()
    caught = swarm.node()
    set_node(swarm, caught, trust="trusted", accepted=30, streak=30)
    caught.lease()
    with swarm.coordinator.database.read() as db:
        assert groups_in_flight(db, 0, swarm.clock()) == (2, 0)
    set_node(swarm, caught, trust="quarantined")
    with swarm.coordinator.database.read() as db:
        assert groups_in_flight(db, 0, swarm.clock()) == (0, 2)


def test_a_node_that_lets_leases_expire_gets_the_next_later(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"lease_s": 30.0}))
    swarm.start()
    idle = swarm.node()
    for _ in range(2):
        swarm.clock.ahead_s += 1 + idle.lease().deadline_s - swarm.clock()
        swarm.tick()
    swarm.relay_up()
    refused = refusal(idle.lease)
    assert refused.code == "request.too_early"
    assert "2 leases in a row ran out in this node's hands" in refused.problem.detail
    assert view_of(swarm, idle).trust == "probation"
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    swarm.relay_up()
    swarm.work(idle)  # and one that is answered puts everything right
    assert len(idle.lease().prompts) == 2
    swarm.close()


# -- abandoned seeds --------------------------------------------------------------------------------------


def test_an_abandoned_seed_is_leased_again(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    held = first = node.lease()
    for _ in range(3):
        abandon(node, held)
        held = node.lease()
        assert held.lease_id != first.lease_id
        assert (held.seed, held.prompts, held.unit) == (first.seed, first.prompts, first.lease_id)
    # Letting the lease expire has the same effect: no prompt is left out, but a node that is too slow has twice the time.
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    swarm.relay_up()
    refused = refusal(node.lease)
    assert refused.code == "request.too_early" and refused.problem.retry_after_s == 1.0
    assert f"lease {held.lease_id} ran out and is being voided" in refused.problem.detail
    swarm.tick()
    again = node.lease()
    assert (again.unit, again.seed, again.prompts) == (first.lease_id, first.seed, first.prompts)
    assert again.deadline_s - again.issued_at_s == 2 * swarm.config.lease_s
    # After it is delivered the next lease is new work.
    node.deliver(again)
    swarm.claim()
    swarm.verdict(again)
    assert node.lease().unit is None
    assert replay(swarm.ledger()).leases[again.lease_id].unit == first.lease_id


def test_work_that_is_owed_is_leased_whole_though_less_is_needed(tmp_path: Path) -> None:
    """Otherwise a node that gives a lease back and asks again at the right time would drop the prompts that it does not like."""
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"prompts_per_lease": 3}))
    swarm.start()
    node, other = swarm.proven_node(), swarm.proven_node()
    first = node.lease()
    abandon(node, first)
    for _ in range(2):
        swarm.work(other)  # 6 of 8 groups that the trainer can use
    assert node.lease().prompts == first.prompts
    swarm.close()


def test_a_node_with_two_leases_owes_both(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"check_rate": 1.0}))
    swarm.start()
    node = swarm.node()
    for _ in range(2):
        swarm.work(node)
    swarm.announce(1)
    held = [node.lease(), node.lease()]
    assert held[0].lease_id != held[1].lease_id
    for lease in held:
        abandon(node, lease)
    assert [node.lease().unit, node.lease().unit] == [lease.lease_id for lease in held]
    swarm.close()


def test_owed_work_belongs_to_one_node(swarm: SmallSwarm) -> None:
    swarm.start()
    walker, other = swarm.node(), swarm.node()
    lease = walker.lease()
    abandon(walker, lease)
    assert other.lease().seed != lease.seed


# -- relays -----------------------------------------------------------------------------------------------


def report(swarm: SmallSwarm, url: str, *versions: int) -> None:
    swarm.relay.call("POST", "/v1/relays", delegated_report(swarm.relay.key, url, versions), HeartbeatReply)


def test_leases_and_claims_name_relays_that_have_the_version(swarm: SmallSwarm) -> None:
    swarm.announce(0)
    node = swarm.node()
    report(swarm, "http://127.0.0.1:1", *())
    assert "no live relay has version 0" in refusal(node.lease).problem.detail
    report(swarm, "http://127.0.0.1:2", 0)
    lease = node.lease()
    assert lease.relays == ("http://127.0.0.1:2",)
    node.deliver(lease)
    swarm.announce(1)
    # No relay has the new version yet, so work continues with the old one.
    second = node.lease()
    assert ([policy.version for policy in second.policies], second.relays) == ([0], ("http://127.0.0.1:2",))
    # The relay of the lease goes offline; the claim names a live one.
    report(swarm, "http://127.0.0.1:3", 0, 1)
    swarm.clock.ahead_s += 121
    report(swarm, "http://127.0.0.1:3", 0, 1)
    claim = swarm.claim()
    assert (claim.lease.relays, claim.relays) == (("http://127.0.0.1:2",), ("http://127.0.0.1:3",))


# -- trust ------------------------------------------------------------------------------------------------


@pytest.fixture
def trusting(tmp_path: Path) -> SmallSwarm:
    """Returns a swarm that checks a trusted node as rarely as possible."""
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"check_rate": 0.0, "groups_per_step": 40}))
    swarm.start()
    return swarm


def verdict(swarm: SmallSwarm, lease: Lease, code: str, checks: str) -> LeaseStatus:
    body = Verdict(
        lease_id=lease.lease_id,
        code=code,
        detail="because",
        rewards=tuple(float(row % 2) for row in range(lease.num_rows)) if code == "accepted" else (),
        output_tokens=3 * lease.num_rows if code == "accepted" else 0,
        checks=checks,  # type: ignore[arg-type]
    )
    return swarm.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", body, LeaseStatus)


def drawn(swarm: SmallSwarm, node: Node, checks: str) -> Lease:
    """Submits until the draw gives a submission these checks, and claims it without a verdict."""
    for _ in range(60):
        lease = node.deliver()
        claim = swarm.claim()
        if claim.checks == checks:
            return lease
        verdict(swarm, lease, "accepted", claim.checks)
    raise AssertionError(f"60 draws and none gave {checks}")


def test_a_trusted_liar_loses_its_unchecked_credit(trusting: SmallSwarm) -> None:
    swarm, node = trusting, trusting.node()
    for _ in range(4):
        lease = node.deliver()
        assert (swarm.claim().checks, swarm.stats().nodes[0].trust) in (
            ("full", "probation"),
            ("full", "trusted"),
            ("rewards", "trusted"),
        )
        verdict(swarm, lease, "accepted", "full")
    spared = drawn(swarm, node, "rewards")
    assert verdict(swarm, spared, "accepted", "rewards").credit == 3 * spared.num_rows
    before = view_of(swarm, node)
    caught = drawn(swarm, node, "full")
    waiting = swarm.stats().groups
    verdict(swarm, caught, "reject.wrong_computation", "full")
    [revoked] = swarm.events("credit.revoked")
    assert spared.lease_id in revoked.body["lease_ids"] and revoked.body["because"] == caught.lease_id
    after = view_of(swarm, node)
    assert after.trust == "quarantined" and after.credit < before.credit + 100
    groups, withdrawn = swarm.stats().groups, len(revoked.body["group_ids"])
    assert groups["withdrawn"] == withdrawn > 0 and "held" not in groups
    assert groups["ready"] == waiting["ready"] + waiting.get("held", 0) - withdrawn
    assert node.status(spared).state == "revoked"
    # From now on every submission gets every check.
    node.deliver()
    assert swarm.claim().checks == "full"
    books = replay(swarm.ledger())
    assert books.nodes[node.id].credit == after.credit
    swarm.close()


def test_suspicious_work_is_void_and_the_next_is_checked(trusting: SmallSwarm) -> None:
    swarm, node = trusting, trusting.node()
    for _ in range(6):
        lease = node.deliver()
        swarm.claim()
        verdict(swarm, lease, "accepted", "full")
    credit = view_of(swarm, node).credit
    suspicious = drawn(swarm, node, "full")
    earned = view_of(swarm, node).credit - credit
    verdict(swarm, suspicious, "void.uncertain", "full")
    after = view_of(swarm, node)
    assert (after.trust, after.credit, after.rejected) == ("trusted", credit + earned, 0)
    node.deliver()
    assert swarm.claim().checks == "full"
    assert replay(swarm.ledger()).nodes[node.id].standing.streak == 0
    swarm.close()


def test_queued_work_gets_every_check_when_its_node_loses_trust(trusting: SmallSwarm) -> None:
    swarm, node = trusting, trusting.node()
    for _ in range(3):
        lease = node.deliver()
        swarm.claim()
        verdict(swarm, lease, "accepted", "full")
    spared = drawn(swarm, node, "rewards")  # claimed: the validator is at it
    lie = node.deliver()
    with swarm.coordinator.transaction() as tx:
        tx.db.execute(update(submissions).where(submissions.c.lease_id == lie.lease_id).values(checks="full"))
    swarm.claim()
    verdict(swarm, lie, "reject.forged_proof", "full")
    # The verdict of the cheap checks arrives now and does not count: the submission is queued again for every check.
    assert verdict(swarm, spared, "accepted", "rewards").state == "submitted"
    claim = swarm.claim()
    assert (claim.lease, claim.checks) == (spared, "full")
    assert verdict(swarm, spared, "accepted", "full").state == "accepted"
    swarm.close()


def test_draws_are_secret_before_and_verifiable_after(trusting: SmallSwarm) -> None:
    swarm, node = trusting, trusting.node()
    for _ in range(12):
        lease = node.deliver()
        verdict(swarm, lease, "accepted", swarm.claim().checks)
    # Nothing that a node or the public can see reveals the checks of an open submission.
    lease = node.deliver()
    assert "checks" not in node.status(lease).model_dump()
    [event] = [
        event for event in swarm.events("submission.received") if event.body["lease_id"] == lease.lease_id
    ]
    assert set(event.body) == {"lease_id", "node", "sha256", "num_bytes", "policy_version"}
    events = swarm.ledger()
    [epoch] = [event.body["epoch"] for event in events if event.type == "epoch.committed"]
    with swarm.coordinator.transaction() as tx:
        secret = tx.db.exec_driver_sql("SELECT secret FROM epochs").scalar_one()
        tx.record("epoch.revealed", epoch=epoch, secret=secret)
    events = swarm.ledger()
    books = replay(events)
    assert books.secrets.unchecked_draws == []  # all repeated, all right
    assert (
        seed_of(books, lease.lease_id)
        == lease.seed
        == lease_seed(bytes.fromhex(secret), lease.lease_id, node.id)
    )
    # An operator that skips checks which the draw required is detected.
    full = next(e for e in events if e.type == "verdict.given" and e.body["drawn"]["checks"] == "full")
    drawn_body = full.body["drawn"] | {"checks": "rewards"}
    forged = full.model_copy(update={"body": full.body | {"drawn": drawn_body}})
    with pytest.raises(CorruptData, match="the draw gave lease"):
        replay([forged if event.seq == full.seq else event for event in events])
    swarm.close()


def test_held_out_work_is_never_taken_on_trust(tmp_path: Path) -> None:
    config = CONFIG.model_copy(
        update={"check_rate": 0.0, "eval_prompts": 8, "eval_every": 1, "groups_per_step": 40}
    )
    swarm = SmallSwarm(tmp_path, config)
    swarm.announce(0)
    swarm.relay_up()
    node = swarm.proven_node()
    for _ in range(4):
        lease = node.deliver()
        assert lease.purpose == "eval"
        swarm.claim()
        swarm.verdict(lease)
    for version in (1, 2):
        swarm.announce(version)
    lease = node.deliver()
    assert (lease.purpose, swarm.claim().checks, view_of(swarm, node).trust) == ("eval", "full", "trusted")
    with swarm.coordinator.database.read() as db:
        rows = db.execute(select(lease_table.c.lease_id).where(lease_table.c.purpose == "eval")).all()
        rates = db.execute(
            select(submissions.c.draw_rate).where(submissions.c.lease_id.in_([row[0] for row in rows]))
        ).scalars()
        assert set(rates) == {1.0}
    swarm.close()


def test_lease_size_follows_the_measured_speed(swarm: SmallSwarm) -> None:
    swarm.start()
    slow = swarm.node()
    lease = slow.lease()
    swarm.clock.ahead_s += 90  # four rows in 90 of 100 seconds
    swarm.relay_up()
    slow.deliver(lease)
    swarm.claim()
    swarm.verdict(lease)
    assert len(slow.lease().prompts) == 1


def test_a_key_that_sends_too_many_requests_is_limited_alone(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG.model_copy(update={"requests_per_s": 2.0}))
    swarm.start()
    loud, quiet = swarm.node(), swarm.node()
    refused = None
    for _ in range(60):
        try:
            loud.beat()
        except Refused as error:
            refused = error
            break
    assert refused is not None and refused.code == "request.too_many"
    assert 0 < (refused.problem.retry_after_s or 0) <= 0.5
    quiet.beat()
    for _ in range(30):
        swarm.relay_up()  # the run's own are not counted
    swarm.close()
