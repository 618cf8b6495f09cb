"""What requests will ask of the tables, known before the first of them is done: read together, for all of a turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.leases import check_queue, lifecycle, verdicts
from shoal.swarm.coordinator.leases.epochs import count_open
from shoal.swarm.coordinator.store.sheet import LEASES, NODES, SUBMISSIONS, UPLOADS
from shoal.swarm.coordinator.store.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of one request."""

    node: str | None = None
    """Whose awaited leases."""
    claims: bool = False
    """The next submission to be checked."""
    lease_id: str = ""
    upload: bool = False
    """Of that lease."""
    submission: bool = False
    judged: bool = False
    """All that a verdict on that lease changes."""


def read_ahead(coordinator: Coordinator, turn: Turn, needs: Sequence[Needs]) -> None:
    """Only what several ask for: for one it is as well read when it is asked for."""
    if len(needs) < 2 or not turn.keeps:
        return
    db = turn.db
    # What is no lease's name has no row; and one request with a name that a database cannot read must not fail all of them.
    needs = [one for one in needs if not one.lease_id or lifecycle.LEASE_ID.fullmatch(one.lease_id)]
    LEASES.fetch(db, {one.lease_id for one in needs if one.lease_id})
    UPLOADS.fetch(db, {one.lease_id for one in needs if one.upload})
    SUBMISSIONS.fetch(db, {one.lease_id for one in needs if one.submission})
    _read_judged(turn, [one.lease_id for one in needs if one.judged])
    nodes = [one.node for one in needs if one.node is not None]
    claims = sum(one.claims for one in needs)
    if not nodes and not claims:
        return
    with coordinator.transaction() as tx:
        lifecycle.expire(tx, coordinator)
        verdicts.release_lapsed(tx, coordinator)
    lifecycle.learn_awaited(turn, nodes)
    if claims:
        turn.recall(check_queue.queue, claims)


def _read_judged(turn: Turn, lease_ids: list[str]) -> None:
    if not lease_ids:
        return
    found = [LEASES.find(turn.db, lease_id) for lease_id in lease_ids]
    NODES.fetch(turn.db, {lease.node for lease in found if lease is not None})
    check_queue.learn_previous_receipts(turn, lease_ids)
    for epoch in {lease.epoch for lease in found if lease is not None}:
        turn.recall(count_open, epoch)
