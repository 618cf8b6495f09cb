"""The data of the run's page, read through one connection. The limits here bound how much a viewer receives."""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, select

from shoal import __version__
from shoal.swarm.coordinator.membership import nodes as node_rows
from shoal.swarm.coordinator.store.schema import leases, ledger, policies, run, submissions, verdicts
from shoal.swarm.coordinator.views import stats
from shoal.swarm.coordinator.views.stats import ViewContext
from shoal.swarm.coordinator.views.timeline import read_timeline
from shoal.tasks.datasets.file_options import file_names
from shoal.wire.codes import ACCEPTED, explain_code
from shoal.wire.lease import Lease
from shoal.wire.messages import NodeView, Stats, StepReport, TaskFigures
from shoal.wire.page_data import (
    CodeCount,
    Curve,
    Head,
    NodePage,
    Now,
    Release,
    RunTerms,
    Sample,
    Snapshot,
    TaskCurve,
    TaskTerms,
    WorkerView,
    WorkItem,
)
from shoal.wire.record import Sealed
from shoal.wire.run_spec import RunSpec, TaskSpec

MAX_POINTS = 300
REPORT_POINTS = 1500
"""Points of the curve in a report, which cannot ask for more when a reader zooms in."""
MAX_WORKERS = 100
MAX_RELEASES = 40
MAX_SAMPLES = 6
SAMPLES_OF_NODE = 3
MAX_WORK = 40
SHORT_COLUMNS = (
    "loss",
    "entropy",
    "clip_fraction",
    "grad_norm",
    "kl",
    "dropped_share",
    "generate_s",
    "check_s",
)
MAX_TEXT = 1200
"""Most characters of a prompt or an answer."""


def take_snapshot(db: Connection, context: ViewContext, curve: Curve | None = None) -> Snapshot:
    """Returns all sections of the page. A caller that caches the curve passes it; else all steps are read, for a report."""
    current = stats.stats(db, context)
    end_s = (
        current.server_time_s
    )  # the right edge of the timeline: now, or the last verdict of a finished run
    if current.finished:
        end_s = db.execute(select(func.max(verdicts.c.given_at_s))).scalar_one() or end_s
    return Snapshot(
        terms=_terms(db, context),
        now=_now(current),
        curve=make_curve(stats.read_reports(db), REPORT_POINTS) if curve is None else curve,
        evaluations=current.evaluations,
        workers=_workers(db, current),
        verdicts=count_codes(current.submissions),
        timeline=read_timeline(db, end_s=end_s),
        relays=current.relays,
        releases=_releases(db),
        samples=read_samples(db, limit=MAX_SAMPLES),
        head=_head(db),
        warnings=current.warnings,
    )


def node_page(db: Connection, context: ViewContext, node: str) -> NodePage:
    """Returns the data of a node's own page. Raises Rejected if the node is not enrolled."""
    row = node_rows.get_node(db, node)
    now_s = context.clock()
    (view,) = stats.node_views(db, [row], context)
    work = _work(db, node)
    return NodePage.copied_from(
        row,
        node=_worker(view, _verified_speeds(db, now_s).get(node, 0.0)),
        work=work,
        samples=read_samples(db, limit=SAMPLES_OF_NODE, lease_ids=[item.lease_id for item in work]),
    )


# -- the current state ------------------------------------------------------------------------------------


def _terms(db: Connection, context: ViewContext) -> RunTerms:
    spec = context.spec
    return RunTerms.copied_from(
        spec,
        run_key=db.execute(select(run.c.run_key)).scalar_one(),
        software=f"shoal {__version__}",
        task=", ".join(task.title for task in spec.tasks),
        options=spec.task.options if not spec.more_tasks else {},
        files=file_names(spec.task, context.folder / "data"),
        samples_per_prompt=spec.sampling.samples_per_prompt,
        started_at_s=db.execute(select(func.min(policies.c.published_at_s))).scalar_one(),
        tasks=tuple(
            _task_terms(spec, task, weight=task.weight / sum(one.weight for one in spec.tasks))
            for task in spec.tasks
        ),
        evals=tuple(
            _task_terms(spec, one.task, every=one.every, prompts=one.prompts, samples_per_prompt=one.samples)
            for one in context.config.evaluations(spec)
        ),
    )


def _task_terms(spec: RunSpec, task: TaskSpec, **values: Any) -> TaskTerms:
    own = spec.sampling.of(task).model_dump() | values
    return TaskTerms(label=task.title, name=task.name, options=task.options, **own)


