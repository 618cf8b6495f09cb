"""Relays: their keys and URLs, the versions that they have, and whether leases may name them.

A relay reports with a key that the operator delegated for its URL, so a report counts for that URL alone. Leases name a relay after
the coordinator itself has fetched a manifest from it (relay_trials.py).
"""

import json

from sqlalchemy import Connection, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished
from shoal.swarm.coordinator.rules.node_status import Liveness, liveness
from shoal.swarm.coordinator.store.schema import policies, relays
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import Rejected
from shoal.wire.delegation import check_relay_delegation
from shoal.wire.messages import HeartbeatReply, RelayReport, RelayView
from shoal.wire.record import Sealed, seal
from shoal.wire.ticket import TICKET_S, Ticket

NOT_TRIED = "the coordinator has not tried its URL yet"

REPORTS = Statement(select(relays).order_by(relays.c.url))
"""The last report of each relay."""
_OF_KEY = Statement(
    select(relays.c.url, relays.c.last_seen_s)
    .where(relays.c.key == given("key"))
    .order_by(relays.c.last_seen_s.desc())
    .limit(1)
)
_ORIGIN = Statement(select(policies.c.origin_url).order_by(policies.c.version.desc()).limit(1))


def report(tx: Transaction, coordinator: Coordinator, told: RelayReport) -> HeartbeatReply:
    """Stores a relay's report, which replaces its previous one. Raises Rejected for a URL that was not delegated to the key."""
    if told.delegation is None:
        raise Rejected(
            "request.not_allowed",
            f"key {tx.actor[:16]} has no delegation for {told.url}; the operator makes one with `shoal identity relay URL`",
        )
    operator = next(key for key, role in coordinator.roles.items() if role == "relay")
    delegation = check_relay_delegation(
        told.delegation, operator=operator, relay=tx.actor, url=told.url, now_s=tx.now_s
    )
    values = {
        "versions": json.dumps(told.versions),
        "bytes_sent": told.bytes_sent,
        "last_seen_s": tx.now_s,
        "delegated_at_s": delegation.not_before_s,
    }
    found = tx.db.execute(select(relays).where(relays.c.url == told.url)).one_or_none()
    if found is not None and found.key == tx.actor:
        tx.write(update(relays).where(relays.c.url == told.url).values(**values))
    else:
        # The URL belongs to the key that was delegated last: so the operator replaces a stolen key.
        if found is not None and found.delegated_at_s >= delegation.not_before_s:
            raise Rejected(
                "request.revoked",
                f"{found.url} was delegated to relay {found.key[:16]} at {found.delegated_at_s:.0f}, "
                f"to {tx.actor[:16]} at {delegation.not_before_s:.0f}; the newest delegation counts",
            )
        values |= {"key": tx.actor, "problem": NOT_TRIED if coordinator.config.try_relays else ""}
        if found is None:
            tx.write(insert(relays).values(url=told.url, **values))
        else:
            tx.write(update(relays).where(relays.c.url == told.url).values(**values, tried_at_s=None))
        tx.record("relay.delegated", relay=tx.actor, url=told.url, until_s=delegation.not_after_s)
    return HeartbeatReply(
        finished=is_finished(tx.db, coordinator.spec), next_in_s=coordinator.config.heartbeat_s
    )


def is_relay_key(db: Connection, key: str) -> bool:
    """Returns whether a relay has reported with this key, which was delegated to it then."""
    return _OF_KEY.row(db, key=key) is not None


def issue_ticket(tx: Transaction, coordinator: Coordinator) -> Sealed[Ticket]:
    """Returns a ticket for the calling key, which the router has checked: a member that is not ejected. Records nothing.

    Raises Rejected for a relay that is offline. No report is accepted after the end of its delegation, so its key gets no tickets
    then either.
    """
    is_member = tx.node is not None or tx.actor in coordinator.roles
    if not is_member and (relay := _OF_KEY.row(tx.db, key=tx.actor)) is not None:
        heard = liveness(relay.last_seen_s, tx.now_s, coordinator.config.heartbeat_s)
        if heard is Liveness.OFFLINE:
            raise Rejected(
                "request.revoked",
                f"relay {relay.url} has not reported with a valid delegation for {tx.now_s - relay.last_seen_s:.0f} s; its next "
                "report lets it have tickets again",
            )
    return make_ticket(coordinator, tx.actor, tx.now_s)


def make_ticket(coordinator: Coordinator, holder: str, now_s: float) -> Sealed[Ticket]:
    ticket = Ticket(run=coordinator.spec.run, holder=holder, expires_at_s=now_s + TICKET_S)
    return seal(ticket, coordinator.run_key)


def origin_url(db: Connection) -> str:
    """Returns where the trainer serves its versions; "" before version 0."""
    url: str | None = _ORIGIN.value(db)
    return url or ""


def views(db: Connection, now_s: float, heartbeat_s: float, newest: int | None) -> tuple[RelayView, ...]:
    """Returns the relays as others see them. No version is believed before it is announced."""
    announced = -1 if newest is None else newest
    return tuple(
        RelayView.copied_from(
            row,
            liveness=liveness(row.last_seen_s, now_s, heartbeat_s).value,
            versions=tuple(version for version in json.loads(row.versions) if version <= announced),
        )
        for row in REPORTS.rows(db)
    )


def usable(db: Connection, now_s: float, heartbeat_s: float, newest: int | None) -> tuple[RelayView, ...]:
    """Returns the relays that leases may name: they answered the coordinator and are not offline.

    A late relay may just be busy, and workers try several.
    """
    known = views(db, now_s, heartbeat_s, newest)
    return tuple(relay for relay in known if relay.liveness != Liveness.OFFLINE.value and not relay.problem)
