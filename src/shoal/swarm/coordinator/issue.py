"""Issuing leases: what work there is for a node that asks, decided by a pure function, and the lease made of it."""

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from shoal.swarm.coordinator import admission, batches, epochs, evaluations, relays
from shoal.swarm.coordinator.coordinator import (
    Coordinator,
    Transaction,
    is_finished,
    is_paused,
    newest_version,
)
from shoal.swarm.coordinator.evaluations import Chunk
from shoal.swarm.coordinator.leases import AWAITED, OPEN, State, expire, find_lease
from shoal.swarm.coordinator.nodes import check_compatible, check_session, get_node, sign_of_life, standing_of
from shoal.swarm.coordinator.policies import policy_refs
from shoal.swarm.coordinator.schema import leases, nodes, policies
from shoal.swarm.coordinator.statements import Statement, given, inserting
from shoal.swarm.coordinator.trust import Standing, Trust, lease_prompts, next_lease_s, open_leases
from shoal.wire.codes import Rejected
from shoal.wire.draw import lease_seed, problem_seeds
from shoal.wire.lease import Lease, PolicyRef, Purpose
from shoal.wire.messages import AskLease, RelayView
from shoal.wire.record import Sealed, seal
from shoal.wire.run import ProofSpec, Sampling

NEWCOMER_SHARE = 1.0
"""Work leased to nodes that have shown nothing yet does not count as coming: beyond what the trainer can use, this share
of it again is leased to them. So idle newcomers hold up nobody who has delivered before, and each other only past that."""
LEASE_SHARE = 0.25
"""A lease is sized so that its node should be done within this share of the time it has."""
PROMPT_SLACK_TOKENS = 1024
"""What a chat template may add to a prompt. A prompt has at most as many tokens as bytes."""

PROVEN_LAPSES = 2

