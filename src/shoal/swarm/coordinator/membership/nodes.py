"""Nodes: sessions, heartbeats, and how verdicts change a node's trust.

The rules are pure functions (rules/trust.py, node_status.py, credit.py). Here they are applied to the tables, and
every change becomes a ledger event.
"""

import random
from typing import Any

from sqlalchemy import Connection, Row, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished
from shoal.swarm.coordinator.rules.node_status import OFFLINE_AFTER, averaged_speed, outdated_since_s
from shoal.swarm.coordinator.rules.trust import NodeStanding, Trust, TrustEvent, VerdictKind, next_standing
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import nodes, submissions
from shoal.swarm.coordinator.store.statements import TableStatements
from shoal.wire.codes import Rejected, explain_code
from shoal.wire.lease import Verdict
from shoal.wire.messages import (
    Heartbeat,
    HeartbeatReply,
    Leave,
    OpenSession,
    Recorded,
    Session,
)
from shoal.wire.requirements import unmet_needs

NODES = TableStatements(nodes)
IS_RELIABLE = (nodes.c.accepted > 0) & (nodes.c.trust != Trust.QUARANTINED.value)
"""Nodes whose submissions are expected to be accepted. Keys are free, so others may submit any amount of junk."""


def get_node(db: Connection, key: str) -> Row[Any]:
    node = NODES.find(db, key)
    if node is None:
        raise Rejected("request.not_found", f"no node {key[:80]!r} is enrolled in this run")
    return node


def standing_of(node: Row[Any]) -> NodeStanding:
    return NodeStanding(
        trust=Trust(node.trust),
        since_s=node.trust_since_s,
        streak=node.streak,
        rejected=node.rejected,
        lapses=node.lapses,
        lapsed_s=node.lapsed_s,
    )


def open_session(tx: Transaction, coordinator: Coordinator, ask: OpenSession) -> Session:
    """Begins a new session of the calling node; sessions that it had before no longer count."""
    node, spec = tx.caller(), coordinator.spec
    # Nodes that report no capabilities are not checked.
    reasons = unmet_needs(ask.capabilities, spec.needs, spec.compute_dtype) if ask.capabilities else []
    if reasons:
        raise Rejected("request.unfit", f"run {spec.run!r}: {'; '.join(reasons)}")
    epoch = node.session_epoch + 1
    before_s, min_software = node.outdated_at_s, coordinator.config.min_software
    outdated_at_s = outdated_since_s(before_s, ask.software, min_software=min_software, now_s=tx.now_s)
    if outdated_at_s != before_s:
        change = "node.current" if outdated_at_s is None else "node.outdated"
        tx.record(change, node=node.node, software=ask.software)
    tx.update(
        NODES,
        tx.actor,
        session_epoch=epoch,
        last_seen_s=tx.now_s,
        live=1,
        software=ask.software,
        outdated_at_s=outdated_at_s,
    )
    tx.record("session.opened", node=tx.actor, epoch=epoch)
    if node.trust == Trust.RETIRED.value:
        change_standing(tx, coordinator, tx.actor, TrustEvent.RETURN, "the node came back")
    return Session(epoch=epoch, heartbeat_s=coordinator.config.heartbeat_s)


def check_compatible(node: Row[Any], coordinator: Coordinator, now_s: float) -> None:
    """Raises Rejected if the node's software is too old and its time to update has passed."""
    config = coordinator.config
    if node.outdated_at_s is not None and now_s >= node.outdated_at_s + config.grace_s:
        raise Rejected(
            "request.outdated",
            f"this is {node.software[:60]!r}, the run needs {config.min_software}; the time to update has passed",
        )


def leave(tx: Transaction, coordinator: Coordinator, ask: Leave) -> Recorded:
    """Retires the calling node: it gets no more leases, but may still submit those it has. A new session brings it back."""
    tx.check_session(ask.epoch)
    return Recorded(seq=change_standing(tx, coordinator, tx.actor, TrustEvent.LEAVE, "the node left") or 0)


