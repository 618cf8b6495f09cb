"""Issuing leases: the door's questions, what planning.py decides on, and the lease made of its answer."""

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from shoal.swarm.coordinator.context import Coordinator, Transaction, is_paused, newest_version
from shoal.swarm.coordinator.leases import batches, epochs, evaluations
from shoal.swarm.coordinator.leases.in_flight import count_issued, flying_groups, is_proven
from shoal.swarm.coordinator.leases.lifecycle import awaited_of, expire, find_lease
from shoal.swarm.coordinator.membership import admission, relays
from shoal.swarm.coordinator.membership.nodes import (
    check_compatible,
    check_session,
    get_node,
    sign_of_life,
    standing_of,
)
from shoal.swarm.coordinator.membership.versions import policy_refs
from shoal.swarm.coordinator.rules.lease_states import State
from shoal.swarm.coordinator.rules.planning import NoWork, Outlook, Work, max_bytes, plan
from shoal.swarm.coordinator.rules.trust import Trust, next_lease_s, open_leases
from shoal.swarm.coordinator.store.sheet import LEASES, NODES
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, PolicyRef
from shoal.wire.messages import AskLease
from shoal.wire.record import Sealed, seal
from shoal.wire.seeded_draw import lease_seed, problem_seeds


def ask_lease(tx: Transaction, coordinator: Coordinator, ask: AskLease) -> Sealed[Lease]:
    check_session(tx, ask.epoch)
    ran_out = expire(tx, coordinator)
    assert tx.node is not None, "only nodes ask for leases"
    node = get_node(tx.db, tx.actor) if ran_out else tx.node
    _check_eligible(tx, coordinator, node)
    held = _held(tx, coordinator, node)
    if held is not None:
        coordinator.turnstile.let_in(tx.actor)
        sign_of_life(tx)
        return held
    _check_patience(tx, coordinator, node)
    try:
        work = plan(_look(tx, coordinator, node), coordinator)
    except NoWork as reason:
        wait_s = _turn_away(tx, coordinator, node)
        raise Rejected("request.too_early", str(reason), retry_after_s=wait_s) from None
    coordinator.turnstile.let_in(tx.actor)
    # Last, for who is refused is to have written nothing (turn.py).
    sign_of_life(tx)
    return _issue(tx, coordinator, node, work)


def _turn_away(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> float:
    """Only who has delivered keeps a place: fresh keys are free, and must hold up nobody."""
    turnstile, least_s = coordinator.turnstile, coordinator.config.retry_s
    if is_proven(node):
        return turnstile.turn_away(tx.actor, tx.now_s, least_s=least_s)
    return turnstile.wait_s(tx.now_s, least_s=least_s)


def _check_eligible(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> None:
    """Asking is a sign of life, and the door keeps the banned out; what is left is compatibility and having left."""
    check_compatible(node, coordinator, tx.now_s)
    if node.trust == Trust.RETIRED.value:
        raise Rejected("request.conflict", "the node has left the run; a new session brings it back")
    if tx.turn.recall(is_paused):
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
    rows = tx.turn.recall(awaited_of, tx.actor)
    limit = _may_hold(tx, coordinator, node)
    if not rows and limit == 0:
        raise Rejected("request.not_admitted", "the stake does not suffice for a single lease any more")
    if not rows or (len(rows) < limit and rows[0].session_epoch == node.session_epoch):
        return None
    LEASES.change(tx.db, rows[0].lease_id, session_epoch=node.session_epoch)
    tx.turn.forget(awaited_of, tx.actor)
    return Sealed[Lease].parse(rows[0].sealed)


def _look(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> Outlook:
    config, recall = coordinator.config, tx.turn.recall
    newest, chunk = recall(newest_version), None
    if newest is not None:
        chunk = evaluations.next_chunk(tx.turn, newest=newest, keep_versions=coordinator.spec.keep_versions)
    formed = [newest is not None and recall(batches.is_formed, newest + ahead) for ahead in (0, 1)]
    oldest = 0
    if newest is not None and config.stale == "wait":
        oldest = max(0, newest + sum(formed) - coordinator.spec.max_lag)
    coming, hoped = recall(flying_groups, oldest)
    return Outlook(
        newest_version=newest,
        last_version=coordinator.spec.last_version,
        finished=tx.is_finished(coordinator.spec),
        relays=relays.usable(recall(relays.reports), tx.now_s, config.heartbeat_s),
        standing=standing_of(node),
        proven=is_proven(node),
        rows_per_s=node.rows_per_s,
        chunk=chunk,
        ready_groups=recall(batches.count_ready, oldest),
        coming_groups=coming,
        hoped_groups=hoped,
        ahead=coordinator.turnstile.ahead_of(tx.actor, tx.now_s),
        batch_formed=formed[0],
        next_formed=formed[1],
        signal_share=recall(batches.signal_share),
    )


def _issue(tx: Transaction, coordinator: Coordinator, node: Row[Any], work: Work) -> Sealed[Lease]:
    lease = _compose(tx, coordinator, work, _origin(tx, coordinator, node, work))
    count_issued(tx.turn, node, lease)
    text = lease.canonical()
    sealed = seal(lease, coordinator.run_key, canonical=text)
    tx.turn.forget(awaited_of, lease.node)
    tx.turn.forget(epochs.count_open, lease.epoch)
    LEASES.insert(
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
        NODES.change(tx.db, node.node, owed=rest)
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
    policies: tuple[PolicyRef, ...] = tx.turn.recall(policy_refs, work.versions)
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
