"""The ledger on disk: events are appended in the transaction of the effect they tell of. wire/ledger.py has the format."""

import json
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select

from shoal.swarm.coordinator.store.database import read_only
from shoal.swarm.coordinator.store.schema import ledger
from shoal.swarm.coordinator.store.statements import Statement, inserting
from shoal.swarm.coordinator.store.turn import Turn
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


class Chain:
    """The ledger's end in one turn: its head, and the events after those on disk, which are written together at its end."""

    def __init__(self, turn: Turn) -> None:
        self._db = turn.db
        row = _HEAD.row(turn.db)
        self.seq: int = row.seq if row else 0
        self.hash: str = row.hash if row else GENESIS
        self._rows: list[dict[str, Any]] = []
        turn.at_end.append(self._write)

    @classmethod
    def of(cls, turn: Turn) -> "Chain":
        chain = turn.shared.get(cls)
        if chain is None:
            chain = turn.shared[cls] = cls(turn)
        assert isinstance(chain, cls)
        return chain

    def extend(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        self.seq, self.hash = rows[-1]["seq"], rows[-1]["hash"]

    def _write(self) -> None:
        if self._rows:
            _INSERT.run_many(self._db, self._rows)


class LedgerWriter:
    """The events of one transaction. They get their numbers at once and join the chain by `flush`."""

    def __init__(self, turn: Turn, now_s: float) -> None:
        self._turn, self._now_s = turn, now_s
        self.events: list[LedgerEvent] = []
        self._rows: list[dict[str, Any]] = []

    def append(self, type: str, actor: str, body: dict[str, Any]) -> int:
        """The event's number."""
        chain = Chain.of(self._turn)
        seq = chain.seq + len(self._rows) + 1
        prev = self.events[-1].hash if self._rows else chain.hash
        text = canonical_json(body)
        digest = hash_of_text(seq, self._now_s, type, actor, text, prev)
        event = LedgerEvent(
            seq=seq, time_s=self._now_s, type=type, actor=actor, body=body, prev=prev, hash=digest
        )
        self.events.append(event)
        self._rows.append(vars(event) | {"body": text.decode()})
        return seq

    def flush(self) -> None:
        if self._rows:
            Chain.of(self._turn).extend(self._rows)
            self._rows = []

    def forget(self) -> None:
        """The effect was refused, so its events never happened."""
        self.events.clear()
        self._rows.clear()


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
