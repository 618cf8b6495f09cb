"""Issuing leases: may this node have one, what work is there (rules/planning.py), and the lease that is made of it."""

import hashlib
import random
import secrets
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, func, not_, select

from shoal.swarm.coordinator.context import Coordinator, RunState, Transaction, run_state
from shoal.swarm.coordinator.leases import batches, epochs, evaluations, lifecycle
from shoal.swarm.coordinator.leases.lease_rows import LEASES, awaited_of, find_lease
from shoal.swarm.coordinator.membership import accounts, admission, relays
from shoal.swarm.coordinator.membership.nodes import (
    IS_RELIABLE,
    check_compatible,
    mark_live,
    standing_of,
)
from shoal.swarm.coordinator.rules.backpressure import SPREAD
from shoal.swarm.coordinator.rules.difficulty import choose_attempts, problem_numbers
from shoal.swarm.coordinator.rules.lease_account import NODE, LeaseAccount, most_open
from shoal.swarm.coordinator.rules.lease_states import AWAITED, OPEN, LeaseState
from shoal.swarm.coordinator.rules.planning import (
    NoWork,
    PlanningInputs,
    PlanningTerms,
    Work,
    max_bytes,
    plan,
)
from shoal.swarm.coordinator.rules.trust import Trust, next_lease_s, open_leases, owed_lease_s
from shoal.swarm.coordinator.store.schema import leases, nodes, policies
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.tasks.task_errors import conversation_before, pose_problem, pose_prompts
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import AskLease
from shoal.wire.record import Sealed, seal
from shoal.wire.seeded_draw import choose_task, lease_seed, problem_seeds

PROVEN_LAPSES = 2
"""A node whose last leases, this many in a row, all expired does not count as proven."""

OVERDUE_TIMES = 3.0
"""A lease of a proven node counts as expected work for this many times the time that the node usually takes for as many rows."""
OVERDUE_SHARE = 0.05
"""Added to that: this share of the time until the deadline, for downloads and uploads."""

RECORD, RECORD_SHARE = 20, 0.25
"""A node waits for the work of nodes with this share of its own accepted submissions, or with RECORD of them. Trust is earned by
few submissions, so many keys with little work behind them could otherwise keep out the nodes that do the work."""

# Otherwise proven nodes that take leases and keep them until the deadline would keep others from getting any.
_OVERDUE = (nodes.c.rows_per_s > 0) & (
    given("now_s")
    > leases.c.issued_at_s
    + OVERDUE_SHARE * (leases.c.deadline_s - leases.c.issued_at_s)
    + OVERDUE_TIMES * leases.c.num_prompts * leases.c.samples_per_prompt / nodes.c.rows_per_s
)
# Leases of unreliable nodes, and of nodes with little accepted work, match also after their submission: junk costs such a node little,
# and would otherwise keep out the nodes that do the work until a validator has rejected it.
_HOPED = (
    not_(IS_RELIABLE)
    | (nodes.c.accepted < given("record"))
    | (leases.c.state.in_(AWAITED) & ((nodes.c.lapses >= PROVEN_LAPSES) | _OVERDUE))
)
# `oldest` is the oldest version whose rollouts the next batch accepts. A lease that was issued before `oldest` was published is
# generated with an older version, so it is too stale for any batch. While `oldest` is not published, the comparison with NULL
# leaves no row.
_IN_FLIGHT = Statement(
    select(
        func.coalesce(func.sum(leases.c.num_prompts), 0).label("total"),
        func.coalesce(func.sum(leases.c.num_prompts).filter(_HOPED), 0).label("hoped"),
    )
    .join(nodes, nodes.c.node == leases.c.node)
    .where(
        leases.c.state.in_(OPEN),
        leases.c.purpose == "train",
        leases.c.issued_at_s
        >= select(policies.c.published_at_s).where(policies.c.version == given("oldest")).scalar_subquery(),
    )
)
_DIGESTS = Statement(
    select(policies.c.version, policies.c.weights_digest)
    .where(policies.c.version.between(given("first"), given("last")))
    .order_by(policies.c.version)
)


