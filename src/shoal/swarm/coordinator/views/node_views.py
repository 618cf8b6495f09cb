"""The public view of nodes, with the part of their credit that is still held."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sqlalchemy import Connection, Row, func, select

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.rules.credit import held_since_s
from shoal.swarm.coordinator.rules.node_activity import liveness
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.schema import verdicts
from shoal.wire.messages import NodeView
from shoal.wire.run_spec import RunSpec


class ViewContext(Protocol):
    """What a view needs besides the tables. A coordinator has it, and so has `shoal report` for a finished run's folder."""

    @property
    def config(self) -> CoordinatorConfig: ...

    @property
    def spec(self) -> RunSpec: ...

    @property
    def clock(self) -> Callable[[], float]: ...


def view(node: Row[Any], held: int, now_s: float, heartbeat_s: float) -> NodeView:
    return NodeView(
        node=node.node,
        trust=node.trust,
        liveness=liveness(node.last_seen_s, now_s, heartbeat_s).value,
        phase=node.phase,
        policy_version=node.policy_version,
        tokens_per_s=node.tokens_per_s,
        accepted=node.accepted,
        rejected=node.rejected,
        void=node.void,
        credit=node.credit,
        credit_held=held,
        owner=node.owner,
        last_code=node.last_code,
        last_detail=node.last_detail,
    )


def views(db: Connection, rows: Sequence[Row[Any]], context: ViewContext) -> tuple[NodeView, ...]:
    """Returns the views of nodes, given as rows of the table."""
    now_s, config = context.clock(), context.config
    # One query for all nodes; then one for each quarantined or banned node, whose hold period is suspended.
    held: dict[str, int] = {
        row[0]: int(row[1])
        for row in db.execute(
            select(verdicts.c.node, func.sum(verdicts.c.credit))
            .where(verdicts.c.given_at_s > now_s - config.hold_s, verdicts.c.revoked_for.is_(None))
            .group_by(verdicts.c.node)
        )
    }
    for row in rows:
        if row.trust in (Trust.QUARANTINED.value, Trust.BANNED.value):
            held[row.node] = _held(db, row, now_s, config.hold_s)
    return tuple(view(row, held.get(row.node, 0), now_s, config.heartbeat_s) for row in rows)


def _held(db: Connection, node: Row[Any], now_s: float, hold_s: float) -> int:
    """Returns the held credit of one node, by the rule for its trust."""
    since_s = held_since_s(Trust(node.trust), node.trust_since_s, now_s, hold_s)
    query = select(func.coalesce(func.sum(verdicts.c.credit), 0)).where(
        verdicts.c.node == node.node, verdicts.c.given_at_s > since_s, verdicts.c.revoked_for.is_(None)
    )
    return int(db.execute(query).scalar_one())
