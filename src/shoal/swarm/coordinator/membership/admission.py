"""Admission: whether an unknown key may enrol. The run file chooses one policy for the run.

open     any key
invite   keys with an invitation code from the operator; each code can be used a number of times. Also keys of `allow`
allow    keys, or owners' keys, that the operator listed
work     keys with a proof of work: SHA-256 over run key, node and nonce begins with `work_bits` zero bits
stake    keys, or owners' keys, with a balance. It limits how many leases they hold, and each rejection reduces it. All nodes of an
         owner share its balance
"""

import hashlib
from collections.abc import Callable

from sqlalchemy import Connection, delete, func, insert, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.lease_states import OPEN
from shoal.swarm.coordinator.rules.trust import Trust
from shoal.swarm.coordinator.store.schema import admissions, leases, nodes, revoked_keys
from shoal.wire.codes import Rejected
from shoal.wire.delegation import check_delegation, work_bits
from shoal.wire.messages import Enrol, Enrolled
from shoal.wire.run_spec import PROTOCOL


def enrol(tx: Transaction, coordinator: Coordinator, ask: Enrol) -> Enrolled:
    """Enrols the calling key. Idempotent: a node may enrol again, for example with a newer delegation."""
    if ask.protocol != PROTOCOL:
        raise Rejected(
            "request.outdated", f"this coordinator speaks protocol {PROTOCOL}, the client {ask.protocol}"
        )
    owner = until_s = None
    if ask.delegation is not None:
        owner = check_delegation(ask.delegation, tx.actor, now_s=tx.now_s)
        until_s = ask.delegation.body.not_after_s
    if tx.node is None:
        admit(tx, coordinator, ask, owner)
        _insert_node(tx, ask, owner, until_s)
        named = {"owner": owner} if owner else {}
        tx.record("node.enrolled", node=tx.actor, software=ask.software, **named)
    elif owner is not None:
        if tx.node.owner != owner:
            raise Rejected("request.conflict", f"node {tx.actor[:16]} was enrolled by another owner")
        if until_s != tx.node.delegated_until_s:
            tx.write(update(nodes).where(nodes.c.node == tx.actor).values(delegated_until_s=until_s))
            tx.record("node.delegated", node=tx.actor, owner=owner, until_s=until_s)
    trust = str(tx.node.trust) if tx.node is not None else Trust.PROBATION.value
    return Enrolled(node=tx.actor, trust=trust, run_key=coordinator.run_key.public)


def _insert_node(tx: Transaction, ask: Enrol, owner: str | None, until_s: float | None) -> None:
    row = {
        "node": tx.actor,
        "enrolled_at_s": tx.now_s,
        "software": ask.software,
        "owner": owner,
        "delegated_until_s": until_s,
        "trust": Trust.PROBATION.value,
        "trust_reason": "new",
        "trust_since_s": tx.now_s,
        "phase": "",
    }
    zeros = ("streak", "lapses", "session_epoch", "live", "accepted", "rejected", "void", "credit")
    measures = ("lapsed_s", "rows_per_s", "tokens_per_s")
    tx.write(insert(nodes).values(**row, **dict.fromkeys(zeros, 0), **dict.fromkeys(measures, 0.0)))


def admit(tx: Transaction, coordinator: Coordinator, ask: Enrol, owner: str | None) -> None:
    """Raises Rejected, with what the run asks for, unless the calling key may enrol."""
    if tx.db.execute(select(revoked_keys).where(revoked_keys.c.node == tx.actor)).one_or_none() is not None:
        raise Rejected("request.revoked", f"key {tx.actor[:16]} was revoked")
    if coordinator.config.admission != "open":
        reason = _POLICIES[coordinator.config.admission](tx, coordinator, ask, owner)
        if reason is not None:
            raise Rejected("request.not_admitted", reason)


def _admit_invited(tx: Transaction, coordinator: Coordinator, ask: Enrol, owner: str | None) -> str | None:
    if _is_allowed(tx, owner):
        return None
    digest = invite_digest(ask.invite)
    found = tx.db.execute(
        select(admissions).where(admissions.c.kind == "invite", admissions.c.subject == digest)
    ).one_or_none()
    if found is None or found.amount < 1 or (found.expires_at_s or tx.now_s) < tx.now_s:
        return "the invitation is missing, unknown, used up or expired; ask the operator for one and join with --invite CODE"
    change_amount(tx, "invite", digest, -1)
    tx.record("invite.used", invite=digest, node=tx.actor)
    return None


