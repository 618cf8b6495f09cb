"""The ledger added up again: what every node's trust and credit must be, from the events alone.

A pure fold. Events that no honest coordinator could have written, in that order, are refused with their number: a change of
trust that nothing led to, a second end of a lease, a group trained on twice, a secret other than the one committed to, a
check that the draw asked for and that was not made.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.coordinator.rules.check_sampling import checks_all
from shoal.swarm.coordinator.rules.credit import Balance, Earning, amount, balance, held_since_s, to_revoke
from shoal.swarm.coordinator.rules.trust import Finding, Happening, Standing, Trust, finding_of, judge
from shoal.wire.codes import UNCERTAIN, CorruptData
from shoal.wire.ledger import LedgerEvent
from shoal.wire.seeded_draw import lease_seed

_MOVES = {f"node.{trust.value}": trust for trust in Trust}
_ORDERS = {
    f"admin.{order.value}": order for order in (Happening.QUARANTINE, Happening.BAN, Happening.RESTORE)
}


@dataclass
class NodeBook:
    standing: Standing
    shown: Trust = Trust.PROBATION
    """As the last event about it says."""
    accepted: int = 0
    void: int = 0
    returned: int = 0
    """Credit given back by appeals."""
    earnings: list[Earning] = field(default_factory=list)

    @property
    def credit(self) -> int:
        return self.returned + sum(earning.amount for earning in self.earnings if not earning.revoked)


@dataclass
class LeaseBook:
    node: str
    epoch: int
    unit: str
    end: str | None = None
    sha256: str | None = None


@dataclass
class Books:
    """What the ledger adds up to, event by event."""

    terms: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, NodeBook] = field(default_factory=dict)
    leases: dict[str, LeaseBook] = field(default_factory=dict)
    commitments: dict[int, str] = field(default_factory=dict)
    secrets: dict[int, bytes] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    draws: list[tuple[str, int, float, str]] = field(default_factory=list)
    """Lease, epoch, rate and what was drawn: checked when the secret is out."""
    seq: int = 0
    time_s: float = 0.0
    last_standing: tuple[str, Standing] | None = None
    """Of the node that something happened to last, before it happened."""

    def add(self, event: LedgerEvent) -> None:
        """Adds one event. Raises CorruptData if it contradicts the events before it."""
        self.seq, self.time_s = event.seq, event.time_s
        if event.type in _MOVES:
            self._move(event.body["node"], _MOVES[event.type])
        elif event.type in _ORDERS:
            self._happen(event.body["node"], _ORDERS[event.type])
        elif event.type in _ADD:
            _ADD[event.type](self, event.body)

    def close(self) -> None:
        """After the last event: what every event led to must have been said."""
        for key, node in self.nodes.items():
            if node.standing.trust is not node.shown:
                raise self._wrong(
                    f"node {key[:16]} must be {node.standing.trust.value}, the ledger says {node.shown.value}"
                )

    def balance(self, key: str, now_s: float) -> Balance:
        node = self.nodes[key]
        since_s = held_since_s(node.standing.trust, node.standing.since_s, now_s, self.terms["hold_s"])
        sums = balance(node.earnings, since_s)
        return Balance(sums.final + node.returned, sums.held)

    # -- one per type of event --------------------------------------------------------------------------

    def _opened(self, body: dict[str, Any]) -> None:
        self.terms = body.get("terms", {})

    def _enrolled(self, body: dict[str, Any]) -> None:
        if body["node"] in self.nodes:
            raise self._wrong(f"node {body['node'][:16]} is enrolled a second time")
        self.nodes[body["node"]] = NodeBook(Standing(trust=Trust.PROBATION, since_s=self.time_s))

    def _session(self, body: dict[str, Any]) -> None:
        self._happen(body["node"], Happening.RETURN)

    def _committed(self, body: dict[str, Any]) -> None:
        self.commitments[body["epoch"]] = body["commitment"]

    def _revealed(self, body: dict[str, Any]) -> None:
        secret = bytes.fromhex(body["secret"])
        if hashlib.sha256(secret).hexdigest() != self.commitments.get(body["epoch"]):
            raise self._wrong(f"the secret of epoch {body['epoch']} is not the one that was committed to")
        self.secrets[body["epoch"]] = secret
        self._check_draws()

    def _issued(self, body: dict[str, Any]) -> None:
        node = self._node(body["node"])
        if node.standing.trust in (Trust.BANNED, Trust.RETIRED):
            raise self._wrong(f"a lease for node {body['node'][:16]}, which is {node.standing.trust.value}")
        unit = body.get("unit", body["lease_id"])
        if unit != body["lease_id"] and self._lease(unit).node != body["node"]:
            raise self._wrong(f"lease {body['lease_id']} repeats the work of another node")
        self.leases[body["lease_id"]] = LeaseBook(body["node"], body["epoch"], unit)

    def _received(self, body: dict[str, Any]) -> None:
        self._lease(body["lease_id"]).sha256 = body["sha256"]

    def _voided(self, body: dict[str, Any]) -> None:
        self._end(body["lease_id"], "void")
        self._node(body["node"]).void += 1
        if body["code"] == "void.expired":
            self._happen(body["node"], Happening.LAPSED)

    def _judged(self, body: dict[str, Any]) -> None:
        finding = finding_of(body["code"])
        self._end(body["lease_id"], finding.value)
        node, drawn = self._node(body["node"]), body["drawn"]
        full = body["checks"] == "full"
        self.draws.append((body["lease_id"], drawn["epoch"], drawn["rate"], drawn["checks"]))
        self._check_draws()
        if finding is Finding.VOID:
            node.void += 1
            if body["code"] == UNCERTAIN:
                self._happen(body["node"], Happening.UNCERTAIN)
        elif finding is Finding.REJECTED:
            self._happen(body["node"], Happening.REJECTED)
        else:
            self._accepted(node, body, full)

    def _accepted(self, node: NodeBook, body: dict[str, Any], full: bool) -> None:
        expected = amount(body["output_tokens"], self.terms["credit_factor"])
        if body["credit"] != expected:
            raise self._wrong(
                f"lease {body['lease_id']} is credited {body['credit']}, its tokens are {expected}"
            )
        if not full and body["drawn"]["checks"] == "full":
            raise self._wrong(f"lease {body['lease_id']} was drawn for every check and got the cheap ones")
        if not full and node.standing.trust is not Trust.TRUSTED:
            raise self._wrong(
                f"lease {body['lease_id']} was taken on trust from a {node.standing.trust.value} node"
            )
        node.accepted += 1
        node.earnings.append(
            Earning(lease_id=body["lease_id"], amount=body["credit"], given_at_s=self.time_s, checked=full)
        )
        self._happen(body["node"], Happening.ACCEPTED if full else Happening.TAKEN_ON_TRUST)

    def _revoked(self, body: dict[str, Any]) -> None:
        node, standing = self._node(body["node"]), self._before_rejection(body["node"])
        since_s = held_since_s(standing.trust, standing.since_s, self.time_s, self.terms["hold_s"])
        taken = {earning.lease_id for earning in to_revoke(node.earnings, since_s)}
        if taken != set(body["lease_ids"]):
            raise self._wrong(f"{len(body['lease_ids'])} leases are revoked, {len(taken)} can be")
        node.earnings = [
            Earning(
                lease_id=earning.lease_id,
                amount=earning.amount,
                given_at_s=earning.given_at_s,
                checked=earning.checked,
                revoked=earning.revoked or earning.lease_id in taken,
            )
            for earning in node.earnings
        ]
        for lease_id in body["lease_ids"]:
            self._lease(lease_id).end = "revoked"
        self.trained.update(body["group_ids"])  # withdrawn: never to be trained on

    def _decided(self, body: dict[str, Any]) -> None:
        if body["upheld"]:
            self._node(body["node"]).returned += body["returned"]
            self._happen(body["node"], Happening.UPHELD)

    def _formed(self, body: dict[str, Any]) -> None:
        for group in body["group_ids"]:
            lease_id = group.rpartition("-")[0]
            if group in self.trained or self._lease(lease_id).end != "accepted":
                raise self._wrong(f"group {group} is trained on twice, or was not accepted")
            self.trained.add(group)

    # -- what they share --------------------------------------------------------------------------------

    def _happen(self, key: str, happening: Happening) -> None:
        node = self._node(key)
        self.last_standing = (key, node.standing)
        node.standing = judge(
            node.standing, happening, self.time_s, trusted_after=self.terms["trusted_after"]
        )

    def _before_rejection(self, key: str) -> Standing:
        """The verdict that led to a revocation stands right before it, and has moved the standing."""
        if self.last_standing is None or self.last_standing[0] != key:
            raise self._wrong(f"credit of node {key[:16]} is revoked without a rejection before it")
        return self.last_standing[1]

    def _move(self, key: str, trust: Trust) -> None:
        """A change of trust must be what the events before it led to; only leaving is its own reason."""
        if trust is Trust.RETIRED:
            self._happen(key, Happening.LEAVE)
        node = self._node(key)
        if node.standing.trust is not trust:
            raise self._wrong(
                f"node {key[:16]} is said to be {trust.value}, but its deeds make it {node.standing.trust.value}"
            )
        node.shown = trust

    def _end(self, lease_id: str, how: str) -> None:
        lease = self._lease(lease_id)
        if lease.end is not None:
            raise self._wrong(f"lease {lease_id} ends as {how}, but it ended before: {lease.end}")
        lease.end = how

    def _check_draws(self) -> None:
        waiting = []
        for lease_id, epoch, rate, drawn in self.draws:
            sha256 = self._lease(lease_id).sha256
            if epoch not in self.secrets or sha256 is None:
                waiting.append((lease_id, epoch, rate, drawn))
            # The other way round is no fault: its node may have fallen out of trust meanwhile.
            elif drawn != "full" and checks_all(self.secrets[epoch], lease_id, sha256, rate):
                raise self._wrong(f"the draw gave lease {lease_id} every check, the ledger says {drawn}")
        self.draws = waiting

    def _node(self, key: str) -> NodeBook:
        if key not in self.nodes:
            raise self._wrong(f"node {key[:16]} is not enrolled")
        return self.nodes[key]

    def _lease(self, lease_id: str) -> LeaseBook:
        if lease_id not in self.leases:
            raise self._wrong(f"lease {lease_id[:32]} was never issued")
        return self.leases[lease_id]

    def _wrong(self, words: str) -> CorruptData:
        return CorruptData(f"ledger event {self.seq}: {words}")


_ADD: dict[str, Callable[[Books, dict[str, Any]], None]] = {
    "run.opened": Books._opened,
    "node.enrolled": Books._enrolled,
    "session.opened": Books._session,
    "epoch.committed": Books._committed,
    "epoch.revealed": Books._revealed,
    "lease.issued": Books._issued,
    "submission.received": Books._received,
    "lease.void": Books._voided,
    "verdict.given": Books._judged,
    "credit.revoked": Books._revoked,
    "appeal.decided": Books._decided,
    "batch.formed": Books._formed,
}


def replay(events: Iterable[LedgerEvent]) -> Books:
    """Returns the totals of a whole ledger. Raises CorruptData at the first event that contradicts the ones before it."""
    books = Books()
    for event in events:
        try:
            books.add(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CorruptData(
                f"ledger event {event.seq} ({event.type}) lacks a field or has one of the wrong type"
            ) from None
    books.close()
    return books


def seed_of(books: Books, lease_id: str) -> str | None:
    """The seed that a lease must have had; None while its epoch's secret is not out."""
    lease = books.leases[lease_id]
    secret = books.secrets.get(lease.epoch)
    return None if secret is None else lease_seed(secret, lease.unit, lease.node)