def _now(current: Stats) -> Now:
    return Now.copied_from(
        current,
        held_groups=current.groups.get("held", 0),
        live_workers=sum(node.liveness == "live" and node.trust != "banned" for node in current.nodes),
        generation_tokens_per_s=round(current.generation_tokens_per_s, 1),
        dropped_groups=current.groups.get("dropped", 0),
        stale_groups=current.groups.get("stale", 0),
        unparseable=round(current.unparseable, 4),
        trainer_disk_bytes=0 if current.latest is None else current.latest.disk_bytes,
        train_passes=3 if current.latest is None else current.latest.train_passes,
        server_time_s=round(current.server_time_s, 1),
    )


def count_codes(counts: dict[str, int]) -> tuple[CodeCount, ...]:
    """Returns the counts with explanations: accepted first, then rejections, then voids, each by decreasing count."""

    def order(code: str) -> tuple[int, int, str]:
        family = 0 if code == ACCEPTED else 1 if code.startswith("reject.") else 2
        return family, -counts[code], code

    return tuple(
        CodeCount(code=code, words=sentence_for(code), count=counts[code])
        for code in sorted(counts, key=order)
    )


def sentence_for(code: str | None) -> str:
    """Returns the meaning of a verdict's code; an empty text if there is no verdict yet."""
    if code is None:
        return ""
    return "checked and accepted" if code == ACCEPTED else explain_code(code)


def _head(db: Connection) -> Head | None:
    row = db.execute(select(ledger).order_by(ledger.c.seq.desc()).limit(1)).one_or_none()
    return None if row is None else Head.copied_from(row)


# -- the curve --------------------------------------------------------------------------------------------


