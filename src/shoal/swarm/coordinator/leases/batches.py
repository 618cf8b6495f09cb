"""Accepted groups, and the batches that the trainer gets of them.

A group is ready, held, dropped (all rewards are equal: no signal), stale, withdrawn (its node was caught), or batched. A batch
is formed once, in the transaction that assigns its groups, and kept as the bytes of its answer. Asking again, after a crash of
either side, gives the same groups, and no group is ever in two batches.

A group of a submission that was accepted without every check is held until a later submission of its node was drawn for every
check and accepted. It is withdrawn if that one is refused. At most `max_unchecked_share` of a batch are such groups; the draw of each
submission decides which of them are used, and a node without enough checked work behind it has none (rules/trust.py). The others
become stale.
"""

import json
import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.rules.difficulty import next_rate, problem_numbers
from shoal.swarm.coordinator.rules.trust import check_draw, checks_before_release, is_usable
from shoal.swarm.coordinator.store.schema import (
    batches,
    epochs,
    groups,
    leases,
    pass_rates,
    submissions,
    uploads,
    verdicts,
)
from shoal.swarm.coordinator.store.statements import Statement, given, inserting
from shoal.wire.lease import Verdict
from shoal.wire.messages import Batch, Group, TaskFigures


class GroupState(StrEnum):
    READY = "ready"
    HELD = "held"
    DROPPED = "dropped"
    STALE = "stale"
    BATCHED = "batched"
    WITHDRAWN = "withdrawn"


WAITING = (GroupState.READY.value, GroupState.HELD.value)
"""States of groups that may still be trained on."""
_COUNT_READY = Statement(
    select(func.count().label("total"), func.coalesce(func.sum(groups.c.unchecked), 0).label("unchecked"))
    .select_from(groups)
    .where(groups.c.state == GroupState.READY.value, groups.c.policy_version >= given("oldest"))
)
RECENT_GROUPS = 64
_SIGNAL = (*WAITING, GroupState.BATCHED.value)
_LATELY = (
    select(groups.c.state)
    # Stale groups were never tested for signal.
    .where(groups.c.state.in_((*_SIGNAL, GroupState.DROPPED.value)))
    .order_by(groups.c.accepted_seq.desc())
    .limit(RECENT_GROUPS)
    .subquery()
)
SIGNAL_PRIOR = 8.0
"""Groups with signal that are added to the counted ones, so that the share is 1 at the beginning and never 0."""
_COUNT_SIGNAL = Statement(
    select(
        func.count().filter(_LATELY.c.state.in_(_SIGNAL)).label("signal"), func.count().label("total")
    ).select_from(_LATELY)
)
_INSERT = inserting(groups)
_PASS_RATE = Statement(
    select(pass_rates.c.rate).where(
        pass_rates.c.task == given("label"), pass_rates.c.problem == given("number")
    )
)
_FORMED = Statement(select(batches.c.version).where(batches.c.version == given("number")))


def has_signal(rewards: tuple[float, ...]) -> bool:
    """Returns whether a group can be learned from: advantages are differences from its mean, so equal rewards teach nothing."""
    return max(rewards) != min(rewards)


def is_stale(newest: int, policy_version: int, max_lag: int) -> bool:
    return newest - policy_version > max_lag


def add_groups(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    submission: Row[Any],
    verdict: Verdict,
    seq: int,
) -> None:
    """Inserts one group for each prompt of an accepted lease. `seq` is the number of the verdict in the ledger."""
    size = lease.samples_per_prompt
    unchecked = verdict.checks != "full"
    newest = newest_version(tx.db)
    assert newest is not None, "a lease was issued, so a policy was published"
    stale = is_stale(newest, submission.policy_version, coordinator.spec.max_lag)
    rows: list[dict[str, Any]] = []
    for index in range(lease.num_prompts):
        rewards = verdict.rewards[index * size : (index + 1) * size]
        usable = GroupState.HELD if unchecked else GroupState.READY
        signal = usable if has_signal(rewards) else GroupState.DROPPED
        rows.append(
            {
                "group_id": f"{lease.lease_id}-{index}",
                "task": lease.task,
                "lease_id": lease.lease_id,
                "prompt_index": index,
                "sha256": submission.sha256,
                "policy_version": submission.policy_version,
                "rewards": json.dumps(rewards),
                "reward_mean": math.fsum(rewards) / size,
                "state": (GroupState.STALE if stale else signal).value,
                "unchecked": int(unchecked),
                "accepted_seq": seq,
                "stale_seq": seq if stale else None,
                "batch_version": None,
            }
        )
    tx.write_many(_INSERT, rows)
    if stale:
        _record_stale(tx, newest, [row["group_id"] for row in rows])


