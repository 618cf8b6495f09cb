"""The ledger on disk, and how its events appear in the log.

Events are appended in the transaction of the effect they describe. wire/ledger.py has the format.
"""

import json
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, select

from shoal.swarm.coordinator.store.schema import ledger
from shoal.swarm.coordinator.store.statements import Statement, inserting
from shoal.telemetry import Log
from shoal.wire.codes import ACCEPTED, explain_code
from shoal.wire.keys import Key
from shoal.wire.ledger import GENESIS, LedgerEvent, LedgerHead, hash_of_text
from shoal.wire.record import Sealed, canonical_json, seal

PAGE = 1000

_HEAD = Statement(select(ledger.c.seq, ledger.c.hash, ledger.c.time_s).order_by(ledger.c.seq.desc()).limit(1))
_INSERT = inserting(ledger)
_PAGE = (
    select(ledger)
    .where(ledger.c.seq >= bindparam("from_seq"))
    .order_by(ledger.c.seq)
    .limit(bindparam("num_events"))
)


class NewEvent(NamedTuple):
    """An event that is not written yet, and its body as the canonical JSON that its hash covers."""

    event: LedgerEvent
    body: str


def read_head(db: Connection) -> tuple[int, str]:
    """Returns number and hash of the last event."""
    row = _HEAD.row(db)
    return (row.seq, row.hash) if row else (0, GENESIS)


def append(db: Connection, events: list[NewEvent]) -> None:
    _INSERT.run_many(db, [vars(new.event) | {"body": new.body} for new in events])


def next_event(head: tuple[int, str], type: str, actor: str, body: dict[str, Any], now_s: float) -> NewEvent:
    """Returns the event that follows `head` in the chain."""
    seq, prev = head[0] + 1, head[1]
    text = canonical_json(body)
    digest = hash_of_text(seq, now_s, type, actor, text, prev)
    event = LedgerEvent(seq=seq, time_s=now_s, type=type, actor=actor, body=body, prev=prev, hash=digest)
    return NewEvent(event, text.decode())


def signed_head(db: Connection, run: str, key: Key) -> Sealed[LedgerHead]:
    row = _HEAD.row(db)
    assert row is not None, "an open run has its first event"
    return seal(LedgerHead(run=run, seq=row.seq, hash=row.hash, time_s=row.time_s), key)


def read_page(db: Connection, from_seq: int, num_events: int) -> list[LedgerEvent]:
    rows = db.execute(_PAGE, {"from_seq": from_seq, "num_events": num_events})
    return [LedgerEvent.copied_from(row, body=json.loads(row.body)) for row in rows]


_PLAIN = {
    "run.opened": ("run opened", ("run",)),
    "node.enrolled": ("node enrolled", ("node", "software")),
    "node.trusted": ("node trusted", ("node", "reason")),
    "run.calibrated": ("calibration repeated", ("from_version", "moved")),
    "policy.published": ("policy published", ("version", "num_bytes")),
    "policy.rederived": (
        "policy made again with other bits; the announced weights stay",
        ("version", "checkpoint_version", "differing_words"),
    ),
    "lease.issued": ("lease issued", ("lease_id", "node", "purpose")),
    "epoch.revealed": ("epoch revealed", ("epoch",)),
    "group.stale": ("groups went stale", ("version", "num_groups")),
    "evaluation.completed": ("held-out evaluation complete", ("version", "reward_mean", "rollouts")),
    "run.finished": ("run finished", ("version",)),
}


def log_event(log: Log, event: LedgerEvent) -> None:
    """Writes one event to the log after its commit. Types that are not listed here are not logged."""
    body = event.body
    if event.type == "verdict.given":
        _log_verdict(log, body)
    elif event.type == "node.quarantined":
        log.warning(f"node quarantined: {body['reason']}", node=_short(body["node"]))
    elif event.type == "node.banned":
        log.warning(f"node ejected: {body['reason']}", node=_short(body["node"]))
    elif event.type == "lease.void":
        log.info(f"lease void: {explain_code(body['code'])}", **_values(body, ("lease_id", "node", "detail")))
    elif event.type == "batch.formed":
        log.info(
            "batch formed",
            version=body["version"],
            groups=len(body["group_ids"]),
            reward_mean=body["reward_mean"],
        )
    elif event.type in _PLAIN:
        message, names = _PLAIN[event.type]
        log.info(message, **_values(body, names))


def _log_verdict(log: Log, body: dict[str, Any]) -> None:
    values = _values(body, ("node", "lease_id"))
    if body["code"] == ACCEPTED:
        log.info("accepted", **values, output_tokens=body["output_tokens"])
    else:
        word = "refused" if body["code"].startswith("reject.") else "void"
        log.warning(
            f"{word}: {explain_code(body['code'])}", **values, code=body["code"], detail=repr(body["detail"])
        )


def _values(body: dict[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    return {name: _short(body[name]) if name in ("node", "lease_id") else body[name] for name in names}


def _short(identifier: str) -> str:
    return identifier[:12]
