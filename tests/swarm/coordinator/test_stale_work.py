"""Which versions a lease may be answered with: drop what goes stale, or wait rather than make it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm, refusal

from shoal.swarm.coordinator.leases.batches import SIGNAL_PRIOR, signal_share
from shoal.swarm.coordinator.leases.issue import groups_in_flight
from shoal.swarm.coordinator.rules.planning import (
    NoWork,
    PlanningInputs,
    PlanningTerms,
    oldest_worth_leasing,
    plan,
)
from shoal.swarm.coordinator.rules.trust import NodeStanding, Trust
from shoal.wire.messages import RelayView


def terms(stale: Literal["drop", "wait"], max_lag: int) -> PlanningTerms:
    return PlanningTerms(
        groups_per_step=CONFIG.groups_per_step,
        prompts_per_lease=8,
        max_prompts_per_lease=CONFIG.max_prompts_per_lease,
        lease_s=CONFIG.lease_s,
        stale=stale,
        max_lag=max_lag,
        samples_per_prompt=SPEC.sampling.samples_per_prompt,
    )


def inputs(**values: Any) -> PlanningInputs:
    plain: dict[str, Any] = {
        "newest_version": 5,
        "last_version": 20,
        "finished": False,
        "relays": (RelayView(url="http://relay", versions=tuple(range(20)), bytes_sent=0, liveness="live"),),
        "standing": NodeStanding(trust=Trust.TRUSTED),
        "proven": True,
        "rows_per_s": 0.0,
        "chunk": None,
        "ready_groups": 0,
        "proven_groups": 0,
        "newcomer_groups": 0,
    }
    return PlanningInputs(**plain | values)


def test_drop_leases_every_version_within_the_lag() -> None:
    for ready in (0, 4, 11):
        assert oldest_worth_leasing(inputs(ready_groups=ready, batch_formed=True), terms("drop", 2)) == 3


@pytest.mark.parametrize(
    ("ready", "flying", "formed", "oldest"),
    [
        (0, 0, False, 3),  # for the batch of version 5: versions 3, 4 and 5 count
        (3, 0, False, 3),
        (2, 2, False, 4),  # that one is full; for the batch of version 6
        (0, 0, True, 4),
        (4, 4, False, 5),
        (0, 4, True, 5),
    ],
)
def test_wait_looks_at_the_batch_these_groups_will_be_in(
    ready: int, flying: int, formed: bool, oldest: int
) -> None:
    look = inputs(ready_groups=ready, proven_groups=flying, batch_formed=formed)
    assert oldest_worth_leasing(look, terms("wait", 2)) == oldest


def test_wait_leases_nothing_that_would_be_too_old() -> None:
    with pytest.raises(NoWork, match=r"would be stale when the step from version 8 uses them \(max_lag 2\)"):
        oldest_worth_leasing(inputs(ready_groups=8, batch_formed=True), terms("wait", 2))


def test_synchronous_training_does_not_generate_while_it_trains() -> None:
    assert oldest_worth_leasing(inputs(), terms("wait", 0)) == 5
    with pytest.raises(NoWork, match="wait for the next version"):
        oldest_worth_leasing(inputs(batch_formed=True), terms("wait", 0))


def test_wait_counts_of_what_is_coming_the_share_that_will_have_signal() -> None:
    look = inputs(proven_groups=8, batch_formed=True)
    with_half = inputs(proven_groups=8, batch_formed=True, signal_share=0.5)
    with pytest.raises(NoWork):
        oldest_worth_leasing(look, terms("wait", 2))
    assert oldest_worth_leasing(with_half, terms("wait", 2)) == 5


@pytest.mark.parametrize(
    ("ready", "share", "formed", "num_prompts"),
    [
        (0, 1.0, False, 8),  # three batches of 4 are open: a whole lease
        (0, 1.0, True, 8),
        (5, 1.0, True, 3),  # 3 groups are missing of the 8 that can still be used
        (5, 0.5, True, 6),
        (7, 0.9, True, 2),
    ],
)
def test_wait_leases_no_more_than_open_batches_need(
    ready: int, share: float, formed: bool, num_prompts: int
) -> None:
    look = inputs(ready_groups=ready, batch_formed=formed, signal_share=share)
    assert plan(look, terms("wait", 2)).num_prompts == num_prompts
    assert plan(look, terms("drop", 2)).num_prompts == 8


def test_nothing_is_made_for_a_batch_after_the_last() -> None:
    look = inputs(newest_version=18, last_version=20, batch_formed=True, ready_groups=3)
    assert plan(look, terms("wait", 2)).num_prompts == 1
    with pytest.raises(NoWork, match="3 groups ready and 1 leased, of 4 that the trainer can use"):
        plan(replace(look, proven_groups=1), terms("wait", 2))
    with pytest.raises(NoWork, match="of 0 that the trainer can use"):
        plan(replace(look, next_formed=True), terms("wait", 2))
    with pytest.raises(NoWork, match="version 20 is the last"):
        plan(replace(look, newest_version=20), terms("wait", 2))


def test_newcomers_get_their_chance_where_others_suffice() -> None:
    full = inputs(ready_groups=12, standing=NodeStanding(trust=Trust.PROBATION))
    with pytest.raises(NoWork):
        plan(full, terms("wait", 2))
    assert plan(replace(full, proven=False), terms("wait", 2)).versions == (3, 4, 5)
    assert plan(replace(full, proven=False, newcomer_groups=11), terms("wait", 2)).num_prompts > 0
    with pytest.raises(NoWork, match="enough work in flight: 12 groups ready and 12 leased, of 12"):
        plan(replace(full, proven=False, newcomer_groups=12), terms("wait", 2))


def test_nodes_that_were_refused_are_served_first() -> None:
    look = inputs(ready_groups=3, ahead=1)
    assert plan(look, terms("wait", 2)).num_prompts == 8  # 9 are missing, enough for both
    with pytest.raises(
        NoWork, match=r"4 groups ready and 0 leased, of 12 .*; nodes that asked earlier come first: 1"
    ):
        plan(replace(look, ready_groups=4), terms("wait", 2))
    assert plan(replace(look, ready_groups=4, proven=False), terms("wait", 2)).num_prompts == 8


def test_a_free_place_goes_to_a_waiting_node(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG, SPEC)
    try:
        swarm.start()
        eager, patient = swarm.node(), swarm.node()
        for node in (patient, eager, eager, eager):  # 8 groups: two batches
            swarm.work(node, rewards=(0.0, 1.0, 0.0, 1.0))
        refusal(patient.lease)
        swarm.batch(0)
        swarm.announce(1)  # 4 groups more can be used
        swarm.relay_up()
        eager.lease()
        assert "asked earlier come first: 1" in refusal(eager.lease).problem.detail
        assert patient.lease().prompts
    finally:
        swarm.close()


def test_a_lease_that_can_no_longer_count_is_not_counted_on(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG, SPEC.model_copy(update={"max_lag": 1}))
    try:
        swarm.start()
        slow, other = swarm.node(), swarm.node()
        for node in (slow, other):
            swarm.work(node, rewards=(0.0, 1.0, 0.0, 1.0))  # now both are proven
        swarm.batch(0)
        slow.lease()  # 2 prompts by version 0, never delivered
        swarm.announce(1)
        swarm.announce(2)
        swarm.relay_up()
        assert len(other.lease().prompts) == 2
        with swarm.coordinator.database.read() as db:
            now_s = swarm.clock()
            assert (groups_in_flight(db, 0, now_s), groups_in_flight(db, 2, now_s)) == ((4, 0), (2, 0))
    finally:
        swarm.close()


def test_the_share_with_signal_is_that_of_late(tmp_path: Path) -> None:
    swarm = SmallSwarm(tmp_path, CONFIG, SPEC)
    try:
        swarm.start()
        node = swarm.node()
        with swarm.coordinator.database.read() as db:
            assert signal_share(db) == 1.0
        for rewards in ((0.0, 1.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0)):
            swarm.work(node, rewards=rewards)
        with swarm.coordinator.database.read() as db:
            assert signal_share(db) == pytest.approx((2 + SIGNAL_PRIOR) / (4 + SIGNAL_PRIOR))
    finally:
        swarm.close()


def test_versions_start_at_0() -> None:
    assert oldest_worth_leasing(inputs(newest_version=1), terms("wait", 4)) == 0


def test_a_synchronous_swarm_waits_for_the_next_version(tmp_path: Path) -> None:
    swarm = SmallSwarm(
        tmp_path, CONFIG.model_copy(update={"stale": "wait"}), SPEC.model_copy(update={"max_lag": 0})
    )
    try:
        swarm.start()
        node = swarm.node()
        swarm.fill(node)
        swarm.batch(0)
        assert "wait for the next version" in refusal(node.lease).problem.detail
        swarm.announce(1)
        assert [policy.version for policy in node.lease().policies] == [1]
    finally:
        swarm.close()


@pytest.mark.parametrize("proven", [True, False])
def test_work_that_goes_stale_in_the_queue_stops_only_a_new_node(tmp_path: Path, proven: bool) -> None:
    """The node submitted in time; that no validator came is not its fault. A new key's junk must not be free, though."""
    config = CONFIG.model_copy(update={"groups_per_step": 40})
    swarm = SmallSwarm(tmp_path, config, SPEC.model_copy(update={"max_lag": 1}))
    swarm.start()
    node = swarm.proven_node() if proven else swarm.node()
    delivered = [node.deliver() for _ in range(12)]
    for version in (1, 2):
        swarm.announce(version)
    swarm.tick()
    assert {node.status(lease).code for lease in delivered} == {"void.stale"}
    if proven:
        assert node.lease().policies[-1].version == 2
    else:
        assert "leases of this node that ended without valid work: 12.0" in refusal(node.lease).problem.detail
    swarm.close()