def mark_live(tx: Transaction, **values: Any) -> None:
    """Notes that the calling node is live, and sets other columns of its row."""
    # A new key writes no event: keys are free, and each could write two events to the ledger every two minutes, for ever.
    if not tx.caller().live and tx.caller().accepted:
        tx.record("node.live", node=tx.actor)
    tx.update(NODES, tx.actor, last_seen_s=tx.now_s, live=1, **values)


def heartbeat(tx: Transaction, coordinator: Coordinator, beat: Heartbeat) -> HeartbeatReply:
    tx.check_session(beat.epoch)
    mark_live(tx, phase=beat.phase, policy_version=beat.policy_version, tokens_per_s=beat.tokens_per_s)
    # Jitter keeps nodes that started together from sending heartbeats together.
    next_in_s = coordinator.config.heartbeat_s * random.uniform(0.8, 1.0)
    return HeartbeatReply(finished=is_finished(tx.db, coordinator.spec), next_in_s=next_in_s)


def record_offline(tx: Transaction, heartbeat_s: float) -> None:
    """Records the nodes with accepted work that went offline since the last call. Housekeeping calls it once a second."""
    silent = (nodes.c.live == 1, nodes.c.last_seen_s <= tx.now_s - OFFLINE_AFTER * heartbeat_s)
    gone = tx.db.execute(select(nodes.c.node, nodes.c.accepted).where(*silent).order_by(nodes.c.node)).all()
    if gone:
        tx.write(update(nodes).where(*silent).values(live=0))
    for node in gone:
        if node.accepted:
            tx.record("node.offline", node=node.node)


# -- standing ---------------------------------------------------------------------------------------------


def change_standing(
    tx: Transaction, coordinator: Coordinator, key: str, event: TrustEvent, reason: str
) -> int | None:
    """Applies an event to a node's standing. Returns the ledger's number of the change of trust, if there is one."""
    node = get_node(tx.db, key)
    before = standing_of(node)
    after = next_standing(before, event, tx.now_s, trusted_after=coordinator.config.trusted_after)
    if after == before:
        return None
    moved = after.trust is not before.trust
    tx.update(
        NODES,
        key,
        trust=after.trust.value,
        trust_reason=_reason(after, reason) if moved else node.trust_reason,
        trust_since_s=after.since_s,
        streak=after.streak,
        rejected=after.rejected,
        lapses=after.lapses,
        lapsed_s=after.lapsed_s,
    )
    if not moved:
        return None
    if before.trust is Trust.TRUSTED:
        check_in_full(tx, key)
    return tx.record(f"node.{after.trust.value}", node=key, reason=_reason(after, reason))


def check_in_full(tx: Transaction, key: str) -> None:
    """Asks for every check on the open submissions of a node that is no longer spared checks, whatever was drawn for them."""
    waiting = select(lease_table.c.lease_id).where(
        lease_table.c.node == key, lease_table.c.state.in_(("submitted", "checking"))
    )
    tx.write(update(submissions).where(submissions.c.lease_id.in_(waiting)).values(checks="full"))


def count_verdict(
    tx: Transaction, node: Row[Any], finding: VerdictKind, *, verdict: Verdict, credit: int, rows_per_s: float
) -> None:
    """Adds a verdict and the measured speed to the node's row, which must be current. `change_standing` changes the standing."""
    tx.update(
        NODES,
        node.node,
        accepted=node.accepted + (finding is VerdictKind.ACCEPTED),
        void=node.void + (finding is VerdictKind.VOID),
        credit=node.credit + credit,
        last_code=verdict.code,
        last_detail=verdict.detail,
        rows_per_s=averaged_speed(node.rows_per_s, rows_per_s),
    )


def count_void(tx: Transaction, node: str) -> None:
    """Counts a lease that ended without a verdict. The last verdict stays visible: it may be the reason for an ejection."""
    tx.write(update(nodes).where(nodes.c.node == node).values(void=nodes.c.void + 1))


def why_rejected(code: str, detail: str) -> str:
    return f"because {explain_code(code)} ({code}: {detail})"


def _reason(after: NodeStanding, reason: str) -> str:
    if after.trust is Trust.TRUSTED:
        return f"{after.streak} submissions accepted in a row"
    if reason.startswith("because "):
        count = "a submission was" if after.rejected == 1 else f"{after.rejected} submissions were"
        return f"{count} refused, the last {reason}"
    return reason
