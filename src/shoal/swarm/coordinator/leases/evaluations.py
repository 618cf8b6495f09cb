"""Held-out evaluations: which versions get one, which parts of it are not leased yet, and its result.

An evaluation is cut into chunks. Each chunk is one lease, pinned to the version, and is leased again until one is accepted.
"""

from sqlalchemy import Connection, func, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN, LeaseState
from shoal.swarm.coordinator.rules.planning import EvalChunk
from shoal.swarm.coordinator.store.schema import evaluation_chunks, evaluations, leases
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.messages import Evaluation

_PENDING = Statement(
    select(evaluations)
    .where(evaluations.c.completed_at_s.is_(None), evaluations.c.version > given("gone"))
    .order_by(evaluations.c.version)
)


def is_due(version: int, *, eval_every: int, last_version: int) -> bool:
    return version % eval_every == 0 or version == last_version


def plan_evaluation(tx: Transaction, coordinator: Coordinator, version: int) -> bool:
    """Plans the evaluation of a published version if it is due. Returns whether the run is over: the last version has none."""
    config, last = coordinator.config, coordinator.spec.last_version
    if config.eval_prompts and is_due(version, eval_every=config.eval_every, last_version=last):
        row = {"num_prompts": config.eval_prompts, "chunk_prompts": config.prompts_per_lease}
        tx.write(insert(evaluations).values(version=version, **row))
        return False
    return version == last


def cut(num_prompts: int, chunk_prompts: int) -> list[int]:
    """Returns the number of prompts in each chunk; the last may have fewer."""
    return [min(chunk_prompts, num_prompts - start) for start in range(0, num_prompts, chunk_prompts)]


def next_chunk(db: Connection, *, newest: int, keep_versions: int) -> EvalChunk | None:
    """Returns the chunk to lease next. Versions that relays no longer keep cannot be evaluated any more."""
    for evaluation in _PENDING.rows(db, gone=newest - keep_versions):
        taken = _taken(db, evaluation.version)
        for index, size in enumerate(cut(evaluation.num_prompts, evaluation.chunk_prompts)):
            if index not in taken:
                return EvalChunk(version=evaluation.version, index=index, num_prompts=size)
    return None


def _taken(db: Connection, version: int) -> set[int]:
    """Returns the chunks that are accepted or leased."""
    states = (*OPEN, LeaseState.ACCEPTED)
    query = select(leases.c.chunk).where(leases.c.eval_version == version, leases.c.state.in_(states))
    return set(db.execute(query).scalars())


def add_chunk(
    tx: Transaction,
    coordinator: Coordinator,
    *,
    version: int,
    chunk: int,
    lease_id: str,
    rewards: tuple[float, ...],
) -> bool:
    """Adds the rewards of an accepted eval lease. Returns whether the run is over: the last version is evaluated."""
    tx.write(
        insert(evaluation_chunks).values(
            version=version, chunk=chunk, lease_id=lease_id, reward_sum=sum(rewards), rollouts=len(rewards)
        )
    )
    row = tx.db.execute(select(evaluations).where(evaluations.c.version == version)).one()
    done, reward_sum, rollouts = _totals(tx.db, version)
    if done < len(cut(row.num_prompts, row.chunk_prompts)):
        return False
    tx.write(update(evaluations).where(evaluations.c.version == version).values(completed_at_s=tx.now_s))
    tx.record("evaluation.completed", version=version, reward_mean=reward_sum / rollouts, rollouts=rollouts)
    return version == coordinator.spec.last_version


def _totals(db: Connection, version: int) -> tuple[int, float, int]:
    row = db.execute(
        select(
            func.count(),
            func.coalesce(func.sum(evaluation_chunks.c.reward_sum), 0.0),
            func.coalesce(func.sum(evaluation_chunks.c.rollouts), 0),
        ).where(evaluation_chunks.c.version == version)
    ).one()
    return int(row[0]), float(row[1]), int(row[2])


def views(db: Connection) -> tuple[Evaluation, ...]:
    """Returns every evaluation that has at least one accepted chunk."""
    rows = db.execute(
        select(
            evaluations.c.version,
            evaluations.c.completed_at_s,
            func.sum(evaluation_chunks.c.reward_sum).label("reward_sum"),
            func.sum(evaluation_chunks.c.rollouts).label("rollouts"),
        )
        .join(evaluation_chunks, evaluation_chunks.c.version == evaluations.c.version)
        .group_by(evaluations.c.version, evaluations.c.completed_at_s)
        .order_by(evaluations.c.version)
    )
    return tuple(
        Evaluation(
            version=row.version,
            reward_mean=row.reward_sum / int(row.rollouts),
            rollouts=int(row.rollouts),
            complete=row.completed_at_s is not None,
        )
        for row in rows
    )


def progress(db: Connection, version: int) -> tuple[int, int] | None:
    """Returns the accepted and the total chunks of a version's evaluation; None if it has no evaluation."""
    row = db.execute(select(evaluations).where(evaluations.c.version == version)).one_or_none()
    return row and (_totals(db, version)[0], len(cut(row.num_prompts, row.chunk_prompts)))
