"""What nobody asks for but time brings: leases and claims run out, nonces are forgotten, the log is folded in."""

import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from shoal.swarm.coordinator import disk_full
from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished, newest_version
from shoal.swarm.coordinator.http.auth import prune_nonces
from shoal.swarm.coordinator.leases import evaluations, lifecycle, verdicts
from shoal.swarm.coordinator.leases.pending_upload import expected_of
from shoal.swarm.coordinator.membership import nodes
from shoal.swarm.coordinator.rules.lease_states import State
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import uploads

TICK_S = 1.0
TIDY_S = 60.0


def tick(coordinator: Coordinator) -> None:
    """Once a second: void what ran out, put lapsed claims back."""
    with coordinator.transaction() as tx:
        lifecycle.expire(tx, coordinator)
        verdicts.release_lapsed(tx, coordinator)
        nodes.tell_offline(tx, coordinator.config.heartbeat_s)


def tidy(coordinator: Coordinator) -> None:
    """Once a minute."""
    with coordinator.transaction() as tx:
        prune_nonces(tx)
    coordinator.database.checkpoint()


def keep_house(
    coordinators: Sequence[Coordinator], stop: threading.Event, *, check: Callable[[], None]
) -> None:
    """Until `stop`. An error ends it, and the coordinator with it: a run must not go on without its clock. Only a full disk is
    waited for.

    `check` raises if the server has ended.
    """
    tidied_s = time.monotonic()
    for coordinator in coordinators:
        coordinator.vitals.beat("housekeeping")
    while not stop.wait(TICK_S):
        check()
        due = time.monotonic() - tidied_s >= TIDY_S
        for coordinator in coordinators:
            go_round(coordinator, tidies=due)
        if due:
            tidied_s = time.monotonic()


def go_round(coordinator: Coordinator, *, tidies: bool) -> None:
    try:
        disk_full.look_again(coordinator)
        tick(coordinator)
        if tidies:
            tidy(coordinator)
    except (OSError, DBAPIError, coordinator.database.driver_error) as error:
        if disk_full.missing(coordinator, error) is None:
            raise
    coordinator.vitals.beat("housekeeping")


def resume(coordinator: Coordinator) -> None:
    """After an opening: whatever a crash or a changed run file left half-way."""
    with coordinator.transaction() as tx:
        rows = tx.db.execute(
            select(uploads)
            .join(lease_table, lease_table.c.lease_id == uploads.c.lease_id)
            .where(lease_table.c.state.in_((State.SUBMITTED.value, State.CHECKING.value)))
        ).all()
        for upload in rows:
            if not coordinator.store.holds(expected_of(upload)):
                lease = lifecycle.find_lease(tx.db, upload.lease_id)
                lifecycle.void(
                    tx, coordinator, lease, "void.infra", f"object {upload.sha256} is gone from the store"
                )
        _settle_last_version(tx, coordinator)


def _settle_last_version(tx: Transaction, coordinator: Coordinator) -> None:
    """A lowered last_version can make a version the last that was not the last when it came."""
    last = coordinator.spec.last_version
    if newest_version(tx.db) != last or is_finished(tx.db, coordinator.spec):
        return
    progress = evaluations.progress(tx.db, last)
    if progress is None:
        evaluations.plan_evaluation(tx, coordinator, last)
    elif progress[0] == progress[1]:
        evaluations.finish_run(tx, coordinator)
