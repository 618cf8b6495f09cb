"""Nodes: who is enrolled, whose session counts, who is alive, who is trusted. The two machines are pure functions.

liveness:  never -> live -> late -> offline; any sign of life makes a node live again. Touches no trust.
trust:     probation -> trusted; a first rejection quarantines, a second ejects (banned).
"""

import random
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, bindparam, insert, select, update

from shoal.swarm.coordinator.coordinator import Coordinator, Transaction, is_finished
from shoal.swarm.coordinator.schema import nodes
from shoal.wire.codes import ACCEPTED, Rejected, in_words
from shoal.wire.messages import Enrol, Enrolled, Heartbeat, HeartbeatReply, NodeView, OpenSession, Session
from shoal.wire.run import PROTOCOL

LATE_AFTER, OFFLINE_AFTER = 3, 8
"""In heartbeats: 45 s and 120 s of the default 15 s."""


class Liveness(StrEnum):
    NEVER = "never"
    LIVE = "live"
    LATE = "late"
    OFFLINE = "offline"


def liveness(last_seen_s: float | None, now_s: float, heartbeat_s: float) -> Liveness:
    if last_seen_s is None:
        return Liveness.NEVER
    silent_s = now_s - last_seen_s
    if silent_s < LATE_AFTER * heartbeat_s:
        return Liveness.LIVE
    return Liveness.LATE if silent_s < OFFLINE_AFTER * heartbeat_s else Liveness.OFFLINE


class Trust(StrEnum):
    PROBATION = "probation"
    TRUSTED = "trusted"
    QUARANTINED = "quarantined"
    BANNED = "banned"


class Finding(StrEnum):
    """What a verdict says about the node."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    VOID = "void"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a node's verdicts so far add up to."""

    trust: Trust
    accepted_in_a_row: int = 0
    rejected: int = 0


def judge(standing: Standing, finding: Finding, *, trusted_after: int) -> Standing:
    """The standing after one more verdict. Void is nobody's doing and changes nothing."""
    if finding is Finding.VOID:
        return standing
    if finding is Finding.REJECTED:
        rejected = standing.rejected + 1
        trust = Trust.QUARANTINED if rejected == 1 else Trust.BANNED
        return Standing(trust=trust, accepted_in_a_row=0, rejected=rejected)
    in_a_row = standing.accepted_in_a_row + 1
    risen = standing.trust is Trust.PROBATION and in_a_row >= trusted_after
    return replace(standing, accepted_in_a_row=in_a_row, trust=Trust.TRUSTED if risen else standing.trust)


def finding_of(code: str) -> Finding:
    if code == ACCEPTED:
        return Finding.ACCEPTED
    return Finding.REJECTED if code.startswith("reject.") else Finding.VOID


# -- requests ---------------------------------------------------------------------------------------------

_FIND = select(nodes).where(nodes.c.node == bindparam("key"))
_SEEN = update(nodes).where(nodes.c.node == bindparam("key")).values(last_seen_s=bindparam("now_s"))
_BEAT = (
    update(nodes)
    .where(nodes.c.node == bindparam("key"))
    .values(
        last_seen_s=bindparam("now_s"),
        phase=bindparam("phase_now"),
        policy_version=bindparam("version_now"),
        tokens_per_s=bindparam("speed_now"),
    )
)


def find_node(db: Connection, key: str) -> Row[Any] | None:
    return db.execute(_FIND, {"key": key}).one_or_none()


def get_node(db: Connection, key: str) -> Row[Any]:
    node = find_node(db, key)
    if node is None:
        raise Rejected("request.not_found", f"no node {key[:80]!r} is enrolled in this run")
    return node


