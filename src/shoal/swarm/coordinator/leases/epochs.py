"""Epochs: one secret seeds a number of leases. Its digest is in the ledger before the first of them is issued, the
secret itself after the last has ended, so that neither side can choose a seed and anybody can check them all.

What a node owes is leased to it again with the seed it knows already; by then its epoch may be out.
"""

import hashlib
import secrets
from dataclasses import dataclass, replace

from sqlalchemy import Connection, exists, func, select

from shoal.swarm.coordinator.context import Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN
from shoal.swarm.coordinator.store.schema import epochs, leases
from shoal.swarm.coordinator.store.sheet import EPOCHS
from shoal.swarm.coordinator.store.statements import Statement, given

_HIDDEN = select(epochs).where(epochs.c.revealed_at_s.is_(None))
_NEWEST = epochs.c.epoch.desc()
_ROOM = Statement(_HIDDEN.where(epochs.c.num_leases < given("most")).order_by(_NEWEST).limit(1))
_SECRET = Statement(_HIDDEN.order_by(_NEWEST).limit(1))
_UNENDED = exists().where(leases.c.epoch == epochs.c.epoch, leases.c.state.in_(OPEN))
_LAST = Statement(select(func.coalesce(func.max(epochs.c.epoch), 0)))
_OPEN_OF = Statement(
    select(func.count())
    .select_from(leases)
    .where(leases.c.epoch == given("number"), leases.c.state.in_(OPEN))
)
_ENDED = Statement(_HIDDEN.where(epochs.c.num_leases >= given("least"), ~_UNENDED).order_by(epochs.c.epoch))


def draw(tx: Transaction, leases_per_epoch: int) -> tuple[int, bytes]:
    """Number and secret of the epoch that the next lease belongs to."""
    room = tx.turn.recall(_room, leases_per_epoch)
    if room is None:
        epoch, secret = _begin(tx, num_leases=1)
        if leases_per_epoch > 1:
            tx.turn.learn(_Room(epoch, secret, 1), _room, leases_per_epoch)
        return epoch, secret
    EPOCHS.change(tx.db, room.epoch, num_leases=room.num_leases + 1)
    if room.num_leases + 1 < leases_per_epoch:
        tx.turn.learn(replace(room, num_leases=room.num_leases + 1), _room, leases_per_epoch)
    else:
        tx.turn.forget(_room, leases_per_epoch)
    return room.epoch, room.secret


@dataclass(frozen=True, slots=True)
class _Room:
    """The epoch that the next lease belongs to."""

    epoch: int
    secret: bytes
    num_leases: int


def _room(db: Connection, most: int) -> _Room | None:
    row = _ROOM.row(db, most=most)
    return None if row is None else _Room(row.epoch, bytes.fromhex(row.secret), row.num_leases)


def secret_now(tx: Transaction) -> tuple[int, bytes]:
    """Number and secret of an epoch that is not revealed yet, for a draw."""
    hidden = tx.turn.recall(_hidden)
    return _begin(tx, num_leases=0) if hidden is None else hidden


def _hidden(db: Connection) -> tuple[int, bytes] | None:
    row = _SECRET.row(db)
    return None if row is None else (row.epoch, bytes.fromhex(row.secret))


def commitment(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def reveal_ended(tx: Transaction, leases_per_epoch: int, *, run_over: bool) -> None:
    """Reveal every epoch whose leases have all ended. An epoch that can still grow is kept, unless the run is over."""
    for row in _ENDED.rows(tx.db, least=0 if run_over else leases_per_epoch):
        EPOCHS.change(tx.db, row.epoch, revealed_at_s=tx.now_s)
        tx.record("epoch.revealed", epoch=row.epoch, secret=row.secret)
        tx.turn.forget(_room)
        tx.turn.forget(_hidden)


def reveal_after(tx: Transaction, epoch: int, leases_per_epoch: int, *, run_over: bool) -> None:
    """A lease of `epoch` has ended: reveal what can be. While that epoch can still grow, nothing can."""
    room = None if run_over else tx.turn.recall(_room, leases_per_epoch)
    if room is not None and room.epoch == epoch:
        return
    # Counted along in a turn, since every lease that ends asks for it.
    if tx.turn.knows(count_open, epoch):
        tx.turn.learn(tx.turn.recall(count_open, epoch) - 1, count_open, epoch)
    if run_over or tx.turn.recall(count_open, epoch) == 0:
        reveal_ended(tx, leases_per_epoch, run_over=run_over)


def count_open(db: Connection, epoch: int) -> int:
    """Leases of an epoch that have not ended."""
    return int(_OPEN_OF.value(db, number=epoch))


def _begin(tx: Transaction, *, num_leases: int) -> tuple[int, bytes]:
    secret, epoch = secrets.token_bytes(32), int(_LAST.value(tx.db)) + 1
    EPOCHS.insert(
        tx.db, epoch=epoch, secret=secret.hex(), commitment=commitment(secret), num_leases=num_leases
    )
    tx.record("epoch.committed", epoch=epoch, commitment=commitment(secret))
    tx.turn.forget(_room)
    tx.turn.learn((epoch, secret), _hidden)
    return epoch, secret
