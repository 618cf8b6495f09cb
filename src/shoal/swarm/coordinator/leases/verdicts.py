"""Verdicts: a validator claims a submission, checks it, and gives one verdict."""

import json
from typing import Any

from sqlalchemy import Connection, Row, case, func, or_, select

from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.leases import batches, evaluations, transcripts
from shoal.swarm.coordinator.leases.lease_rows import SUBMISSIONS, find_lease, move, status
from shoal.swarm.coordinator.leases.lifecycle import end, finish_run, void, void_all, void_stale
from shoal.swarm.coordinator.membership import accounts, admission, relays
from shoal.swarm.coordinator.membership.nodes import (
    IS_RELIABLE,
    change_standing,
    count_verdict,
    get_node,
    why_rejected,
)
from shoal.swarm.coordinator.membership.revocation import revoke_unchecked
from shoal.swarm.coordinator.rules import credit as credits
from shoal.swarm.coordinator.rules import node_status
from shoal.swarm.coordinator.rules.cumulative_evidence import EXCUSABLE, GIVEN_CODE, Sums, scores_of
from shoal.swarm.coordinator.rules.lease_states import TERMINAL, LeaseEvent, LeaseState
from shoal.swarm.coordinator.rules.planning import serving
from shoal.swarm.coordinator.rules.trust import Trust, TrustEvent, VerdictKind, is_draw_open, verdict_kind
from shoal.swarm.coordinator.store.schema import calibrations, leases, nodes, submissions, uploads, verdicts
from shoal.swarm.coordinator.store.statements import Statement, TableStatements, given
from shoal.wire.codes import ACCEPTED, CODES, RECALIBRATING, UNCERTAIN, UNCHECKED, Rejected
from shoal.wire.lease import Checks, Lease, Verdict
from shoal.wire.messages import AskClaim, Claim, LeaseStatus
from shoal.wire.record import Sealed

