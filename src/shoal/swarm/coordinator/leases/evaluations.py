"""Held-out evaluations: which versions get one, which parts of it are not leased yet, and its result.

An evaluation is cut into chunks. Each chunk is one lease, pinned to the version, and is leased again until one is accepted.

Chunks go to nodes with accepted work. A chunk that a node has held for a while is leased to another node too; the first accepted
submission counts. So a node that takes chunks and keeps them delays the evaluation only a little, and a key that has not delivered
anything does not delay it at all. Without training work left, nodes without accepted work get chunks too, but what they hold does
not keep a chunk from others.
"""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN
from shoal.swarm.coordinator.rules.planning import LEASE_SHARE, EvalChunk
from shoal.swarm.coordinator.store.schema import evaluation_chunks, evaluations, leases, nodes, verdicts
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.messages import Evaluation

_PENDING = Statement(
    select(evaluations)
    .where(evaluations.c.completed_at_s.is_(None), evaluations.c.version > given("gone"))
    .order_by(evaluations.c.version)
)
_HOLDERS = Statement(
    select(leases.c.chunk, leases.c.node, leases.c.issued_at_s, nodes.c.accepted)
    .join(nodes, nodes.c.node == leases.c.node)
    .where(leases.c.eval_version == given("number"), leases.c.state.in_(OPEN))
)
_LET_GO = Statement(
    select(leases.c.lease_id)
    .where(
        leases.c.eval_version == given("number"),
        leases.c.node == given("name"),
        leases.c.code.in_(("void.abandoned", "void.expired")),
    )
    .limit(1)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAsker:
    """The node that asks for held-out work."""

    node: str
    proven: bool
    now_s: float
    lease_s: float

    @property
    def taken_since_s(self) -> float:
        """Returns the time since when a lease must have been issued to keep its chunk from other nodes."""
        return self.now_s - self.lease_s * LEASE_SHARE


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


def next_chunk(
    db: Connection, asker: EvalAsker, *, newest: int, keep_versions: int, last_version: int
) -> EvalChunk | None:
    """Returns the chunk to lease to a node. Versions that relays no longer keep cannot be evaluated any more."""
    if not asker.proven and newest < last_version:
        return None
    for evaluation in _PENDING.rows(db, gone=newest - keep_versions):
        version = evaluation.version
        if _LET_GO.row(db, number=version, name=asker.node) is not None:
            continue
        holders, accepted = _holders(db, asker, version), _accepted_chunks(db, version)
        free = [
            (len(holders[index]), index, size)
            for index, size in enumerate(cut(evaluation.num_prompts, evaluation.chunk_prompts))
            if index not in accepted and not _is_taken(holders[index], asker)
        ]
        if free:
            _, index, size = min(free)
            return EvalChunk(version=version, index=index, num_prompts=size)
    return None


def _holders(db: Connection, asker: EvalAsker, version: int) -> dict[int, list[tuple[str, float]]]:
    """Returns who holds a lease of each chunk, and since when. A proven node does not wait for nodes without accepted work."""
    holders: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for row in _HOLDERS.rows(db, number=version):
        if row.accepted > 0 or not asker.proven or row.node == asker.node:
            holders[row.chunk].append((row.node, row.issued_at_s))
    return holders


def _is_taken(holders: list[tuple[str, float]], asker: EvalAsker) -> bool:
    return any(node == asker.node or issued_s > asker.taken_since_s for node, issued_s in holders)


def _accepted_chunks(db: Connection, version: int) -> set[int]:
    query = select(evaluation_chunks.c.chunk).where(evaluation_chunks.c.version == version)
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
    """Adds the rewards of an accepted eval lease, unless its chunk has a result already.

    Returns whether the run is over: the last version is evaluated.
    """
    if chunk in _accepted_chunks(tx.db, version):
        return False
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
            func.coalesce(func.sum(verdicts.c.output_tokens), 0).label("output_tokens"),
        )
        .join(evaluation_chunks, evaluation_chunks.c.version == evaluations.c.version)
        .outerjoin(verdicts, verdicts.c.lease_id == evaluation_chunks.c.lease_id)
        .group_by(evaluations.c.version, evaluations.c.completed_at_s)
        .order_by(evaluations.c.version)
    )
    return tuple(
        Evaluation(
            version=row.version,
            reward_mean=row.reward_sum / int(row.rollouts),
            rollouts=int(row.rollouts),
            complete=row.completed_at_s is not None,
            answer_tokens_mean=int(row.output_tokens) / int(row.rollouts),
        )
        for row in rows
    )


def progress(db: Connection, version: int) -> tuple[int, int] | None:
    """Returns the accepted and the total chunks of a version's evaluation; None if it has no evaluation."""
    row = db.execute(select(evaluations).where(evaluations.c.version == version)).one_or_none()
    return row and (_totals(db, version)[0], len(cut(row.num_prompts, row.chunk_prompts)))
