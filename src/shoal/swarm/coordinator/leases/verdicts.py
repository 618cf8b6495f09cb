"""Checks: a validator claims a submission, looks at it, and gives one verdict."""

import json
from typing import Any

from sqlalchemy import Row, select

from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.leases import batches, check_queue, evaluations
from shoal.swarm.coordinator.leases.lifecycle import Event, end, find_lease, move, status, void_all
from shoal.swarm.coordinator.leases.submissions import find_submission, void_stale
from shoal.swarm.coordinator.membership import admission, relays
from shoal.swarm.coordinator.membership.nodes import count_verdict, enter, get_node, happen, why_rejected
from shoal.swarm.coordinator.membership.revocation import revoke_unchecked
from shoal.swarm.coordinator.rules import credit as credits
from shoal.swarm.coordinator.rules import speed
from shoal.swarm.coordinator.rules.lease_states import TERMINAL, State
from shoal.swarm.coordinator.rules.trust import Finding, Happening, Trust, finding_of
from shoal.swarm.coordinator.store.schema import leases, submissions, verdicts
from shoal.swarm.coordinator.store.sheet import SUBMISSIONS, VERDICTS
from shoal.swarm.coordinator.store.statements import Statement, given
from shoal.wire.codes import ACCEPTED, CODES, UNCERTAIN, Rejected
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import Claim, LeaseStatus
from shoal.wire.record import Sealed

_EVENT = {Finding.ACCEPTED: Event.ACCEPT, Finding.REJECTED: Event.REJECT, Finding.VOID: Event.VOID}
_LAPSED = Statement(
    select(leases)
    .join(submissions, submissions.c.lease_id == leases.c.lease_id)
    .where(leases.c.state == State.CHECKING.value, submissions.c.claimed_until_s < given("now_s"))
)
_GIVEN = Statement(select(verdicts.c.code).where(verdicts.c.lease_id == given("id")))


def claim(tx: Transaction, coordinator: Coordinator) -> Claim:
    """A submission for this validator alone, until the claim runs out."""
    release_lapsed(tx, coordinator)
    row = check_queue.take_next(tx.turn)
    if row is None:
        raise Rejected(
            "request.too_early", "no submission waits to be checked", retry_after_s=coordinator.config.retry_s
        )
    until_s = tx.now_s + coordinator.config.claim_s
    move(tx, row, Event.CLAIM)
    SUBMISSIONS.change(
        tx.db, row.lease_id, claimed_by=tx.actor, claimed_at_s=tx.now_s, claimed_until_s=until_s
    )
    return _to_claim(tx, coordinator, row, until_s=until_s)


def look_again(tx: Transaction, coordinator: Coordinator, lease_id: str) -> Claim:
    """A submission as its validator saw it, for an audit: nothing changes, and every check is asked for."""
    row = check_queue.find_submitted(tx.db, lease_id)
    if row is None:
        raise Rejected("request.not_found", f"lease {lease_id} has no submission")
    claim = _to_claim(tx, coordinator, row, until_s=tx.now_s)
    return claim.model_copy(update={"checks": "full"})


def _to_claim(tx: Transaction, coordinator: Coordinator, row: Row[Any], *, until_s: float) -> Claim:
    version = range(row.policy_version, row.policy_version + 1)
    live = relays.usable(tx.turn.recall(relays.reports), tx.now_s, coordinator.config.heartbeat_s)
    return Claim(
        lease=Sealed[Lease].parse(row.sealed).body,
        checks=row.checks,
        relays=relays.serving(live, version)[0],
        policy_version=row.policy_version,
        sha256=row.sha256,
        num_bytes=row.num_bytes,
        received_at_s=row.received_at_s,
        deadline_s=until_s,
        copy_of=row.copy_of,
    )


def release_lapsed(tx: Transaction, coordinator: Coordinator) -> int:
    """Claims whose validator was not heard of again go back into the queue, or are void if too old by now; how many. Once a
    turn, which is no time."""
    if tx.turn.knows(release_lapsed):
        return 0
    tx.turn.learn(True, release_lapsed)
    rows = _LAPSED.rows(tx.db, now_s=tx.now_s)
    for lease in rows:
        move(tx, lease, Event.RELEASE)
    if rows and (newest := newest_version(tx.db)) is not None:
        void_stale(tx, coordinator, newest)
    return len(rows)


def give_verdict(tx: Transaction, coordinator: Coordinator, lease_id: str, verdict: Verdict) -> LeaseStatus:
    """Idempotent: the same finding again changes nothing, another one is refused. The first counts."""
    _check_code(lease_id, verdict)
    verdict = verdict.model_copy(
        update={"detail": verdict.detail.replace("\0", "\\0")}
    )  # see messages.ShortText
    lease = find_lease(tx.db, lease_id)
    # Every verdict ends its lease.
    earlier = _GIVEN.value(tx.db, id=lease_id) if lease.state in TERMINAL else None
    if earlier is not None and earlier != verdict.code:
        raise Rejected("request.conflict", f"lease {lease_id} has the verdict {earlier}, not {verdict.code}")
    # It may have ended meanwhile without a verdict: gone stale, or its node ejected. The answer says so.
    if earlier is not None or lease.state in TERMINAL:
        return status(lease)
    submission = find_submission(tx.db, lease_id)
    if submission is None or submission.claimed_by is None:
        raise Rejected(
            "request.conflict", f"lease {lease_id} is {lease.state}: nobody claimed it for checking"
        )
    if verdict.code == ACCEPTED:
        _check_accepted(lease, verdict)
        # Its node fell out of trust while it was looked at: cheap checks do not suffice any more.
        if submission.checks == "full" and verdict.checks != "full":
            if lease.state == State.CHECKING:
                move(tx, lease, Event.RELEASE)
            return status(find_lease(tx.db, lease_id))
    _enter(tx, coordinator, lease, submission, verdict)
    return status(find_lease(tx.db, lease_id))