def enrol(tx: Transaction, coordinator: Coordinator, ask: Enrol) -> Enrolled:
    """Idempotent: a node that forgot it was enrolled enrols again."""
    if ask.protocol != PROTOCOL:
        raise Rejected(
            "request.outdated", f"this coordinator speaks protocol {PROTOCOL}, the client {ask.protocol}"
        )
    if tx.node is None:
        row = {
            "node": tx.actor,
            "enrolled_at_s": tx.now_s,
            "software": ask.software,
            "trust": Trust.PROBATION.value,
            "trust_reason": "new",
            "phase": "",
            "tokens_per_s": 0.0,
        }
        zeros = ("accepted_in_a_row", "session_epoch", "accepted", "rejected", "void", "credit")
        tx.db.execute(insert(nodes).values(**row, **dict.fromkeys(zeros, 0)))
        tx.record("node.enrolled", node=tx.actor, software=ask.software)
    trust = str(tx.node.trust) if tx.node is not None else Trust.PROBATION.value
    return Enrolled(node=tx.actor, trust=trust, run_key=coordinator.run_key.public)


def open_session(tx: Transaction, coordinator: Coordinator, ask: OpenSession) -> Session:
    assert tx.node is not None, "the door lets only enrolled keys open a session"
    epoch = tx.node.session_epoch + 1
    tx.db.execute(
        update(nodes)
        .where(nodes.c.node == tx.actor)
        .values(session_epoch=epoch, last_seen_s=tx.now_s, software=ask.software)
    )
    tx.record("session.opened", node=tx.actor, epoch=epoch)
    return Session(epoch=epoch, heartbeat_s=coordinator.config.heartbeat_s)


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
    tx.db.execute(_SEEN, {"key": tx.actor, "now_s": tx.now_s})


def heartbeat(tx: Transaction, coordinator: Coordinator, beat: Heartbeat) -> HeartbeatReply:
    check_session(tx, beat.epoch)
    values = {"phase_now": beat.phase, "version_now": beat.policy_version, "speed_now": beat.tokens_per_s}
    tx.db.execute(_BEAT, {"key": tx.actor, "now_s": tx.now_s, **values})
    # Jitter keeps nodes that started together from beating together.
    next_in_s = coordinator.config.heartbeat_s * random.uniform(0.8, 1.0)
    return HeartbeatReply(finished=is_finished(tx.db, coordinator.spec), next_in_s=next_in_s)


# -- verdicts ---------------------------------------------------------------------------------------------


def count_verdict(
    tx: Transaction, node: Row[Any], *, code: str, detail: str, credit: int, trusted_after: int
) -> Trust:
    """Enter a verdict into the node's record; its trust afterwards."""
    before = Standing(
        trust=Trust(node.trust), accepted_in_a_row=node.accepted_in_a_row, rejected=node.rejected
    )
    finding = finding_of(code)
    after = judge(before, finding, trusted_after=trusted_after)
    reason = _reason(after, code, detail) if after.trust is not before.trust else node.trust_reason
    tx.db.execute(
        update(nodes)
        .where(nodes.c.node == node.node)
        .values(
            trust=after.trust.value,
            trust_reason=reason,
            accepted_in_a_row=after.accepted_in_a_row,
            accepted=node.accepted + (finding is Finding.ACCEPTED),
            rejected=after.rejected,
            void=node.void + (finding is Finding.VOID),
            credit=node.credit + credit,
            last_code=code,
            last_detail=detail,
        )
    )
    if after.trust is not before.trust:
        tx.record(f"node.{after.trust.value}", node=node.node, reason=reason)
    return after.trust


def count_void(tx: Transaction, node: str) -> None:
    """A lease ended without a verdict. The last verdict stays in view: it may be the reason for an ejection."""
    tx.db.execute(update(nodes).where(nodes.c.node == node).values(void=nodes.c.void + 1))


def _reason(after: Standing, code: str, detail: str) -> str:
    if after.trust is Trust.TRUSTED:
        return f"{after.accepted_in_a_row} submissions accepted in a row"
    count = (
        "a submission was refused" if after.rejected == 1 else f"{after.rejected} submissions were refused"
    )
    return f"{count}, the last because {in_words(code)} ({code}: {detail})"


def view(node: Row[Any], now_s: float, heartbeat_s: float) -> NodeView:
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
        last_code=node.last_code,
        last_detail=node.last_detail,
    )
