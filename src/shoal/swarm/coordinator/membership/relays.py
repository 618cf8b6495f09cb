"""Relays: their URLs, the versions that they have, and whether they are live."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished
from shoal.swarm.coordinator.rules.node_status import Liveness, liveness
from shoal.swarm.coordinator.store.schema import relays
from shoal.swarm.coordinator.store.statements import Statement
from shoal.wire.messages import HeartbeatReply, RelayReport, RelayView
from shoal.wire.record import Sealed, seal
from shoal.wire.ticket import TICKET_S, Ticket

_ALL = Statement(select(relays).order_by(relays.c.url))


def report(tx: Transaction, coordinator: Coordinator, told: RelayReport) -> HeartbeatReply:
    """Stores a relay's report, which replaces its previous one."""
    tx.write(delete(relays).where(relays.c.url == told.url))
    tx.write(
        insert(relays).values(
            url=told.url,
            versions=json.dumps(told.versions),
            bytes_sent=told.bytes_sent,
            last_seen_s=tx.now_s,
        )
    )
    return HeartbeatReply(
        finished=is_finished(tx.db, coordinator.spec), next_in_s=coordinator.config.heartbeat_s
    )


def issue_ticket(tx: Transaction, coordinator: Coordinator) -> Sealed[Ticket]:
    """Returns a ticket for the calling key, which the router has checked: a member that is not ejected. Records nothing."""
    ticket = Ticket(run=coordinator.spec.run, holder=tx.actor, expires_at_s=tx.now_s + TICKET_S)
    return seal(ticket, coordinator.run_key)


def reports(db: Connection) -> list[Row[Any]]:
    """Returns the last report of each relay."""
    return _ALL.rows(db)


def views(reports: Sequence[Row[Any]], now_s: float, heartbeat_s: float) -> tuple[RelayView, ...]:
    return tuple(
        RelayView(
            url=row.url,
            liveness=liveness(row.last_seen_s, now_s, heartbeat_s).value,
            versions=tuple(json.loads(row.versions)),
            bytes_sent=row.bytes_sent,
        )
        for row in reports
    )


def usable(reports: Sequence[Row[Any]], now_s: float, heartbeat_s: float) -> tuple[RelayView, ...]:
    """Returns the relays for workers: all but the offline ones. A late relay may just be busy, and workers try several."""
    known = views(reports, now_s, heartbeat_s)
    return tuple(relay for relay in known if relay.liveness != Liveness.OFFLINE.value)
