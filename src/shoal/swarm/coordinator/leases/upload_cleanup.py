"""Bytes that came in but that nobody submits. They go again: else a node that only ever uploads could fill the disk."""

from sqlalchemy import select

from shoal.net.object_store import Declared
from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.leases.pending_upload import expected_of
from shoal.swarm.coordinator.store.schema import submissions, uploads


def remove_leftover(tx: Transaction, coordinator: Coordinator, left: Declared) -> None:
    """Take an upload out of the store, unless a submission or another upload is the same bytes.

    If the transaction fails after all, the object is merely missing: whoever submits it is told to send it again.
    """
    coordinator.database.when_committed(lambda: coordinator.expected.forget(left.token))
    submitted = select(submissions.c.lease_id).where(submissions.c.sha256 == left.sha256)
    uploaded = select(uploads.c.lease_id).where(
        uploads.c.sha256 == left.sha256, uploads.c.token != left.token
    )
    for query in (submitted, uploaded):
        if tx.db.execute(query.limit(1)).one_or_none() is not None:
            return
    coordinator.store.remove(left)


def remove_leftover_of(tx: Transaction, coordinator: Coordinator, lease_id: str) -> None:
    """A lease ended without a submission."""
    upload = tx.db.execute(select(uploads).where(uploads.c.lease_id == lease_id)).one_or_none()
    if upload is not None:
        remove_leftover(tx, coordinator, expected_of(upload))
