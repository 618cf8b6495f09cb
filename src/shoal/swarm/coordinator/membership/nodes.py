"""Nodes: who is enrolled, whose session counts, and what their deeds did to their standing.

The machines are pure and have files of their own: trust.py, liveness.py, compatibility.py, credit.py. Here they meet the
tables, and every move becomes a ledger event.
"""

import random
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction, finished_version
from shoal.swarm.coordinator.leases.in_flight import flying_groups
from shoal.swarm.coordinator.membership import admission
from shoal.swarm.coordinator.rules.compatibility import Compatibility, Fit, compatibility, meet
from shoal.swarm.coordinator.rules.liveness import OFFLINE_AFTER
from shoal.swarm.coordinator.rules.speed import averaged
from shoal.swarm.coordinator.rules.trust import Finding, Happening, Standing, Trust, judge
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import nodes, submissions
from shoal.swarm.coordinator.store.sheet import NODES
from shoal.swarm.coordinator.store.turn import Turn
from shoal.wire.codes import Rejected, explain_code
from shoal.wire.lease import Verdict
from shoal.wire.messages import (
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    Leave,
    OpenSession,
    Recorded,
    Session,
)
from shoal.wire.requirements import unmet_needs
from shoal.wire.run_spec import PROTOCOL


def find_node(db: Connection, key: str) -> Row[Any] | None:
    return NODES.find(db, key)


def get_node(db: Connection, key: str) -> Row[Any]:
    node = find_node(db, key)
    if node is None:
        raise Rejected("request.not_found", f"no node {key[:80]!r} is enrolled in this run")
    return node


def standing_of(node: Row[Any]) -> Standing:
    return Standing(
        trust=Trust(node.trust),
        since_s=node.trust_since_s,
        streak=node.streak,
        rejected=node.rejected,
        lapses=node.lapses,
        lapsed_s=node.lapsed_s,
    )


def enrol(tx: Transaction, coordinator: Coordinator, ask: Enrol) -> Enrolled:
    """Idempotent: a node that forgot it was enrolled enrols again; so does one that brings a newer delegation."""
    if ask.protocol != PROTOCOL:
        raise Rejected(
            "request.outdated", f"this coordinator speaks protocol {PROTOCOL}, the client {ask.protocol}"
        )
    owner, until_s = admission.owner_of(tx, ask)
    if tx.node is None:
        admission.admit(tx, coordinator, ask, owner)
        _insert(tx, ask, owner, until_s)
        named = {"owner": owner} if owner else {}
        tx.record("node.enrolled", node=tx.actor, software=ask.software, **named)
    elif owner is not None:
        _renew(tx, tx.node, owner, until_s)
    trust = str(tx.node.trust) if tx.node is not None else Trust.PROBATION.value
    return Enrolled(node=tx.actor, trust=trust, run_key=coordinator.run_key.public)


def _insert(tx: Transaction, ask: Enrol, owner: str | None, until_s: float | None) -> None:
    row = {
        "node": tx.actor,
        "enrolled_at_s": tx.now_s,
        "software": ask.software,
        "owner": owner,
        "delegated_until_s": until_s,
        "trust": Trust.PROBATION.value,
        "trust_reason": "new",
        "trust_since_s": tx.now_s,
        "phase": "",
        "owed": "",
    }
    zeros = ("streak", "lapses", "session_epoch", "live", "accepted", "rejected", "void", "credit")
    measures = ("lapsed_s", "rows_per_s", "tokens_per_s")
    tx.db.execute(insert(nodes).values(**row, **dict.fromkeys(zeros, 0), **dict.fromkeys(measures, 0.0)))


def _renew(tx: Transaction, node: Row[Any], owner: str, until_s: float | None) -> None:
    if node.owner != owner:
        raise Rejected("request.conflict", f"node {node.node[:16]} was enrolled by another owner")
    if until_s != node.delegated_until_s:
        tx.db.execute(update(nodes).where(nodes.c.node == node.node).values(delegated_until_s=until_s))
        tx.record("node.delegated", node=node.node, owner=owner, until_s=until_s)


