"""Groups in flight: of train leases that have not ended, those to count on and those only hoped for.

They are summed up once a turn and then counted along, since every lease that is issued asks for the sum.
"""

from typing import Any

from sqlalchemy import Connection, Row, func, select

from shoal.swarm.coordinator.rules.lease_states import AWAITED, OPEN
from shoal.swarm.coordinator.store.schema import leases, nodes, policies
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.swarm.coordinator.store.turn import Turn
from shoal.wire.lease import Lease

PROVEN_LAPSES = 2

_UNPROVEN = (nodes.c.accepted == 0) | (nodes.c.lapses >= PROVEN_LAPSES)
_HOPED = leases.c.state.in_(AWAITED) & _UNPROVEN
_FLYING = Statement(
    select(
        func.coalesce(func.sum(leases.c.num_prompts), 0).label("total"),
        func.coalesce(func.sum(leases.c.num_prompts).filter(_HOPED), 0).label("hoped"),
    )
    .join(nodes, nodes.c.node == leases.c.node)
    .where(
        leases.c.state.in_(OPEN), leases.c.purpose == "train", leases.c.issued_at_s >= given("issued_from_s")
    )
)
_PUBLISHED = Statement(select(policies.c.published_at_s).where(policies.c.version == given("number")))


def is_proven(node: Row[Any]) -> bool:
    """It has delivered before, and does not let leases lapse."""
    return bool(node.accepted > 0 and node.lapses < PROVEN_LAPSES)


def flying_groups(db: Connection, oldest: int) -> tuple[int, int]:
    """Groups of open train leases: those to count on, and those in the hands of nodes that have shown nothing yet.

    What was leased before version `oldest` was out is made by an older one, and comes too late for any batch.
    """
    issued_from_s = published_at_s(db, oldest)
    if issued_from_s is None:  # not out yet: nothing in flight can be by it
        return 0, 0
    found = _FLYING.row(db, issued_from_s=issued_from_s)
    assert found is not None, "a sum is one row"
    return int(found.total - found.hoped), int(found.hoped)


def published_at_s(db: Connection, version: int) -> float | None:
    found: float | None = _PUBLISHED.value(db, number=version)
    return found


def count_issued(turn: Turn, node: Row[Any], lease: Lease) -> None:
    if lease.purpose != "train":
        return
    num_groups = len(lease.prompts)
    if is_proven(node):
        _count(turn, lease.issued_at_s, coming=num_groups, hoped=0)
    else:
        _count(turn, lease.issued_at_s, coming=0, hoped=num_groups)


def count_submitted(turn: Turn, node: Row[Any], lease: Row[Any]) -> None:
    if lease.purpose == "train" and not is_proven(node):
        _count(turn, lease.issued_at_s, coming=lease.num_prompts, hoped=-lease.num_prompts)


def count_ended(turn: Turn, lease: Row[Any]) -> None:
    """`lease` as it was before."""
    if lease.purpose != "train":
        return
    if lease.state in AWAITED:
        turn.forget(flying_groups)  # whether it was hoped for depends on what its node was then
    else:
        _count(turn, lease.issued_at_s, coming=-lease.num_prompts, hoped=0)


def _count(turn: Turn, issued_at_s: float, *, coming: int, hoped: int) -> None:
    for (oldest,) in turn.known(flying_groups):
        issued_from_s = turn.recall(published_at_s, oldest)
        if issued_from_s is not None and issued_at_s >= issued_from_s:
            known = turn.recall(flying_groups, oldest)
            turn.learn((known[0] + coming, known[1] + hoped), flying_groups, oldest)