def pass_rate(db: Connection, task: str, problem: int) -> float | None:
    """Returns the pass rate of a problem by its number; None if no group of it was accepted."""
    rate: float | None = _PASS_RATE.value(db, label=task, number=problem)
    return rate


def update_pass_rates(tx: Transaction, coordinator: Coordinator, lease: Row[Any], verdict: Verdict) -> None:
    """Enters the rewards of an accepted train lease into the pass rates of its problems, if its task uses them."""
    body = json.loads(lease.sealed)["body"]  # plain JSON: the coordinator sealed it itself
    if not body["attempts"]:
        return
    size = lease.samples_per_prompt
    numbers = problem_numbers(body["seed"], body["attempts"], coordinator.num_problems(lease.task))
    for index, number in enumerate(numbers):
        before = pass_rate(tx.db, lease.task, number)
        rate = next_rate(before, verdict.rewards[index * size : (index + 1) * size])
        if before is None:
            tx.write(insert(pass_rates).values(task=lease.task, problem=number, rate=rate))
        else:
            own = (pass_rates.c.task == lease.task, pass_rates.c.problem == number)
            tx.write(update(pass_rates).where(*own).values(rate=rate))


def retire_stale(tx: Transaction, newest: int, max_lag: int) -> None:
    """Marks the ready and held groups as stale that are too old once version `newest` is published."""
    too_old = (groups.c.state.in_(WAITING), groups.c.policy_version < newest - max_lag)
    query = select(groups.c.group_id).where(*too_old).order_by(groups.c.accepted_seq)
    if ids := list(tx.db.execute(query).scalars()):
        seq = _record_stale(tx, newest, ids)
        tx.write(update(groups).where(*too_old).values(state=GroupState.STALE.value, stale_seq=seq))


def withdraw(tx: Transaction, lease_ids: list[str]) -> list[str]:
    """Withdraws the groups of revoked leases that were not trained on yet, and returns their ids."""
    unused = (groups.c.state.in_(WAITING), groups.c.lease_id.in_(lease_ids))
    ids = list(tx.db.execute(select(groups.c.group_id).where(*unused).order_by(groups.c.group_id)).scalars())
    tx.write(update(groups).where(*unused).values(state=GroupState.WITHDRAWN.value))
    return ids


def release_held(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], because: str, before_seq: int
) -> None:
    """Makes held groups of a node ready after its lease `because` passed every check.

    Only groups that may be used, and whose submissions came before receipt `before_seq`, that of the lease. A node must have
    passed enough checks in a row before any of its groups is released; checked groups without signal do not count.
    """
    share = coordinator.config.max_unchecked_share
    needed = checks_before_release(coordinator.config.check_rate, share)
    if node.streak * signal_share(tx.db) < needed:
        return
    ids = [
        row.group_id
        for row in _held_groups(tx.db, node.node, before_seq)
        if is_usable(check_draw(bytes.fromhex(row.secret), row.lease_id, row.sha256), row.draw_rate, share)
    ]
    if ids:
        tx.write(update(groups).where(groups.c.group_id.in_(ids)).values(state=GroupState.READY.value))
        tx.record("group.released", node=node.node, because=because, group_ids=ids)


def withdraw_held(tx: Transaction, node: str, because: str) -> None:
    """Withdraws all held groups of a node that was caught. `because` is the refused lease, or "" for an action of the operator."""
    ids = [row.group_id for row in _held_groups(tx.db, node)]
    if ids:
        tx.write(update(groups).where(groups.c.group_id.in_(ids)).values(state=GroupState.WITHDRAWN.value))
        tx.record("group.withdrawn", node=node, because=because, group_ids=ids)


def _held_groups(db: Connection, node: str, before_seq: int | None = None) -> Sequence[Any]:
    """Returns the held groups of a node, each with what the draw of its submission is computed from."""
    query = (
        select(
            groups.c.group_id,
            submissions.c.lease_id,
            submissions.c.sha256,
            submissions.c.draw_rate,
            epochs.c.secret,
        )
        .join(submissions, submissions.c.lease_id == groups.c.lease_id)
        .join(epochs, epochs.c.epoch == submissions.c.draw_epoch)
        .where(groups.c.state == GroupState.HELD.value, submissions.c.node == node)
        .order_by(groups.c.group_id)
    )
    if before_seq is not None:
        query = query.where(submissions.c.seq < before_seq)
    return db.execute(query).all()


