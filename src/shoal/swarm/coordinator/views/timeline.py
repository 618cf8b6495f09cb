"""The timeline of the last steps, as bars: generate, upload, queue, check, train, broadcast."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, Select, func, select

from shoal.swarm.coordinator.store.schema import batches, leases, policies, submissions, uploads, verdicts
from shoal.wire.messages import StepReport
from shoal.wire.page_data import Span, Stage, Timeline

MAX_LANES = 8
MAX_SPANS = 160
STEPS_SHOWN, MAX_STEPS = 5, 30
"""The timeline starts at the batch of the STEPS_SHOWN-th last step. If that is less than SHORTEST_S ago, it shows up to MAX_STEPS."""
SHORTEST_S, LONGEST_S = 5.0, 900.0


def read_timeline(db: Connection, *, end_s: float) -> Timeline:
    """Returns what the trainer, the validators and the busiest workers did during the last steps before `end_s`."""
    formed = db.execute(
        select(batches.c.version, batches.c.formed_at_s, policies.c.published_at_s, policies.c.report)
        .outerjoin(policies, policies.c.version == batches.c.version + 1)
        .order_by(batches.c.version.desc())
        .limit(MAX_STEPS)
    ).all()
    since_s = min((row.formed_at_s for row in formed[:STEPS_SHOWN]), default=end_s)
    start_s = max(end_s - LONGEST_S, min(since_s, end_s - SHORTEST_S))
    # The last whole step is shown, however long it is.
    start_s = min([start_s, *(row.formed_at_s for row in formed if row.published_at_s is not None)][:2])
    training = [bar for bar in _trainer_bars(formed, end_s) if bar.ended_s > start_s]
    work = [bar for bar in _work_bars(db, start_s, end_s) if bar.ended_s > start_s]
    shown = sorted(work, key=lambda bar: bar.ended_s)[-max(1, MAX_SPANS - len(training)) :]
    kept = sorted([*training, *shown], key=lambda bar: bar.ended_s)
    return Timeline(
        end_s=round(end_s, 2),
        span_s=round(end_s - start_s, 2),
        spans=tuple(  # times are relative to `end_s`, and clipped to the timeline
            Span.copied_from(
                bar,
                start_s=round(max(bar.began_s, start_s) - end_s, 2),
                end_s=round(min(bar.ended_s, end_s) - end_s, 2),
            )
            for bar in kept
        ),
    )


class _Bar(NamedTuple):
    """One bar, with absolute times."""

    stage: Stage
    lane: str
    began_s: float
    ended_s: float
    version: int | None
    code: str | None = None
    purpose: str = "train"


def _trainer_bars(formed: Iterable[Any], end_s: float) -> Iterable[_Bar]:
    """Yields two bars per step: `train_s` seconds from the batch on are training, the rest until the announcement is publishing."""
    for row in formed:
        version = row.version + 1
        if row.published_at_s is None:
            yield _Bar("train", "trainer", row.formed_at_s, end_s, version)
            continue
        trained_s = row.formed_at_s + StepReport.parse(row.report).train_s if row.report else row.formed_at_s
        trained_s = min(trained_s, row.published_at_s)
        yield _Bar("train", "trainer", row.formed_at_s, trained_s, version)
        yield _Bar("broadcast", "trainer", trained_s, row.published_at_s, version)


def _work_bars(db: Connection, start_s: float, end_s: float) -> Iterable[_Bar]:
    """Yields the bars of recent leases. Only the MAX_LANES nodes with most leases get bars of their own."""
    query: Select[Any] = (
        select(
            leases.c.node,
            leases.c.purpose,
            leases.c.issued_at_s,
            leases.c.ended_at_s,
            uploads.c.asked_at_s,
            submissions.c.policy_version,
            submissions.c.received_at_s,
            submissions.c.claimed_at_s,
            verdicts.c.given_at_s,
            verdicts.c.code,
        )
        .outerjoin(uploads, uploads.c.lease_id == leases.c.lease_id)
        .outerjoin(submissions, submissions.c.lease_id == leases.c.lease_id)
        .outerjoin(verdicts, verdicts.c.lease_id == leases.c.lease_id)
        .where(func.coalesce(leases.c.ended_at_s, start_s) >= start_s)
        .order_by(leases.c.issued_at_s.desc())
        .limit(MAX_SPANS // 2)
    )
    rows = db.execute(query).all()
    shown = {node for node, _ in Counter(row.node for row in rows).most_common(MAX_LANES)}
    for row in rows:
        yield from _lease_bars(row, end_s, shown=row.node in shown)


def _lease_bars(row: Row[Any], end_s: float, *, shown: bool) -> Iterable[_Bar]:
    """Yields the bars of one lease: those of its node if it is `shown`, and those of the validator."""

    def first_known(*moments: float | None) -> float:
        """Returns the first moment that has happened; else the end of the lease; else the end of the timeline."""
        known = (moment for moment in (*moments, row.ended_at_s, end_s) if moment is not None)
        return float(next(known))

    def bar(stage: Stage, lane: str, began_s: float, ended_s: float, code: str | None = None) -> _Bar:
        return _Bar(stage, lane, began_s, ended_s, row.policy_version, code, row.purpose)

    if shown:
        yield bar("generate", row.node, row.issued_at_s, first_known(row.asked_at_s, row.received_at_s))
        if row.asked_at_s is not None:
            yield bar("upload", row.node, row.asked_at_s, first_known(row.received_at_s))
    if row.received_at_s is None:
        return
    if row.claimed_at_s is None:
        yield bar("queue", "validator", row.received_at_s, first_known())
    else:
        yield bar("check", "validator", row.claimed_at_s, first_known(row.given_at_s), row.code)
