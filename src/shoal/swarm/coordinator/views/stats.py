"""The public statistics of a run. Each function reads through one connection, so its figures are consistent."""

from typing import Any

from sqlalchemy import Connection, Row, func, select, true

from shoal import __version__
from shoal.swarm.coordinator.context import Coordinator, is_finished, newest_version
from shoal.swarm.coordinator.leases import evaluations
from shoal.swarm.coordinator.leases.batches import (
    count_by_state,
    count_dropped,
    count_ready,
    is_formed,
    share_unparseable,
)
from shoal.swarm.coordinator.membership import relays
from shoal.swarm.coordinator.rules.lease_states import OPEN, LeaseState
from shoal.swarm.coordinator.rules.node_activity import LATE_AFTER, Liveness
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.ledger_chain import head_seq
from shoal.swarm.coordinator.store.schema import batches as batch_table
from shoal.swarm.coordinator.store.schema import leases, policies, submissions, verdicts
from shoal.swarm.coordinator.store.schema import nodes as node_table
from shoal.swarm.coordinator.views import node_views
from shoal.swarm.coordinator.views.node_views import ViewContext
from shoal.swarm.coordinator.views.status_sentence import Situation, waiting_for
from shoal.wire.manifest import Manifest
from shoal.wire.messages import History, Info, RunList, RunView, Stats, StepReport
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL

SPEED_WINDOW_S = 60.0
"""Speeds are averages over this time."""
NODES_SHOWN = 500


def info(db: Connection, coordinator: Coordinator) -> Info:
    """Returns what GET /v1/info answers."""
    config = coordinator.config
    return Info(
        protocol=PROTOCOL,
        software=f"shoal {__version__}",
        run_key=coordinator.run_key.public,
        spec=coordinator.spec,
        newest_version=newest_version(db),
        finished=is_finished(db, coordinator.spec),
        server_time_s=coordinator.clock(),
        admission=config.admission,
        work_bits=config.work_bits if config.admission == "work" else 0,
        credit_factor=config.credit_factor,
        hold_s=config.hold_s,
        min_software=config.min_software,
        entry_points=config.entry_points,
    )


def runs(db: Connection, coordinator: Coordinator) -> RunList:
    """Returns what GET /v1/runs answers for one run."""
    config, spec, situation = coordinator.config, coordinator.spec, read_situation(db, coordinator)
    newest = db.execute(
        select(policies.c.manifest).order_by(policies.c.version.desc()).limit(1)
    ).scalar_one_or_none()
    live = relays.usable(relays.reports(db), coordinator.clock(), config.heartbeat_s)
    view = RunView(
        run=spec.run,
        task=spec.task.name,
        compute_dtype=spec.compute_dtype,
        newest_version=situation.newest_version,
        last_version=spec.last_version,
        finished=situation.finished,
        weights_bytes=0 if newest is None else Sealed[Manifest].parse(newest).body.num_bytes,
        admission=config.admission,
        live_workers=situation.live_workers,
        needs=spec.needs,
        entry_points=config.entry_points,
        relays=tuple(relay.url for relay in live),
    )
    return RunList(runs=(view,))


def stats(db: Connection, context: ViewContext) -> Stats:
    """Returns what GET /v1/stats answers."""
    now_s, heartbeat_s = context.clock(), context.config.heartbeat_s
    situation = read_situation(db, context)
    trained = db.execute(
        select(func.count(), func.coalesce(func.sum(batch_table.c.num_groups), 0)).select_from(batch_table)
    ).one()
    return Stats(
        run=context.spec.run,
        newest_version=situation.newest_version,
        last_version=situation.last_version,
        finished=situation.finished,
        waiting_for=waiting_for(situation),
        ready_groups=situation.ready_groups,
        groups_needed=situation.groups_needed,
        open_leases=situation.open_leases,
        queued_checks=situation.queued_checks,
        submissions=ended_by_code(db),
        groups=count_by_state(db),
        unparseable=share_unparseable(db, true()),
        batches=trained[0],
        trained_groups=int(trained[1]),
        generation_tokens_per_s=verified_tokens_per_s(db, now_s),
        latest=_latest_report(db),
        evaluations=evaluations.views(db),
        nodes=node_views.views(db, _nodes(db), context),
        relays=relays.views(relays.reports(db), now_s, heartbeat_s),
        bytes_published=int(
            db.execute(select(func.coalesce(func.sum(policies.c.num_bytes), 0))).scalar_one()
        ),
        ledger_seq=head_seq(db),
        server_time_s=now_s,
    )


def history(db: Connection) -> History:
    """Returns what GET /v1/history answers."""
    reports = db.execute(
        select(policies.c.report).where(policies.c.report.is_not(None)).order_by(policies.c.version)
    ).scalars()
    return History(
        steps=tuple(StepReport.parse(report) for report in reports), evaluations=evaluations.views(db)
    )


