"""Replays a ledger: computes every node's trust and credit from the events alone. Pure functions.

Raises CorruptData with the event's number if no honest coordinator could have written the events in that order: a change of
trust without a reason, a second end of a lease, a group trained on twice, a secret other than the committed one, a check that
the draw required but that was not made, or a conviction by accumulated evidence that the recorded scores do not give.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.swarm.coordinator.rules.credit import (
    Balance,
    Earning,
    amount,
    balance,
    held_since_s,
    to_revoke,
    weights_share,
)
from shoal.swarm.coordinator.rules.cumulative_evidence import GIVEN_CODE, NEW_NODE, RunEvidence, scores_of
from shoal.swarm.coordinator.rules.trust import (
    NodeStanding,
    Trust,
    TrustEvent,
    VerdictKind,
    gets_every_check,
    is_draw_open,
    next_standing,
    verdict_kind,
)
from shoal.swarm.coordinator.task_choices import RecordedDraw, ReplayedLease, TaskChoices
from shoal.wire.codes import ACCEPTED, ACCUMULATED, UNCERTAIN, UNCHECKED, CorruptData
from shoal.wire.ledger import LedgerEvent
from shoal.wire.seeded_draw import lease_seed

_TRUST_EVENTS = {f"node.{trust.value}": trust for trust in Trust}
_ADMIN_EVENTS = {
    f"admin.{action.value}": action for action in (TrustEvent.QUARANTINE, TrustEvent.BAN, TrustEvent.RESTORE)
}


@dataclass
class ReplayedNode:
    """A node's standing and credit, as computed from the events."""

    standing: NodeStanding
    owner: str | None = None
    recorded_trust: Trust = Trust.PROBATION
    """The trust that the last event about the node names."""
    accepted: int = 0
    void: int = 0
    returned: int = 0
    """Credit given back by appeals."""
    earnings: list[Earning] = field(default_factory=list)

    @property
    def credit(self) -> int:
        return self.returned + sum(earning.amount for earning in self.earnings if not earning.revoked)


