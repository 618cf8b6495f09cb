"""Housekeeping: once a second leases and claims expire and SQLite's log is checkpointed, once a minute nonces, rejected files and
old rollouts' texts are deleted."""

import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from shoal.swarm.coordinator import disk_full
from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished, newest_version
from shoal.swarm.coordinator.http.auth import prune_nonces
from shoal.swarm.coordinator.leases import epochs, evaluations, lifecycle, transcripts, verdicts
from shoal.swarm.coordinator.leases.lease_rows import expected_upload, find_lease
from shoal.swarm.coordinator.membership import accounts, nodes
from shoal.swarm.coordinator.rules.lease_states import LeaseState
from shoal.swarm.coordinator.store.schema import leases as lease_table
from shoal.swarm.coordinator.store.schema import uploads

TIDY_S = 60.0


def tick(coordinator: Coordinator) -> None:
    """Runs once a second. Leases and claims expire here and nowhere else."""
    with coordinator.transaction() as tx:
        lifecycle.expire_overdue(tx, coordinator)
        verdicts.release_lapsed_claims(tx, coordinator)
        nodes.record_offline(tx, coordinator.config.heartbeat_s)
    coordinator.database.checkpoint()


def tidy(coordinator: Coordinator) -> None:
    """Runs once a minute."""
    with coordinator.transaction() as tx:
        prune_nonces(tx)
        epochs.end_old_debts(tx, coordinator)
        lifecycle.delete_rejected(tx, coordinator)
        accounts.forget_networks(tx, coordinator.config.half_life_s())
        transcripts.prune(tx, coordinator.config.rollouts_mb * 1_000_000)
    coordinator.database.truncate_log()


def run_housekeeping(
    coordinators: Sequence[Coordinator], stop: threading.Event, *, check: Callable[[], None]
) -> None:
    """Runs until `stop`. An error ends it and the coordinator, because without it no lease would expire. A full disk is
    waited for.

    `check` raises if the server has ended.
    """
    tidied_s = time.monotonic()
    for coordinator in coordinators:
        coordinator.health.beat("housekeeping")
    while not stop.wait(lifecycle.EXPIRE_EVERY_S):
        check()
        due = time.monotonic() - tidied_s >= TIDY_S
        for coordinator in coordinators:
            run_once(coordinator, tidies=due)
        if due:
            tidied_s = time.monotonic()


def run_once(coordinator: Coordinator, *, tidies: bool) -> None:
    try:
        disk_full.probe(coordinator)
        tick(coordinator)
        if tidies:
            tidy(coordinator)
    except (OSError, DBAPIError, coordinator.database.driver_error) as error:
        if disk_full.report(coordinator, error) is None:
            raise
    coordinator.health.beat("housekeeping")


def resume(coordinator: Coordinator) -> None:
    """Repairs, after the coordinator was opened, what a crash or a changed run file left incomplete."""
    with coordinator.transaction() as tx:
        rows = tx.db.execute(
            select(uploads)
            .join(lease_table, lease_table.c.lease_id == uploads.c.lease_id)
            .where(lease_table.c.state.in_((LeaseState.SUBMITTED.value, LeaseState.CHECKING.value)))
        ).all()
        for upload in rows:
            if not coordinator.store.holds(expected_upload(upload)):
                lease = find_lease(tx.db, upload.lease_id)
                lifecycle.void(
                    tx, coordinator, lease, "void.infra", f"object {upload.sha256} is gone from the store"
                )
        _settle_last_version(tx, coordinator)


def _settle_last_version(tx: Transaction, coordinator: Coordinator) -> None:
    """Plans or ends the last evaluation if a lowered last_version made the newest version the last one."""
    last = coordinator.spec.last_version
    if newest_version(tx.db) != last or is_finished(tx.db, coordinator.spec):
        return
    progress = evaluations.progress(tx.db, last)
    if progress is None:
        run_over = evaluations.plan_evaluation(tx, coordinator, last)
    else:
        run_over = progress[0] == progress[1]
    if run_over:
        lifecycle.finish_run(tx, coordinator)
