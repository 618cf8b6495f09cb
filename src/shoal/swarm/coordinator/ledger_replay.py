"""Replays a ledger: computes every node's trust and credit from the events alone. Pure functions.

Raises CorruptData with the event's number if no honest coordinator could have written the events in that order: a change of
trust without a reason, a second end of a lease, a group trained on twice, a secret other than the committed one, a check that
the draw required but that was not made, credit for another node, or a conviction or a mean that the recorded numbers do not give.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.swarm.coordinator.replay_parts import (
    Contradiction,
    RecordedDraw,
    ReplayedGroups,
    ReplayedLease,
    ReplayedNode,
    ReplayedSecrets,
    TaskChoices,
)
from shoal.swarm.coordinator.rules.credit import (
    Balance,
    Earning,
    amount,
    balance,
    held_since_s,
    to_revoke,
    weights_share,
)
from shoal.swarm.coordinator.rules.cumulative_evidence import (
    GIVEN_CODE,
    NEW_NODE,
    RunEvidence,
    Sums,
    risen_statistics,
    scores_of,
)
from shoal.swarm.coordinator.rules.trust import (
    NodeStanding,
    Trust,
    TrustEvent,
    VerdictKind,
    next_standing,
    verdict_kind,
)
from shoal.wire.codes import UNCERTAIN, UNCHECKED, CorruptData
from shoal.wire.ledger import LedgerEvent
from shoal.wire.proof_noise import LaterNoise, Noise
from shoal.wire.seeded_draw import lease_seed

_TRUST_EVENTS = {f"node.{trust.value}": trust for trust in Trust}
_BEFORE_REVOCATION = ("epoch.revealed", "credit.revoked")
"""Types of the events that may come between a rejection and the revocation of credit."""
_ADMIN_EVENTS = {
    f"admin.{action.value}": action for action in (TrustEvent.QUARANTINE, TrustEvent.BAN, TrustEvent.RESTORE)
}


@dataclass
class ReplayedLedger:
    """The state of a run after the events that were added so far."""

    terms: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, ReplayedNode] = field(default_factory=dict)
    leases: dict[str, ReplayedLease] = field(default_factory=dict)
    secrets: ReplayedSecrets = field(init=False)
    groups: ReplayedGroups = field(init=False)
    weights: dict[str, float] = field(default_factory=dict)
    """The weight of each task, by label, as the newest terms say."""
    by_difficulty: set[str] = field(default_factory=set)
    """Labels of the tasks with difficulty sampling."""
    choices: TaskChoices = field(default_factory=TaskChoices)
    evidence: RunEvidence = field(default_factory=RunEvidence)
    uncertain: dict[tuple[str, int], list[Sums]] = field(default_factory=dict)
    """The scores of work that was void.uncertain, by its unit and the version that made it."""
    noise: Noise | None = None
    """The newest calibration."""
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
    newest_version: int = -1
    max_lag: int | None = None
    last_version: int | None = None
    finished_version: int | None = None
    seq: int = 0
    time_s: float = 0.0
    to_be_revoked: str = ""
    """The rejected lease for which credit must be revoked next."""
    last_standing: tuple[str, NodeStanding] | None = None
    """The node whose standing changed last, with its standing before that change."""

    def __post_init__(self) -> None:
        self.secrets, self.groups = ReplayedSecrets(self._lease), ReplayedGroups(self._lease)

    def add(self, event: LedgerEvent) -> None:
        """Adds one event. Raises Contradiction if it contradicts the events before it."""
        self.seq, self.time_s = event.seq, event.time_s
        if event.type not in _BEFORE_REVOCATION:
            self._check_revoked()
        if event.type in _TRUST_EVENTS:
            self._check_trust(event.body["node"], _TRUST_EVENTS[event.type])
        elif event.type in _ADMIN_EVENTS:
            self._apply_event(event.body["node"], _ADMIN_EVENTS[event.type])
        elif event.type in _HANDLERS:
            _HANDLERS[event.type](self, event.body)

    def close(self) -> None:
        """Checks, after the last event, that the ledger records every change of trust and every secret, and that seeds chose tasks
        and problems. Raises Contradiction."""
        self._check_revoked()
        is_over = self.finished_version is not None and self.finished_version == self.last_version
        hidden = self.secrets.hidden()
        if is_over and hidden and all(lease.end is not None for lease in self.leases.values()):
            raise Contradiction(f"the run is finished, but the secret of epoch {hidden[0]} is not revealed")
        self.choices.check(lambda lease_id: seed_of(self, lease_id))
        for key, node in self.nodes.items():
            if node.standing.trust is not node.recorded_trust:
                raise Contradiction(
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
        if self.noise is None and spec.get("noise"):
            self.noise = Noise.parse(json.dumps(spec["noise"]))
        self.max_lag, self.last_version = spec.get("max_lag"), spec.get("last_version")
        self.admitted_weights = spec.get("admitted_weights", {})
        tasks = _by_label([spec[key] for key in ("task",) if key in spec] + spec.get("more_tasks", []))
        self.weights = {label: task.get("weight", 1.0) for label, task in tasks.items()}
        self.by_difficulty = {label for label, task in tasks.items() if task.get("difficulty")}
        evals = _by_label([one["task"] for one in spec.get("evals", [])]) or tasks
        self.evaluated = set(evals)
        usual = spec.get("sampling", {}).get("max_new_tokens", 0)
        self.max_new_tokens = {
            label: (task.get("sampling") or {}).get("max_new_tokens") or usual
            for label, task in (evals | tasks).items()
        }

    def _enrolled(self, body: dict[str, Any]) -> None:
        if body["node"] in self.nodes:
            raise Contradiction(f"node {body['node'][:16]} is enrolled a second time")
        self.nodes[body["node"]] = ReplayedNode(
            NodeStanding(trust=Trust.PROBATION, since_s=self.time_s), owner=body.get("owner")
        )

    def _published(self, body: dict[str, Any]) -> None:
        if body["version"] != self.newest_version + 1:
            raise Contradiction(f"version {body['version']} is published after version {self.newest_version}")
        self.newest_version = body["version"]

    def _calibrated(self, body: dict[str, Any]) -> None:
        told = body.get("risen")
        later = LaterNoise.parse(json.dumps({name: body[name] for name in body.keys() - {"rises", "risen"}}))
        risen = risen_statistics({} if self.noise is None else later.noise.rise_since(self.noise))
        if told is not None:  # ledgers of earlier releases took nothing back
            if set(told) != set(risen):
                raise Contradiction(
                    f"the calibration from version {later.from_version} on takes back {told}, its means give {list(risen)}"
                )
            self.evidence.calibrated(later.measured_version, self.time_s, risen)
        self.noise = later.noise

    def _finished(self, body: dict[str, Any]) -> None:
        self.finished_version = body["version"]

    def _issued(self, body: dict[str, Any]) -> None:
        node = self._node(body["node"])
        if body["lease_id"] in self.leases:
            raise Contradiction(f"lease {body['lease_id']} is issued a second time")
        if node.standing.trust in (Trust.BANNED, Trust.RETIRED):
            raise Contradiction(
                f"a lease is issued to node {body['node'][:16]}, which is {node.standing.trust.value}"
            )
        unit = body.get("unit", body["lease_id"])
        if body["epoch"] not in self.secrets.commitments or (
            unit == body["lease_id"] and body["epoch"] in self.secrets.revealed
        ):
            raise Contradiction(
                f"lease {body['lease_id']} is of epoch {body['epoch']}, whose secret is not committed, or known already"
            )
        if unit != body["lease_id"]:
            before = self._lease(self.units.get(unit, unit))
            if before.node != body["node"]:
                raise Contradiction(f"lease {body['lease_id']} repeats the work of another node")
            if before.end != "void":
                raise Contradiction(f"lease {body['lease_id']} repeats work that is {before.end or 'open'}")
        self.units[unit] = body["lease_id"]
        lease = self.leases[body["lease_id"]] = ReplayedLease.issued(body)
        if lease.task:
            known = self.weights if lease.purpose == "train" else self.evaluated
            if lease.task not in known:
                raise Contradiction(
                    f"lease {body['lease_id']} is of task {lease.task!r}, the terms have {sorted(known)}"
                )
            by_difficulty = lease.purpose == "train" and lease.task in self.by_difficulty
            if len(lease.attempts) != (lease.num_prompts if by_difficulty else 0):
                raise Contradiction(
                    f"lease {body['lease_id']} has {len(lease.attempts)} attempts for {lease.num_prompts} prompts of task "
                    f"{lease.task!r}, whose difficulty is {str(by_difficulty).lower()}"
                )
            self.choices.add_lease(body["lease_id"], lease, self.weights)
            lease.max_tokens = lease.num_prompts * lease.samples * self.max_new_tokens.get(lease.task, 0)

    def _received(self, body: dict[str, Any]) -> None:
        lease = self._lease_of(body)
        if lease.sha256 is not None or lease.end is not None:
            raise Contradiction(f"lease {body['lease_id']} has a second submission, or one after its end")
        if lease.versions and body["policy_version"] not in lease.versions:
            raise Contradiction(
                f"the submission on lease {body['lease_id']} names version {body['policy_version']}, leased are {lease.versions}"
            )
        lease.sha256, lease.received_seq = body["sha256"], self.seq
        lease.policy_version = body["policy_version"]
        # Ledgers of release 0.1.0 do not have this term; their rates followed another rule.
        if "max_unchecked_share" in self.terms:
            trusted = self._node(lease.node).standing.trust is Trust.TRUSTED
            lease.least_rate = self.terms["check_rate"] if trusted else 1.0

    def _voided(self, body: dict[str, Any]) -> None:
        self._lease_of(body)
        self._end(body["lease_id"], "void")
        self._node(body["node"]).void += 1
        if body["code"] == "void.expired":
            self._apply_event(body["node"], TrustEvent.LAPSED)
        elif body["code"] == UNCHECKED:
            self._apply_event(body["node"], TrustEvent.UNCERTAIN)

    def _judged(self, body: dict[str, Any]) -> None:
        finding = verdict_kind(body["code"])
        lease = self._lease_of(body)
        self._end(body["lease_id"], finding.value)
        node, drawn = self._node(body["node"]), body["drawn"]
        full = body["checks"] == "full"
        lease.checks, lease.draw_rate = body["checks"], drawn["rate"]
        if lease.sha256 is None:
            raise Contradiction(f"lease {body['lease_id']} has a verdict without a submission")
        if drawn["rate"] < lease.least_rate - 1e-9:
            raise Contradiction(
                f"lease {body['lease_id']} was drawn at a rate of {drawn['rate']:g}, its node's is {lease.least_rate:g}"
            )
        self.secrets.add_draw(RecordedDraw(body["lease_id"], drawn["epoch"], drawn["rate"], drawn["checks"]))
        self._check_conviction(body, node)
        if finding is VerdictKind.VOID:
            node.void += 1
            if body["code"] == UNCERTAIN:
                self._apply_event(body["node"], TrustEvent.UNCERTAIN)
        elif finding is VerdictKind.REJECTED:
            if to_revoke(node.earnings, self._held_since_s(node.standing)):
                self.to_be_revoked = body["lease_id"]
            node.rejected_seq = self.seq
            self._apply_event(body["node"], TrustEvent.REJECTED)
        else:
            self._accepted(node, body, full)

    def _check_conviction(self, body: dict[str, Any], node: ReplayedNode) -> None:
        """Adds the scores of a verdict to the evidence, and checks that they give its code."""
        given = body["evidence"].get(GIVEN_CODE, body["code"])
        lease = self._lease(body["lease_id"])
        work = (lease.unit, lease.policy_version)
        # The prefixes keep apart a key that is a node and an owner.
        keys = (f"node {body['node']}", *([f"owner {node.owner}"] if node.owner else []))
        earlier = self.uncertain.get(work, [])
        found = self.evidence.add(
            keys,
            given,
            body["evidence"],
            version=lease.policy_version,
            now_s=self.time_s,
            is_new=node.accepted < NEW_NODE,
            earlier=earlier,
        )
        code = given if found is None else found.code
        if body["code"] == UNCERTAIN:
            self.uncertain[work] = [*earlier, scores_of(given, body["evidence"])]
        if code != body["code"]:
            raise Contradiction(f"lease {body['lease_id']} is {body['code']}, but the evidence gives {code}")

    def _accepted(self, node: ReplayedNode, body: dict[str, Any], full: bool) -> None:
        share = weights_share(body["evidence"], self.admitted_weights)
        if share is None:
            raise Contradiction(
                f"lease {body['lease_id']} was accepted with weights that the run does not admit"
            )
        expected = amount(body["output_tokens"], self.terms["credit_factor"], share)
        if body["credit"] != expected:
            raise Contradiction(
                f"lease {body['lease_id']} has credit {body['credit']}, its tokens give {expected}"
            )
        lease = self._lease(body["lease_id"])
        if lease.max_tokens and body["output_tokens"] > lease.max_tokens:
            raise Contradiction(
                f"lease {body['lease_id']} has {body['output_tokens']} tokens, at most {lease.max_tokens} were leased"
            )
        num_rows = lease.num_prompts * lease.samples
        if num_rows and (len(body["rewards"]) != num_rows or body["output_tokens"] < num_rows):
            raise Contradiction(
                f"lease {body['lease_id']} of {num_rows} rows has {len(body['rewards'])} rewards and "
                f"{body['output_tokens']} tokens"
            )
        lease.rewards = body["rewards"]
        if not full and body["drawn"]["checks"] == "full":
            raise Contradiction(
                f"lease {body['lease_id']} was drawn for every check but got only the cheap ones"
            )
        if not full and node.standing.trust is not Trust.TRUSTED:
            raise Contradiction(
                f"lease {body['lease_id']} was accepted without every check from a {node.standing.trust.value} node"
            )
        self.choices.add_rewards(body["lease_id"], body["rewards"])
        if lease.purpose == "eval":
            self.groups.add_chunk(body["lease_id"], lease)
        node.accepted += 1
        node.earnings.append(
            Earning(lease_id=body["lease_id"], amount=body["credit"], given_at_s=self.time_s, checked=full)
        )
        self._apply_event(body["node"], TrustEvent.ACCEPTED if full else TrustEvent.TAKEN_ON_TRUST)

    def _revoked(self, body: dict[str, Any]) -> None:
        node, standing = self._node(body["node"]), self._before_rejection(body["node"])
        self.to_be_revoked = ""
        taken = {one.lease_id for one in to_revoke(node.earnings, self._held_since_s(standing))}
        if taken != set(body["lease_ids"]):
            raise Contradiction(f"{len(body['lease_ids'])} leases are revoked, expected {len(taken)}")
        node.earnings = [replace(one, revoked=one.revoked or one.lease_id in taken) for one in node.earnings]
        for lease_id in body["lease_ids"]:
            self._lease(lease_id).end = "revoked"
        self.revoked[body["because"]] = sum(one.amount for one in node.earnings if one.lease_id in taken)
        self.groups.withdraw(body["group_ids"])

    def _appealed(self, body: dict[str, Any]) -> None:
        lease = self._lease(body["lease_id"])
        if lease.end != "rejected" or lease.node != body["node"] or body["lease_id"] in self.appeals:
            raise Contradiction(f"lease {body['lease_id']} is appealed twice, or was not rejected")
        self.appeals[body["lease_id"]] = False

    def _decided(self, body: dict[str, Any]) -> None:
        if self.appeals.get(body["lease_id"], True) or self._lease(body["lease_id"]).node != body["node"]:
            raise Contradiction(
                f"an appeal against lease {body['lease_id']} is decided twice, or was not filed"
            )
        self.appeals[body["lease_id"]] = True
        most = self.revoked.get(body["lease_id"], 0) if body["upheld"] else 0
        if body["returned"] != most:
            raise Contradiction(
                f"the appeal against lease {body['lease_id']} returns {body['returned']} of credit, {most} was revoked for it"
            )
        if body["upheld"]:
            self._node(body["node"]).returned += body["returned"]
            self._apply_event(body["node"], TrustEvent.UPHELD)

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
            raise Contradiction(f"credit of node {key[:16]} is revoked without a rejection before it")
        return self.last_standing[1]

    def _check_trust(self, key: str, trust: Trust) -> None:
        """Checks that a recorded change of trust follows from the events before it. Leaving needs no other event."""
        node = self._node(key)
        if trust is Trust.RETIRED:
            self._apply_event(key, TrustEvent.LEAVE)
            if node.standing.trust is Trust.QUARANTINED:  # ledgers of release 0.1.0 have it
                node.standing = replace(node.standing, trust=trust, since_s=self.time_s)
        if node.standing.trust is not trust:
            raise Contradiction(
                f"node {key[:16]} is recorded as {trust.value}, but the events make it {node.standing.trust.value}"
            )
        node.recorded_trust = trust

    def _end(self, lease_id: str, how: str) -> None:
        lease = self._lease(lease_id)
        if lease.end is not None:
            raise Contradiction(f"lease {lease_id} ends as {how}, but it ended before as {lease.end}")
        lease.end = how

    def _held_since_s(self, standing: NodeStanding) -> float:
        return held_since_s(standing.trust, standing.since_s, self.time_s, self.terms["hold_s"])

    def _check_revoked(self) -> None:
        if self.to_be_revoked:
            raise Contradiction(
                f"the rejection of lease {self.to_be_revoked} does not revoke the credit given on trust"
            )

    def _node(self, key: str) -> ReplayedNode:
        if key not in self.nodes:
            raise Contradiction(f"node {key[:16]} is not enrolled")
        return self.nodes[key]

    def _lease(self, lease_id: str) -> ReplayedLease:
        if lease_id not in self.leases:
            raise Contradiction(f"lease {lease_id[:32]} was never issued")
        return self.leases[lease_id]

    def _lease_of(self, body: dict[str, Any]) -> ReplayedLease:
        """Returns the lease that an event is about. The event must name its node: another one would be credited or blamed."""
        lease = self._lease(body["lease_id"])
        if body.get("node", lease.node) != lease.node:
            raise Contradiction(
                f"lease {body['lease_id']} was issued to another node than {body['node'][:16]}"
            )
        return lease


def _by_label(tasks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {task.get("label") or task["name"]: task for task in tasks}


_HANDLERS: dict[str, Callable[[ReplayedLedger, dict[str, Any]], None]] = {
    "run.opened": ReplayedLedger._opened,
    "node.enrolled": ReplayedLedger._enrolled,
    "session.opened": lambda ledger, body: ledger._apply_event(body["node"], TrustEvent.RETURN),
    "epoch.committed": lambda ledger, body: ledger.secrets.commit(body, ledger.seq),
    "epoch.revealed": lambda ledger, body: ledger.secrets.reveal(body, ledger.seq),
    "policy.published": ReplayedLedger._published,
    "run.calibrated": ReplayedLedger._calibrated,
    "lease.issued": ReplayedLedger._issued,
    "submission.received": ReplayedLedger._received,
    "lease.void": ReplayedLedger._voided,
    "verdict.given": ReplayedLedger._judged,
    "credit.revoked": ReplayedLedger._revoked,
    "appeal.filed": ReplayedLedger._appealed,
    "appeal.decided": ReplayedLedger._decided,
    "group.released": lambda ledger, body: ledger.groups.release(
        body, ledger._node(body["node"]).rejected_seq
    ),
    "group.withdrawn": lambda ledger, body: ledger.groups.withdraw(body["group_ids"]),
    "batch.formed": lambda ledger, body: ledger.groups.form(
        body, ledger.terms.get("max_unchecked_share"), ledger.max_lag
    ),
    "evaluation.completed": lambda ledger, body: ledger.groups.complete_evaluation(body),
    "run.finished": ReplayedLedger._finished,
}


def replay(events: Iterable[LedgerEvent]) -> ReplayedLedger:
    """Returns the state after a whole ledger. Raises CorruptData at the first event that contradicts the ones before it."""
    replayed = ReplayedLedger()
    for event in events:
        with _as_corrupt(event):
            replayed.add(event)
    if replayed.seq:
        with _as_corrupt(event):
            replayed.close()
    return replayed


@contextmanager
def _as_corrupt(event: LedgerEvent) -> Iterator[None]:
    """Raises CorruptData with the number of an event for what the block raises because of the ledger."""
    try:
        yield
    except Contradiction as error:
        raise CorruptData(f"ledger event {event.seq}: {error}") from None
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError):
        raise CorruptData(
            f"ledger event {event.seq} ({event.type}), or one before it, lacks a field or has one of the wrong type"
        ) from None


def seed_of(replayed: ReplayedLedger, lease_id: str) -> str | None:
    """Returns the seed that a lease must have had; None while its epoch's secret is not revealed."""
    lease = replayed.leases[lease_id]
    secret = replayed.secrets.revealed.get(lease.epoch)
    return None if secret is None else lease_seed(secret, lease.unit, lease.node)