def _check_code(lease_id: str, verdict: Verdict) -> None:
    if verdict.lease_id != lease_id:
        raise Rejected(
            "request.malformed", f"the verdict is on lease {verdict.lease_id}, the path names {lease_id}"
        )
    if verdict.code != ACCEPTED and (verdict.code not in CODES or verdict.code.startswith("request.")):
        raise Rejected("request.malformed", f"{verdict.code[:80]!r} is not a verdict; wire/codes.py has them")


def _check_accepted(lease: Row[Any], verdict: Verdict) -> None:
    num_rows = lease.num_prompts * lease.samples_per_prompt
    if len(verdict.rewards) != num_rows:
        raise Rejected("request.malformed", f"{len(verdict.rewards)} rewards for {num_rows} rows")
    # Our own words: there is nothing to check about them.
    max_tokens = num_rows * int(json.loads(lease.sealed)["body"]["sampling"]["max_new_tokens"])
    if not num_rows <= verdict.output_tokens <= max_tokens:
        raise Rejected(
            "request.malformed",
            f"{verdict.output_tokens} output tokens in {num_rows} rows, possible are {num_rows} to {max_tokens}",
        )


def _enter(
    tx: Transaction, coordinator: Coordinator, lease: Row[Any], submission: Row[Any], verdict: Verdict
) -> None:
    finding = finding_of(verdict.code)
    accepted = finding is Finding.ACCEPTED
    credit = credits.amount(verdict.output_tokens, coordinator.config.credit_factor) if accepted else 0
    seq = tx.record(
        "verdict.given",
        lease_id=lease.lease_id,
        node=lease.node,
        code=verdict.code,
        detail=verdict.detail,
        output_tokens=verdict.output_tokens,
        rewards=list(verdict.rewards),
        evidence=verdict.evidence,
        checks=verdict.checks,
        drawn={"epoch": submission.draw_epoch, "rate": submission.draw_rate, "checks": submission.checks},
        credit=credit,
    )
    VERDICTS.insert(
        tx.db,
        lease_id=lease.lease_id,
        validator=tx.actor,
        node=lease.node,
        code=verdict.code,
        output_tokens=verdict.output_tokens if accepted else 0,
        checks=verdict.checks,
        credit=credit,
        graded=len(verdict.rewards) if accepted else 0,
        unparseable=_unparseable(verdict) if accepted else 0,
        body=verdict.model_dump_json(),
        given_at_s=tx.now_s,
    )
    end(tx, coordinator, lease, _EVENT[finding], code=verdict.code, detail=verdict.detail, credit=credit)
    node, rate = get_node(tx.db, lease.node), _rows_per_s(tx, lease, submission)
    count_verdict(tx, node, finding, verdict=verdict, credit=credit, rows_per_s=rate)
    if finding is Finding.REJECTED:
        _punish(tx, coordinator, lease, verdict)
    elif accepted:
        full = verdict.checks == "full"
        enter(tx, coordinator, node, Happening.ACCEPTED if full else Happening.TAKEN_ON_TRUST, "")
        _use(tx, coordinator, lease, submission, verdict, seq)
    elif verdict.code == UNCERTAIN:
        enter(tx, coordinator, node, Happening.UNCERTAIN, "")


def _punish(tx: Transaction, coordinator: Coordinator, lease: Row[Any], verdict: Verdict) -> None:
    """What a rejection does: to what was taken on trust, to the stake, to the standing, and to what is still open."""
    before = get_node(tx.db, lease.node)
    revoke_unchecked(tx, coordinator, before, because=lease.lease_id)
    admission.slash(tx, coordinator, before.owner or before.node, lease.lease_id)
    happen(tx, coordinator, lease.node, Happening.REJECTED, why_rejected(verdict.code, verdict.detail))
    if get_node(tx.db, lease.node).trust == Trust.BANNED.value:
        void_all(tx, coordinator, lease.node, "void.abandoned", "the node was ejected")


def _rows_per_s(tx: Transaction, lease: Row[Any], submission: Row[Any]) -> float:
    """The lease was answered: that says how fast the node is."""
    return speed.rows_per_s(
        lease.num_prompts * lease.samples_per_prompt,
        issued_at_s=lease.issued_at_s,
        previous_receipt_s=tx.turn.recall(check_queue.previous_receipt_s, lease.lease_id),
        received_at_s=submission.received_at_s,
    )


def _unparseable(verdict: Verdict) -> int:
    """As its evidence says; a validator that does not count them has found none."""
    count = verdict.evidence.get("unparseable", 0)
    return min(max(count, 0), len(verdict.rewards)) if isinstance(count, int) else 0


def _use(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    submission: Row[Any],
    verdict: Verdict,
    seq: int,
) -> None:
    """Accepted work goes where its lease says: into groups for the trainer, or into the held-out curve."""
    if lease.purpose == "eval":
        evaluations.add_chunk(
            tx,
            coordinator,
            version=lease.eval_version,
            chunk=lease.chunk,
            lease_id=lease.lease_id,
            rewards=verdict.rewards,
        )
        return
    newest = tx.turn.recall(newest_version)
    assert newest is not None, "a lease was issued, so a policy was published"
    max_lag = coordinator.spec.max_lag
    batches.add_groups(tx, lease, submission, verdict, seq=seq, newest=newest, max_lag=max_lag)