def _admit_allowed(tx: Transaction, coordinator: Coordinator, ask: Enrol, owner: str | None) -> str | None:
    if _is_allowed(tx, owner):
        return None
    return f"this run admits only keys that the operator listed; {tx.actor} is not one of them"


def _is_allowed(tx: Transaction, owner: str | None) -> bool:
    """Returns whether the operator listed the calling key or its owner."""
    return any(amount_of(tx.db, "allow", key) for key in (tx.actor, owner) if key)


def _admit_by_work(tx: Transaction, coordinator: Coordinator, ask: Enrol, owner: str | None) -> str | None:
    needed, done = coordinator.config.work_bits, work_bits(coordinator.run_key.public, tx.actor, ask.work)
    if done >= needed:
        return None
    return f"this run asks for a proof of work of {needed} bits for this run and node; this one has {done}"


def _admit_by_stake(tx: Transaction, coordinator: Coordinator, ask: Enrol, owner: str | None) -> str | None:
    per_lease, has = coordinator.config.stake_per_lease, amount_of(tx.db, "stake", owner or tx.actor)
    if has >= per_lease:
        return None
    return f"this run asks for a stake of {per_lease} per lease; {owner or tx.actor} has {has}"


_POLICIES: dict[str, Callable[[Transaction, Coordinator, Enrol, str | None], str | None]] = {
    "invite": _admit_invited,
    "allow": _admit_allowed,
    "work": _admit_by_work,
    "stake": _admit_by_stake,
}
"""Each admits the calling key, or returns what the run asks for."""


# -- balances ---------------------------------------------------------------------------------------------


def invite_digest(code: str) -> str:
    """Returns the digest that is stored of an invitation. Only the operator and the invited node know the code itself."""
    return hashlib.sha256(f"shoal/invite/1\n{code}".encode()).hexdigest()


def amount_of(db: Connection, kind: str, subject: str) -> int:
    found = db.execute(
        select(admissions.c.amount).where(admissions.c.kind == kind, admissions.c.subject == subject)
    ).scalar_one_or_none()
    return int(found or 0)


def change_amount(
    tx: Transaction, kind: str, subject: str, by: int, *, expires_at_s: float | None = None
) -> int:
    """Changes an amount and returns it; it never falls below 0. `expires_at_s` replaces an earlier end."""
    row = (admissions.c.kind == kind, admissions.c.subject == subject)
    before = tx.db.execute(select(admissions.c.amount).where(*row)).scalar_one_or_none()
    after = max(0, (before or 0) + by)
    if before is None:
        tx.write(
            insert(admissions).values(kind=kind, subject=subject, amount=after, expires_at_s=expires_at_s)
        )
    else:
        renewed = {} if expires_at_s is None else {"expires_at_s": expires_at_s}
        tx.write(update(admissions).where(*row).values(amount=after, **renewed))
    return after


def remove(tx: Transaction, kind: str, subject: str) -> None:
    tx.write(delete(admissions).where(admissions.c.kind == kind, admissions.c.subject == subject))


def slash(tx: Transaction, coordinator: Coordinator, account: str, lease_id: str) -> None:
    """Takes the stake of one lease from an account after a rejection, if the run admits by stake."""
    if coordinator.config.admission != "stake":
        return
    before = amount_of(tx.db, "stake", account)
    after = change_amount(tx, "stake", account, -coordinator.config.stake_per_lease)
    if after != before:
        tx.record("stake.slashed", account=account, amount=before - after, left=after, lease_id=lease_id)


def staked_leases(db: Connection, coordinator: Coordinator, account: str) -> int | None:
    """Returns how many leases all nodes of an account may hold together; None if the run does not admit by stake."""
    if coordinator.config.admission != "stake":
        return None
    return amount_of(db, "stake", account) // coordinator.config.stake_per_lease


def check_stake(tx: Transaction, coordinator: Coordinator, account: str) -> None:
    """Raises Rejected if the stake of an account covers no further lease.

    Submissions without a verdict count too: the stake is taken only when a lie is found, so any number of lies could otherwise be on
    their way for the stake of one.
    """
    covered = staked_leases(tx.db, coordinator, account)
    if covered is None:
        return
    of_account = func.coalesce(nodes.c.owner, nodes.c.node) == account
    held = select(func.count()).select_from(leases).join(nodes, nodes.c.node == leases.c.node)
    opened = int(tx.db.execute(held.where(of_account, leases.c.state.in_(OPEN))).scalar_one())
    if opened >= covered:
        raise Rejected(
            "request.too_early",
            f"the stake of {account[:16]} covers {covered} leases, and {opened} of its nodes' leases have no verdict yet",
            retry_after_s=coordinator.config.retry_s,
        )
