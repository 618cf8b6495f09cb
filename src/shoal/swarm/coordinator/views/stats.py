"""Reads what the public routes show: information about the run, counts, nodes, and one sentence on what the run waits for."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, Row, func, select, true

from shoal import __version__
from shoal.swarm.coordinator.config import NAMES_FILE, NOTICES_FILE, CoordinatorConfig
from shoal.swarm.coordinator.context import Coordinator, is_finished, newest_version, spec_now
from shoal.swarm.coordinator.leases import evaluations
from shoal.swarm.coordinator.leases.batches import (
    count_by_state,
    count_dropped,
    count_held,
    count_ready,
    is_formed,
    share_unparseable,
)
from shoal.swarm.coordinator.membership import accounts, relays
from shoal.swarm.coordinator.rules.credit import held_since_s
from shoal.swarm.coordinator.rules.lease_states import OPEN, LeaseState
from shoal.swarm.coordinator.rules.node_status import LATE_AFTER, Liveness, liveness
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.ledger_chain import read_head
from shoal.swarm.coordinator.store.schema import batches as batch_table
from shoal.swarm.coordinator.store.schema import groups, leases, policies, submissions, verdicts
from shoal.swarm.coordinator.store.schema import nodes as node_table
from shoal.wire.codes import Rejected
from shoal.wire.ledger import TokenCounts
from shoal.wire.manifest import Manifest
from shoal.wire.messages import (
    History,
    Info,
    NodeView,
    RunList,
    RunView,
    RunWarning,
    Stats,
    StepReport,
)
from shoal.wire.proof_noise import NoiseDoubt
from shoal.wire.record import Sealed
from shoal.wire.run_spec import PROTOCOL, RunSpec

VALIDATOR_PATIENCE_S = 5.0
"""If no submission was claimed for this long, the queue waits for a validator to appear."""
MANY_UNCERTAIN = 4
"""Verdicts in a row that are void.uncertain; of honest work at most 1 in 100 is (rules/cumulative_evidence.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The counts that decide what the run is waiting for."""

    newest_version: int | None
    last_version: int
    finished: bool
    known_relays: int
    live_relays: int
    """Relays that leases may name."""
    relay_problem: str = ""
    """Why leases do not name one that reports."""
    enrolled: int
    live_workers: int
    eval_workers: int
    """Workers that are live and not in quarantine."""
    queued_checks: int
    running_checks: int = 0
    """Submissions that a validator has claimed and not judged yet."""
    queue_untouched_s: float
    """Seconds since the last claim, or since the oldest queued submission arrived, whichever is later."""
    ready_groups: int
    groups_needed: int
    held_groups: int = 0
    """Groups of submissions without every check that wait for the next full check of their node."""
    open_leases: int
    batch_formed: bool
    """True if the batch of the newest version is formed."""
    dropped_groups: int = 0
    """Groups without signal that were accepted since the last batch."""
    noise_doubt: NoiseDoubt | None = None
    """Why the calibration may be old."""
    uncertain_in_a_row: int = 0
    """How many of the newest verdicts are void.uncertain, without another verdict between them."""
    eval_chunks: tuple[int, int] | None
    """Accepted chunks and all chunks of the newest version's evaluation."""


def waiting_for(now: Situation) -> str:
    """Returns what the run is waiting for. What blocks everything is named before work that is merely not done yet."""
    return _trainer_reason(now) or _missing_role_reason(now) or _work_reason(now)


def _trainer_reason(now: Situation) -> str | None:
    newest = now.newest_version
    if now.finished:
        return "nothing: the run is finished"
    if newest is None:
        return "a policy: the trainer has not published version 0"
    if newest == now.last_version:
        return None
    if now.batch_formed:
        return f"the trainer: it is training version {newest + 1}"
    if now.ready_groups >= now.groups_needed:
        return f"the trainer: {now.groups_needed} groups are ready for version {newest}, not collected yet"
    return None


def _missing_role_reason(now: Situation) -> str | None:
    if not now.live_relays:
        problem = f"; {now.relay_problem}" if now.relay_problem else ""
        return f"relays: none live (0 of {now.known_relays} known){problem}"
    if now.queued_checks and now.queue_untouched_s > VALIDATOR_PATIENCE_S:
        queued = _count(now.queued_checks, "submission")
        return f"a validator: {queued} queued, none claimed for {now.queue_untouched_s:.0f} s"
    if not now.live_workers:
        return f"workers: none live (0 of {now.enrolled} enrolled)"
    return None


def _work_reason(now: Situation) -> str:
    open_leases = f"{_count(now.open_leases, 'lease')} open on {_count(now.live_workers, 'live worker')}"
    if now.newest_version != now.last_version:
        dropped = (
            f"; {_count(now.dropped_groups, 'group')} dropped, all rewards equal"
            if now.dropped_groups
            else ""
        )
        held = f"; {_count(now.held_groups, 'group')} held until checked" if now.held_groups else ""
        unchecked = now.queued_checks + now.running_checks
        checks = f"; {_count(unchecked, 'submission')} at the validator" if unchecked else ""
        doubt = _doubt(now.noise_doubt) or _uncertain(now.uncertain_in_a_row)
        return f"rollouts: {now.ready_groups} of {now.groups_needed} groups ready, {open_leases}{checks}{dropped}{held}{doubt}"
    if not now.eval_workers:
        return f"workers: {now.live_workers} live, all in quarantine, and an evaluation needs one that is not"
    done, total = now.eval_chunks or (0, 0)
    return f"the evaluation of version {now.newest_version}: {done} of {total} parts accepted, {open_leases}"


def _doubt(doubt: NoiseDoubt | None) -> str:
    if doubt is None or not doubt.submissions:
        return ""
    return (
        f"; {_count(doubt.submissions, 'submission')} of up to version {doubt.version} in doubt: their noise is {doubt.ratio:.2f} times "
        "the calibrated one, and the trainer measures it again"
    )


def _uncertain(in_a_row: int) -> str:
    if in_a_row < MANY_UNCERTAIN:
        return ""
    return f"; the newest {in_a_row} verdicts are void.uncertain: {accounts.NO_FIT} (docs/toploc.md, Calibration)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class ViewContext(Protocol):
    """What a view needs besides the tables. A coordinator has it, and so has `shoal report` for a finished run's folder."""

    @property
    def config(self) -> CoordinatorConfig: ...

    @property
    def spec(self) -> RunSpec: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def folder(self) -> Path:
        """The coordinator's folder, with what `shoal run` writes there: NOTICES_FILE and NAMES_FILE."""


def node_views(db: Connection, rows: Sequence[Row[Any]], context: ViewContext) -> tuple[NodeView, ...]:
    """Returns the views of nodes, given as rows of the table."""
    now_s, config = context.clock(), context.config
    # One query for all of them; then one for each quarantined or banned node, whose hold period is suspended.
    held: dict[str, int] = {
        row[0]: int(row[1])
        for row in db.execute(
            select(verdicts.c.node, func.sum(verdicts.c.credit))
            .where(
                # Anybody may ask for one node, which must not cost a sum over all verdicts of a day.
                verdicts.c.node.in_([row.node for row in rows]),
                verdicts.c.given_at_s > now_s - config.hold_s,
                verdicts.c.revoked_for.is_(None),
            )
            .group_by(verdicts.c.node)
        )
    }
    for row in rows:
        if row.trust in (Trust.QUARANTINED.value, Trust.BANNED.value):
            held[row.node] = _held(db, row, now_s, config.hold_s)
    names = read_names(context.folder)
    return tuple(
        NodeView.copied_from(
            row,
            liveness=liveness(row.last_seen_s, now_s, config.heartbeat_s).value,
            # An ejected node gets no more work; its last heartbeat may still claim to generate.
            phase="" if row.trust == Trust.BANNED.value else row.phase,
            credit_held=held.get(row.node, 0),
            name=names.get(row.node, ""),
        )
        for row in rows
    )


def _held(db: Connection, node: Row[Any], now_s: float, hold_s: float) -> int:
    """Returns the held credit of one node, by the rule for its trust."""
    since_s = held_since_s(Trust(node.trust), node.trust_since_s, now_s, hold_s)
    query = select(func.coalesce(func.sum(verdicts.c.credit), 0)).where(
        verdicts.c.node == node.node, verdicts.c.given_at_s > since_s, verdicts.c.revoked_for.is_(None)
    )
    return int(db.execute(query).scalar_one())


MAX_WARNINGS = 40
SPEED_WINDOW_S = 60.0
"""Speeds are averages over this time."""
NODES_SHOWN = 500


def info(db: Connection, coordinator: Coordinator) -> Info:
    """Returns what GET /v1/info answers."""
    config = coordinator.config
    return Info.copied_from(
        config,
        protocol=PROTOCOL,
        software=f"shoal {__version__}",
        run_key=coordinator.run_key.public,
        spec=spec_now(db, coordinator.spec),
        newest_version=newest_version(db),
        finished=is_finished(db, coordinator.spec),
        server_time_s=coordinator.clock(),
        work_bits=config.work_bits if config.admission == "work" else 0,
        noise_doubt=noise_doubt(db, coordinator.clock()),
    )


def noise_doubt(db: Connection, now_s: float) -> NoiseDoubt | None:
    """Returns why the calibration should be repeated now; None if it need not be."""
    watch = accounts.noise_watch(db)
    if not watch.asks(now_s):
        return None
    version = newest_version(db) if watch.version < 0 else watch.version
    ratio = max(watch.ratio, watch.mean)
    return NoiseDoubt(version=version or 0, submissions=watch.doubts, ratio=round(ratio, 4))


def runs(db: Connection, coordinator: Coordinator) -> RunList:
    """Returns what GET /v1/runs answers for one run."""
    config, spec, situation = coordinator.config, coordinator.spec, read_situation(db, coordinator)
    newest = db.execute(
        select(policies.c.manifest).order_by(policies.c.version.desc()).limit(1)
    ).scalar_one_or_none()
    live = relays.usable(db, coordinator.clock(), config.heartbeat_s, situation.newest_version)
    view = RunView.copied_from(
        situation,
        run=spec.run,
        task=", ".join(task.title for task in spec.tasks),
        compute_dtype=spec.compute_dtype,
        weights_bytes=0 if newest is None else Sealed[Manifest].parse(newest).body.num_bytes,
        admission=config.admission,
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
    return Stats.copied_from(
        situation,
        run=context.spec.run,
        waiting_for=waiting_for(situation),
        submissions=ended_by_code(db),
        groups=count_by_state(db),
        unparseable=share_unparseable(db, true()),
        batches=trained[0],
        trained_groups=int(trained[1]),
        generation_tokens_per_s=verified_tokens_per_s(db, now_s),
        latest=_latest_report(db),
        evaluations=evaluations.views(db),
        nodes=node_views(db, _nodes(db), context),
        relays=relays.views(db, now_s, heartbeat_s, situation.newest_version),
        origin=relays.origin_url(db),
        bytes_published=int(
            db.execute(select(func.coalesce(func.sum(policies.c.num_bytes), 0))).scalar_one()
        ),
        tokens=count_tokens(db),
        ledger_seq=read_head(db)[0],
        server_time_s=now_s,
        warnings=read_warnings(db, context.folder),
    )


def count_tokens(db: Connection) -> TokenCounts:
    """Returns the output tokens of accepted work. The verdicts and groups are those of the ledger; a group's share of its lease's
    tokens is taken to be that of the other groups."""
    total = func.coalesce(func.sum(verdicts.c.output_tokens), 0)
    generated = int(db.execute(select(total)).scalar_one())
    held_out = db.execute(
        select(total)
        .join(leases, leases.c.lease_id == verdicts.c.lease_id)
        .where(leases.c.purpose != "train")
    )
    checked = db.execute(select(total).where(verdicts.c.checks == "full"))
    per_lease = (
        select(groups.c.lease_id, func.count().label("num_groups")).group_by(groups.c.lease_id).subquery()
    )
    share = verdicts.c.output_tokens * 1.0 / per_lease.c.num_groups
    by_state = {
        str(state): round(float(tokens))
        for state, tokens in db.execute(
            select(groups.c.state, func.sum(share))
            .join(verdicts, verdicts.c.lease_id == groups.c.lease_id)
            .join(per_lease, per_lease.c.lease_id == groups.c.lease_id)
            .group_by(groups.c.state)
        )
    }
    trained, dropped = by_state.pop("batched", 0), by_state.pop("dropped", 0)
    return TokenCounts(
        generated=generated,
        held_out=int(held_out.scalar_one()),
        checked=int(checked.scalar_one()),
        trained=trained,
        dropped=dropped,
        unused=sum(by_state.values()),
    )


def read_warnings(db: Connection, folder: Path) -> tuple[RunWarning, ...]:
    """Returns the newest warnings of the trainer's reports and the notices of `shoal run`, oldest first."""
    reports = db.execute(
        select(policies.c.report, policies.c.published_at_s)
        .where(policies.c.report.like('%"warnings":["%'))
        .order_by(policies.c.version.desc())
        .limit(MAX_WARNINGS)
    )
    found = [
        RunWarning(source="trainer", text=text, version=report.version, time_s=published_at_s)
        for body, published_at_s in reports
        for report in [StepReport.parse(body)]
        for text in report.warnings
    ]
    found += read_notices(folder)
    return tuple(sorted(found, key=lambda one: one.time_s or 0.0)[-MAX_WARNINGS:])


def read_notices(folder: Path) -> list[RunWarning]:
    """Returns the newest notices in the coordinator's folder; none if `shoal run` did not start it."""
    path = folder / NOTICES_FILE
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines()[-MAX_WARNINGS:]:
        with contextlib.suppress(Rejected):  # a kill or a full disk may have cut a line
            found.append(RunWarning.parse(line))
    return found


def read_names(folder: Path) -> dict[str, str]:
    """Returns the names that `shoal run` gave to the workers it started, by node id."""
    path = folder / NAMES_FILE
    if not path.exists():
        return {}
    names: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return names


def history(db: Connection) -> History:
    """Returns what GET /v1/history answers."""
    return History(steps=tuple(read_reports(db)), evaluations=evaluations.views(db))


def read_reports(db: Connection, after_version: int = 0) -> list[StepReport]:
    """Returns the trainer's reports on all steps that produced a version after `after_version`."""
    query = (
        select(policies.c.report)
        .where(policies.c.report.is_not(None), policies.c.version > after_version)
        .order_by(policies.c.version)
    )
    return [StepReport.parse(report) for report in db.execute(query).scalars()]


def read_situation(db: Connection, context: ViewContext) -> Situation:
    """Reads the counts that decide what the run is waiting for."""
    now_s, heartbeat_s = context.clock(), context.config.heartbeat_s
    newest = newest_version(db)
    known_relays = relays.views(db, now_s, heartbeat_s, newest)
    live_relays = [relay for relay in known_relays if relay.liveness != Liveness.OFFLINE.value]
    enrolled, live, quarantined = _count_workers(db, now_s - LATE_AFTER * heartbeat_s)
    query = select(leases.c.state, func.count()).where(leases.c.state.in_(OPEN)).group_by(leases.c.state)
    by_state = {row[0]: row[1] for row in db.execute(query)}
    return Situation(
        newest_version=newest,
        last_version=context.spec.last_version,
        finished=is_finished(db, context.spec),
        known_relays=len(known_relays),
        live_relays=sum(not relay.problem for relay in live_relays),
        relay_problem=next((f"{relay.url}: {relay.problem}" for relay in live_relays if relay.problem), ""),
        enrolled=enrolled,
        live_workers=live,
        eval_workers=live - quarantined,
        queued_checks=by_state.get(LeaseState.SUBMITTED.value, 0),
        running_checks=by_state.get(LeaseState.CHECKING.value, 0),
        queue_untouched_s=_queue_untouched_s(db, now_s),
        ready_groups=count_ready(db, 0, context.config.max_unchecked_share),
        held_groups=count_held(db),
        groups_needed=context.config.groups_per_step,
        open_leases=by_state.get(LeaseState.ISSUED.value, 0) + by_state.get(LeaseState.UPLOADING.value, 0),
        batch_formed=newest is not None and is_formed(db, newest),
        dropped_groups=count_dropped(db),
        noise_doubt=noise_doubt(db, now_s),
        uncertain_in_a_row=accounts.uncertain_in_a_row(db),
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
    # NULL first, as PostgreSQL sorts: keys that only enrol, which are free, would hide all workers.
    last_seen = node_table.c.last_seen_s.desc().nulls_last()
    rows = db.execute(select(node_table).order_by(last_seen).limit(NODES_SHOWN)).all()
    return sorted(rows, key=lambda row: (row.enrolled_at_s, row.node))
