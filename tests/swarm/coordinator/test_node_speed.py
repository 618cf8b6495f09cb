"""The measured speed of a node, with leases that wait and with two leases at once."""

import pytest
from small_swarm import CONFIG, SmallSwarm
from sqlalchemy import select

from shoal.swarm.coordinator.rules.node_status import averaged_speed, rows_per_s
from shoal.swarm.coordinator.store.schema import leases, nodes, submissions
from shoal.wire.lease import Lease


def measured(swarm: SmallSwarm) -> float:
    with swarm.coordinator.database.read() as db:
        return float(db.execute(select(nodes.c.rows_per_s)).scalar_one())


def times(swarm: SmallSwarm, lease: Lease) -> tuple[float, float]:
    """Times of issue and of receipt."""
    joined = select(leases.c.issued_at_s, submissions.c.received_at_s).join_from(leases, submissions)
    with swarm.coordinator.database.read() as db:
        issued_at_s, received_at_s = db.execute(joined.where(leases.c.lease_id == lease.lease_id)).one()
    return issued_at_s, received_at_s


def test_time_is_measured_from_the_lease_or_the_previous_receipt() -> None:
    def measure(issued_at_s: float, previous_receipt_s: float | None) -> float:
        return rows_per_s(
            12, issued_at_s=issued_at_s, previous_receipt_s=previous_receipt_s, received_at_s=20.0
        )

    assert measure(8.0, None) == 1.0
    assert measure(0.0, 8.0) == 1.0
    assert measure(8.0, 0.0) == 1.0
    assert measure(20.0, 20.0) == 12_000  # the clock did not move


def test_two_leases_at_once_take_the_time_of_both() -> None:
    speed = 0.0
    for _ in range(60):
        speed = averaged_speed(averaged_speed(speed, 8 / 10.0), 8 / 0.01)
    assert speed == pytest.approx(16 / 10.0, rel=0.25)
    assert averaged_speed(2.0, 2.0) == pytest.approx(2.0)


def test_a_lease_fetched_ahead_is_measured_from_the_receipt_before(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    for _ in range(CONFIG.trusted_after):
        swarm.work(node)
    swarm.batch(0)  # so that there is room for more
    swarm.announce(1)
    before = measured(swarm)
    first, ahead = node.lease(), node.lease()
    assert first.lease_id != ahead.lease_id
    for lease in (first, ahead):
        swarm.clock.ahead_s += 8.0
        node.deliver(lease)
    for _ in range(2):
        swarm.verdict(swarm.claim().lease)
    (first_issued_s, first_received_s), (issued_s, received_s) = times(swarm, first), times(swarm, ahead)
    assert issued_s < first_received_s < received_s - 7.0
    expected = averaged_speed(before, first.num_rows / (first_received_s - first_issued_s))
    assert measured(swarm) == pytest.approx(
        averaged_speed(expected, ahead.num_rows / (received_s - first_received_s))
    )
