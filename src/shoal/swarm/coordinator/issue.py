"""Issuing leases: what work there is for a node that asks, decided by a pure function, and the lease made of it."""

import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from shoal.swarm.coordinator import batches, epochs, evaluations, relays
from shoal.swarm.coordinator.coordinator import Coordinator, Transaction, is_finished, newest_version
from shoal.swarm.coordinator.evaluations import Chunk
from shoal.swarm.coordinator.leases import AWAITED, OPEN, State, expire
from shoal.swarm.coordinator.nodes import Trust, check_session, sign_of_life
from shoal.swarm.coordinator.policies import policy_refs
from shoal.swarm.coordinator.schema import leases
from shoal.wire.codes import Rejected
from shoal.wire.draw import lease_seed, problem_seeds
from shoal.wire.lease import Lease, PolicyRef, Purpose
from shoal.wire.messages import AskLease
from shoal.wire.record import Sealed, seal
from shoal.wire.run import ProofSpec, Sampling

PROMPT_SLACK_TOKENS = 1024
"""What a chat template may add to a prompt. A prompt has at most as many tokens as bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All that decides whether there is work for a node."""

    newest_version: int | None
    last_version: int
    finished: bool
    num_relays: int
    trust: Trust
    chunk: Chunk | None
    """Held-out work that nobody has."""
    ready_groups: int
    flying_groups: int
    """In train leases that have not ended."""
    batch_formed: bool = False
    """The trainer has its batch of the newest version: new groups serve a later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a lease is made of: `versions` are those allowed, the newest last."""

    purpose: Purpose
    versions: range
    chunk: int
    num_prompts: int
    samples_per_prompt: int


class NoWork(Exception):
    """Nothing for this node now; the reason in words."""


def plan(outlook: Outlook, coordinator: Coordinator) -> Work:
    """The work for a node that asks, or NoWork."""
    config, spec = coordinator.config, coordinator.spec
    if outlook.finished:
        raise NoWork("the run is finished")
    if outlook.newest_version is None:
        raise NoWork("no policy yet: the trainer has not published version 0")
    if not outlook.num_relays:
        raise NoWork("no relay is live, so nobody could fetch the weights")
    newest = outlook.newest_version
    # The curve must not hang on a node that is under suspicion.
    if outlook.chunk is not None and outlook.trust is not Trust.QUARANTINED:
        return Work(
            purpose="eval",
            versions=range(outlook.chunk.version, outlook.chunk.version + 1),
            chunk=outlook.chunk.index,
            num_prompts=outlook.chunk.num_prompts,
            samples_per_prompt=config.eval_samples,
        )
    steps_ahead = min(spec.max_lag + 1, outlook.last_version - newest)
    wanted = config.groups_per_step * steps_ahead
    if outlook.ready_groups + outlook.flying_groups >= wanted:
        raise NoWork(_enough(outlook, wanted))
    oldest = oldest_worth_leasing(outlook, coordinator)
    return Work(
        purpose="train",
        versions=range(oldest, newest + 1),
        chunk=0,
        num_prompts=config.prompts_per_lease,
        samples_per_prompt=spec.sampling.samples_per_prompt,
    )


def oldest_worth_leasing(outlook: Outlook, coordinator: Coordinator) -> int:
    """The oldest version a new train lease may be answered with.

    drop: any that the trainer would take now. Nodes are never idle; what is too old when its turn comes is dropped.
    wait: any that it will still take when the turn of these groups comes, after all that are ready or leased. A node
    waits for the next version rather than work for nothing; at max_lag 0 nobody generates while the trainer trains.
    """
    config, max_lag = coordinator.config, coordinator.spec.max_lag
    newest = outlook.newest_version
    assert newest is not None, "no version, no lease"
    if config.stale == "drop":
        return max(0, newest - max_lag)
    queued = outlook.ready_groups + outlook.flying_groups
    serves = newest + outlook.batch_formed + queued // config.groups_per_step
    if serves - max_lag > newest:
        raise NoWork(
            f"groups by version {newest} would be stale when the step from version {serves} uses them "
            f"(max_lag {max_lag}); wait for the next version"
        )
    return max(0, serves - max_lag)


def _enough(outlook: Outlook, wanted: int) -> str:
    if wanted == 0:
        return f"version {outlook.newest_version} is the last; only its held-out evaluation is still out"
    return (
        f"enough work in flight: {outlook.ready_groups} groups ready and {outlook.flying_groups} leased, "
        f"of {wanted} that the trainer can use before they go stale"
    )


