"""Held-out evaluations: which versions get one, which parts of it are not leased yet, and its result.

An evaluation is cut into chunks. Each chunk is one lease, pinned to the version, and is leased again until one is accepted.

Chunks go to nodes with accepted work. A chunk that a node has held for a while is leased to another node too; the first accepted
submission counts. So a node that takes chunks and keeps them delays the evaluation only a little. A chunk that is held by a node with
no accepted work, or with much less than the node that asks, is leased at once. Nodes without accepted work get chunks only when no
training work is left.

A node that gets a chunk again gets the same seed. It could otherwise provoke void verdicts until it likes the answers.
"""

from collections import Counter
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN, LeaseState
from shoal.swarm.coordinator.rules.planning import LEASE_SHARE, EvalChunk, chunk_prompts
from shoal.swarm.coordinator.store.schema import evaluation_chunks, evaluations, leases, nodes, verdicts
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.lease import Verdict
from shoal.wire.messages import Evaluation

_PENDING = Statement(
    select(evaluations)
    .where(evaluations.c.completed_at_s.is_(None), evaluations.c.version > given("gone"))
    .order_by(evaluations.c.version, evaluations.c.task)
)
_HOLDERS = Statement(
    select(leases.c.chunk, leases.c.node, leases.c.issued_at_s, nodes.c.accepted)
    .join(nodes, nodes.c.node == leases.c.node)
    .where(
        leases.c.eval_version == given("number"), leases.c.task == given("label"), leases.c.state.in_(OPEN)
    )
)
_LET_GO = Statement(
    select(func.count().label("times"), func.max(leases.c.deadline_s).label("deadline_s")).where(
        leases.c.eval_version == given("number"),
        leases.c.node == given("name"),
        leases.c.code.in_(("void.abandoned", "void.expired")),
    )
)
_VOIDED = Statement(
    select(leases.c.unit)
    .where(
        leases.c.eval_version == given("number"),
        leases.c.task == given("label"),
        leases.c.chunk == given("chunk"),
        leases.c.node == given("name"),
        leases.c.state == LeaseState.VOID.value,
    )
    .limit(1)
)


def is_due(version: int, *, eval_every: int, last_version: int) -> bool:
    return version % eval_every == 0 or version == last_version


def plan_evaluation(tx: Transaction, coordinator: Coordinator, version: int) -> bool:
    """Plans the evaluations of a published version that are due. Returns whether the run is over: the last version has none."""
    last = coordinator.spec.last_version
    due = [
        one for one, _ in coordinator.evaluated if is_due(version, eval_every=one.every, last_version=last)
    ]
    for one in due:
        size = prompts_of_chunk(coordinator, one.samples)
        row = {"num_prompts": one.prompts, "chunk_prompts": size, "samples": one.samples}
        tx.write(insert(evaluations).values(version=version, task=one.task.title, **row))
    return not due and version == last


def prompts_of_chunk(coordinator: Coordinator, samples: int) -> int:
    """Returns the number of prompts in a chunk. It is the same in the whole run, because the problems of a chunk follow from its index."""
    spec = coordinator.spec
    trained_samples = max(spec.sampling.of(task).samples_per_prompt for task in spec.tasks)
    return chunk_prompts(
        coordinator.config.prompts_per_lease, trained_samples=trained_samples, samples=samples
    )


def cut(num_prompts: int, chunk_prompts: int) -> list[int]:
    """Returns the number of prompts in each chunk; the last may have fewer."""
    return [min(chunk_prompts, num_prompts - start) for start in range(0, num_prompts, chunk_prompts)]


def next_chunk(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], *, newest: int, proven: bool, record: int
) -> EvalChunk | None:
    """Returns the chunk to lease to a node. Versions that relays no longer keep cannot be evaluated any more.

    Leases of nodes with fewer than `record` accepted submissions, or none, do not keep a chunk from a proven node.
    """
    spec = coordinator.spec
    if not proven and newest < spec.last_version:
        return None
    taken_since_s = tx.now_s - coordinator.config.lease_s * LEASE_SHARE
    for evaluation in _PENDING.rows(tx.db, gone=newest - spec.keep_versions):
        version, task = evaluation.version, evaluation.task
        if _must_wait(tx, coordinator, node, version):
            continue
        holders, taken = Counter[int](), _accepted_chunks(tx.db, version, task)
        for held in _HOLDERS.rows(tx.db, number=version, label=task):
            own = held.node == node.node
            if own or not proven or held.accepted >= max(1, record):
                holders[held.chunk] += 1
                if own or held.issued_at_s > taken_since_s:
                    taken.add(held.chunk)
        free = [
            (holders[index], index, size)
            for index, size in enumerate(cut(evaluation.num_prompts, evaluation.chunk_prompts))
            if index not in taken
        ]
        if free:
            _, index, size = min(free)
            return EvalChunk(
                version=version, index=index, num_prompts=size, task=task, samples=evaluation.samples
            )
    return None


def voided_unit(db: Connection, node: str, version: int, task: str, chunk: int) -> str | None:
    """Returns the first lease of a chunk that this node had and that became void; None if it had none."""
    unit: str | None = _VOIDED.value(db, number=version, label=task, chunk=chunk, name=node)
    return unit