_EVENT = {
    VerdictKind.ACCEPTED: LeaseEvent.ACCEPT,
    VerdictKind.REJECTED: LeaseEvent.REJECT,
    VerdictKind.VOID: LeaseEvent.VOID,
}
_VERDICTS = TableStatements(verdicts)
_EARLIER = submissions.alias("earlier")
_EARLIER_LEASE = leases.alias("earlier_lease")
# The node whose submission of these bytes was accepted first. A submission that was not accepted proves nothing: anybody can
# submit bytes that an honest node is going to submit.
_COPY_OF = (
    select(_EARLIER.c.node)
    .join(_EARLIER_LEASE, _EARLIER_LEASE.c.lease_id == _EARLIER.c.lease_id)
    .where(
        _EARLIER.c.sha256 == submissions.c.sha256,
        _EARLIER.c.seq < submissions.c.seq,
        _EARLIER_LEASE.c.state == LeaseState.ACCEPTED.value,
    )
    .order_by(_EARLIER.c.seq)
    .limit(1)
    .scalar_subquery()
    .label("copy_of")
)
_WITH_LEASE = select(submissions, leases.c.sealed, leases.c.state, _COPY_OF).join(
    leases, leases.c.lease_id == submissions.c.lease_id
)
MAX_LAPSED_CLAIMS = 2
"""Claims of one submission that may run out before it is void."""
UNRELIABLE_CLAIMS = 4
"""One claim in this many is of a node that is not reliable, even while submissions of reliable nodes wait. These nodes would
otherwise never be checked while reliable nodes submit more than the validators can check."""
_RANK = case((IS_RELIABLE, given("reliable_rank")), else_=1)
# Submissions whose claim ran out come last, so that they delay nothing else. Held-out work comes before other work, because the
# end of the run waits for it. Nodes with accepted work come before others: junk of new keys costs nothing, and would otherwise
# delay every check. Then in the order of receipt. The validator whose claim ran out never gets the same submission next.
_NEXT = Statement(
    _WITH_LEASE.join(nodes, nodes.c.node == submissions.c.node)
    .where(
        leases.c.state == LeaseState.SUBMITTED.value,
        submissions.c.lapsed_claims <= given("most_lapses"),
        or_(submissions.c.lapsed_claims == 0, submissions.c.claimed_by != given("validator")),
    )
    .order_by(submissions.c.lapsed_claims, leases.c.purpose, _RANK, submissions.c.seq)
    .limit(1)
)
_LAST_CLAIMED = Statement(
    select(case((IS_RELIABLE, 1), else_=0).label("reliable"))
    .select_from(submissions)
    .join(nodes, nodes.c.node == submissions.c.node)
    .where(submissions.c.claimed_at_s.is_not(None))
    .order_by(submissions.c.claimed_at_s.desc())
    .limit(UNRELIABLE_CLAIMS - 1)
)
_ONE = Statement(
    _WITH_LEASE.add_columns(leases.c.code, uploads.c.stored_at_s)
    .join(uploads, uploads.c.lease_id == leases.c.lease_id)
    .where(submissions.c.lease_id == given("id"))
)
_PREVIOUS_RECEIPT_S = Statement(
    select(submissions.c.received_at_s)
    .where(submissions.c.node == given("name"), submissions.c.seq < given("number"))
    .order_by(submissions.c.seq.desc())
    .limit(1)
)
_LAPSED_CLAIMS = Statement(
    select(leases, submissions.c.lapsed_claims)
    .join(submissions, submissions.c.lease_id == leases.c.lease_id)
    .where(leases.c.state == LeaseState.CHECKING.value, submissions.c.claimed_until_s < given("now_s"))
)
_WAITING = Statement(
    select(leases, submissions.c.claimed_by, submissions.c.claimed_until_s)
    .join(submissions, submissions.c.lease_id == leases.c.lease_id)
    .where(
        leases.c.state == LeaseState.SUBMITTED.value,
        submissions.c.lapsed_claims > 0,
        submissions.c.claimed_until_s < given("tried_before_s"),
    )
)
# Work that keeps other validators busy: fresh submissions, and those that they check.
_WORK_OF_OTHERS = Statement(
    select(submissions.c.lease_id)
    .join(leases, leases.c.lease_id == submissions.c.lease_id)
    .where(
        ((leases.c.state == LeaseState.SUBMITTED.value) & (submissions.c.lapsed_claims == 0))
        | ((leases.c.state == LeaseState.CHECKING.value) & (submissions.c.claimed_by != given("validator")))
    )
    .limit(1)
)
_UNCERTAIN_BEFORE = Statement(
    select(verdicts.c.body)
    .join(leases, leases.c.lease_id == verdicts.c.lease_id)
    .join(submissions, submissions.c.lease_id == verdicts.c.lease_id)
    .where(
        leases.c.code == UNCERTAIN,
        leases.c.unit == given("unit"),
        submissions.c.policy_version == given("version"),
    )
)
_CALIBRATED_AT = Statement(
    select(func.coalesce(func.max(calibrations.c.from_version), -1)).where(
        calibrations.c.from_version <= given("version")
    )
)
_NUM_CALIBRATIONS = Statement(select(func.count()).select_from(calibrations))
_GIVEN = Statement(select(verdicts.c.body).where(verdicts.c.lease_id == given("id")))


def claim(tx: Transaction, coordinator: Coordinator, ask: AskClaim) -> Claim:
    """Returns the next submission, reserved for this validator until the claim runs out."""
    # All validators have the same key, so processes are told apart by the name that they give.
    validator = f"{tx.actor}/{ask.validator}"
    last = _LAST_CLAIMED.rows(tx.db)
    is_turn_of_others = len(last) == UNRELIABLE_CLAIMS - 1 and all(one.reliable for one in last)
    row = _NEXT.row(
        tx.db,
        validator=validator,
        most_lapses=0 if ask.fresh else MAX_LAPSED_CLAIMS,
        reliable_rank=2 if is_turn_of_others else 0,
    )
    if row is None:
        raise Rejected(
            "request.too_early", "no submission waits to be checked", retry_after_s=coordinator.config.retry_s
        )
    until_s = tx.now_s + coordinator.config.claim_s
    move(tx, row, LeaseEvent.CLAIM)
    tx.update(SUBMISSIONS, row.lease_id, claimed_by=validator, claimed_at_s=tx.now_s, claimed_until_s=until_s)
    found = _make_claim(row, checks=row.checks, until_s=until_s)
    return _with_servers(tx, coordinator, found, calibrations=int(_NUM_CALIBRATIONS.value(tx.db)))