@dataclass
class ReplayedLedger:
    """The state of a run after the events that were added so far."""

    terms: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, ReplayedNode] = field(default_factory=dict)
    leases: dict[str, ReplayedLease] = field(default_factory=dict)
    commitments: dict[int, str] = field(default_factory=dict)
    secrets: dict[int, bytes] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    """Groups that were trained on or withdrawn: they must not be trained on again."""
    released: set[str] = field(default_factory=set)
    """Groups accepted without every check that may be trained on, because a later full check of their node passed."""
    unchecked_draws: list[RecordedDraw] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    """The weight of each task, by label, as the newest terms say."""
    by_difficulty: set[str] = field(default_factory=set)
    """Labels of the tasks with difficulty sampling."""
    choices: TaskChoices = field(default_factory=TaskChoices)
    evidence: RunEvidence = field(default_factory=RunEvidence)
    uncertain: set[tuple[str, int]] = field(default_factory=set)
    """Work that was void.uncertain: its unit, and the version that made it."""
    evaluated: set[str] = field(default_factory=set)
    """Labels of the held-out evaluations."""
    max_new_tokens: dict[str, int] = field(default_factory=dict)
    """Longest answer of each task and evaluation, by label."""
    units: dict[str, str] = field(default_factory=dict)
    """The newest lease of each unit of work."""
    revoked: dict[str, int] = field(default_factory=dict)
    """Credit that was revoked for a rejection, by lease."""
    appeals: dict[str, bool] = field(default_factory=dict)
    """Whether the appeal against a lease's rejection is decided."""
    seq: int = 0
    time_s: float = 0.0
    last_standing: tuple[str, NodeStanding] | None = None
    """The node whose standing changed last, with its standing before that change."""

    def add(self, event: LedgerEvent) -> None:
        """Adds one event. Raises CorruptData if it contradicts the events before it."""
        self.seq, self.time_s = event.seq, event.time_s
        if event.type in _TRUST_EVENTS:
            self._check_trust(event.body["node"], _TRUST_EVENTS[event.type])
        elif event.type in _ADMIN_EVENTS:
            self._apply_event(event.body["node"], _ADMIN_EVENTS[event.type])
        elif event.type in _HANDLERS:
            _HANDLERS[event.type](self, event.body)

    def close(self) -> None:
        """Checks, after the last event, that the ledger records every change of trust, and that seeds chose tasks and problems."""
        try:
            self.choices.check(lambda lease_id: seed_of(self, lease_id))
        except ValueError as error:
            raise CorruptData(f"the ledger is inconsistent: {error}") from None
        for key, node in self.nodes.items():
            if node.standing.trust is not node.recorded_trust:
                raise self._corrupt(
                    f"node {key[:16]} must be {node.standing.trust.value}, the ledger says {node.recorded_trust.value}"
                )

    def balance(self, key: str, now_s: float) -> Balance:
        """Returns the final and the held credit of a node at a time."""
        node = self.nodes[key]
        since_s = held_since_s(node.standing.trust, node.standing.since_s, now_s, self.terms["hold_s"])
        sums = balance(node.earnings, since_s)
        return Balance(sums.final + node.returned, sums.held)

    # -- one method per type of event -------------------------------------------------------------------

    def _opened(self, body: dict[str, Any]) -> None:
        self.terms = body.get("terms", {})
        spec = body.get("spec", {})
        self.admitted_weights = spec.get("admitted_weights", {})
        tasks = [spec[key] for key in ("task",) if key in spec] + spec.get("more_tasks", [])
        self.weights = {task.get("label") or task["name"]: task.get("weight", 1.0) for task in tasks}
        self.by_difficulty = {task.get("label") or task["name"] for task in tasks if task.get("difficulty")}
        evals = [one["task"] for one in spec.get("evals", [])] or tasks
        self.evaluated = {task.get("label") or task["name"] for task in evals}
        usual = spec.get("sampling", {}).get("max_new_tokens", 0)
        self.max_new_tokens = {
            task.get("label") or task["name"]: (task.get("sampling") or {}).get("max_new_tokens") or usual
            for task in [*evals, *tasks]
        }

    def _enrolled(self, body: dict[str, Any]) -> None:
        if body["node"] in self.nodes:
            raise self._corrupt(f"node {body['node'][:16]} is enrolled a second time")
        self.nodes[body["node"]] = ReplayedNode(
            NodeStanding(trust=Trust.PROBATION, since_s=self.time_s), owner=body.get("owner")
        )

    def _session(self, body: dict[str, Any]) -> None:
        self._apply_event(body["node"], TrustEvent.RETURN)

    def _committed(self, body: dict[str, Any]) -> None:
        if body["epoch"] in self.commitments:
            raise self._corrupt(f"epoch {body['epoch']} is committed a second time")
        self.commitments[body["epoch"]] = body["commitment"]

    def _revealed(self, body: dict[str, Any]) -> None:
        secret = bytes.fromhex(body["secret"])
        if hashlib.sha256(secret).hexdigest() != self.commitments.get(body["epoch"]):
            raise self._corrupt(f"the secret of epoch {body['epoch']} does not match its commitment")
        self.secrets[body["epoch"]] = secret
        self._check_draws()

    def _issued(self, body: dict[str, Any]) -> None:
        node = self._node(body["node"])
        if node.standing.trust in (Trust.BANNED, Trust.RETIRED):
            raise self._corrupt(
                f"a lease is issued to node {body['node'][:16]}, which is {node.standing.trust.value}"
            )
        unit = body.get("unit", body["lease_id"])
        if body["epoch"] not in self.commitments or (
            unit == body["lease_id"] and body["epoch"] in self.secrets
        ):
            raise self._corrupt(
                f"lease {body['lease_id']} is of epoch {body['epoch']}, whose secret is not committed, or known already"
            )
        if unit != body["lease_id"]:
            before = self._lease(self.units.get(unit, unit))
            if before.node != body["node"]:
                raise self._corrupt(f"lease {body['lease_id']} repeats the work of another node")
            if before.end != "void":
                raise self._corrupt(f"lease {body['lease_id']} repeats work that is {before.end or 'open'}")
        self.units[unit] = body["lease_id"]
        lease = self.leases[body["lease_id"]] = ReplayedLease(
            body["node"],
            body["epoch"],
            unit,
            purpose=body.get("purpose", "train"),
            task=body.get("task", ""),
            attempts=tuple(body.get("attempts", ())),
            problems=tuple(body.get("problems", ())),
            num_problems=body.get("num_problems", 0),
            num_prompts=body.get("num_prompts", 0),
            samples=body.get("samples_per_prompt", 0),
        )
        if lease.task:
            known = self.weights if lease.purpose == "train" else self.evaluated
            if lease.task not in known:
                raise self._corrupt(
                    f"lease {body['lease_id']} is of task {lease.task!r}, the terms have {sorted(known)}"
                )
            by_difficulty = lease.purpose == "train" and lease.task in self.by_difficulty
            if len(lease.attempts) != (lease.num_prompts if by_difficulty else 0):
                raise self._corrupt(
                    f"lease {body['lease_id']} has {len(lease.attempts)} attempts for {lease.num_prompts} prompts of task "
                    f"{lease.task!r}, whose difficulty is {str(by_difficulty).lower()}"
                )
            self.choices.add_lease(body["lease_id"], lease, self.weights)
            lease.max_tokens = lease.num_prompts * lease.samples * self.max_new_tokens.get(lease.task, 0)

    def _received(self, body: dict[str, Any]) -> None:
        lease = self._lease(body["lease_id"])
        lease.sha256, lease.received_seq = body["sha256"], self.seq
        lease.policy_version = body["policy_version"]
        # Ledgers of release 0.1.0 do not have this term; their rates followed another rule.
        if "max_unchecked_share" in self.terms:
            trusted = self._node(lease.node).standing.trust is Trust.TRUSTED
            lease.least_rate = self.terms["check_rate"] if trusted else 1.0

    def _voided(self, body: dict[str, Any]) -> None:
        self._end(body["lease_id"], "void")
        self._node(body["node"]).void += 1
        if body["code"] == "void.expired":
            self._apply_event(body["node"], TrustEvent.LAPSED)
        elif body["code"] == UNCHECKED:
            self._apply_event(body["node"], TrustEvent.UNCERTAIN)

    def _judged(self, body: dict[str, Any]) -> None:
        finding = verdict_kind(body["code"])
        self._end(body["lease_id"], finding.value)
        node, drawn = self._node(body["node"]), body["drawn"]
        full = body["checks"] == "full"
        lease = self._lease(body["lease_id"])
        lease.checks, lease.draw_rate = body["checks"], drawn["rate"]
        if lease.sha256 is None:
            raise self._corrupt(f"lease {body['lease_id']} has a verdict without a submission")
        if drawn["rate"] < lease.least_rate - 1e-9:
            raise self._corrupt(
                f"lease {body['lease_id']} was drawn at a rate of {drawn['rate']:g}, its node's is {lease.least_rate:g}"
            )
        self.unchecked_draws.append(
            RecordedDraw(body["lease_id"], drawn["epoch"], drawn["rate"], drawn["checks"])
        )
        self._check_draws()
        self._check_conviction(body, node)
        if finding is VerdictKind.VOID:
            node.void += 1
            if body["code"] == UNCERTAIN:
                self._apply_event(body["node"], TrustEvent.UNCERTAIN)
        elif finding is VerdictKind.REJECTED:
            self._apply_event(body["node"], TrustEvent.REJECTED)
        else:
            self._accepted(node, body, full)

    def _check_conviction(self, body: dict[str, Any], node: ReplayedNode) -> None:
        """Adds the scores of a verdict to the evidence, and checks that they give its code."""
        given = body["evidence"].get(GIVEN_CODE, body["code"])
        lease = self._lease(body["lease_id"])
        work = (lease.unit, lease.policy_version)
        scores = scores_of(given, body["evidence"])
        is_new = node.accepted < NEW_NODE
        code = UNCERTAIN if is_new and given == ACCEPTED and self.evidence.doubt(scores) else given
        # The same work with the same version gives the same bits again, which are no new evidence.
        if work not in self.uncertain and scores:
            # The prefixes keep apart a key that is a node and an owner.
            keys = (f"node {body['node']}", *([f"owner {node.owner}"] if node.owner else []))
            code = ACCUMULATED if self.evidence.add(keys, scores, is_new=is_new) is not None else code
        if body["code"] == UNCERTAIN:
            self.uncertain.add(work)
        if code != body["code"]:
            raise self._corrupt(f"lease {body['lease_id']} is {body['code']}, but the evidence gives {code}")

    def _accepted(self, node: ReplayedNode, body: dict[str, Any], full: bool) -> None:
        share = weights_share(body["evidence"], self.admitted_weights)
        if share is None:
            raise self._corrupt(
                f"lease {body['lease_id']} was accepted with weights that the run does not admit"
            )
        expected = amount(body["output_tokens"], self.terms["credit_factor"], share)
        if body["credit"] != expected:
            raise self._corrupt(
                f"lease {body['lease_id']} has credit {body['credit']}, its tokens give {expected}"
            )
        lease = self._lease(body["lease_id"])
        if lease.max_tokens and body["output_tokens"] > lease.max_tokens:
            raise self._corrupt(
                f"lease {body['lease_id']} has {body['output_tokens']} tokens, at most {lease.max_tokens} were leased"
            )
        if not full and body["drawn"]["checks"] == "full":
            raise self._corrupt(
                f"lease {body['lease_id']} was drawn for every check but got only the cheap ones"
            )
        if not full and node.standing.trust is not Trust.TRUSTED:
            raise self._corrupt(
                f"lease {body['lease_id']} was accepted without every check from a {node.standing.trust.value} node"
            )
        self.choices.add_rewards(body["lease_id"], body["rewards"])
        node.accepted += 1
        node.earnings.append(
            Earning(lease_id=body["lease_id"], amount=body["credit"], given_at_s=self.time_s, checked=full)
        )
        self._apply_event(body["node"], TrustEvent.ACCEPTED if full else TrustEvent.TAKEN_ON_TRUST)

    def _revoked(self, body: dict[str, Any]) -> None:
        node, standing = self._node(body["node"]), self._before_rejection(body["node"])
        since_s = held_since_s(standing.trust, standing.since_s, self.time_s, self.terms["hold_s"])
        taken = {earning.lease_id for earning in to_revoke(node.earnings, since_s)}
        if taken != set(body["lease_ids"]):
            raise self._corrupt(f"{len(body['lease_ids'])} leases are revoked, expected {len(taken)}")
        node.earnings = [
            Earning(
                lease_id=earning.lease_id,
                amount=earning.amount,
                given_at_s=earning.given_at_s,
                checked=earning.checked,
                revoked=earning.revoked or earning.lease_id in taken,
            )
            for earning in node.earnings
        ]
        for lease_id in body["lease_ids"]:
            self._lease(lease_id).end = "revoked"
        self.revoked[body["because"]] = sum(one.amount for one in node.earnings if one.lease_id in taken)
        self.trained.update(body["group_ids"])  # withdrawn groups must not be trained on later

    def _appealed(self, body: dict[str, Any]) -> None:
        lease = self._lease(body["lease_id"])
        if lease.end != "rejected" or lease.node != body["node"] or body["lease_id"] in self.appeals:
            raise self._corrupt(f"lease {body['lease_id']} is appealed twice, or was not rejected")
        self.appeals[body["lease_id"]] = False

    def _decided(self, body: dict[str, Any]) -> None:
        if self.appeals.get(body["lease_id"], True) or self._lease(body["lease_id"]).node != body["node"]:
            raise self._corrupt(
                f"an appeal against lease {body['lease_id']} is decided twice, or was not filed"
            )
        self.appeals[body["lease_id"]] = True
        most = self.revoked.get(body["lease_id"], 0) if body["upheld"] else 0
        if body["returned"] != most:
            raise self._corrupt(
                f"the appeal against lease {body['lease_id']} returns {body['returned']} of credit, {most} was revoked for it"
            )
        if body["upheld"]:
            self._node(body["node"]).returned += body["returned"]
            self._apply_event(body["node"], TrustEvent.UPHELD)

    def _released(self, body: dict[str, Any]) -> None:
        """Checks that held groups are released by a later submission of their node that was drawn for every check and accepted."""
        because = self._lease(body["because"])
        passed = because.end == "accepted" and because.checks == "full"
        if not (passed and because.node == body["node"] and is_draw_open(because.draw_rate, because.purpose)):
            raise self._corrupt(f"lease {body['because']} releases groups, but passed no full check by lot")
        for group in body["group_ids"]:
            lease = self._lease(group.rpartition("-")[0])
            if lease.node != body["node"] or lease.received_seq >= because.received_seq:
                raise self._corrupt(f"group {group} is released by a check that does not come after it")
        self.released.update(body["group_ids"])

    def _withdrawn(self, body: dict[str, Any]) -> None:
        self.trained.update(body["group_ids"])

    def _formed(self, body: dict[str, Any]) -> None:
        # Ledgers of release 0.1.0 do not have this term, and their unchecked groups were not held.
        share, unchecked = self.terms.get("max_unchecked_share"), 0
        for group in body["group_ids"]:
            lease = self._lease(group.rpartition("-")[0])
            if group in self.trained or lease.end != "accepted":
                raise self._corrupt(f"group {group} is trained on twice, or was not accepted")
            if lease.num_prompts and int(group.rpartition("-")[2]) >= lease.num_prompts:
                raise self._corrupt(
                    f"group {group} is trained on, but its lease has {lease.num_prompts} prompts"
                )
            if lease.checks != "full":
                unchecked += 1
                if share is not None and group not in self.released:
                    raise self._corrupt(
                        f"group {group} is trained on without a full check of its node after it"
                    )
            self.trained.add(group)
        most = len(body["group_ids"]) * (1.0 if share is None else share)
        if unchecked > most + 1e-9:
            raise self._corrupt(f"the batch has {unchecked} unchecked groups, at most {most:g} are allowed")

    # -- shared by those methods ------------------------------------------------------------------------

    def _apply_event(self, key: str, event: TrustEvent) -> None:
        node = self._node(key)
        self.last_standing = (key, node.standing)
        node.standing = next_standing(
            node.standing, event, self.time_s, trusted_after=self.terms["trusted_after"]
        )

    def _before_rejection(self, key: str) -> NodeStanding:
        """Returns the node's standing before the rejection that caused a revocation. The rejection must be the event before it."""
        if self.last_standing is None or self.last_standing[0] != key:
            raise self._corrupt(f"credit of node {key[:16]} is revoked without a rejection before it")
        return self.last_standing[1]

    def _check_trust(self, key: str, trust: Trust) -> None:
        """Checks that a recorded change of trust follows from the events before it. Leaving needs no other event."""
        node = self._node(key)
        if trust is Trust.RETIRED:
            self._apply_event(key, TrustEvent.LEAVE)
            if node.standing.trust is Trust.QUARANTINED:  # ledgers of release 0.1.0 have it
                node.standing = replace(node.standing, trust=trust, since_s=self.time_s)
        if node.standing.trust is not trust:
            raise self._corrupt(
                f"node {key[:16]} is recorded as {trust.value}, but the events make it {node.standing.trust.value}"
            )
        node.recorded_trust = trust

    def _end(self, lease_id: str, how: str) -> None:
        lease = self._lease(lease_id)
        if lease.end is not None:
            raise self._corrupt(f"lease {lease_id} ends as {how}, but it ended before as {lease.end}")
        lease.end = how

    def _check_draws(self) -> None:
        """Checks the draws whose secrets are revealed, and keeps the others."""
        unchecked = []
        for draw in self.unchecked_draws:
            sha256 = self._lease(draw.lease_id).sha256
            if draw.epoch not in self.secrets or sha256 is None:
                unchecked.append(draw)
            # The opposite is allowed: a node that lost its trust after the draw gets every check.
            elif draw.checks != "full" and gets_every_check(
                self.secrets[draw.epoch], draw.lease_id, sha256, draw.rate
            ):
                raise self._corrupt(
                    f"the draw gave lease {draw.lease_id} every check, the ledger says {draw.checks}"
                )
        self.unchecked_draws = unchecked

    def _node(self, key: str) -> ReplayedNode:
        if key not in self.nodes:
            raise self._corrupt(f"node {key[:16]} is not enrolled")
        return self.nodes[key]

    def _lease(self, lease_id: str) -> ReplayedLease:
        if lease_id not in self.leases:
            raise self._corrupt(f"lease {lease_id[:32]} was never issued")
        return self.leases[lease_id]

    def _corrupt(self, reason: str) -> CorruptData:
        return CorruptData(f"ledger event {self.seq}: {reason}")


