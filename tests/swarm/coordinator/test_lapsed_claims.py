"""A validator that dies in the middle of a check: its submission goes back into the queue, unless time has passed it by.

A stale submission cannot be checked: relays no longer keep the version that made it, and a validator would wait for it.
"""

from pathlib import Path

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm, refusal

from shoal.swarm.coordinator.ledger_replay import replay
from shoal.wire.messages import AskClaim, Claim


def publish(swarm: SmallSwarm, *versions: int) -> None:
    for version in versions:
        swarm.announce(version)


def claim_as(swarm: SmallSwarm, name: str, *, fresh: bool = False) -> Claim:
    """Claims as one of several validators."""
    ask = AskClaim(validator=name, fresh=fresh)
    return swarm.validator.call("POST", "/v1/checks/claim", ask, Claim)


def lapse(swarm: SmallSwarm) -> None:
    swarm.clock.ahead_s += CONFIG.claim_s + 1
    swarm.tick()


def test_it_is_given_to_another_validator_first(swarm: SmallSwarm) -> None:
    swarm.start()
    lease = swarm.node().deliver()
    claim_as(swarm, "slow")
    lapse(swarm)
    assert refusal(claim_as, swarm, "slow").code == "request.too_early"
    claim = claim_as(swarm, "other")
    assert (claim.lease, claim.lapses) == (lease, 1)


def test_a_validator_that_is_alone_never_gets_it_again(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    claim_as(swarm, "alone")
    lapse(swarm)
    assert refusal(claim_as, swarm, "alone").code == "request.too_early"
    assert node.status(lease).state == "submitted", "another validator may still come"
    lapse(swarm)
    assert refusal(claim_as, swarm, "alone").code == "request.too_early"
    assert node.status(lease).code == "void.unchecked"


def test_a_validator_that_is_alone_checks_all_others_meanwhile(swarm: SmallSwarm) -> None:
    swarm.start()
    slow, other = swarm.node(), swarm.node()
    lease = slow.deliver()
    claim_as(swarm, "alone")
    lapse(swarm)
    quick = other.deliver()
    lapse(swarm)
    assert slow.status(lease).state == "submitted", (
        "another submission waits, so another validator may only be busy"
    )
    assert claim_as(swarm, "alone").lease == quick
    assert refusal(claim_as, swarm, "alone").code == "request.too_early"
    swarm.tick()
    assert slow.status(lease).code == "void.unchecked", "nobody else checks anything"


def test_it_waits_for_a_validator_that_is_busy_but_not_for_ever(swarm: SmallSwarm) -> None:
    swarm.start()
    slow, other = swarm.node(), swarm.node()
    lease = slow.deliver()
    claim_as(swarm, "a")
    lapse(swarm)
    other.deliver()
    claim_as(swarm, "b")
    swarm.clock.ahead_s += CONFIG.claim_s - 1
    swarm.tick()
    assert slow.status(lease).state == "submitted"
    swarm.clock.ahead_s += CONFIG.lease_s
    swarm.tick()
    assert slow.status(lease).code == "void.unchecked"


def test_it_goes_behind_the_others(swarm: SmallSwarm) -> None:
    swarm.start()
    first, second = swarm.node(), swarm.node()
    slow = first.deliver()
    claim_as(swarm, "a")
    lapse(swarm)
    quick = second.deliver()
    assert claim_as(swarm, "b").lease == quick
    assert refusal(claim_as, swarm, "b", fresh=True).code == "request.too_early", (
        "nothing is checked together with it"
    )
    assert claim_as(swarm, "b").lease == slow


def test_after_two_lapses_it_is_void_and_its_node_is_checked_in_full(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path / "run", CONFIG.model_copy(update={"check_rate": 0.0, "groups_per_step": 40}))
    swarm.start()
    node = swarm.node()
    for _ in range(3):
        swarm.work(node)
    lease = node.deliver()
    for name in ("a", "b"):
        assert claim_as(swarm, name).lease == lease
        lapse(swarm)
    assert node.status(lease).code == "void.unchecked"
    swarm.relay_up()
    again = node.deliver()
    assert again.unit == lease.lease_id
    assert claim_as(swarm, "a").checks == "full"
    books = replay(swarm.ledger())
    assert (books.nodes[node.id].standing.streak, books.nodes[node.id].standing.rejected) == (0, 0)
    swarm.close()


@pytest.mark.parametrize("name", ["UPPER", "a" * 65, "a/b"])
def test_the_name_of_a_validator_is_short_and_plain(swarm: SmallSwarm, name: str) -> None:
    with pytest.raises(ValueError):
        AskClaim(validator=name)


def test_it_is_void_if_its_version_has_gone_stale(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    swarm.claim()
    publish(swarm, *range(1, SPEC.max_lag + 2))
    assert node.status(lease).state == "checking", "the validator that has claimed it may finish"
    swarm.clock.ahead_s = CONFIG.claim_s + 1
    assert refusal(swarm.claim).code == "request.too_early"
    swarm.tick()
    assert node.status(lease).code == "void.stale"
    assert [event.body["code"] for event in swarm.events("lease.void")] == ["void.stale"]


def test_held_out_work_is_void_once_its_version_is_no_longer_kept(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"eval_prompts": 2, "eval_every": 100})
    swarm = SmallSwarm(tmp_path / "run", config, SPEC.model_copy(update={"keep_versions": 3}))
    try:
        swarm.start()
        node = swarm.proven_node()
        lease = node.deliver()
        assert lease.purpose == "eval"
        publish(swarm, 1, 2)
        assert swarm.claim().lease == lease, "far behind, but it is not training work: it cannot go stale"
        publish(swarm, 3)
        swarm.clock.ahead_s = CONFIG.claim_s + 1
        swarm.tick()
        assert node.status(lease).code == "void.stale"
        assert "version 0" in (node.status(lease).detail or "")
        assert refusal(swarm.claim).code == "request.too_early"
    finally:
        swarm.close()
