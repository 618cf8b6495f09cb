"""Admission, delegations and admin actions: each refusal has its code, each action is in the ledger."""

import time
from pathlib import Path

import pytest
from small_swarm import CONFIG, Node, SmallSwarm, refusal, signed_client
from sqlalchemy import func, select

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.swarm.coordinator.membership.admin_actions import ACTIONS
from shoal.swarm.coordinator.membership.admission import invite_digest
from shoal.swarm.coordinator.store.schema import nodes
from shoal.wire.codes import Rejected
from shoal.wire.delegation import check_delegation, delegate, solve_work, work_bits
from shoal.wire.keys import Key
from shoal.wire.messages import (
    AdminOrder,
    Appeal,
    Enrol,
    Enrolled,
    Info,
    LeaseStatus,
    Leave,
    OpenSession,
    Recorded,
    RevokeKey,
    Session,
)
from shoal.wire.run_spec import PROTOCOL


def open_swarm(dir: Path, **changes: object) -> SmallSwarm:
    swarm = SmallSwarm(dir, CONFIG.model_copy(update=changes))
    swarm.start()
    return swarm


def order(swarm: SmallSwarm, action: str, subject: str = "", amount: int = 0) -> Recorded:
    client = signed_client(swarm.url, Key.load(swarm.dir / "keys" / "admin.key"), swarm.transport())
    try:
        ask = AdminOrder(reason="a test", subject=subject, amount=amount)
        return client.call("POST", f"/v1/admin/{action}", ask, Recorded)
    finally:
        client.close()


def enrol(node: Node, **values: object) -> Enrolled:
    ask = Enrol.model_validate({"protocol": PROTOCOL, "software": "test", **values})
    return node.client.call("POST", "/v1/enrol", ask, Enrolled)


def enter(node: Node, **values: object) -> Node:
    enrol(node, **values)
    node.epoch = node.client.call("POST", "/v1/session", OpenSession(software="test"), Session).epoch
    return node


def count_nodes(swarm: SmallSwarm) -> int:
    with swarm.coordinator.database.read() as db:
        return int(db.execute(select(func.count()).select_from(nodes)).scalar_one())


# -- policies ---------------------------------------------------------------------------------------------