def waiting_sentence(db: Connection, coordinator: Coordinator) -> str:
    """Returns what the run is waiting for, as a sentence."""
    return waiting_for(read_situation(db, coordinator))


def read_situation(db: Connection, context: ViewContext) -> Situation:
    """Reads the counts that decide what the run is waiting for."""
    now_s, heartbeat_s = context.clock(), context.config.heartbeat_s
    newest = newest_version(db)
    known_relays = relays.views(relays.reports(db), now_s, heartbeat_s)
    enrolled, live, quarantined = _count_workers(db, now_s - LATE_AFTER * heartbeat_s)
    by_state = dict(_open_by_state(db))
    return Situation(
        newest_version=newest,
        last_version=context.spec.last_version,
        finished=is_finished(db, context.spec),
        known_relays=len(known_relays),
        live_relays=sum(relay.liveness != Liveness.OFFLINE.value for relay in known_relays),
        enrolled=enrolled,
        live_workers=live,
        eval_workers=live - quarantined,
        queued_checks=by_state.get(LeaseState.SUBMITTED.value, 0),
        queue_untouched_s=_queue_untouched_s(db, now_s),
        ready_groups=count_ready(db, 0),
        groups_needed=context.config.groups_per_step,
        open_leases=by_state.get(LeaseState.ISSUED.value, 0) + by_state.get(LeaseState.UPLOADING.value, 0),
        batch_formed=newest is not None and is_formed(db, newest),
        dropped_groups=count_dropped(db),
        eval_chunks=None if newest is None else evaluations.progress(db, newest),
    )


def _count_workers(db: Connection, live_since_s: float) -> tuple[int, int, int]:
    """Returns the number of nodes that are not banned, of live ones among them, and of quarantined ones among those.

    The database counts: enrolling is free, so there may be very many nodes.
    """
    live = node_table.c.last_seen_s > live_since_s
    query = select(
        func.count(),
        func.count().filter(live),
        func.count().filter(live, node_table.c.trust == Trust.QUARANTINED.value),
    ).where(node_table.c.trust != Trust.BANNED.value)
    row = db.execute(query).one()
    return row[0], row[1], row[2]


def _open_by_state(db: Connection) -> list[tuple[str, int]]:
    query = select(leases.c.state, func.count()).where(leases.c.state.in_(OPEN)).group_by(leases.c.state)
    return [(row[0], row[1]) for row in db.execute(query)]


def ended_by_code(db: Connection) -> dict[str, int]:
    """Returns the number of ended leases for each code."""
    query = select(leases.c.code, func.count()).where(leases.c.code.is_not(None)).group_by(leases.c.code)
    return {row[0]: row[1] for row in db.execute(query)}


def _queue_untouched_s(db: Connection, now_s: float) -> float:
    oldest_s = db.execute(
        select(func.min(submissions.c.received_at_s))
        .join(leases, leases.c.lease_id == submissions.c.lease_id)
        .where(leases.c.state == LeaseState.SUBMITTED.value)
    ).scalar_one()
    if oldest_s is None:
        return 0.0
    claimed_s = db.execute(select(func.max(submissions.c.claimed_at_s))).scalar_one()
    return float(now_s - max(oldest_s, claimed_s or 0.0))


def verified_tokens_per_s(db: Connection, now_s: float) -> float:
    """Returns tokens per second of recently accepted submissions. The speeds that nodes report themselves are not used."""
    first_s = db.execute(select(func.min(policies.c.published_at_s))).scalar_one()
    if first_s is None or first_s >= now_s:
        return 0.0
    window_s = min(SPEED_WINDOW_S, now_s - first_s)
    tokens = db.execute(
        select(func.coalesce(func.sum(verdicts.c.output_tokens), 0)).where(
            verdicts.c.given_at_s > now_s - window_s
        )
    ).scalar_one()
    return float(int(tokens) / window_s)


def _latest_report(db: Connection) -> StepReport | None:
    report = db.execute(
        select(policies.c.report)
        .where(policies.c.report.is_not(None))
        .order_by(policies.c.version.desc())
        .limit(1)
    ).scalar_one_or_none()
    return None if report is None else StepReport.parse(report)


def _nodes(db: Connection) -> list[Row[Any]]:
    """Returns nodes in the order of enrolment; with more than NODES_SHOWN, those that were seen last."""
    rows = db.execute(select(node_table).order_by(node_table.c.last_seen_s.desc()).limit(NODES_SHOWN)).all()
    return sorted(rows, key=lambda row: (row.enrolled_at_s, row.node))