def look_again(tx: Transaction, coordinator: Coordinator, lease_id: str) -> Claim:
    """Returns a submission for an audit: every check is asked for, and nothing changes."""
    return _with_servers(tx, coordinator, stored_claim(tx.db, lease_id), deadline_s=tx.now_s)


def stored_claim(db: Connection, lease_id: str) -> Claim:
    """Returns a submission for an audit, without relays. Raises Rejected if the lease has none, or its file is deleted."""
    row = _ONE.row(db, id=lease_id)
    if row is None:
        raise Rejected("request.not_found", f"lease {lease_id} has no submission")
    if row.state == LeaseState.REJECTED and row.stored_at_s is None:
        raise Rejected(
            "request.not_found", f"the file of lease {lease_id} was rejected ({row.code}) and is deleted"
        )
    return _make_claim(row, checks="full", until_s=row.received_at_s)


def _with_servers(tx: Transaction, coordinator: Coordinator, claim: Claim, **values: Any) -> Claim:
    """Returns the claim with the relays and the origin that serve its version now, and with these values."""
    version = claim.policy_version
    live = relays.usable(tx.db, tx.now_s, coordinator.config.heartbeat_s, version)
    urls, _ = serving(live, range(version, version + 1))
    return claim.model_copy(update={"relays": urls, "origin": relays.origin_url(tx.db), **values})


def _make_claim(row: Row[Any], *, checks: Checks, until_s: float) -> Claim:
    return Claim.copied_from(
        row,
        lease=Sealed[Lease].parse(row.sealed).body,
        checks=checks,
        deadline_s=until_s,
        lapses=row.lapsed_claims,
    )


def release_lapsed_claims(tx: Transaction, coordinator: Coordinator) -> None:
    """Puts claims that ran out back into the queue, or voids them if they ran out twice or are too old by now.

    Housekeeping calls it once a second.
    """
    rows = _LAPSED_CLAIMS.rows(tx.db, now_s=tx.now_s)
    for lease in rows:
        lapses = lease.lapsed_claims + 1
        tx.update(SUBMISSIONS, lease.lease_id, lapsed_claims=lapses)
        if lapses < MAX_LAPSED_CLAIMS:
            move(tx, lease, LeaseEvent.RELEASE)
        else:
            detail = f"{lapses} claims of {coordinator.config.claim_s:.0f} s ran out"
            void(tx, coordinator, lease, UNCHECKED, detail)
    if rows and (newest := newest_version(tx.db)) is not None:
        void_stale(tx, coordinator, newest)
    _void_refused_by_all(tx, coordinator)


def _void_refused_by_all(tx: Transaction, coordinator: Coordinator) -> None:
    """Voids submissions whose claim ran out and that no other validator takes: the run has one validator, or all are overloaded.

    Another validator has `claim_s` to take it, and more while it has other submissions to check, but no more than `lease_s`.
    """
    config = coordinator.config
    for lease in _WAITING.rows(tx.db, tried_before_s=tx.now_s - config.claim_s):
        others_come = _WORK_OF_OTHERS.row(tx.db, validator=lease.claimed_by) is not None
        if others_come and tx.now_s < lease.claimed_until_s + config.lease_s:
            continue
        waited_s = tx.now_s - lease.claimed_until_s
        detail = f"a claim of {config.claim_s:.0f} s ran out, and no other validator took it within {waited_s:.0f} s"
        void(tx, coordinator, lease, UNCHECKED, detail)