def _record_stale(tx: Transaction, newest: int, group_ids: list[str]) -> int:
    return tx.record(
        "group.stale", code="void.stale", version=newest, num_groups=len(group_ids), group_ids=group_ids
    )


def find_batch(db: Connection, version: int) -> Batch | None:
    body = db.execute(select(batches.c.body).where(batches.c.version == version)).scalar_one_or_none()
    return None if body is None else Batch.parse(body)


def is_formed(db: Connection, version: int) -> bool:
    return _FORMED.value(db, number=version) is not None


def count_ready(db: Connection, oldest: int, max_unchecked_share: float) -> int:
    """Returns how many ready groups of version `oldest` or newer fit into batches, the unchecked ones only up to their share."""
    found = _COUNT_READY.row(db, oldest=oldest)
    assert found is not None, "a count is one row"
    return usable_groups(int(found.total - found.unchecked), int(found.unchecked), max_unchecked_share)


def usable_groups(checked: int, unchecked: int, max_unchecked_share: float) -> int:
    """Returns how many of these groups fit into batches of which at most `max_unchecked_share` are unchecked."""
    if max_unchecked_share == 1:
        return checked + unchecked
    # The small number makes up for rounding: 3 * 0.25 / 0.75 must be 1.
    return checked + min(unchecked, int(checked * max_unchecked_share / (1 - max_unchecked_share) + 1e-9))


def signal_share(db: Connection) -> float:
    """Returns the share of recently accepted groups that have signal, as an estimate of the next ones."""
    found = _COUNT_SIGNAL.row(db)
    assert found is not None, "a count is one row"
    return float((found.signal + SIGNAL_PRIOR) / (found.total + SIGNAL_PRIOR))


def count_held(db: Connection) -> int:
    """Returns the number of groups that wait for a full check of their node."""
    held = groups.c.state == GroupState.HELD.value
    return int(db.execute(select(func.count()).select_from(groups).where(held)).scalar_one())


def count_dropped(db: Connection) -> int:
    """Returns the number of groups without signal that were accepted since the last batch."""
    last_seq = select(func.coalesce(func.max(batches.c.seq), 0)).scalar_subquery()
    dropped = (groups.c.state == GroupState.DROPPED.value, groups.c.accepted_seq > last_seq)
    return int(db.execute(select(func.count()).select_from(groups).where(*dropped)).scalar_one())


def form_batch(tx: Transaction, coordinator: Coordinator, version: int) -> Batch | None:
    """Forms the batch of `version` from ready groups, oldest first; returns None if there are too few.

    `version` is the newest version or the one after it.
    """
    wanted = coordinator.config.groups_per_step
    rows = _choose(tx.db, version - coordinator.spec.max_lag, wanted, coordinator.config.max_unchecked_share)
    if len(rows) < wanted:
        return None
    batch = Batch(
        version=version,
        groups=tuple(Group.copied_from(row, rewards=tuple(json.loads(row.rewards))) for row in rows),
        reward_mean=_mean_reward(rows) or 0.0,
        **_since_last_batch(tx.db, coordinator, rows),
        **_mean_times(tx.db, sorted({row.lease_id for row in rows})),
    )
    ids = [group.group_id for group in batch.groups]
    seq = tx.record(
        "batch.formed",
        version=version,
        group_ids=ids,
        dropped_groups=batch.dropped_groups,
        stale_groups=batch.stale_groups,
        reward_mean=batch.reward_mean,
        accepted_reward_mean=batch.accepted_reward_mean,
        accepted_rollouts=batch.accepted_rollouts,
        tasks={title: one.model_dump(exclude={"answer_tokens_mean"}) for title, one in batch.tasks.items()},
    )
    tx.write(
        insert(batches).values(
            version=version, num_groups=len(ids), body=batch.model_dump_json(), formed_at_s=tx.now_s, seq=seq
        )
    )
    tx.write(
        update(groups)
        .where(groups.c.group_id.in_(ids))
        .values(state=GroupState.BATCHED.value, batch_version=version)
    )
    return batch


def _choose(db: Connection, oldest: int, wanted: int, max_unchecked_share: float) -> list[Row[Any]]:
    """Returns the oldest ready groups, at most `wanted`, of which at most `max_unchecked_share` of `wanted` are unchecked."""
    order = (groups.c.policy_version, groups.c.accepted_seq, groups.c.prompt_index)
    found: list[Row[Any]] = []
    for unchecked, limit in ((0, wanted), (1, int(wanted * max_unchecked_share + 1e-9))):
        query = select(groups).where(
            groups.c.state == GroupState.READY.value,
            groups.c.unchecked == unchecked,
            # For the newest version retire_stale has removed what is too old; for the version after it, not yet.
            groups.c.policy_version >= oldest,
        )
        found += db.execute(query.order_by(*order).limit(limit)).all()
    found.sort(key=lambda row: (row.policy_version, row.accepted_seq, row.prompt_index))
    return found[:wanted]