def max_bytes(prompts: tuple[str, ...], sampling: Sampling, proof: ProofSpec) -> int:
    """What an honest file can come to, twice over."""
    prompt_tokens = max(len(prompt.encode()) for prompt in prompts) + PROMPT_SLACK_TOKENS
    segments = -(-(sampling.max_new_tokens - 1) // proof.segment_tokens)
    row = 4 * prompt_tokens + 8 * sampling.max_new_tokens + segments * (2 * proof.topk + 2) + 64
    return 2 * len(prompts) * sampling.samples_per_prompt * row + (64 << 10)


def check_upload_limit(coordinator: Coordinator) -> None:
    """A lease must not ask for more than may be uploaded."""
    config, spec = coordinator.config, coordinator.spec
    prompts = tuple(
        coordinator.task.problem("train", seed).prompt for seed in range(config.prompts_per_lease)
    )
    needed = max_bytes(prompts, spec.sampling, spec.proof)
    if needed > config.max_upload_bytes:
        raise ValueError(
            f"a lease of {config.prompts_per_lease} prompts may come to {needed} bytes, above "
            f"max_upload_bytes={config.max_upload_bytes}; raise it or lower prompts_per_lease"
        )


def ask_lease(tx: Transaction, coordinator: Coordinator, ask: AskLease) -> Sealed[Lease]:
    node = check_session(tx, ask.epoch)
    sign_of_life(tx)
    expire(tx, coordinator)
    held = _held(tx, coordinator, node)
    if held is not None:
        return held
    try:
        work = plan(_look(tx, coordinator, Trust(node.trust)), coordinator)
    except NoWork as reason:
        raise Rejected("request.too_early", str(reason), retry_after_s=coordinator.config.retry_s) from None
    return _issue(tx, coordinator, node, work)


def _held(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> Sealed[Lease] | None:
    """The lease to give again: of a session that is gone, or because the node has as many as it may hold.

    So a node that crashed, or whose answer got lost, goes on where it was instead of waiting for a deadline.
    """
    rows = tx.db.execute(
        select(leases)
        .where(leases.c.node == tx.actor, leases.c.state.in_(AWAITED))
        .order_by(leases.c.session_epoch, leases.c.issued_at_s, leases.c.lease_id)
    ).all()
    limit = coordinator.config.max_open_leases if node.trust == Trust.TRUSTED.value else 1
    if not rows or (len(rows) < limit and rows[0].session_epoch == node.session_epoch):
        return None
    tx.db.execute(
        update(leases).where(leases.c.lease_id == rows[0].lease_id).values(session_epoch=node.session_epoch)
    )
    return Sealed[Lease].parse(rows[0].sealed)


def _look(tx: Transaction, coordinator: Coordinator, trust: Trust) -> Outlook:
    config, newest = coordinator.config, newest_version(tx.db)
    chunk = None
    if newest is not None:
        chunk = evaluations.next_chunk(tx.db, newest=newest, keep_versions=coordinator.spec.keep_versions)
    return Outlook(
        newest_version=newest,
        last_version=coordinator.spec.last_version,
        finished=is_finished(tx.db, coordinator.spec),
        num_relays=len(relays.usable(tx.db, tx.now_s, config.heartbeat_s)),
        trust=trust,
        chunk=chunk,
        ready_groups=batches.count_ready(tx.db),
        flying_groups=flying_groups(tx.db),
        batch_formed=newest is not None and batches.is_formed(tx.db, newest),
    )


def flying_groups(db: Connection) -> int:
    query = select(func.coalesce(func.sum(leases.c.num_prompts), 0)).where(
        leases.c.state.in_(OPEN), leases.c.purpose == "train"
    )
    return int(db.execute(query).scalar_one())


def _issue(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Sealed[Lease]:
    epoch, secret = epochs.draw(tx, coordinator.config.leases_per_epoch)
    lease = _compose(tx, coordinator, work, epoch=epoch, secret=secret)
    sealed = seal(lease, coordinator.run_key)
    tx.db.execute(
        insert(leases).values(
            lease_id=lease.lease_id,
            node=lease.node,
            purpose=lease.purpose,
            epoch=epoch,
            session_epoch=node.session_epoch,
            eval_version=work.versions.start if work.purpose == "eval" else None,
            chunk=lease.chunk,
            num_prompts=len(lease.prompts),
            samples_per_prompt=lease.sampling.samples_per_prompt,
            max_bytes=lease.max_bytes,
            sealed=sealed.model_dump_json(),
            issued_at_s=lease.issued_at_s,
            deadline_s=lease.deadline_s,
            state=State.ISSUED.value,
            credit=0,
        )
    )
    tx.record(
        "lease.issued",
        lease_id=lease.lease_id,
        node=lease.node,
        purpose=lease.purpose,
        epoch=epoch,
        chunk=lease.chunk,
        versions=[policy.version for policy in lease.policies],
        deadline_s=lease.deadline_s,
        lease_digest=lease.digest(),
    )
    return sealed


def _compose(tx: Transaction, coordinator: Coordinator, work: Work, *, epoch: int, secret: bytes) -> Lease:
    config, spec = coordinator.config, coordinator.spec
    lease_id = secrets.token_hex(16)
    seed = lease_seed(secret, lease_id, tx.actor)
    seeds = problem_seeds(
        seed, run=spec.run, purpose=work.purpose, chunk=work.chunk, num_prompts=work.num_prompts
    )
    prompts = tuple(coordinator.task.problem(work.purpose, number).prompt for number in seeds)
    sampling = spec.sampling.model_copy(update={"samples_per_prompt": work.samples_per_prompt})
    policies: tuple[PolicyRef, ...] = policy_refs(tx.db, work.versions)
    return Lease(
        lease_id=lease_id,
        run=spec.run,
        node=tx.actor,
        purpose=work.purpose,
        epoch=epoch,
        seed=seed,
        chunk=work.chunk,
        policies=policies,
        relays=relays.usable(tx.db, tx.now_s, config.heartbeat_s),
        task=spec.task,
        prompts=prompts,
        chat=coordinator.task.chat,
        sampling=sampling,
        proof=spec.proof,
        max_bytes=min(max_bytes(prompts, sampling, spec.proof), config.max_upload_bytes),
        issued_at_s=tx.now_s,
        deadline_s=tx.now_s + config.lease_s,
    )