def test_admission_by_invitation(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, admission="invite")
    first, second, third = (swarm.stranger() for _ in range(3))
    for invite in ("", "guess"):
        assert refusal(enrol, first, invite=invite).code == "request.not_admitted"
    order(swarm, "invite", invite_digest("welcome"), amount=2)
    # The code itself is not stored.
    assert not any(b"welcome" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    enrol(first, invite="welcome")
    enrol(first, invite="")  # it is in
    enrol(second, invite="welcome")
    assert refusal(enrol, third, invite="welcome").code == "request.not_admitted"
    assert count_nodes(swarm) == 2
    assert [event.body["node"] for event in swarm.events("invite.used")] == [first.id, second.id]
    swarm.close()


def test_an_invitation_expires(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, admission="invite")
    order(swarm, "invite", invite_digest("late"))
    with swarm.coordinator.transaction() as tx:
        tx.db.exec_driver_sql("UPDATE admissions SET expires_at_s = 5")
    assert refusal(enrol, swarm.stranger(), invite="late").code == "request.not_admitted"
    order(swarm, "invite", invite_digest("late"))  # issued again: it is valid again
    enrol(swarm.stranger(), invite="late")
    swarm.close()


def test_admission_by_listed_keys(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, admission="allow")
    node, owned, owner = swarm.stranger(), swarm.stranger(), Key.generate()
    assert refusal(enrol, node).code == "request.not_admitted"
    order(swarm, "allow", node.id)
    enrol(node)
    # An owner is listed once for all its nodes.
    word = delegate(owner, owned.id, now_s=time.time())
    assert refusal(enrol, owned, delegation=word).code == "request.not_admitted"
    order(swarm, "allow", owner.public)
    enrol(owned, delegation=word)
    order(swarm, "disallow", owner.public)
    other = swarm.stranger()
    later = delegate(owner, other.id, now_s=time.time())
    assert refusal(enrol, other, delegation=later).code == "request.not_admitted"
    swarm.close()


def test_admission_by_proof_of_work(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, admission="work", work_bits=10)
    info = Info.parse(swarm.public.get("/v1/info").content)
    assert (info.admission, info.work_bits) == ("work", 10)
    node, thief = swarm.stranger(), swarm.stranger()
    work = solve_work(info.run_key, node.id, 10)
    assert work_bits(info.run_key, node.id, work) >= 10
    assert "this one has" in refusal(enrol, node, work="").problem.detail
    enrol(node, work=work)
    # The work of one node is not valid for another (except by chance, 1 in 1,000).
    if work_bits(info.run_key, thief.id, work) < 10:
        assert refusal(enrol, thief, work=work).code == "request.not_admitted"
    swarm.close()


def test_admission_by_stake(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, admission="stake", stake_per_lease=5)
    owner, node = Key.generate(), swarm.stranger()
    word = delegate(owner, node.id, now_s=time.time())
    assert refusal(enrol, node, delegation=word).code == "request.not_admitted"
    order(swarm, "stake", owner.public, amount=12)
    enter(node, delegation=word)
    swarm.work(node, "reject.copied")
    [slashed] = swarm.events("stake.slashed")
    assert (slashed.body["amount"], slashed.body["left"]) == (5, 7)
    swarm.work(node, "void.infra")
    order(swarm, "stake", owner.public, amount=-4)  # 3 left: less than one lease
    assert refusal(node.lease).code == "request.not_admitted"
    replay(swarm.ledger())
    swarm.close()


def test_one_stake_covers_the_leases_of_all_nodes_of_its_owner(tmp_path: Path) -> None:
    """Otherwise one stake would pay for any number of lies at once, because it is taken only when they are found."""
    swarm = open_swarm(tmp_path, admission="stake", stake_per_lease=5)
    owner = Key.generate()
    order(swarm, "stake", owner.public, amount=12)
    nodes = [swarm.stranger() for _ in range(3)]
    for node in nodes:
        enter(node, delegation=delegate(owner, node.id, now_s=time.time()))
    held = [node.lease() for node in nodes[:2]]
    refused = refusal(nodes[2].lease)
    assert refused.code == "request.too_early" and "covers 2" in refused.problem.detail
    assert nodes[0].lease() == held[0]  # what it has, it gets again
    nodes[0].deliver(held[0])  # a submission that is not checked yet needs its stake too
    assert refusal(nodes[2].lease).code == "request.too_early"
    swarm.claim()
    swarm.verdict(held[0])
    assert nodes[2].lease().node == nodes[2].id
    swarm.close()


# -- owners -----------------------------------------------------------------------------------------------


def test_a_delegation_expires(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path)
    owner, node, now_s = Key.generate(), swarm.stranger(), time.time()
    enter(node, delegation=delegate(owner, node.id, now_s=now_s - 86000, days=1))
    assert swarm.stats().nodes[0].owner == owner.public
    node.beat()
    # After it expires every request is refused until the owner delegates again.
    with swarm.coordinator.transaction() as tx:
        tx.db.exec_driver_sql("UPDATE nodes SET delegated_until_s = 5")
    assert refusal(node.beat).code == "request.revoked"
    enter(node, delegation=delegate(owner, node.id, now_s=now_s))
    node.beat()
    # Another owner cannot take the node over.
    stolen = delegate(Key.generate(), node.id, now_s=now_s)
    assert refusal(enrol, node, delegation=stolen).code == "request.conflict"
    swarm.close()


def test_an_owner_revokes_a_key(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path)
    owner, node = Key.generate(), swarm.stranger()
    enter(node, delegation=delegate(owner, node.id, now_s=time.time()))
    lease = node.lease()
    ask = RevokeKey(node=node.id, reason="the laptop is gone")
    stranger = swarm.stranger()
    assert refusal(stranger.client.call, "POST", "/v1/keys/revoke", ask, Recorded).code == "request.not_yours"
    assert refusal(node.client.call, "POST", "/v1/keys/revoke", ask, Recorded).code == "request.not_yours"
    client = signed_client(swarm.url, owner, swarm.transport())
    client.call("POST", "/v1/keys/revoke", ask, Recorded)
    for call in (node.beat, node.lease, lambda: node.status(lease)):
        assert refusal(call).code == "request.revoked"
    enrol(node, delegation=delegate(owner, node.id, now_s=time.time() + 1))
    assert refusal(node.beat).code == "request.revoked"  # for good
    assert [event.body["node"] for event in swarm.events("key.revoked")] == [node.id]
    client.close()
    swarm.close()


@pytest.mark.parametrize("is_claimed", [False, True])
def test_revoking_a_key_does_not_save_its_submission_from_the_verdict(
    tmp_path: Path, is_claimed: bool
) -> None:
    swarm = open_swarm(tmp_path, admission="stake", stake_per_lease=5)
    owner, node = Key.generate(), swarm.stranger()
    order(swarm, "stake", owner.public, amount=12)
    enter(node, delegation=delegate(owner, node.id, now_s=time.time()))
    lie = node.deliver()
    if is_claimed:
        swarm.claim()
    client = signed_client(swarm.url, owner, swarm.transport())
    client.call("POST", "/v1/keys/revoke", RevokeKey(node=node.id, reason="it is checked"), Recorded)
    client.close()
    if not is_claimed:
        assert swarm.claim().lease == lie
    assert swarm.verdict(lie, "reject.forged_proof").code == "reject.forged_proof"
    [slashed] = swarm.events("stake.slashed")
    assert (slashed.body["account"], slashed.body["left"]) == (owner.public, 7)
    assert swarm.stats().nodes[0].trust == "quarantined"
    replay(swarm.ledger())
    swarm.close()


@pytest.mark.parametrize(
    ("now_s", "node", "words"),
    [
        (1500.0, "cd" * 32, "is for node"),
        (2000.0, "ab" * 32, "is valid from"),
        (600.0, "ab" * 32, "is valid from"),
    ],
)
def test_invalid_delegations_are_refused(now_s: float, node: str, words: str) -> None:
    word = delegate(Key.generate(), "ab" * 32, now_s=1000.0, days=1000 / 86400)
    with pytest.raises(Rejected, match=words):
        check_delegation(word, node, now_s=now_s)


def test_a_delegation_is_short_and_signed() -> None:
    owner = Key.generate()
    with pytest.raises(ValueError, match="at most 30"):
        delegate(owner, "ab" * 32, now_s=0, days=31)
    word = delegate(owner, "ab" * 32, now_s=0)
    assert check_delegation(word, "ab" * 32, now_s=5) == owner.public
    longer = word.model_copy(update={"body": word.body.model_copy(update={"not_after_s": 1e9})})
    with pytest.raises(Rejected, match="does not match"):
        check_delegation(longer, "ab" * 32, now_s=5)


# -- admin actions ----------------------------------------------------------------------------------------


def test_admin_actions_need_the_admin_key_and_a_reason(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    before = len(swarm.ledger())
    ask = AdminOrder(reason="I want to", subject=node.id)
    for client in (node.client, swarm.validator, swarm.trainer, swarm.relay):
        assert refusal(client.call, "POST", "/v1/admin/ban", ask, Recorded).code == "request.not_allowed"
    admin = signed_client(swarm.url, Key.load(swarm.dir / "keys" / "admin.key"), swarm.transport())
    for body in (b"{}", b'{"reason": ""}', b'{"reason": "no", "subject": "x"}'):
        assert refusal(admin.send, "POST", "/v1/admin/ban", body).code == "request.malformed"
    assert refusal(order, swarm, "dance").code == "request.not_found"
    assert refusal(order, swarm, "ban", "ab" * 32).code == "request.not_found"
    for action in ("invite", "allow", "stake"):
        assert refusal(order, swarm, action, "not a key").code == "request.malformed"
    assert len(swarm.ledger()) == before
    admin.close()


def test_admin_actions_on_nodes(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    trusts = []
    for action in ("quarantine", "restore", "ban", "restore"):
        order(swarm, action, node.id)
        trusts.append(swarm.stats().nodes[0].trust)
        if action == "ban":
            assert refusal(node.beat).code == "request.banned"
    assert trusts == ["quarantined", "probation", "banned", "probation"]
    assert node.status(lease).code == "void.operator"
    [ban] = swarm.events("admin.ban")
    admin = Key.load(swarm.dir / "keys" / "admin.key").public
    assert (ban.actor, ban.body) == (admin, {"node": node.id, "reason": "a test"})
    replay(swarm.ledger())


def test_a_pause(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    order(swarm, "pause")
    assert refusal(swarm.node().lease).code == "request.paused"
    node.deliver(lease)  # what is out may come in
    swarm.claim()
    swarm.verdict(lease)
    order(swarm, "resume")
    second = node.lease()
    order(swarm, "void", second.lease_id)
    assert node.status(second).code == "void.operator"
    assert refusal(order, swarm, "void", second.lease_id).code == "request.lease_closed"


def test_an_appeal(swarm: SmallSwarm) -> None:
    swarm.start()
    node, other = swarm.node(), swarm.node()
    accepted = swarm.work(node)
    rejected = [swarm.work(node, "reject.wrong_logprobs") for _ in range(2)]
    path = f"/v1/leases/{rejected[1].lease_id}/appeal"
    plea = Appeal(text="my graphics card had a fever")
    assert swarm.stats().nodes[0].trust == "banned"
    assert refusal(other.client.call, "POST", path, plea, Recorded).code == "request.not_yours"
    good = f"/v1/leases/{accepted.lease_id}/appeal"
    assert refusal(node.client.call, "POST", good, plea, Recorded).code == "request.conflict"
    assert refusal(order, swarm, "uphold", rejected[1].lease_id).code == "request.conflict"
    node.client.call("POST", path, plea, Recorded)
    assert refusal(node.client.call, "POST", path, plea, Recorded).code == "request.conflict"
    order(swarm, "uphold", rejected[1].lease_id)
    assert swarm.stats().nodes[0].trust == "quarantined"
    node.client.call("POST", f"/v1/leases/{rejected[0].lease_id}/appeal", plea, Recorded)
    order(swarm, "dismiss", rejected[0].lease_id)
    assert refusal(order, swarm, "uphold", rejected[0].lease_id).code == "request.conflict"
    assert swarm.stats().nodes[0].trust == "quarantined"
    assert [event.body["upheld"] for event in swarm.events("appeal.decided")] == [True, False]
    replay(swarm.ledger())


def test_leaving_and_coming_back(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.lease()
    node.client.call("POST", "/v1/leave", Leave(epoch=node.epoch), Recorded)
    assert refusal(node.lease).code == "request.conflict"
    node.deliver(lease)  # it drains
    swarm.claim()
    assert isinstance(swarm.verdict(lease), LeaseStatus)
    assert (swarm.stats().nodes[0].trust, swarm.stats().nodes[0].accepted) == ("retired", 1)
    node.join()
    assert node.lease().node == node.id
    replay(swarm.ledger())


def test_leaving_does_not_end_a_quarantine_by_the_operator(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    order(swarm, "quarantine", node.id)
    node.client.call("POST", "/v1/leave", Leave(epoch=node.epoch), Recorded)
    node.join()
    assert swarm.stats().nodes[0].trust == "quarantined"
    replay(swarm.ledger())


def test_old_software_has_a_grace_period(tmp_path: Path) -> None:
    swarm = open_swarm(tmp_path, min_software="shoal 0.9.0", grace_s=60.0)
    node = swarm.stranger()
    enrol(node)

    def session(software: str) -> None:
        ask = OpenSession(software=software)
        node.epoch = node.client.call("POST", "/v1/session", ask, Session).epoch

    session("shoal 0.8.0")
    lease = node.lease()
    swarm.clock.ahead_s += 61
    swarm.relay_up()
    assert refusal(node.lease).code == "request.outdated"
    node.deliver(lease)  # what it has, it may finish
    session("shoal 0.9.1")
    node.lease()
    assert [event.type for event in swarm.ledger() if event.type in ("node.outdated", "node.current")] == [
        "node.outdated",
        "node.current",
    ]
    swarm.close()


def test_every_admin_action_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "operator.md").read_text()
    for action in ACTIONS:
        assert f"`{action}`" in page
