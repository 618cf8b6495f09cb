"""Epochs: one secret seeds a number of leases. Its digest is in the ledger before the first of them is issued, the
secret itself after the last has ended, so that neither side can choose a seed and anybody can check them all."""

import hashlib
import secrets

from sqlalchemy import exists, func, insert, select, update

from shoal.swarm.coordinator.coordinator import Transaction
from shoal.swarm.coordinator.schema import epochs, leases

OPEN_STATES = ("issued", "uploading", "submitted", "checking")


def draw(tx: Transaction, leases_per_epoch: int) -> tuple[int, bytes]:
    """Number and secret of the epoch that the next lease belongs to."""
    row = tx.db.execute(
        select(epochs)
        .where(epochs.c.revealed_at_s.is_(None), epochs.c.num_leases < leases_per_epoch)
        .order_by(epochs.c.epoch.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        return _begin(tx)
    tx.db.execute(
        update(epochs).where(epochs.c.epoch == row.epoch).values(num_leases=epochs.c.num_leases + 1)
    )
    return row.epoch, bytes.fromhex(row.secret)


def secret_now(tx: Transaction) -> tuple[int, bytes]:
    """Number and secret of an epoch that is not revealed yet, for a draw."""
    row = tx.db.execute(
        select(epochs).where(epochs.c.revealed_at_s.is_(None)).order_by(epochs.c.epoch.desc()).limit(1)
    ).one_or_none()
    return _begin(tx, num_leases=0) if row is None else (row.epoch, bytes.fromhex(row.secret))


def commitment(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


def reveal_ended(tx: Transaction, leases_per_epoch: int, *, run_over: bool) -> None:
    """Reveal every epoch whose leases have all ended. An epoch that can still grow is kept, unless the run is over."""
    unended = exists().where(leases.c.epoch == epochs.c.epoch, leases.c.state.in_(OPEN_STATES))
    ended = select(epochs).where(epochs.c.revealed_at_s.is_(None), ~unended)
    if not run_over:
        ended = ended.where(epochs.c.num_leases >= leases_per_epoch)
    for row in tx.db.execute(ended.order_by(epochs.c.epoch)).all():
        tx.db.execute(update(epochs).where(epochs.c.epoch == row.epoch).values(revealed_at_s=tx.now_s))
        tx.record("epoch.revealed", epoch=row.epoch, secret=row.secret)


def _begin(tx: Transaction, num_leases: int = 1) -> tuple[int, bytes]:
    secret = secrets.token_bytes(32)
    epoch = int(tx.db.execute(select(func.coalesce(func.max(epochs.c.epoch), 0))).scalar_one()) + 1
    tx.db.execute(
        insert(epochs).values(
            epoch=epoch,
            secret=secret.hex(),
            commitment=commitment(secret),
            num_leases=num_leases,
            revealed_at_s=None,
        )
    )
    tx.record("epoch.committed", epoch=epoch, commitment=commitment(secret))
    return epoch, secret