def give_verdict(tx: Transaction, coordinator: Coordinator, lease_id: str, verdict: Verdict) -> LeaseStatus:
    """Enters a verdict. Idempotent: the same finding again changes nothing, and another one is refused. The first counts."""
    _check_code(lease_id, verdict)
    # PostgreSQL stores no NUL character (see messages.ShortText).
    verdict = verdict.model_copy(update={"detail": verdict.detail.replace("\0", "\\0")})
    lease = find_lease(tx.db, lease_id)
    if lease.state in TERMINAL:
        body = _GIVEN.value(tx.db, id=lease_id)
        if body is not None and (given := _code_given(Verdict.parse(body))) != verdict.code:
            raise Rejected(
                "request.conflict", f"lease {lease_id} has the verdict {given}, not {verdict.code}"
            )
        # The lease may have ended without a verdict: it went stale, or its node was ejected. The answer says so.
        return status(lease)
    submission = SUBMISSIONS.find(tx.db, lease_id)
    if submission is None or submission.claimed_by is None:
        raise Rejected(
            "request.conflict", f"lease {lease_id} is {lease.state}: nobody claimed it for checking"
        )
    if verdict.code == ACCEPTED:
        _check_accepted(coordinator, lease, verdict)
    if _must_check_again(tx, submission, verdict):
        if lease.state == LeaseState.CHECKING:
            move(tx, lease, LeaseEvent.RELEASE)
        return status(find_lease(tx.db, lease_id))
    _apply(tx, coordinator, lease, submission, verdict)
    return status(find_lease(tx.db, lease_id))


def _must_check_again(tx: Transaction, submission: Row[Any], verdict: Verdict) -> bool:
    """Returns whether something has changed during the check that makes its verdict void."""
    if verdict.code == ACCEPTED:
        # The node lost its trust, so the submission needs every check now.
        return bool(submission.checks == "full" and verdict.checks != "full")
    # The run measured its noise again: by the new calibration the work may be correct.
    judged_by = verdict.evidence.get("calibrated_at")
    return (
        verdict.code in EXCUSABLE
        and judged_by is not None
        and judged_by != _CALIBRATED_AT.value(tx.db, version=submission.policy_version)
    )


def _check_code(lease_id: str, verdict: Verdict) -> None:
    if verdict.lease_id != lease_id:
        raise Rejected(
            "request.malformed", f"the verdict is on lease {verdict.lease_id}, the path names {lease_id}"
        )
    if verdict.code != ACCEPTED and (verdict.code not in CODES or verdict.code.startswith("request.")):
        raise Rejected("request.malformed", f"{verdict.code[:80]!r} is not a verdict; wire/codes.py has them")


def _check_accepted(coordinator: Coordinator, lease: Row[Any], verdict: Verdict) -> None:
    if _weights_share(coordinator, verdict) is None:
        raise Rejected(
            "request.malformed",
            f"weights {str(verdict.evidence[credits.WEIGHTS])[:40]!r} were accepted, which the run does not admit",
        )
    num_rows = lease.num_prompts * lease.samples_per_prompt
    if len(verdict.rewards) != num_rows:
        raise Rejected("request.malformed", f"{len(verdict.rewards)} rewards for {num_rows} rows")
    # Plain JSON: the coordinator sealed this lease itself.
    max_tokens = num_rows * int(json.loads(lease.sealed)["body"]["sampling"]["max_new_tokens"])
    if not num_rows <= verdict.output_tokens <= max_tokens:
        raise Rejected(
            "request.malformed",
            f"{verdict.output_tokens} output tokens in {num_rows} rows, possible are {num_rows} to {max_tokens}",
        )


