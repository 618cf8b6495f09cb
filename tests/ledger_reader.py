"""Reads the whole ledger of a coordinator that runs or ran, for tests."""

from pathlib import Path

from shoal.swarm.coordinator.store.database import read_only
from shoal.swarm.coordinator.store.ledger_chain import PAGE, read_page
from shoal.wire.ledger import LedgerEvent


def read_ledger(database: Path | str) -> list[LedgerEvent]:
    """Returns every event, from the SQLite file or the PostgreSQL URL."""
    events: list[LedgerEvent] = []
    with read_only(database) as db:
        while page := read_page(db, events[-1].seq + 1 if events else 1, PAGE):
            events += page
    return events
