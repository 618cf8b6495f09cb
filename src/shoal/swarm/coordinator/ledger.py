"""The ledger on disk: events are appended in the transaction of the effect they tell of. wire/ledger.py has the format."""

import json
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select

from shoal.swarm.coordinator.database import read_only
from shoal.swarm.coordinator.schema import ledger
from shoal.swarm.coordinator.statements import Statement, inserting
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


class LedgerWriter:
    """The events of one transaction. They get their numbers at once and are written together by `flush`."""

    def __init__(self, db: Connection, now_s: float) -> None:
        self._db, self._now_s = db, now_s
        self._head: tuple[int, str] | None = None
        self._written = 0
        self.events: list[LedgerEvent] = []
        self._texts: list[bytes] = []

    def append(self, type: str, actor: str, body: dict[str, Any]) -> int:
        """The event's number."""
        if self._head is None:
            row = _HEAD.row(self._db)
            self._head = (row.seq, row.hash) if row else (0, GENESIS)
        seq, prev = self._head[0] + 1, self._head[1]
        text = canonical_json(body)
        digest = hash_of_text(seq, self._now_s, type, actor, text, prev)
        self._head = (seq, digest)
        self._texts.append(text)
        self.events.append(
            LedgerEvent(
                seq=seq, time_s=self._now_s, type=type, actor=actor, body=body, prev=prev, hash=digest
            )
        )
        return seq

    def flush(self) -> None:
        written, self._written = self._written, len(self.events)
        if fresh := self.events[written:]:
            texts = self._texts[written:]
            _INSERT.run_many(
                self._db, [_to_row(event, text) for event, text in zip(fresh, texts, strict=True)]
            )

    def forget(self) -> None:
        """The effect was refused, so its events never happened."""
        self._head, self._written = None, 0
        self.events.clear()
        self._texts.clear()


def head_seq(db: Connection) -> int:
    return int(db.execute(select(func.coalesce(func.max(ledger.c.seq), 0))).scalar_one())


def signed_head(db: Connection, run: str, key: Key) -> Sealed[LedgerHead]:
    row = _HEAD.row(db)
    assert row is not None, "a run that is open has its first event"
    return seal(LedgerHead(run=run, seq=row.seq, hash=row.hash, time_s=row.time_s), key)


def read_page(db: Connection, from_seq: int, num_events: int) -> list[LedgerEvent]:
    rows = db.execute(_PAGE, {"from_seq": from_seq, "num_events": num_events})
    return [_to_event(row) for row in rows]


def read_ledger(database: Path | str) -> list[LedgerEvent]:
    """Every event, from the file or by the URL of a coordinator that runs or ran."""
    events: list[LedgerEvent] = []
    with read_only(database) as db:
        while page := read_page(db, events[-1].seq + 1 if events else 1, PAGE):
            events += page
    return events


def _to_row(event: LedgerEvent, body: bytes) -> dict[str, Any]:
    return vars(event) | {"body": body.decode()}


def _to_event(row: Row[Any]) -> LedgerEvent:
    return LedgerEvent(
        seq=row.seq,
        time_s=row.time_s,
        type=row.type,
        actor=row.actor,
        body=json.loads(row.body),
        prev=row.prev,
        hash=row.hash,
    )