def _since_last_batch(db: Connection, coordinator: Coordinator, batched: list[Row[Any]]) -> dict[str, Any]:
    """Returns counts of dropped and stale groups and mean rewards of what was accepted since the last batch, by task and in all.

    `batched` are the groups of the batch that is formed now.
    """
    last_seq = db.execute(select(func.coalesce(func.max(batches.c.seq), 0))).scalar_one()
    accepted = groups.c.accepted_seq > last_seq
    rows = db.execute(
        select(
            groups.c.task,
            func.count().label("groups"),
            func.count().filter(groups.c.state == GroupState.DROPPED.value).label("dropped"),
            func.sum(leases.c.samples_per_prompt).label("rollouts"),
            func.sum(groups.c.reward_mean * leases.c.samples_per_prompt).label("reward_sum"),
        )
        .join(leases, leases.c.lease_id == groups.c.lease_id)
        .where(accepted)
        .group_by(groups.c.task)
    )
    found = {row.task: row for row in rows}
    stale = db.execute(
        select(func.count()).select_from(groups).where(groups.c.stale_seq > last_seq)
    ).scalar_one()
    num_accepted = sum(row.groups for row in found.values())
    dropped = sum(row.dropped for row in found.values())
    rollouts = sum(int(row.rollouts) for row in found.values())
    return {
        "dropped_groups": dropped,
        "stale_groups": stale,
        "accepted_reward_mean": sum(row.reward_sum for row in found.values()) / rollouts
        if rollouts
        else None,
        "accepted_rollouts": rollouts,
        "dropped_share": dropped / max(1, num_accepted),
        "unparseable": share_unparseable(
            db, verdicts.c.lease_id.in_(select(groups.c.lease_id).where(accepted).distinct())
        ),
        "tasks": {
            title: _task_figures(found.get(title), [row for row in batched if row.task == title])
            for title in (one.spec.title for one in coordinator.trained)
        },
    }


def _task_figures(accepted: Row[Any] | None, batched: list[Row[Any]]) -> TaskFigures:
    """Returns a task's figures: `accepted` are the sums since the last batch, `batched` the task's groups in this one."""
    return TaskFigures(
        groups=len(batched),
        reward_mean=_mean_reward(batched),
        accepted_groups=0 if accepted is None else accepted.groups,
        accepted_rollouts=0 if accepted is None else int(accepted.rollouts),
        accepted_reward_mean=None if accepted is None else accepted.reward_sum / int(accepted.rollouts),
        dropped_groups=0 if accepted is None else accepted.dropped,
    )


def _mean_reward(rows: list[Row[Any]]) -> float | None:
    """Returns the mean reward of the rollouts of these groups."""
    rewards = [reward for row in rows for reward in json.loads(row.rewards)]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _mean_times(db: Connection, lease_ids: list[str]) -> dict[str, Any]:
    """Returns the mean seconds that generating and checking these leases took."""
    generated, checked = db.execute(
        select(
            func.avg(uploads.c.asked_at_s - leases.c.issued_at_s),
            func.avg(verdicts.c.given_at_s - submissions.c.claimed_at_s),
        )
        .select_from(leases)
        .join(uploads, uploads.c.lease_id == leases.c.lease_id)
        .join(submissions, submissions.c.lease_id == leases.c.lease_id)
        .join(verdicts, verdicts.c.lease_id == leases.c.lease_id)
        .where(leases.c.lease_id.in_(lease_ids))
    ).one()
    return {"generate_s": round(generated or 0.0, 3), "check_s": round(checked or 0.0, 3)}


def share_unparseable(db: Connection, which: ColumnElement[bool]) -> float:
    """Returns the share of graded rows without a readable answer, over the verdicts that match `which`."""
    query = select(func.sum(verdicts.c.unparseable), func.sum(verdicts.c.graded)).where(which)
    unparseable, graded = db.execute(query).one()
    return float((unparseable or 0) / max(1, graded or 0))


def count_by_state(db: Connection) -> dict[str, int]:
    query = select(groups.c.state, func.count()).group_by(groups.c.state)
    return {row[0]: row[1] for row in db.execute(query)}