def open_session(tx: Transaction, coordinator: Coordinator, ask: OpenSession) -> Session:
    node = tx.node
    assert node is not None, "the door lets only enrolled keys open a session"
    _check_machine(coordinator, ask)
    epoch = node.session_epoch + 1
    fit = _meet(tx, coordinator, node, ask.software)
    tx.db.execute(
        update(nodes)
        .where(nodes.c.node == tx.actor)
        .values(
            session_epoch=epoch,
            last_seen_s=tx.now_s,
            live=1,
            software=ask.software,
            outdated_at_s=fit.outdated_at_s,
        )
    )
    tx.record("session.opened", node=tx.actor, epoch=epoch)
    if node.trust == Trust.RETIRED.value:
        happen(tx, coordinator, tx.actor, Happening.RETURN, "it came back")
    return Session(epoch=epoch, heartbeat_s=coordinator.config.heartbeat_s)


def _check_machine(coordinator: Coordinator, ask: OpenSession) -> None:
    """Who does not say what it brings may try."""
    spec = coordinator.spec
    reasons = unmet_needs(ask.capabilities, spec.needs, spec.compute_dtype) if ask.capabilities else []
    if reasons:
        raise Rejected("request.unfit", f"run {spec.run!r}: {'; '.join(reasons)}")


def _meet(tx: Transaction, coordinator: Coordinator, node: Row[Any], software: str) -> Fit:
    demands = coordinator.config.demands()
    before = Fit(outdated_at_s=node.outdated_at_s)
    after = meet(before, protocol=PROTOCOL, software=software, demands=demands, now_s=tx.now_s)
    if after != before:
        outdated = after.outdated_at_s is not None
        tx.record("node.outdated" if outdated else "node.current", node=node.node, software=software)
    return after


def check_compatible(node: Row[Any], coordinator: Coordinator, now_s: float) -> None:
    demands = coordinator.config.demands()
    if compatibility(Fit(outdated_at_s=node.outdated_at_s), demands, now_s) is Compatibility.INCOMPATIBLE:
        raise Rejected(
            "request.outdated",
            f"this is {node.software[:60]!r}, the run needs {demands.min_software}; the time to update has passed",
        )


def leave(tx: Transaction, coordinator: Coordinator, ask: Leave) -> Recorded:
    """No more leases for it; what it has may still be delivered. A new session brings it back."""
    check_session(tx, ask.epoch)
    return Recorded(seq=happen(tx, coordinator, tx.actor, Happening.LEAVE, "by its own wish") or 0)


def check_session(tx: Transaction, epoch: int) -> Row[Any]:
    """The node that asks, if its session is the newest of its key."""
    node = tx.node
    assert node is not None, "the door lets only enrolled keys ask with a session"
    if epoch != node.session_epoch:
        raise Rejected(
            "request.stale_epoch",
            f"session {epoch} of node {tx.actor[:16]}, but its newest is {node.session_epoch}",
        )
    return node


def sign_of_life(tx: Transaction) -> None:
    _tell_return(tx)
    NODES.change(tx.db, tx.actor, last_seen_s=tx.now_s, live=1)


def heartbeat(tx: Transaction, coordinator: Coordinator, beat: Heartbeat) -> HeartbeatReply:
    check_session(tx, beat.epoch)
    _tell_return(tx)
    NODES.change(
        tx.db,
        tx.actor,
        last_seen_s=tx.now_s,
        live=1,
        phase=beat.phase,
        policy_version=beat.policy_version,
        tokens_per_s=beat.tokens_per_s,
    )
    return reply(tx.turn, coordinator)


