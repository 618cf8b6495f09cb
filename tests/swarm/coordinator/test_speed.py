"""How fast a node is: waiting its turn is not being slow, and two leases at once are not twice as fast."""

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm
from sqlalchemy import select

from shoal.swarm.coordinator.schema import nodes
from shoal.swarm.coordinator.speed import averaged, rows_per_s

ROWS = CONFIG.prompts_per_lease * SPEC.sampling.samples_per_prompt


def measured(swarm: SmallSwarm) -> float:
    with swarm.coordinator.database.read() as db:
        return float(db.execute(select(nodes.c.rows_per_s)).scalar_one())


def test_from_the_lease_or_from_the_receipt_before() -> None:
    def measure(issued_at_s: float, previous_receipt_s: float | None) -> float:
        return rows_per_s(
            12, issued_at_s=issued_at_s, previous_receipt_s=previous_receipt_s, received_at_s=20.0
        )

    assert measure(8.0, None) == 1.0
    assert measure(0.0, 8.0) == 1.0
    assert measure(8.0, 0.0) == 1.0
    assert measure(20.0, 20.0) == 12_000  # a clock that stood still


def test_two_leases_at_once_take_the_time_of_both() -> None:
    speed = 0.0
    for _ in range(60):
        speed = averaged(averaged(speed, 8 / 10.0), 8 / 0.01)
    assert speed == pytest.approx(16 / 10.0, rel=0.25)
    assert averaged(2.0, 2.0) == pytest.approx(2.0)


def test_a_lease_fetched_ahead_is_measured_from_the_receipt_before(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    for _ in range(CONFIG.trusted_after):
        lease = node.lease()
        swarm.clock.advance_s += 8.0
        node.deliver(lease)
        swarm.claim()
        swarm.verdict(lease)
    assert measured(swarm) == pytest.approx(ROWS / 8.0)
    swarm.batch(0)  # room for more
    swarm.announce(1)
    first, ahead = node.lease(), node.lease()
    assert first.lease_id != ahead.lease_id
    for lease in (first, ahead):
        swarm.clock.advance_s += 8.0
        swarm.relay_up()
        node.deliver(lease)
    for _ in range(2):
        swarm.verdict(swarm.claim().lease)
    assert measured(swarm) == pytest.approx(ROWS / 8.0)