_HANDLERS: dict[str, Callable[[ReplayedLedger, dict[str, Any]], None]] = {
    "run.opened": ReplayedLedger._opened,
    "node.enrolled": ReplayedLedger._enrolled,
    "session.opened": ReplayedLedger._session,
    "epoch.committed": ReplayedLedger._committed,
    "epoch.revealed": ReplayedLedger._revealed,
    "lease.issued": ReplayedLedger._issued,
    "submission.received": ReplayedLedger._received,
    "lease.void": ReplayedLedger._voided,
    "verdict.given": ReplayedLedger._judged,
    "credit.revoked": ReplayedLedger._revoked,
    "appeal.filed": ReplayedLedger._appealed,
    "appeal.decided": ReplayedLedger._decided,
    "group.released": ReplayedLedger._released,
    "group.withdrawn": ReplayedLedger._withdrawn,
    "batch.formed": ReplayedLedger._formed,
}


def replay(events: Iterable[LedgerEvent]) -> ReplayedLedger:
    """Returns the state after a whole ledger. Raises CorruptData at the first event that contradicts the ones before it."""
    replayed = ReplayedLedger()
    for event in events:
        try:
            replayed.add(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise CorruptData(
                f"ledger event {event.seq} ({event.type}) lacks a field or has one of the wrong type"
            ) from None
    replayed.close()
    return replayed


def seed_of(replayed: ReplayedLedger, lease_id: str) -> str | None:
    """Returns the seed that a lease must have had; None while its epoch's secret is not revealed."""
    lease = replayed.leases[lease_id]
    secret = replayed.secrets.get(lease.epoch)
    return None if secret is None else lease_seed(secret, lease.unit, lease.node)
