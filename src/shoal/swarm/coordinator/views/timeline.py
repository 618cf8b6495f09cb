"""Where the time of the last steps went, as bars: generate, upload, wait, check, train, broadcast."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from shoal.swarm.coordinator.store.schema import batches, leases, policies, submissions, uploads, verdicts
from shoal.wire.messages import StepReport
from shoal.wire.page_data import Span, Stage, Timeline

MAX_LANES = 8
MAX_SPANS = 160
STEPS_SHOWN, MAX_STEPS = 5, 30
"""The timeline is as long as so many steps; where it is longer than they took, it has more of them."""
SHORTEST_S, LONGEST_S = 5.0, 900.0


def read_timeline(db: Connection, *, end_s: float) -> Timeline:
    """The last steps: what the trainer, the validators and the busiest workers did when."""
    formed = db.execute(
        select(batches.c.version, batches.c.formed_at_s, policies.c.published_at_s, policies.c.report)
        .outerjoin(policies, policies.c.version == batches.c.version + 1)
        .order_by(batches.c.version.desc())
        .limit(MAX_STEPS)
    ).all()
    since_s = min((row.formed_at_s for row in formed[:STEPS_SHOWN]), default=end_s)
    start_s = max(end_s - LONGEST_S, min(since_s, end_s - SHORTEST_S))
    spans = [*_trainer_spans(formed, end_s), *_work_spans(db, start_s, end_s)]
    kept = sorted((span for span in spans if span[3] > start_s), key=lambda span: span[3])[-MAX_SPANS:]
    return Timeline(
        end_s=round(end_s, 2),
        span_s=round(end_s - start_s, 2),
        spans=tuple(_span(span, start_s, end_s) for span in kept),
    )


_Bar = tuple[Stage, str, float, float, int | None, str | None, str]
"""Stage, lane, start, end, version, code, purpose."""


def _span(bar: _Bar, start_s: float, end_s: float) -> Span:
    stage, lane, began_s, ended_s, version, code, purpose = bar
    return Span(
        stage=stage,
        lane=lane,
        start_s=round(max(began_s, start_s) - end_s, 2),
        end_s=round(min(ended_s, end_s) - end_s, 2),
        version=version,
        code=code,
        purpose=purpose,
    )


def _trainer_spans(formed: Iterable[Any], end_s: float) -> Iterable[_Bar]:
    """From batch to announcement: `train_s` of it trained, the rest wrote, cut and published the version."""
    for row in formed:
        if row.published_at_s is None:
            yield "train", "trainer", row.formed_at_s, end_s, row.version + 1, None, "train"
            continue
        trained_s = row.formed_at_s + StepReport.parse(row.report).train_s if row.report else row.formed_at_s
        trained_s = min(trained_s, row.published_at_s)
        yield "train", "trainer", row.formed_at_s, trained_s, row.version + 1, None, "train"
        yield "broadcast", "trainer", trained_s, row.published_at_s, row.version + 1, None, "train"


def _work_spans(db: Connection, start_s: float, end_s: float) -> Iterable[_Bar]:
    rows = db.execute(_recent_work(start_s)).all()
    busiest: dict[str, int] = {}
    for row in rows:
        busiest[row.node] = busiest.get(row.node, 0) + 1
    shown = set(sorted(busiest, key=lambda node: -busiest[node])[:MAX_LANES])
    for row in rows:
        yield from _lease_spans(row, end_s, shown=row.node in shown)


def _recent_work(start_s: float) -> Select[Any]:
    return (
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


def _lease_spans(row: Row[Any], end_s: float, *, shown: bool) -> Iterable[_Bar]:
    def first(*moments: float | None) -> float:
        known = (moment for moment in (*moments, row.ended_at_s, end_s) if moment is not None)
        return float(next(known))

    version, purpose = row.policy_version, row.purpose
    if shown:
        generated_s = first(row.asked_at_s, row.received_at_s)
        yield "generate", row.node, row.issued_at_s, generated_s, version, None, purpose
        if row.asked_at_s is not None:
            yield "upload", row.node, row.asked_at_s, first(row.received_at_s), version, None, purpose
    if row.received_at_s is None:
        return
    if row.claimed_at_s is None:
        yield "queue", "validator", row.received_at_s, first(), version, None, purpose
    else:
        yield "check", "validator", row.claimed_at_s, first(row.given_at_s), version, row.code, purpose