def ask_lease(tx: Transaction, coordinator: Coordinator, ask: AskLease) -> Sealed[Lease]:
    """Returns a lease for the calling node: one that it holds already, or a new one. Raises Rejected if there is no work."""
    tx.check_session(ask.epoch)
    state = run_state(tx.db)
    node, held = tx.caller(), awaited_of(tx.db, tx.actor)
    _check_overdue(tx, held)
    _check_eligible(tx, coordinator, node, state)
    account = accounts.account_of(tx, coordinator, node)
    again = _lease_again(tx, coordinator, node, held, account, ask.holds)
    if again is not None:
        tx.update(LEASES, again.lease_id, session_epoch=node.session_epoch)
        tx.after_commit(lambda: coordinator.backpressure.release_place(node.node))
        mark_live(tx)
        return Sealed[Lease].parse(again.sealed)
    _check_lapses(tx, coordinator, node)
    admission.check_stake(tx, coordinator, node.owner or node.node)
    accounts.check_next_lease(tx, coordinator, node, account)
    try:
        work = plan(_planning_inputs(tx, coordinator, node, state), _planning_terms(coordinator))
    except NoWork as reason:
        wait_s = _refuse(tx, coordinator, node)
        raise Rejected("request.too_early", str(reason), retry_after_s=wait_s) from None
    tx.after_commit(lambda: coordinator.backpressure.release_place(node.node))
    # After the last check: if a request writes and is then refused, all requests of its commit group run twice.
    mark_live(tx)
    return _issue(tx, coordinator, node, work)


def _check_overdue(tx: Transaction, held: list[Row[Any]]) -> None:
    """Raises Rejected until housekeeping has voided the node's leases that ran out, which it does once a second.

    Otherwise the node would be given a lease that it can no longer submit, or a new seed although it still owes an earlier one.
    """
    overdue = [lease.lease_id for lease in held if lease.deadline_s < tx.now_s]
    if overdue:
        raise Rejected(
            "request.too_early",
            f"lease {overdue[0]} ran out and is being voided; ask again after that",
            retry_after_s=lifecycle.EXPIRE_EVERY_S,
        )