_UNPROVEN = (nodes.c.accepted == 0) | (nodes.c.lapses >= PROVEN_LAPSES)
_HOPED = leases.c.state.in_(AWAITED) & _UNPROVEN
_FLYING = Statement(
    select(
        func.coalesce(func.sum(leases.c.num_prompts), 0).label("total"),
        func.coalesce(func.sum(leases.c.num_prompts).filter(_HOPED), 0).label("hoped"),
    )
    .join(nodes, nodes.c.node == leases.c.node)
    .where(
        leases.c.state.in_(OPEN), leases.c.purpose == "train", leases.c.issued_at_s >= given("issued_from_s")
    )
)
_PUBLISHED = Statement(select(policies.c.published_at_s).where(policies.c.version == given("number")))
_AWAITED_OF = Statement(
    select(leases)
    .where(leases.c.node == given("id"), leases.c.state.in_(AWAITED))
    .order_by(leases.c.session_epoch, leases.c.issued_at_s, leases.c.lease_id)
)
_TAKE_OVER = Statement(update(leases).where(leases.c.lease_id == given("id")), "session_epoch")
_INSERT = inserting(leases, but=("code", "detail", "ended_at_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All that decides whether there is work for a node."""

    newest_version: int | None
    last_version: int
    finished: bool
    relays: tuple[RelayView, ...]
    """Live ones."""
    standing: Standing
    proven: bool
    """The node has delivered before, and does not let leases lapse."""
    rows_per_s: float
    chunk: Chunk | None
    """Held-out work that nobody has."""
    ready_groups: int
    """With `stale = "wait"`, those only that the next batch may still take; so too what is in flight."""
    coming_groups: int
    """In train leases that have not ended: delivered, or in the hands of proven nodes."""
    hoped_groups: int
    """In the hands of nodes that have shown nothing yet."""
    batch_formed: bool = False
    """The trainer has its batch of the newest version: new groups serve a later one."""
    next_formed: bool = False
    """And that of the one after it, which is on its way out."""
    signal_share: float = 1.0
    """Of the groups accepted lately, those with signal: what of the coming ones will count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a lease is made of: `versions` are those allowed, the newest last."""

    purpose: Purpose
    versions: tuple[int, ...]
    relays: tuple[str, ...]
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
    if not outlook.relays:
        raise NoWork("no relay is live, so nobody could fetch the weights")
    newest = outlook.newest_version
    # The curve must not hang on a node that is under suspicion.
    if outlook.chunk is not None and outlook.standing.trust is not Trust.QUARANTINED:
        version = outlook.chunk.version
        urls, held = relays.serving(outlook.relays, range(version, version + 1))
        if urls:
            return Work(
                purpose="eval",
                versions=held,
                relays=urls,
                chunk=outlook.chunk.index,
                num_prompts=outlook.chunk.num_prompts,
                samples_per_prompt=config.eval_samples,
            )
    if newest >= outlook.last_version:
        raise NoWork(f"version {newest} is the last; only its held-out evaluation is still out")
    oldest = oldest_worth_leasing(outlook, coordinator)
    wanted = config.groups_per_step * open_batches(outlook, coordinator)
    _refuse_surplus(outlook, wanted)
    urls, held = relays.serving(outlook.relays, range(oldest, newest + 1))
    if not urls:
        raise NoWork(f"no live relay has version {newest} yet, or one at most {spec.max_lag} behind it")
    return Work(
        purpose="train",
        versions=held,
        relays=urls,
        chunk=0,
        num_prompts=_num_prompts(outlook, coordinator, wanted),
        samples_per_prompt=spec.sampling.samples_per_prompt,
    )


def _num_prompts(outlook: Outlook, coordinator: Coordinator, wanted: int) -> int:
    """As many as the node, by what was measured of it, answers in a quarter of the time; halved by each lapse. No more than
    it takes to fill what is `wanted`, except where work is made to be dropped."""
    config = coordinator.config
    usual, most = config.prompts_per_lease, max(config.prompts_per_lease, config.max_prompts_per_lease)
    if config.stale == "wait" and outlook.proven:
        needed = math.ceil((wanted - expected_groups(outlook)) / outlook.signal_share)
        usual, most = min(usual, needed), min(most, needed)
    if outlook.rows_per_s == 0:
        return lease_prompts(outlook.standing, most=usual)
    rows = outlook.rows_per_s * config.lease_s * LEASE_SHARE
    fits = int(rows / coordinator.spec.sampling.samples_per_prompt)
    return lease_prompts(outlook.standing, most=max(1, min(most, fits)))


def open_batches(outlook: Outlook, coordinator: Coordinator) -> int:
    """How many batches groups by the newest version can be in. drop: as if none were formed yet."""
    newest = outlook.newest_version
    assert newest is not None, "no version, no lease"
    formed = outlook.batch_formed + outlook.next_formed if coordinator.config.stale == "wait" else 0
    return max(0, min(coordinator.spec.max_lag + 1, outlook.last_version - newest) - formed)


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
    queued = expected_groups(outlook)  # not what idle newcomers hold
    serves = newest + outlook.batch_formed + outlook.next_formed + int(queued // config.groups_per_step)
    if serves - max_lag > newest:
        raise NoWork(
            f"groups by version {newest} would be stale when the step from version {serves} uses them "
            f"(max_lag {max_lag}); wait for the next version"
        )
    return max(0, serves - max_lag)


def expected_groups(outlook: Outlook) -> float:
    """That the trainer will find, of what is ready and what proven nodes hold: some will be without signal."""
    return outlook.ready_groups + outlook.coming_groups * outlook.signal_share


def _refuse_surplus(outlook: Outlook, wanted: int) -> None:
    proven = coming = expected_groups(outlook)
    limit = wanted
    if not outlook.proven:
        coming += outlook.hoped_groups * outlook.signal_share
        limit = int(wanted * (1 + NEWCOMER_SHARE))
    if coming >= limit or proven >= wanted:
        leased = outlook.coming_groups + outlook.hoped_groups
        raise NoWork(
            f"enough work in flight: {outlook.ready_groups} groups ready and {leased} leased, "
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
    most = max(config.prompts_per_lease, config.max_prompts_per_lease)
    prompts = tuple(coordinator.task.problem("train", seed).prompt for seed in range(most))
    needed = max_bytes(prompts, spec.sampling, spec.proof)
    if needed > config.max_upload_bytes:
        raise ValueError(
            f"a lease of {most} prompts may come to {needed} bytes, above "
            f"max_upload_bytes={config.max_upload_bytes}; raise it or lower prompts_per_lease"
        )


def ask_lease(tx: Transaction, coordinator: Coordinator, ask: AskLease) -> Sealed[Lease]:
    check_session(tx, ask.epoch)
    sign_of_life(tx)
    ran_out = expire(tx, coordinator)
    assert tx.node is not None, "only nodes ask for leases"
    node = get_node(tx.db, tx.actor) if ran_out else tx.node
    _check_eligible(tx, coordinator, node)
    held = _held(tx, coordinator, node)
    if held is not None:
        return held
    _check_patience(tx, coordinator, node)
    try:
        work = plan(_look(tx, coordinator, node), coordinator)
    except NoWork as reason:
        wait_s = coordinator.turnstile.wait_s(tx.now_s, least_s=coordinator.config.retry_s)
        raise Rejected("request.too_early", str(reason), retry_after_s=wait_s) from None
    return _issue(tx, coordinator, node, work)


def _check_eligible(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> None:
    """Asking is a sign of life, and the door keeps the banned out; what is left is compatibility and having left."""
    check_compatible(node, coordinator, tx.now_s)
    if node.trust == Trust.RETIRED.value:
        raise Rejected("request.conflict", "the node has left the run; a new session brings it back")
    if is_paused(tx.db):
        raise Rejected("request.paused", "no leases are issued", retry_after_s=coordinator.config.heartbeat_s)


def _check_patience(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> None:
    """Who lets leases lapse one after the other waits longer for each."""
    wait_s = next_lease_s(standing_of(node), lease_s=coordinator.config.lease_s) - tx.now_s
    if wait_s > 0:
        raise Rejected(
            "request.too_early",
            f"{node.lapses} leases in a row ran out in this node's hands; it gets the next in {wait_s:.0f} s",
            retry_after_s=min(wait_s, 60.0),
        )


def _may_hold(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> int:
    config = coordinator.config
    earned = open_leases(standing_of(node), most=config.max_open_leases, trusted_after=config.trusted_after)
    staked = admission.staked_leases(tx.db, coordinator, node.owner or node.node)
    return earned if staked is None else min(earned, staked)


def _held(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> Sealed[Lease] | None:
    """The lease to give again: of a session that is gone, or because the node has as many as it may hold.

    So a node that crashed, or whose answer got lost, goes on where it was instead of waiting for a deadline.
    """
    rows = _AWAITED_OF.rows(tx.db, id=tx.actor)
    limit = _may_hold(tx, coordinator, node)
    if not rows and limit == 0:
        raise Rejected("request.not_admitted", "the stake does not suffice for a single lease any more")
    if not rows or (len(rows) < limit and rows[0].session_epoch == node.session_epoch):
        return None
    _TAKE_OVER.run(tx.db, id=rows[0].lease_id, session_epoch=node.session_epoch)
    return Sealed[Lease].parse(rows[0].sealed)


def _look(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> Outlook:
    config, newest = coordinator.config, newest_version(tx.db)
    chunk = None
    if newest is not None:
        chunk = evaluations.next_chunk(tx.db, newest=newest, keep_versions=coordinator.spec.keep_versions)
    formed = [newest is not None and batches.is_formed(tx.db, newest + ahead) for ahead in (0, 1)]
    oldest = 0
    if newest is not None and config.stale == "wait":
        oldest = max(0, newest + sum(formed) - coordinator.spec.max_lag)
    coming, hoped = flying_groups(tx.db, oldest)
    return Outlook(
        newest_version=newest,
        last_version=coordinator.spec.last_version,
        finished=is_finished(tx.db, coordinator.spec),
        relays=relays.usable(tx.db, tx.now_s, config.heartbeat_s),
        standing=standing_of(node),
        proven=bool(node.accepted > 0 and node.lapses < PROVEN_LAPSES),
        rows_per_s=node.rows_per_s,
        chunk=chunk,
        ready_groups=batches.count_ready(tx.db, oldest),
        coming_groups=coming,
        hoped_groups=hoped,
        batch_formed=formed[0],
        next_formed=formed[1],
        signal_share=batches.signal_share(tx.db),
    )


def flying_groups(db: Connection, oldest: int) -> tuple[int, int]:
    """Groups of open train leases: those to count on, and those in the hands of nodes that have shown nothing yet.

    What was leased before version `oldest` was out is made by an older one, and comes too late for any batch.
    """
    issued_from_s = _PUBLISHED.value(db, number=oldest)
    if issued_from_s is None:  # not out yet: nothing in flight can be by it
        return 0, 0
    found = _FLYING.row(db, issued_from_s=issued_from_s)
    assert found is not None, "a sum is one row"
    return int(found.total - found.hoped), int(found.hoped)


def _issue(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Sealed[Lease]:
    lease = _compose(tx, coordinator, work, _origin(tx, coordinator, node, work))
    text = lease.canonical()
    sealed = seal(lease, coordinator.run_key, canonical=text)
    _INSERT.run(
        tx.db,
        lease_id=lease.lease_id,
        node=lease.node,
        unit=lease.unit or lease.lease_id,
        purpose=lease.purpose,
        epoch=lease.epoch,
        session_epoch=node.session_epoch,
        eval_version=work.versions[0] if work.purpose == "eval" else None,
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
    tx.record(
        "lease.issued",
        lease_id=lease.lease_id,
        node=lease.node,
        purpose=lease.purpose,
        epoch=lease.epoch,
        unit=lease.unit or lease.lease_id,
        chunk=lease.chunk,
        versions=[policy.version for policy in lease.policies],
        deadline_s=lease.deadline_s,
        lease_digest=hashlib.sha256(text).hexdigest(),
    )
    return sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a lease's seed comes from: new, or a lease that the node let go."""

    lease_id: str
    unit: str | None
    epoch: int
    seed: str
    num_prompts: int


def _origin(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Origin:
    lease_id = secrets.token_hex(16)
    if work.purpose == "train" and node.owed:
        unit, _, rest = node.owed.partition(",")
        first = Sealed[Lease].parse(find_lease(tx.db, unit).sealed).body
        tx.db.execute(update(nodes).where(nodes.c.node == node.node).values(owed=rest))
        # Never more than it had: the further prompts would be new to it.
        return Origin(
            lease_id=lease_id,
            unit=unit,
            epoch=first.epoch,
            seed=first.seed,
            num_prompts=min(work.num_prompts, len(first.prompts)),
        )
    epoch, secret = epochs.draw(tx, coordinator.config.leases_per_epoch)
    seed = lease_seed(secret, lease_id, tx.actor)
    return Origin(lease_id=lease_id, unit=None, epoch=epoch, seed=seed, num_prompts=work.num_prompts)


def _compose(tx: Transaction, coordinator: Coordinator, work: Work, origin: Origin) -> Lease:
    config, spec = coordinator.config, coordinator.spec
    lease_id, seed = origin.lease_id, origin.seed
    seeds = problem_seeds(
        seed, run=spec.run, purpose=work.purpose, chunk=work.chunk, num_prompts=origin.num_prompts
    )
    prompts = tuple(coordinator.task.problem(work.purpose, number).prompt for number in seeds)
    sampling = spec.sampling.model_copy(update={"samples_per_prompt": work.samples_per_prompt})
    policies: tuple[PolicyRef, ...] = policy_refs(tx.db, work.versions)
    return Lease(
        lease_id=lease_id,
        run=spec.run,
        node=tx.actor,
        purpose=work.purpose,
        epoch=origin.epoch,
        unit=origin.unit,
        seed=seed,
        chunk=work.chunk,
        policies=policies,
        relays=work.relays,
        task=spec.task,
        prompts=prompts,
        chat=coordinator.task.chat,
        sampling=sampling,
        proof=spec.proof,
        max_bytes=min(max_bytes(prompts, sampling, spec.proof), config.max_upload_bytes),
        issued_at_s=tx.now_s,
        deadline_s=tx.now_s + config.lease_s,
    )