def _apply(
    tx: Transaction, coordinator: Coordinator, lease: Row[Any], submission: Row[Any], verdict: Verdict
) -> None:
    """Records a verdict, ends its lease, and changes the node's counts and trust.

    The evidence of all submissions together may convict a node whose submission alone is accepted or uncertain.
    """
    node = get_node(tx.db, lease.node)
    earlier = _earlier_scores(tx, lease, submission)
    found = accounts.add_evidence(
        tx, coordinator, node, verdict, version=submission.policy_version, earlier=earlier
    )
    if found is not None:
        # A conviction is about all submissions together; an excuse is about this one, so its reason stays.
        given = f" [{verdict.code}: {verdict.detail}]" if found.code == RECALIBRATING else ""
        verdict = Verdict(
            lease_id=lease.lease_id,
            code=found.code,
            detail=found.detail + given,
            evidence=verdict.evidence | {GIVEN_CODE: verdict.code},
            checks=verdict.checks,
        )
    finding = verdict_kind(verdict.code)
    accepted = finding is VerdictKind.ACCEPTED
    share = _weights_share(coordinator, verdict) or 0.0
    factor = coordinator.config.credit_factor
    credit = credits.amount(verdict.output_tokens, factor, share) if accepted else 0
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
    tx.insert(
        _VERDICTS,
        lease_id=lease.lease_id,
        validator=tx.actor,
        node=lease.node,
        code=verdict.code,
        output_tokens=verdict.output_tokens if accepted else 0,
        checks=verdict.checks,
        credit=credit,
        graded=len(verdict.rewards) if accepted else 0,
        unparseable=evaluations.counted(verdict, "unparseable", len(verdict.rewards)) if accepted else 0,
        body=verdict.model_dump_json(exclude={"transcript"}),
        given_at_s=tx.now_s,
    )
    if accepted and coordinator.config.rollouts_mb:
        transcripts.keep(tx, lease, submission, verdict, seq=seq)
    end(tx, coordinator, lease, _EVENT[finding], code=verdict.code, detail=verdict.detail, credit=credit)
    rate = node_status.rows_per_s(
        lease.num_prompts * lease.samples_per_prompt,
        issued_at_s=lease.issued_at_s,
        previous_receipt_s=_PREVIOUS_RECEIPT_S.value(tx.db, name=submission.node, number=submission.seq),
        received_at_s=submission.received_at_s,
    )
    node = get_node(tx.db, lease.node)
    count_verdict(tx, node, finding, verdict=verdict, credit=credit, rows_per_s=rate)
    if finding is VerdictKind.REJECTED:
        _punish(tx, coordinator, lease, verdict)
    elif accepted:
        full = verdict.checks == "full"
        event = TrustEvent.ACCEPTED if full else TrustEvent.TAKEN_ON_TRUST
        change_standing(tx, coordinator, lease.node, event, "")
        if full and is_draw_open(submission.draw_rate, lease.purpose):
            after = get_node(tx.db, lease.node)
            batches.release_held(tx, coordinator, after, lease.lease_id, submission.seq)
        _use_accepted(tx, coordinator, lease, submission, verdict, seq)
    elif verdict.code == UNCERTAIN:
        change_standing(tx, coordinator, lease.node, TrustEvent.UNCERTAIN, "")


def _earlier_scores(tx: Transaction, lease: Row[Any], submission: Row[Any]) -> list[Sums]:
    """Returns the scores of the same work, made with the same version, as often as it was uncertain before."""
    if lease.unit == lease.lease_id:
        return []
    rows = _UNCERTAIN_BEFORE.rows(tx.db, unit=lease.unit, version=submission.policy_version)
    earlier = [Verdict.parse(row.body) for row in rows]
    return [scores_of(_code_given(one), one.evidence) for one in earlier]


def _code_given(verdict: Verdict) -> str:
    """Returns the validator's own code for a submission whose code the evidence of others may have changed."""
    return str(verdict.evidence.get(GIVEN_CODE, verdict.code))


def _weights_share(coordinator: Coordinator, verdict: Verdict) -> float | None:
    return credits.weights_share(verdict.evidence, coordinator.spec.admitted_weights.model_dump())


def _punish(tx: Transaction, coordinator: Coordinator, lease: Row[Any], verdict: Verdict) -> None:
    """Applies a rejection: revokes unchecked credit, takes the stake of a lease, lowers the trust, voids leases of a banned node."""
    before = get_node(tx.db, lease.node)
    revoke_unchecked(tx, coordinator, before, because=lease.lease_id)
    batches.withdraw_held(tx, lease.node, lease.lease_id)
    admission.slash(tx, coordinator, before.owner or before.node, lease.lease_id)
    change_standing(
        tx, coordinator, lease.node, TrustEvent.REJECTED, why_rejected(verdict.code, verdict.detail)
    )
    if get_node(tx.db, lease.node).trust == Trust.BANNED.value:
        void_all(tx, coordinator, lease.node, "void.abandoned", "the node was ejected")


def _use_accepted(
    tx: Transaction,
    coordinator: Coordinator,
    lease: Row[Any],
    submission: Row[Any],
    verdict: Verdict,
    seq: int,
) -> None:
    """Adds accepted work to the trainer's groups or to the held-out evaluation, by the lease's purpose."""
    if lease.purpose == "eval":
        if evaluations.add_chunk(tx, coordinator, lease, verdict):
            finish_run(tx, coordinator)
        return
    batches.add_groups(tx, coordinator, lease, submission, verdict, seq)
    batches.update_pass_rates(tx, coordinator, lease, verdict)