def reply(turn: Turn, coordinator: Coordinator) -> HeartbeatReply:
    """To a heartbeat that was entered."""
    finished = turn.recall(finished_version) == coordinator.spec.last_version
    return HeartbeatReply(finished=finished, next_in_s=_next_beat_s(coordinator))


def _next_beat_s(coordinator: Coordinator) -> float:
    # Jitter keeps nodes that started together from beating together.
    return coordinator.config.heartbeat_s * random.uniform(0.8, 1.0)


def _tell_return(tx: Transaction) -> None:
    assert tx.node is not None
    if not tx.node.live:
        tx.record("node.live", node=tx.actor)


def tell_offline(tx: Transaction, heartbeat_s: float) -> None:
    """Nodes that have fallen silent since the last look."""
    silent = (nodes.c.live == 1, nodes.c.last_seen_s <= tx.now_s - OFFLINE_AFTER * heartbeat_s)
    gone = list(tx.db.execute(select(nodes.c.node).where(*silent).order_by(nodes.c.node)).scalars())
    if gone:
        tx.db.execute(update(nodes).where(*silent).values(live=0))
    for node in gone:
        tx.record("node.offline", node=node)


# -- standing ---------------------------------------------------------------------------------------------


def happen(
    tx: Transaction, coordinator: Coordinator, key: str, happening: Happening, reason: str
) -> int | None:
    """Enter a happening into a node's standing. The ledger's number of the change of trust, if there is one."""
    return enter(tx, coordinator, get_node(tx.db, key), happening, reason)


def enter(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], happening: Happening, reason: str
) -> int | None:
    """The same, by whoever has the node's row as it is."""
    key = node.node
    before = standing_of(node)
    after = judge(before, happening, tx.now_s, trusted_after=coordinator.config.trusted_after)
    if after == before:
        return None
    moved = after.trust is not before.trust
    if after.lapses != before.lapses:
        tx.turn.forget(flying_groups)  # it may count as proven now, or not any more
    NODES.change(
        tx.db,
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
        _check_in_full(tx, key)
    return tx.record(f"node.{after.trust.value}", node=key, reason=_reason(after, reason))


def _check_in_full(tx: Transaction, key: str) -> None:
    """What the draw spared while it was trusted, and nobody has judged, is not spared any more."""
    waiting = select(lease_table.c.lease_id).where(
        lease_table.c.node == key, lease_table.c.state.in_(("submitted", "checking"))
    )
    tx.db.execute(update(submissions).where(submissions.c.lease_id.in_(waiting)).values(checks="full"))


def count_verdict(
    tx: Transaction, node: Row[Any], finding: Finding, *, verdict: Verdict, credit: int, rows_per_s: float
) -> None:
    """Enter a verdict and how fast it was answered into the record of the node, given as it is; all but its standing."""
    if node.accepted == 0:
        tx.turn.forget(flying_groups)
    NODES.change(
        tx.db,
        node.node,
        accepted=node.accepted + (finding is Finding.ACCEPTED),
        void=node.void + (finding is Finding.VOID),
        credit=node.credit + credit,
        last_code=verdict.code,
        last_detail=verdict.detail,
        rows_per_s=averaged(node.rows_per_s, rows_per_s),
    )


def count_void(tx: Transaction, node: str) -> None:
    """A lease ended without a verdict. The last verdict stays in view: it may be the reason for an ejection."""
    tx.db.execute(update(nodes).where(nodes.c.node == node).values(void=nodes.c.void + 1))


def why_rejected(code: str, detail: str) -> str:
    return f"because {explain_code(code)} ({code}: {detail})"


def _reason(after: Standing, reason: str) -> str:
    if after.trust is Trust.TRUSTED:
        return f"{after.streak} submissions accepted in a row"
    if reason.startswith("because "):
        count = (
            "a submission was refused"
            if after.rejected == 1
            else f"{after.rejected} submissions were refused"
        )
        return f"{count}, the last {reason}"
    return reason