def make_curve(steps: Sequence[StepReport], max_points: int = MAX_POINTS) -> Curve:
    """Returns a curve of at most `max_points` points. Each is the mean of the same number of steps; the last may have fewer."""
    size = -(-len(steps) // max_points) or 1
    points = [steps[start : start + size] for start in range(0, len(steps), size)]

    def means(name: str, digits: int) -> tuple[float, ...]:
        return tuple(
            round(sum(getattr(step, name) for step in point) / len(point), digits) for point in points
        )

    accepted_rewards = [
        _weighted_mean(point, "accepted_reward_mean", "accepted_rollouts", 4) for point in points
    ]
    return Curve(
        steps_per_point=size,
        version=tuple(point[-1].version for point in points),
        reward=means("reward_mean", 4),
        # Points without accepted rollouts have the mean of the trained ones.
        accepted_reward=tuple(
            trained if accepted is None else accepted
            for accepted, trained in zip(accepted_rewards, means("reward_mean", 4), strict=True)
        ),
        accepted_rollouts=tuple(sum(step.accepted_rollouts for step in point) for point in points),
        answer_tokens=means("answer_tokens_mean", 1),
        lag=means("lag_mean", 2),
        lag_max=tuple(max(step.lag_max for step in point) for point in points),
        wait_s=means("wait_s", 2),
        train_s=means("train_s", 2),
        tokens_per_s=means("tokens_per_s", 0),
        tasks={
            title: _task_curve([[step.tasks.get(title) for step in point] for point in points])
            for title in dict.fromkeys(title for step in steps for title in step.tasks)
        },
        publish_s=tuple(
            _short(sum(step.publish_exposed_s + step.checkpoint_exposed_s for step in point) / len(point))
            for point in points
        ),
        **{
            name: tuple(_short(sum(getattr(step, name) for step in point) / len(point)) for point in points)
            for name in SHORT_COLUMNS
        },
    )


def _task_curve(points: Sequence[Sequence[TaskFigures | None]]) -> TaskCurve:
    """Returns the curve of one task from its figures in the steps of each point; None: a step without them."""

    def means(value: str, weight: str, digits: int) -> tuple[float | None, ...]:
        return tuple(_weighted_mean(point, value, weight, digits) for point in points)

    return TaskCurve(
        reward=means("reward_mean", "groups", 4),
        accepted_reward=means("accepted_reward_mean", "accepted_rollouts", 4),
        groups=tuple(sum(one.groups for one in point if one is not None) for point in points),
        answer_tokens=means("answer_tokens_mean", "groups", 1),
    )


def _weighted_mean(
    steps: Sequence[StepReport | TaskFigures | None], value: str, weight: str, digits: int
) -> float | None:
    """Returns the mean of the steps that have the value, weighted by another of their figures; None if no step has it."""
    pairs = [(getattr(one, value), getattr(one, weight)) for one in steps if one is not None]
    known: list[tuple[float, int]] = [(mean, count) for mean, count in pairs if mean is not None and count]
    if not known:
        return None
    return round(sum(mean * count for mean, count in known) / sum(count for _, count in known), digits)


def _short(value: float) -> float:
    """Returns a number with four significant digits: these columns range from 1e-6 to 1e6."""
    return float(f"{value:.4g}")


# -- workers ----------------------------------------------------------------------------------------------


def _workers(db: Connection, current: Stats) -> tuple[WorkerView, ...]:
    """Returns the MAX_WORKERS nodes with the most credit, banned ones last. GET /v1/stats lists more."""
    speeds = _verified_speeds(db, current.server_time_s)
    shown = sorted(current.nodes, key=lambda node: (node.trust == "banned", -node.credit, node.node))
    return tuple(_worker(node, speeds.get(node.node, 0.0)) for node in shown[:MAX_WORKERS])


def _worker(node: NodeView, verified_tokens_per_s: float) -> WorkerView:
    return WorkerView.copied_from(
        node,
        tokens_per_s=round(node.tokens_per_s, 1),
        words=sentence_for(node.last_code),
        verified_tokens_per_s=round(verified_tokens_per_s, 1),
    )


def _verified_speeds(db: Connection, now_s: float) -> dict[str, float]:
    query = (
        select(verdicts.c.node, func.sum(verdicts.c.output_tokens))
        .where(verdicts.c.given_at_s > now_s - stats.SPEED_WINDOW_S)
        .group_by(verdicts.c.node)
    )
    return {row[0]: float(row[1]) / stats.SPEED_WINDOW_S for row in db.execute(query)}


def _work(db: Connection, node: str) -> tuple[WorkItem, ...]:
    """Returns the last leases of a node, newest first."""
    query = (
        select(leases, submissions.c.policy_version, submissions.c.num_bytes, submissions.c.received_at_s)
        .outerjoin(submissions, submissions.c.lease_id == leases.c.lease_id)
        .where(leases.c.node == node)
        .order_by(leases.c.issued_at_s.desc())
        .limit(MAX_WORK)
    )
    return tuple(
        WorkItem.copied_from(row, words=sentence_for(row.code), detail=row.detail or "")
        for row in db.execute(query)
    )


# -- versions and samples ---------------------------------------------------------------------------------


def _releases(db: Connection) -> tuple[Release, ...]:
    query = (
        select(policies.c.version, policies.c.num_bytes, policies.c.published_at_s)
        .order_by(policies.c.version.desc())
        .limit(MAX_RELEASES)
    )
    newest_first = [
        Release.copied_from(row, published_at_s=round(row.published_at_s, 2)) for row in db.execute(query)
    ]
    return tuple(reversed(newest_first))


def read_samples(db: Connection, *, limit: int, lease_ids: Sequence[str] | None = None) -> tuple[Sample, ...]:
    """Returns the newest sample answers that validators put into verdicts; with `lease_ids`, only those of these leases."""
    query = (
        select(
            verdicts.c.body,
            verdicts.c.given_at_s,
            leases.c.node,
            leases.c.sealed,
            submissions.c.policy_version,
        )
        .join(leases, leases.c.lease_id == verdicts.c.lease_id)
        .join(submissions, submissions.c.lease_id == verdicts.c.lease_id)
        .where(verdicts.c.code == ACCEPTED, leases.c.purpose == "train")
        .order_by(verdicts.c.given_at_s.desc())
        .limit(limit)
    )
    if lease_ids is not None:
        query = query.where(verdicts.c.lease_id.in_(lease_ids))
    return tuple(sample for row in db.execute(query) if (sample := _sample(row)) is not None)


def _sample(row: Any) -> Sample | None:
    """Returns the sample in a verdict's evidence, with the prompt from the lease; None if the evidence has no valid sample."""
    evidence = json.loads(row.body)["evidence"]
    index, answer = evidence.get("sample_prompt"), evidence.get("sample_answer")
    reward, expected = evidence.get("sample_reward"), evidence.get("sample_expected")
    lease = Sealed[Lease].parse(row.sealed).body
    complete = isinstance(index, int) and isinstance(answer, str) and isinstance(reward, int | float)
    if not complete or not 0 <= index < len(lease.prompts):
        return None
    return Sample(
        lease_id=lease.lease_id,
        node=row.node,
        policy_version=row.policy_version,
        prompt=lease.prompts[index][-MAX_TEXT:],
        answer=answer[:MAX_TEXT],
        reward=float(reward),
        given_at_s=round(row.given_at_s, 1),
        expected=expected[:MAX_TEXT] if isinstance(expected, str) else "",
        task=lease.task.title,
    )
