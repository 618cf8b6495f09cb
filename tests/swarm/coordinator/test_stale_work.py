"""Which versions a lease may be answered with: drop what goes stale, or wait rather than make it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm, refusal

from shoal.swarm.coordinator.coordinator import Coordinator
from shoal.swarm.coordinator.planning import NoWork, Outlook, oldest_worth_leasing
from shoal.swarm.coordinator.trust import Standing, Trust


def terms(stale: str, max_lag: int) -> Coordinator:
    return cast(
        Coordinator,
        SimpleNamespace(
            config=SimpleNamespace(stale=stale, groups_per_step=4), spec=SimpleNamespace(max_lag=max_lag)
        ),
    )


def outlook(**values: Any) -> Outlook:
    plain: dict[str, Any] = {
        "newest_version": 5,
        "last_version": 20,
        "finished": False,
        "relays": (),
        "standing": Standing(trust=Trust.TRUSTED),
        "proven": True,
        "rows_per_s": 0.0,
        "chunk": None,
        "ready_groups": 0,
        "coming_groups": 0,
        "hoped_groups": 0,
    }
    return Outlook(**plain | values)


def test_drop_takes_whatever_counts_now() -> None:
    for ready in (0, 4, 11):
        assert oldest_worth_leasing(outlook(ready_groups=ready, batch_formed=True), terms("drop", 2)) == 3


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
    look = outlook(ready_groups=ready, coming_groups=flying, batch_formed=formed)
    assert oldest_worth_leasing(look, terms("wait", 2)) == oldest


def test_wait_leases_nothing_that_would_be_too_old() -> None:
    with pytest.raises(NoWork, match=r"would be stale when the step from version 8 uses them \(max_lag 2\)"):
        oldest_worth_leasing(outlook(ready_groups=8, batch_formed=True), terms("wait", 2))


def test_synchronous_training_does_not_generate_while_it_trains() -> None:
    assert oldest_worth_leasing(outlook(), terms("wait", 0)) == 5
    with pytest.raises(NoWork, match="wait for the next version"):
        oldest_worth_leasing(outlook(batch_formed=True), terms("wait", 0))


def test_versions_start_at_0() -> None:
    assert oldest_worth_leasing(outlook(newest_version=1), terms("wait", 4)) == 0


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