def _refuse(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> float:
    """Returns how long a node without work should wait. Counts the refusal after commit, because a commit group may run twice.

    Only nodes with an accepted submission keep a place in the queue; otherwise new keys, which cost nothing, could block it.
    """
    backpressure, now_s, least_s = coordinator.backpressure, tx.now_s, coordinator.config.retry_s
    proven = is_proven(node)
    wait_s = backpressure.wait_s(proven=proven, least_s=least_s, spread=random.uniform(*SPREAD))
    if proven:
        tx.after_commit(
            lambda: backpressure.keep_place(node.node, now_s, wait_s, accepted=node.accepted, least_s=least_s)
        )
    else:
        tx.after_commit(lambda: backpressure.others.count(now_s, least_s=least_s))
    return wait_s


def _check_eligible(tx: Transaction, coordinator: Coordinator, node: Row[Any], state: RunState) -> None:
    """Raises Rejected for nodes that are outdated or have left, and while the run is paused. auth.py refuses banned nodes."""
    check_compatible(node, coordinator, tx.now_s)
    if node.trust == Trust.RETIRED.value:
        raise Rejected("request.conflict", "the node has left the run; a new session brings it back")
    if state.paused:
        raise Rejected("request.paused", "no leases are issued", retry_after_s=coordinator.config.heartbeat_s)


def _check_lapses(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> None:
    """Raises Rejected if the node must wait because its last leases expired: each one in a row makes the wait longer."""
    wait_s = next_lease_s(standing_of(node), lease_s=coordinator.config.lease_s) - tx.now_s
    if wait_s > 0:
        raise Rejected(
            "request.too_early",
            f"{node.lapses} leases in a row ran out in this node's hands; it gets the next in {wait_s:.0f} s",
            retry_after_s=min(wait_s, 60.0),
        )


def _lease_again(
    tx: Transaction,
    coordinator: Coordinator,
    node: Row[Any],
    held: list[Row[Any]],
    account: LeaseAccount,
    holds: tuple[str, ...] | None,
) -> Row[Any] | None:
    """Returns the lease of `held` that is sent again; None if the node may get a new one.

    One that belongs to an earlier session or that the node does not know is sent again, and the first if the node has as many
    as it may hold. So a node that crashed, or that never got the answer, continues where it was; the lease would otherwise expire,
    which counts against the node.
    """
    config = coordinator.config
    earned = open_leases(standing_of(node), most=config.max_open_leases, trusted_after=config.trusted_after)
    limit = most_open(account, NODE, earned)
    staked = admission.staked_leases(tx.db, coordinator, node.owner or node.node)
    if staked is not None:
        limit = min(limit, staked)
    if not held and limit == 0:
        raise Rejected("request.not_admitted", "the stake does not suffice for a single lease any more")
    for lease in held:
        if lease.session_epoch != node.session_epoch or (holds is not None and lease.lease_id not in holds):
            return lease
    return held[0] if held and len(held) >= limit else None


def is_proven(node: Row[Any]) -> bool:
    """Returns whether the node has an accepted submission, does not let leases run out and is not suspected."""
    return bool(node.accepted > 0 and node.lapses < PROVEN_LAPSES and node.trust != Trust.QUARANTINED.value)


def groups_in_flight(db: Connection, oldest: int, now_s: float, record: int = 0) -> tuple[int, int]:
    """Counts the groups of open train leases of version `oldest` or newer: first those that will arrive, then the others.

    Those of proven nodes with at least `record` accepted submissions will arrive, unless they are overdue. So do submissions of
    nodes with accepted work, and as many of it, that are not suspected.
    """
    found = _IN_FLIGHT.row(db, oldest=oldest, now_s=now_s, record=record)
    assert found is not None, "a sum is one row"
    return int(found.total - found.hoped), int(found.hoped)


def _planning_terms(coordinator: Coordinator) -> PlanningTerms:
    config, spec = coordinator.config, coordinator.spec
    return PlanningTerms(
        groups_per_step=config.groups_per_step,
        prompts_per_lease=config.prompts_per_lease,
        max_prompts_per_lease=config.max_prompts_per_lease,
        lease_s=config.lease_s,
        stale=config.stale,
        max_lag=spec.max_lag,
        samples_per_prompt=max(spec.sampling.of(task).samples_per_prompt for task in spec.tasks),
    )


def _planning_inputs(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], state: RunState
) -> PlanningInputs:
    config, spec, newest = coordinator.config, coordinator.spec, state.newest_version
    oldest = 0
    if newest is not None and config.stale == "wait":
        oldest = max(0, newest + state.batch_formed + state.next_formed - spec.max_lag)
    proven, record = is_proven(node), min(RECORD, int(RECORD_SHARE * node.accepted))
    coming, hoped = groups_in_flight(tx.db, oldest, tx.now_s, record)
    return PlanningInputs(
        newest_version=newest,
        last_version=spec.last_version,
        finished=state.finished_version == spec.last_version,
        relays=relays.usable(tx.db, tx.now_s, config.heartbeat_s, newest),
        standing=standing_of(node),
        proven=proven,
        rows_per_s=node.rows_per_s,
        chunk=None
        if newest is None
        else evaluations.next_chunk(tx, coordinator, node, newest=newest, proven=proven, record=record),
        ready_groups=batches.count_ready(tx.db, oldest, config.max_unchecked_share),
        proven_groups=coming,
        newcomer_groups=hoped,
        ahead=coordinator.backpressure.ahead_of(tx.actor, tx.now_s, record),
        batch_formed=state.batch_formed,
        next_formed=state.next_formed,
        signal_share=batches.signal_share(tx.db),
    )


def _issue(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Sealed[Lease]:
    lease = _compose(tx, coordinator, node, work)
    text = lease.canonical()
    sealed = seal(lease, coordinator.run_key, canonical=text)
    problems: dict[str, Any] = {}
    if lease.attempts:  # what the ledger needs so that the choices of difficulty sampling can be repeated
        size = coordinator.num_problems(lease.task.title)
        numbers = problem_numbers(lease.seed, lease.attempts, size)
        problems = {"attempts": list(lease.attempts), "problems": numbers, "num_problems": size}
    public = {  # in the table and in the ledger
        "lease_id": lease.lease_id,
        "node": lease.node,
        "purpose": lease.purpose,
        "epoch": lease.epoch,
        "chunk": lease.chunk,
        "deadline_s": lease.deadline_s,
        "unit": lease.unit or lease.lease_id,
        "task": lease.task.title,
        "num_prompts": len(lease.prompts),
        "samples_per_prompt": lease.sampling.samples_per_prompt,
    }
    tx.insert(
        LEASES,
        **public,
        network=tx.network,
        session_epoch=node.session_epoch,
        eval_version=work.versions[0] if work.purpose == "eval" else None,
        max_bytes=lease.max_bytes,
        sealed=sealed.model_dump_json(),
        issued_at_s=lease.issued_at_s,
        state=LeaseState.ISSUED.value,
        credit=0,
    )
    tx.record(
        "lease.issued",
        **public,
        versions=[policy.version for policy in lease.policies],
        lease_digest=hashlib.sha256(text).hexdigest(),
        **problems,
    )
    return sealed


def _work_to_repeat(tx: Transaction, node: Row[Any], work: Work) -> Lease | None:
    """Returns the node's first lease of work that it gets again, because it owes it or because it became void; None for new work."""
    if work.purpose == "train":
        unit = epochs.take_debt(tx, node.node)
    else:
        unit = evaluations.voided_unit(tx.db, node.node, work.versions[0], work.evaluation, work.chunk)
    return None if unit is None else Sealed[Lease].parse(find_lease(tx.db, unit).sealed).body


def _compose(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Lease:
    config, spec = coordinator.config, coordinator.spec
    lease_id, first = secrets.token_hex(16), _work_to_repeat(tx, node, work)
    if first is None:
        epoch, secret = epochs.secret_for_lease(tx, config.leases_per_epoch)
        seed, num_prompts = lease_seed(secret, lease_id, tx.actor), work.num_prompts
        lease_s = config.lease_s
    else:
        # All prompts of the first lease, also if fewer are needed now: a node could otherwise choose the time at which the prompts
        # that it does not like are not leased again.
        epoch, seed, num_prompts = first.epoch, first.seed, len(first.prompts)
        lease_s = owed_lease_s(standing_of(node), lease_s=config.lease_s, num_prompts=num_prompts)
    if work.purpose == "train":
        leased = coordinator.trained[choose_task(seed, [one.spec.weight for one in coordinator.trained])]
        sampling = spec.sampling.of(leased.spec)
    else:
        leased = next(task for one, task in coordinator.evaluated if one.task.title == work.evaluation)
        own = spec.sampling.of(leased.spec)
        sampling = own.model_copy(update={"samples_per_prompt": work.samples_per_prompt})
    if first is not None:
        # If attempts were chosen again, a node could get other problems by giving leases back.
        attempts = first.attempts
    elif work.purpose == "train" and leased.spec.difficulty:
        title, size = leased.spec.title, coordinator.num_problems(leased.spec.title)
        attempts = choose_attempts(seed, num_prompts, size, partial(batches.pass_rate, tx.db, title))
    else:
        attempts = ()
    seeds = problem_seeds(
        seed, run=spec.run, purpose=work.purpose, chunk=work.chunk, num_prompts=num_prompts, attempts=attempts
    )
    problems = [pose_problem(leased.task, work.purpose, problem_seed) for problem_seed in seeds]
    prompts = tuple(problem.prompt for problem in problems)
    contexts = tuple(conversation_before(leased.task, leased.spec, problem) for problem in problems)
    said = tuple(
        "".join([*(turn.content for turn in context), prompt])
        for context, prompt in zip(contexts, prompts, strict=True)
    )
    return Lease(
        lease_id=lease_id,
        run=spec.run,
        node=tx.actor,
        purpose=work.purpose,
        epoch=epoch,
        unit=None if first is None else first.lease_id,
        seed=seed,
        chunk=work.chunk,
        policies=_policy_refs(tx.db, work.versions),
        relays=work.relays,
        origin=relays.origin_url(tx.db),
        task=leased.spec,
        attempts=attempts,
        prompts=prompts,
        chat=bool(leased.task.chat),
        contexts=contexts if any(contexts) else (),
        sampling=sampling,
        proof=spec.proof,
        max_bytes=min(max_bytes(said, sampling, spec.proof), config.max_upload_bytes),
        issued_at_s=tx.now_s,
        deadline_s=tx.now_s + lease_s,
    )


def _policy_refs(db: Connection, versions: tuple[int, ...]) -> tuple[PolicyRef, ...]:
    """Returns those of `versions` that are published, the newest last."""
    rows = _DIGESTS.rows(db, first=min(versions), last=max(versions))
    return tuple(
        PolicyRef(version=row.version, weights_digest=row.weights_digest)
        for row in rows
        if row.version in versions
    )


def check_upload_limit(coordinator: Coordinator) -> None:
    """Raises ValueError if the largest lease may need a larger upload than the configuration allows."""
    config, spec = coordinator.config, coordinator.spec
    most = max(config.prompts_per_lease, config.max_prompts_per_lease)
    sizes = []
    for leased in coordinator.trained:
        prompts = pose_prompts(leased.task, "train", range(most))
        sizes.append((max_bytes(prompts, spec.sampling.of(leased.spec), spec.proof), most))
    for one, leased in coordinator.evaluated:
        num_prompts = min(evaluations.prompts_of_chunk(coordinator, one.samples), one.prompts)
        prompts = pose_prompts(leased.task, "eval", range(num_prompts))
        sampling = spec.sampling.of(leased.spec).model_copy(update={"samples_per_prompt": one.samples})
        sizes.append((max_bytes(prompts, sampling, spec.proof), len(prompts)))
    needed, num_prompts = max(sizes)
    if needed > config.max_upload_bytes:
        raise ValueError(
            f"a lease of {num_prompts} prompt{'s' * (num_prompts > 1)} may need {needed} bytes, above "
            f"max_upload_bytes={config.max_upload_bytes}; raise it, or lower prompts_per_lease or the samples of a prompt"
        )
