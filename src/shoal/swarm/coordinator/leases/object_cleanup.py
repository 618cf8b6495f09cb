"""What lies in an object store and nobody submitted, taken out again. The folder needs none of this: see leftovers.

A URL to upload by counts until its lease has ended, whatever became of the upload: so only what is older than any such URL is
looked at. Nothing is remembered in between, so a crash loses nothing.
"""

import threading

from sqlalchemy import select

from shoal.net.s3_store import S3Store, StoreDown
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.store.schema import submissions, uploads

SWEEP_S = 3600.0
SLACK_S = 900.0
"""Between the store's clock and ours, and for a submission that is being received."""


def sweep(coordinator: Coordinator, store: S3Store) -> int:
    """How many objects were removed."""
    removed = 0
    for tokens in store.tokens(older_than_s=coordinator.clock() - coordinator.config.lease_s - SLACK_S):
        for token in _nobodys(coordinator, tokens):
            store.delete(token)
            removed += 1
    return removed


def keep_sweeping(coordinator: Coordinator, store: S3Store, stop: threading.Event) -> None:
    """Until `stop`. A store that does not answer is asked again an hour later: leftovers cost space, nothing else."""
    while True:
        try:
            if removed := sweep(coordinator, store):
                coordinator.log.info("swept the object store", removed=removed)
        except StoreDown as error:
            coordinator.log.warning("the object store could not be swept", reason=error)
        if stop.wait(SWEEP_S):
            return


def _nobodys(coordinator: Coordinator, tokens: list[str]) -> list[str]:
    submitted = (
        select(uploads.c.token)
        .join(submissions, submissions.c.lease_id == uploads.c.lease_id)
        .where(uploads.c.token.in_(tokens))
    )
    with coordinator.database.read() as db:
        kept = set(db.execute(submitted).scalars())
    return [token for token in tokens if token not in kept]