def _must_wait(tx: Transaction, coordinator: Coordinator, node: Row[Any], version: int) -> bool:
    """Returns whether the node gave chunks of this version back or let them expire, and others are to be asked first.

    It waits until the deadline of the last one, and `lease_s` more for each. The wait has an end, because every node may have let a chunk
    go once, for example because answers were lost on the way; the evaluation would then never be complete.
    """
    lost = _LET_GO.row(tx.db, number=version, name=node.node)
    assert lost is not None, "a count is one row"
    return bool(lost.times) and tx.now_s < lost.deadline_s + lost.times * coordinator.config.lease_s


def _accepted_chunks(db: Connection, version: int, task: str) -> set[int]:
    query = select(evaluation_chunks.c.chunk).where(
        evaluation_chunks.c.version == version, evaluation_chunks.c.task == task
    )
    return set(db.execute(query).scalars())


def add_chunk(tx: Transaction, coordinator: Coordinator, lease: Row[Any], verdict: Verdict) -> bool:
    """Adds the rewards of an accepted eval lease, unless its chunk has a result already.

    Returns whether the run is over: all evaluations of the last version are complete.
    """
    version, task, rewards = lease.eval_version, lease.task, verdict.rewards
    if lease.chunk in _accepted_chunks(tx.db, version, task):
        return False
    tx.write(
        insert(evaluation_chunks).values(
            version=version,
            task=task,
            chunk=lease.chunk,
            lease_id=lease.lease_id,
            reward_sum=sum(rewards),
            rollouts=len(rewards),
            prompts=lease.num_prompts,
            right=counted(verdict, "right", len(rewards)),
            passed=counted(verdict, "passed", lease.num_prompts),
            majority=counted(verdict, "majority", lease.num_prompts),
        )
    )
    own = (evaluations.c.version == version, evaluations.c.task == task)
    row = tx.db.execute(select(evaluations).where(*own)).one()
    done = len(_accepted_chunks(tx.db, version, task))
    if done < len(cut(row.num_prompts, row.chunk_prompts)):
        return False
    tx.write(update(evaluations).where(*own).values(completed_at_s=tx.now_s))
    (result,) = views(tx.db, *own)
    tx.record(
        "evaluation.completed",
        version=version,
        task=task,
        **result.model_dump(
            include={"reward_mean", "rollouts", "samples", "pass_at_1", "pass_at_k", "majority"}
        ),
    )
    is_open = (evaluations.c.version == version, evaluations.c.completed_at_s.is_(None))
    still_open = tx.db.execute(select(evaluations.c.task).where(*is_open).limit(1)).one_or_none()
    return bool(version == coordinator.spec.last_version and still_open is None)


def counted(verdict: Verdict, name: str, most: int) -> int:
    """Returns a count of the verdict's evidence; 0 if the validator does not count it."""
    count = verdict.evidence.get(name, 0)
    return min(max(count, 0), most) if isinstance(count, int) else 0


def views(db: Connection, *which: ColumnElement[bool]) -> tuple[Evaluation, ...]:
    """Returns every evaluation that has at least one accepted chunk, or those of them that match `which`."""
    chunks = evaluation_chunks.c
    rows = db.execute(
        select(
            evaluations.c.version,
            evaluations.c.task,
            evaluations.c.samples,
            evaluations.c.completed_at_s,
            func.sum(chunks.reward_sum).label("reward_sum"),
            func.sum(chunks.rollouts).label("rollouts"),
            func.sum(chunks.prompts).label("prompts"),
            func.sum(chunks.right).label("right"),
            func.sum(chunks.passed).label("passed"),
            func.sum(chunks.majority).label("majority"),
            func.coalesce(func.sum(verdicts.c.output_tokens), 0).label("output_tokens"),
        )
        .join(
            evaluation_chunks,
            (chunks.version == evaluations.c.version) & (chunks.task == evaluations.c.task),
        )
        .outerjoin(verdicts, verdicts.c.lease_id == chunks.lease_id)
        .where(*which)
        .group_by(
            evaluations.c.version, evaluations.c.task, evaluations.c.samples, evaluations.c.completed_at_s
        )
        .order_by(evaluations.c.version, evaluations.c.task)
    )
    return tuple(
        Evaluation.copied_from(
            row,
            reward_mean=row.reward_sum / int(row.rollouts),
            rollouts=int(row.rollouts),
            complete=row.completed_at_s is not None,
            answer_tokens_mean=int(row.output_tokens) / int(row.rollouts),
            pass_at_1=int(row.right) / int(row.rollouts),
            pass_at_k=int(row.passed) / int(row.prompts),
            majority=int(row.majority) / int(row.prompts),
        )
        for row in rows
    )


def progress(db: Connection, version: int) -> tuple[int, int] | None:
    """Returns the accepted and the total chunks of a version's evaluations; None if it has none."""
    rows = db.execute(select(evaluations).where(evaluations.c.version == version)).all()
    done = select(func.count()).where(evaluation_chunks.c.version == version)
    total = sum(len(cut(row.num_prompts, row.chunk_prompts)) for row in rows)
    return (db.execute(done).scalar_one(), total) if rows else None
