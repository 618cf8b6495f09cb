"""Epochs: one secret seeds a number of leases.

The digest of the secret is in the ledger before the first of them is issued, the secret itself after the last has ended. So
neither side can choose a seed, and anybody can check all of them.

Work that a node owes is leased to it again with the seed that it knows already; by then its epoch may be revealed.
"""

import hashlib
import secrets

from sqlalchemy import exists, func, select

from shoal.swarm.coordinator.context import Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN
from shoal.swarm.coordinator.store.schema import epochs, leases
from shoal.swarm.coordinator.store.statements import Statement, TableStatements, given

EPOCHS = TableStatements(epochs)

_SECRET = select(epochs).where(epochs.c.revealed_at_s.is_(None))
_NEWEST_FIRST = epochs.c.epoch.desc()
_GROWING = Statement(_SECRET.where(epochs.c.num_leases < given("most")).order_by(_NEWEST_FIRST).limit(1))
_NEWEST_SECRET = Statement(_SECRET.order_by(_NEWEST_FIRST).limit(1))
_HAS_OPEN_LEASES = exists().where(leases.c.epoch == epochs.c.epoch, leases.c.state.in_(OPEN))
_LAST = Statement(select(func.coalesce(func.max(epochs.c.epoch), 0)))
_ANY_OPEN = Statement(
    select(leases.c.lease_id).where(leases.c.epoch == given("number"), leases.c.state.in_(OPEN)).limit(1)
)
_ENDED = Statement(
    _SECRET.where(epochs.c.num_leases >= given("least"), ~_HAS_OPEN_LEASES).order_by(epochs.c.epoch)
)


def secret_for_lease(tx: Transaction, leases_per_epoch: int) -> tuple[int, bytes]:
    """Returns number and secret of the epoch that the next lease belongs to, and counts the lease."""
    growing = _GROWING.row(tx.db, most=leases_per_epoch)
    if growing is None:
        return _begin(tx, num_leases=1)
    tx.update(EPOCHS, growing.epoch, num_leases=growing.num_leases + 1)
    return growing.epoch, bytes.fromhex(growing.secret)


def secret_for_sampling(tx: Transaction) -> tuple[int, bytes]:
    """Returns number and secret of an epoch that is not revealed yet, to draw which submissions are checked in full."""
    row = _NEWEST_SECRET.row(tx.db)
    return _begin(tx, num_leases=0) if row is None else (row.epoch, bytes.fromhex(row.secret))


def commitment(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def reveal_ended(tx: Transaction, leases_per_epoch: int, *, run_over: bool) -> None:
    """Reveals every epoch whose leases have all ended. An epoch that can still grow is kept secret, unless the run is over."""
    for row in _ENDED.rows(tx.db, least=0 if run_over else leases_per_epoch):
        tx.update(EPOCHS, row.epoch, revealed_at_s=tx.now_s)
        tx.record("epoch.revealed", epoch=row.epoch, secret=row.secret)


def reveal_after(tx: Transaction, epoch: int, leases_per_epoch: int, *, run_over: bool) -> None:
    """Reveals what can be revealed after a lease of `epoch` has ended: nothing, while another lease of it is open."""
    if run_over or _ANY_OPEN.row(tx.db, number=epoch) is None:
        reveal_ended(tx, leases_per_epoch, run_over=run_over)


def _begin(tx: Transaction, *, num_leases: int) -> tuple[int, bytes]:
    secret, epoch = secrets.token_bytes(32), int(_LAST.value(tx.db)) + 1
    tx.insert(EPOCHS, epoch=epoch, secret=secret.hex(), commitment=commitment(secret), num_leases=num_leases)
    tx.record("epoch.committed", epoch=epoch, commitment=commitment(secret))
    return epoch, secret
