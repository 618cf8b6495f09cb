"""Accepted groups reach the trainer exactly once, also after crashes; groups that cannot be used are counted."""

from pathlib import Path

import pytest
from small_swarm import CONFIG, SmallSwarm, at_once, refusal, with_signal, without_signal

from shoal.swarm.coordinator.leases.batches import has_signal, is_stale
from shoal.wire.lease import Verdict
from shoal.wire.ledger import verify_chain
from shoal.wire.messages import LeaseStatus


def test_a_batch_is_formed_when_enough_groups_are_ready(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    first = swarm.work(node)
    refused = refusal(swarm.batch, 0)
    assert refused.code == "request.too_early"
    assert refused.problem.detail == "rollouts: 2 of 4 groups ready, 0 leases open on 1 live worker"
    assert refused.problem.retry_after_s == swarm.config.retry_s
    second = swarm.work(node)
    batch = swarm.batch(0)
    assert [(group.lease_id, group.prompt_index) for group in batch.groups] == [
        (first.lease_id, 0),
        (first.lease_id, 1),
        (second.lease_id, 0),
        (second.lease_id, 1),
    ]
    assert {group.rewards for group in batch.groups} == {(0.0, 1.0)}
    assert (batch.reward_mean, batch.dropped_groups, batch.stale_groups) == (0.5, 0, 0)


def test_inference_that_trained_nothing_is_reported(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    dull = node.deliver()
    swarm.claim()
    verdict = Verdict(
        lease_id=dull.lease_id,
        code="accepted",
        detail="",
        rewards=without_signal(dull),
        output_tokens=dull.num_rows,
        evidence={"right": 1, "unparseable": 3},
    )
    swarm.validator.call("POST", f"/v1/checks/{dull.lease_id}/verdict", verdict, LeaseStatus)
    swarm.fill(node)
    batch = swarm.batch(0)
    assert (batch.dropped_groups, batch.dropped_share) == (2, 2 / 6)
    assert batch.unparseable == 3 / (3 * dull.num_rows)
    stats = swarm.stats()
    assert stats.groups == {"batched": 4, "dropped": 2} and stats.unparseable == batch.unparseable


def test_a_batch_never_changes(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    swarm.fill(node)
    batch = swarm.batch(0)
    assert swarm.batch(0) == batch
    swarm.reopen()
    assert swarm.batch(0) == batch
    swarm.announce(1)
    assert swarm.batch(0) == batch
    assert len(swarm.events("batch.formed")) == 1


def test_no_group_is_in_two_batches_across_crashes(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    seen: list[str] = []
    for version in range(2):
        # The bound on work in flight lets two steps' worth be ready at once.
        while swarm.stats().ready_groups < swarm.config.groups_per_step:
            swarm.work(node)
        swarm.reopen()
        seen += [group.group_id for group in swarm.batch(version).groups]
        swarm.reopen()
        swarm.announce(version + 1)
    assert len(seen) == len(set(seen)) == 8
    formed = [group for event in swarm.events("batch.formed") for group in event.body["group_ids"]]
    assert formed == seen
    stats = swarm.stats()
    assert (stats.batches, stats.trained_groups) == (2, 8)
    verify_chain(swarm.ledger())


def test_concurrent_requests_get_the_same_batch(swarm: SmallSwarm) -> None:
    swarm.start()
    swarm.fill(swarm.node())
    batches = at_once(lambda: swarm.batch(0), 6)
    assert batches == [batches[0]] * 6
    assert len(swarm.events("batch.formed")) == 1


def test_groups_without_signal_are_dropped_and_counted(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    swarm.claim()
    swarm.verdict(lease, rewards=without_signal(lease))
    assert swarm.stats().ready_groups == 0
    assert "; 2 groups dropped, all rewards equal" in refusal(swarm.batch, 0).problem.detail
    lease = node.deliver()
    swarm.claim()
    swarm.verdict(lease, rewards=(0.0, 1.0, 0.0, 0.0))  # one group with signal, one without
    assert swarm.stats().ready_groups == 1
    swarm.work(node)
    swarm.work(node)
    batch = swarm.batch(0)
    assert (len(batch.groups), batch.dropped_groups) == (4, 3)
    # The batch's own groups; beside it every group accepted since the last batch: two of 1, one of 0, five of a half.
    assert batch.reward_mean == 0.5
    assert batch.accepted_reward_mean == pytest.approx((2 * 1 + 0 + 5 * 0.5) / 8)
    assert batch.accepted_rollouts == 16
    # The remaining groups were already counted, so the next batch reports only later ones.
    swarm.announce(1)
    swarm.work(node)
    swarm.work(node)
    assert (swarm.batch(1).dropped_groups, swarm.batch(1).reward_mean) == (0, 0.5)


def test_stale_groups_are_void_and_counted(swarm: SmallSwarm) -> None:
    swarm.start()
    node, slow = swarm.node(), swarm.node()
    late, queued = slow.lease(), node.deliver()
    swarm.claim()
    checking = node.deliver()
    swarm.verdict(queued)
    assert swarm.stats().ready_groups == 2
    swarm.claim()
    waiting = node.deliver()
    for version in (1, 2):
        swarm.announce(version)  # max_lag is 1: what version 0 made is now too old
    stats = swarm.stats()
    assert stats.ready_groups == 0
    assert [event.body["num_groups"] for event in swarm.events("group.stale")] == [2]
    # This one was not claimed for checking, so it need not be checked.
    assert node.status(waiting).code == "void.stale"
    # This one was being checked: it gets its credit, and its groups are stale.
    assert swarm.verdict(checking).state == "accepted"
    assert [event.body["num_groups"] for event in swarm.events("group.stale")] == [2, 2]
    # This one arrives when it is already too old: it gets a receipt and is void immediately.
    slow.deliver(late)
    assert slow.status(late).code == "void.stale"
    swarm.fill(node)
    batch = swarm.batch(2)
    assert {group.policy_version for group in batch.groups} == {2}
    assert batch.stale_groups == 4


def test_older_groups_go_first(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    swarm.work(node)
    swarm.announce(1)
    swarm.work(node)
    swarm.work(node)
    assert [group.policy_version for group in swarm.batch(1).groups] == [0, 0, 1, 1]
    assert swarm.stats().ready_groups == 2


def test_only_the_newest_version_gets_a_new_batch(swarm: SmallSwarm) -> None:
    assert refusal(swarm.batch, 0).code == "request.conflict"
    swarm.start()
    swarm.fill(swarm.node())
    assert refusal(swarm.batch, 1).code == "request.conflict"
    for version in range(1, 5):
        swarm.announce(version)
    assert refusal(swarm.batch, 3).code == "request.not_found"
    assert "the last" in refusal(swarm.batch, 4).problem.detail
    assert swarm.events("batch.formed") == []


def test_the_next_batch_may_be_formed_before_its_version_is_announced(swarm: SmallSwarm) -> None:
    """The batch of version 1 takes groups by version 0 before version 1 is announced, but never groups that are too old."""
    swarm.start()
    node = swarm.node()
    swarm.fill(node)
    first = swarm.batch(0)
    refused = refusal(swarm.batch, 1)
    assert refused.code == "request.too_early", "nothing is ready yet"
    swarm.fill(node)
    ahead = swarm.batch(1)
    assert {group.policy_version for group in ahead.groups} == {0}
    assert not {group.group_id for group in ahead.groups} & {group.group_id for group in first.groups}
    assert refusal(swarm.batch, 2).code == "request.conflict", "one version ahead, not two"
    swarm.announce(1)
    assert swarm.batch(1) == ahead
    swarm.fill(node)
    assert {group.policy_version for group in swarm.batch(2).groups} == {1}
    verify_chain(swarm.ledger())


def test_work_in_flight_is_bounded(tmp_path: Path) -> None:
    # Two steps (max_lag 1) need 8 groups, 4 leases; newcomers may hold as many again.
    swarm = SmallSwarm(tmp_path, CONFIG)
    swarm.start()
    nodes = [swarm.node() for _ in range(9)]
    for node in nodes[:8]:
        node.lease()
    refused = refusal(nodes[8].lease)
    assert refused.code == "request.too_early"
    assert "enough work in flight: 0 groups ready and 16 leased, of 8" in refused.problem.detail
    assert refused.problem.retry_after_s
    # The last step needs groups for one step only, the last version none.
    for version in (1, 2, 3):
        swarm.announce(version)
    swarm.clock.ahead_s += swarm.config.lease_s + 1
    swarm.relay_up()
    swarm.tick()
    # Four of them get the work that they owe: one step needs 4 groups, and newcomers may hold as many again.
    for node in nodes[:4]:
        assert len(node.lease().prompts) == 2
    assert "of 4 that" in refusal(nodes[8].lease).problem.detail
    swarm.announce(4)
    assert "finished" in refusal(nodes[8].lease).problem.detail
    swarm.close()


def test_signal_and_staleness() -> None:
    assert has_signal((0.0, 1.0)) and not has_signal((0.5, 0.5)) and not has_signal((1.0,))
    assert [is_stale(3, version, max_lag=2) for version in (0, 1, 3)] == [True, False, False]


def test_rewards_come_back_as_they_were_given(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = node.deliver()
    swarm.claim()
    swarm.verdict(lease, rewards=(0.1, 0.30000000000000004, 1e-17, 1.0))
    swarm.work(node, rewards=with_signal(lease))
    assert [group.rewards for group in swarm.batch(0).groups][:2] == [
        (0.1, 0.30000000000000004),
        (1e-17, 1.0),
    ]
