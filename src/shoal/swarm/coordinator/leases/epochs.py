"""Epochs: one secret seeds a number of leases.

The digest of the secret is in the ledger before the first of them is issued, the secret itself after the last has ended. So
neither side can choose a seed, and anybody can check all of them.

Work that a node did not deliver is a debt: it is leased to the node again with the same seed, and the secret of its epoch stays
secret until then. Otherwise anybody could compute the file that the node is going to submit. A debt ends DEBT_S after its work was
first leased, so that a node that never returns does not keep a secret for ever.
"""

import hashlib
import secrets
from typing import Any

from sqlalchemy import Row, delete, exists, func, or_, select

from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished
from shoal.swarm.coordinator.rules.lease_states import OPEN
from shoal.swarm.coordinator.store.schema import debts, epochs, leases
from shoal.swarm.coordinator.store.statements import Statement, TableStatements, given

DEBT_S = 24 * 3600.0
EPOCHS = TableStatements(epochs)
DEBTS = TableStatements(debts)

_SECRET = select(epochs).where(epochs.c.revealed_at_s.is_(None))
_NEWEST_FIRST = epochs.c.epoch.desc()
_GROWING = Statement(_SECRET.where(epochs.c.num_leases < given("most")).order_by(_NEWEST_FIRST).limit(1))
_NEWEST_SECRET = Statement(_SECRET.order_by(_NEWEST_FIRST).limit(1))
_IN_USE = or_(
    exists().where(leases.c.epoch == epochs.c.epoch, leases.c.state.in_(OPEN)),
    exists().where(debts.c.epoch == epochs.c.epoch),
)
_LAST = Statement(select(func.coalesce(func.max(epochs.c.epoch), 0)))
_USED = Statement(select(epochs.c.epoch).where(epochs.c.epoch == given("number"), _IN_USE))
_OLDEST_DEBT = Statement(
    select(debts).where(debts.c.node == given("name")).order_by(debts.c.owed_at_s, debts.c.unit).limit(1)
)
_ENDED = Statement(_SECRET.where(epochs.c.num_leases >= given("least"), ~_IN_USE).order_by(epochs.c.epoch))


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


def reveal_ended(tx: Transaction, coordinator: Coordinator) -> None:
    """Reveals every epoch whose leases have all ended and of which no work is owed. An epoch that can still grow is kept secret.

    When the run is over, no work is leased again, so debts end and all epochs without open leases are revealed.
    """
    least = coordinator.config.leases_per_epoch
    if is_finished(tx.db, coordinator.spec):
        tx.write(delete(debts))
        least = 0
    for row in _ENDED.rows(tx.db, least=least):
        tx.update(EPOCHS, row.epoch, revealed_at_s=tx.now_s)
        tx.record("epoch.revealed", epoch=row.epoch, secret=row.secret)


def reveal_after(tx: Transaction, coordinator: Coordinator, epoch: int) -> None:
    """Reveals what can be revealed after a lease of `epoch` has ended: nothing, while it has another open lease or a debt."""
    if _USED.row(tx.db, number=epoch) is None or is_finished(tx.db, coordinator.spec):
        reveal_ended(tx, coordinator)


def add_debt(tx: Transaction, unit: Row[Any]) -> None:
    """Notes that the node of lease `unit` owes its work. The lease must be the first one of the work."""
    tx.insert(
        DEBTS,
        unit=unit.lease_id,
        node=unit.node,
        epoch=unit.epoch,
        issued_at_s=unit.issued_at_s,
        owed_at_s=tx.now_s,
    )


def take_debt(tx: Transaction, node: str) -> str | None:
    """Returns the unit that a node has owed for longest, and ends that debt; None if it owes nothing."""
    found = _OLDEST_DEBT.row(tx.db, name=node)
    if found is None:
        return None
    tx.write(delete(debts).where(debts.c.unit == found.unit))
    return str(found.unit)


def end_debts_of(tx: Transaction, coordinator: Coordinator, node: str) -> None:
    """Ends the debts of a node that gets no more leases, and reveals the epochs that waited for them."""
    tx.write(delete(debts).where(debts.c.node == node))
    reveal_ended(tx, coordinator)


def end_old_debts(tx: Transaction, coordinator: Coordinator) -> None:
    """Ends debts whose work was first leased more than DEBT_S ago, and reveals the epochs that waited for them."""
    tx.write(delete(debts).where(debts.c.issued_at_s < tx.now_s - DEBT_S))
    reveal_ended(tx, coordinator)


def _begin(tx: Transaction, *, num_leases: int) -> tuple[int, bytes]:
    secret, epoch = secrets.token_bytes(32), int(_LAST.value(tx.db)) + 1
    tx.insert(EPOCHS, epoch=epoch, secret=secret.hex(), commitment=commitment(secret), num_leases=num_leases)
    tx.record("epoch.committed", epoch=epoch, commitment=commitment(secret))
    return epoch, secret
