"""Trust and liveness of a node as tables, and the effects of an ejection."""

import pytest
from small_swarm import SmallSwarm, refusal

from shoal.swarm.coordinator.rules.node_status import Liveness, liveness
from shoal.swarm.coordinator.rules.trust import (
    NodeStanding,
    Trust,
    TrustEvent,
    VerdictKind,
    next_standing,
    verdict_kind,
)
from shoal.wire.messages import NodeView, ProblemDetails

P, T, Q, B, _ = Trust
ok, bad, odd = TrustEvent.ACCEPTED, TrustEvent.REJECTED, TrustEvent.UNCERTAIN


@pytest.mark.parametrize(
    ("last_seen_s", "now_s", "expected"),
    [
        (None, 1000.0, Liveness.NEVER),
        (1000.0, 1000.0, Liveness.LIVE),
        (1000.0, 1044.9, Liveness.LIVE),
        (1000.0, 1045.0, Liveness.LATE),
        (1000.0, 1119.9, Liveness.LATE),
        (1000.0, 1120.0, Liveness.OFFLINE),
        (1000.0, 9999.0, Liveness.OFFLINE),
        (1000.0, 990.0, Liveness.LIVE),  # the clock was set back
    ],
)
def test_liveness(last_seen_s: float | None, now_s: float, expected: Liveness) -> None:
    assert liveness(last_seen_s, now_s, heartbeat_s=15.0) is expected


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], P),
        ([ok], P),
        ([ok, ok], P),
        ([ok, ok, ok], T),
        ([ok, ok, odd, ok], P),
        ([ok, ok, odd, ok, ok, ok], T),
        ([ok, ok, ok, odd], T),
        ([odd] * 9, P),
        ([bad], Q),
        ([ok, ok, ok, bad], Q),
        ([bad, *[ok] * 9], Q),
        ([bad, odd, odd], Q),
        ([bad, bad], B),
        ([bad, *[ok] * 9, bad], B),
        ([ok, ok, ok, bad, ok, bad], B),
        ([bad, bad, *[ok] * 9], B),
    ],
)
def test_trust(findings: list[TrustEvent], expected: Trust) -> None:
    standing = NodeStanding(trust=Trust.PROBATION)
    for finding in findings:
        standing = next_standing(standing, finding, 0.0, trusted_after=3)
    assert standing.trust is expected
    assert standing.rejected == findings.count(bad)


def test_codes_say_whether_the_contributor_is_responsible() -> None:
    assert [verdict_kind(code) for code in ("accepted", "reject.copied", "void.stale")] == [*VerdictKind]


def test_a_liar_is_quarantined_then_ejected(swarm: SmallSwarm) -> None:
    swarm.start()
    liar, honest = swarm.node(), swarm.node()
    swarm.work(liar, "reject.wrong_computation")
    assert [node.trust for node in swarm.stats().nodes] == ["quarantined", "probation"]
    lease = swarm.work(liar, "reject.forged_proof")
    assert view_of(swarm, liar.id).trust == "banned"
    for call in (liar.beat, liar.lease, liar.join, lambda: liar.status(lease)):
        refused = refusal(call)
        assert refused.code == "request.banned"
        assert "2 submissions were refused" in refused.problem.detail
        assert "a proof was not made from any hidden states" in refused.problem.detail
    view = view_of(swarm, liar.id)
    assert (view.rejected, view.credit, view.last_code) == (2, 0, "reject.forged_proof")
    assert [event.body["node"] for event in swarm.events("node.banned")] == [liar.id]
    swarm.work(honest)
    assert swarm.stats().submissions == {
        "reject.wrong_computation": 1,
        "reject.forged_proof": 1,
        "accepted": 1,
    }


def test_open_leases_of_an_ejected_node_become_void(swarm: SmallSwarm) -> None:
    swarm.start()
    liar = swarm.node()
    leases = [liar.deliver() for _ in range(3)]
    held = liar.lease()
    for lease in leases[:2]:
        assert swarm.claim().lease == lease
    third = swarm.claim().lease
    swarm.verdict(leases[0], "reject.copied")
    swarm.verdict(leases[1], "reject.copied")
    # The validator was still checking the third. Its verdict changes nothing, and the answer says so.
    status = swarm.verdict(third)
    assert (status.state, status.code) == ("void", "void.abandoned")
    assert {event.body["lease_id"] for event in swarm.events("lease.void")} == {third.lease_id, held.lease_id}
    assert swarm.stats().ready_groups == 0
    # The reason for the ejection stays visible.
    assert view_of(swarm, liar.id).last_code == "reject.copied"


def test_going_offline_does_not_change_trust(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    swarm.work(node)
    swarm.work(node)
    for ahead_s, expected in ((0, "live"), (50, "late"), (130, "offline")):
        swarm.clock.ahead_s = ahead_s
        swarm.tick()
        view = view_of(swarm, node.id)
        assert (view.liveness, view.trust) == (expected, "trusted")
    node.beat()
    assert view_of(swarm, node.id).liveness == "live"


def test_a_node_without_a_session_was_never_seen(swarm: SmallSwarm) -> None:
    missing = swarm.public.get(f"/v1/nodes/{'0' * 64}")
    assert ProblemDetails.parse(missing.content).code == "request.not_found"
    assert ProblemDetails.parse(swarm.public.get("/v1/nodes/me").content).code == "request.not_found"


def view_of(swarm: SmallSwarm, node: str) -> NodeView:
    return NodeView.parse(swarm.public.get(f"/v1/nodes/{node}").content)


def test_new_keys_that_come_and_go_write_nothing_to_the_ledger(swarm: SmallSwarm) -> None:
    swarm.start()
    new, proven = swarm.node(), swarm.proven_node()
    before = len(swarm.ledger())
    for ahead_s in (130, 260):
        swarm.clock.ahead_s = ahead_s
        swarm.tick()
        assert {view_of(swarm, node.id).liveness for node in (new, proven)} == {"offline"}
        for node in (new, proven):
            node.beat()
    found = [(event.type, event.body["node"]) for event in swarm.ledger()[before:]]
    assert found == 2 * [("node.offline", proven.id), ("node.live", proven.id)]
