"""The parts of a replayed ledger (ledger_replay.py): nodes, leases, secrets and draws, choices of tasks and problems, groups and evaluations.

Their methods take the body of one event. They raise Contradiction if no honest coordinator could have written it after the events
before. Pure functions.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.swarm.coordinator.rules.credit import Earning
from shoal.swarm.coordinator.rules.difficulty import choose_attempts, next_rate, problem_numbers
from shoal.swarm.coordinator.rules.trust import NodeStanding, Trust, gets_every_check, is_draw_open
from shoal.wire.seeded_draw import choose_task

ROUNDING = 1e-6
"""Relative difference between a recorded mean and ours that the order of a sum explains."""


@dataclass
class ReplayedNode:
    """A node's standing and credit, as computed from the events."""

    standing: NodeStanding
    owner: str | None = None
    recorded_trust: Trust = Trust.PROBATION
    """The trust that the last event about the node names."""
    accepted: int = 0
    void: int = 0
    rejected_seq: int = 0
    """Number of the event of its last rejection."""
    returned: int = 0
    """Credit given back by appeals."""
    earnings: list[Earning] = field(default_factory=list)

    @property
    def credit(self) -> int:
        return self.returned + sum(earning.amount for earning in self.earnings if not earning.revoked)


@dataclass
class ReplayedLease:
    """A lease, as computed from the events."""

    node: str
    epoch: int
    unit: str
    purpose: str = "train"
    received_seq: int = 0
    """Number of the event `submission.received`."""
    policy_version: int = -1
    versions: tuple[int, ...] = ()
    """The leased versions; empty in ledgers that do not have them."""
    chunk: int = 0
    """The part of the held-out set that an eval lease covers."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of its rows, once it is accepted."""
    end: str | None = None
    """`accepted`, `rejected`, `void` or `revoked`; None while it is open."""
    sha256: str | None = None
    checks: str = "full"
    """The checks that its accepted submission passed."""
    draw_rate: float = 1.0
    least_rate: float = 0.0
    """Smallest rate that the draw of its checks may have had."""
    max_tokens: int = 0
    """Most output tokens of its rows; 0 if unknown."""
    task: str = ""
    attempts: tuple[int, ...] = ()
    """The attempts of difficulty sampling; empty without it."""
    problems: tuple[int, ...] = ()
    num_problems: int = 0
    num_prompts: int = 0
    """0 in ledgers that do not have it."""
    samples: int = 0

    @classmethod
    def issued(cls, body: dict[str, Any]) -> "ReplayedLease":
        """Returns the lease that an event `lease.issued` is about. Ledgers of release 0.1.0 lack most fields."""
        return cls(
            node=body["node"],
            epoch=body["epoch"],
            unit=body.get("unit", body["lease_id"]),
            purpose=body.get("purpose", "train"),
            task=body.get("task", ""),
            attempts=tuple(body.get("attempts", ())),
            problems=tuple(body.get("problems", ())),
            num_problems=body.get("num_problems", 0),
            num_prompts=body.get("num_prompts", 0),
            samples=body.get("samples_per_prompt", 0),
            versions=tuple(body.get("versions", ())),
            chunk=body.get("chunk", 0),
        )


FindLease = Callable[[str], ReplayedLease]
"""Returns a lease by its id; raises Contradiction if it was never issued."""


class Contradiction(Exception):
    """An event contradicts the events before it."""


class RecordedDraw(NamedTuple):
    """The draw that a verdict claims. It can be checked once the epoch's secret is revealed."""

    lease_id: str
    epoch: int
    rate: float
    checks: str


@dataclass
class ReplayedSecrets:
    """The secrets of all epochs. Its methods raise Contradiction."""

    find: FindLease
    commitments: dict[int, str] = field(default_factory=dict)
    revealed: dict[int, bytes] = field(default_factory=dict)
    committed_seq: dict[int, int] = field(default_factory=dict)
    revealed_seq: dict[int, int] = field(default_factory=dict)
    """Numbers of the events that committed to the secret of each epoch and revealed it."""
    unchecked_draws: list[RecordedDraw] = field(default_factory=list)

    def commit(self, body: dict[str, Any], seq: int) -> None:
        if body["epoch"] in self.commitments:
            raise Contradiction(f"epoch {body['epoch']} is committed a second time")
        self.commitments[body["epoch"]] = body["commitment"]
        self.committed_seq[body["epoch"]] = seq

    def reveal(self, body: dict[str, Any], seq: int) -> None:
        secret = bytes.fromhex(body["secret"])
        if hashlib.sha256(secret).hexdigest() != self.commitments.get(body["epoch"]):
            raise Contradiction(f"the secret of epoch {body['epoch']} does not match its commitment")
        self.revealed[body["epoch"]] = secret
        self.revealed_seq.setdefault(body["epoch"], seq)
        self._check_draws()

    def hidden(self) -> list[int]:
        """Returns the epochs whose secrets are not revealed."""
        return sorted(self.commitments.keys() - self.revealed.keys())

    def add_draw(self, draw: RecordedDraw) -> None:
        """Adds a draw, and checks that its secret was committed to, and not known, when the submission came.

        Otherwise the operator or the node could have chosen the draw.
        """
        received_seq = self.find(draw.lease_id).received_seq
        committed, revealed = self.committed_seq.get(draw.epoch), self.revealed_seq.get(draw.epoch)
        known = revealed is not None and revealed < received_seq
        if committed is None or committed > received_seq or known:
            raise Contradiction(
                f"lease {draw.lease_id} was drawn with the secret of epoch {draw.epoch}, which was not committed, or known already"
            )
        self.unchecked_draws.append(draw)
        self._check_draws()

    def _check_draws(self) -> None:
        """Checks the draws whose secrets are revealed, and keeps the others."""
        unchecked = []
        for draw in self.unchecked_draws:
            sha256 = self.find(draw.lease_id).sha256
            if draw.epoch not in self.revealed or sha256 is None:
                unchecked.append(draw)
            # The opposite is allowed: a node that lost its trust after the draw gets every check.
            elif draw.checks != "full" and gets_every_check(
                self.revealed[draw.epoch], draw.lease_id, sha256, draw.rate
            ):
                raise Contradiction(
                    f"the draw gave lease {draw.lease_id} every check, the ledger says {draw.checks}"
                )
        self.unchecked_draws = unchecked


@dataclass
class TaskChoices:
    """The train leases of a ledger and the rewards of their problems, in order."""

    leases: dict[str, ReplayedLease] = field(default_factory=dict)
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """The weights of all tasks when each lease was issued, by lease."""
    order: list[tuple[str, list[float] | None]] = field(default_factory=list)
    """Leases as they were issued (None), and their rewards as they were accepted."""

    def add_lease(self, lease_id: str, lease: ReplayedLease, weights: dict[str, float]) -> None:
        """Notes a lease that was issued under these weights."""
        if lease.purpose == "train" and (len(weights) > 1 or lease.attempts):
            self.leases[lease_id], self.weights[lease_id] = lease, weights
            self.order.append((lease_id, None))

    def add_rewards(self, lease_id: str, rewards: list[float]) -> None:
        """Notes the rewards of an accepted lease."""
        if lease_id in self.leases and self.leases[lease_id].attempts:
            self.order.append((lease_id, rewards))

    def check(self, seed_of: Callable[[str], str | None]) -> None:
        """Raises Contradiction for the first lease whose task or problems do not follow from its seed and the rewards before it.

        `seed_of` returns None for a lease whose epoch is not revealed; such a lease is not checked.
        """
        rates: dict[str, dict[int, float]] = {}
        sizes: dict[str, int] = {}
        for lease_id, rewards in self.order:
            lease = self.leases[lease_id]
            if lease.attempts and lease.num_problems != sizes.setdefault(lease.task, lease.num_problems):
                # Another number gives other problems to the same seed.
                raise Contradiction(
                    f"lease {lease_id} has {lease.num_problems} problems of task {lease.task!r}, earlier ones {sizes[lease.task]}"
                )
            own = rates.setdefault(lease.task, {})
            if rewards is not None:
                for index, problem in enumerate(lease.problems):
                    group = rewards[index * lease.samples : (index + 1) * lease.samples]
                    own[problem] = next_rate(own.get(problem), group)
            elif (seed := seed_of(lease_id)) is not None:
                self._check_lease(lease_id, lease, seed, own)

    def _check_lease(self, lease_id: str, lease: ReplayedLease, seed: str, rates: dict[int, float]) -> None:
        weights = self.weights[lease_id]
        drawn = list(weights)[choose_task(seed, list(weights.values()))]
        if drawn != lease.task:
            raise Contradiction(f"lease {lease_id} is of task {lease.task!r}, its seed draws {drawn!r}")
        if not lease.attempts:
            return
        if problem_numbers(seed, lease.attempts, lease.num_problems) != list(lease.problems):
            raise Contradiction(f"lease {lease_id} has problems that its seed and attempts do not give")
        if lease.unit != lease_id:  # repeated work has the attempts of its first lease
            first = self.leases.get(lease.unit)
            if first is None:
                raise Contradiction(f"lease {lease_id} repeats work that was not leased by difficulty")
            wanted = first.attempts[: lease.num_prompts]
        else:
            wanted = choose_attempts(seed, lease.num_prompts, lease.num_problems, rates.get)
        if lease.attempts != wanted:
            raise Contradiction(
                f"lease {lease_id} has attempts {lease.attempts}, the pass rates give {wanted}"
            )


@dataclass
class ReplayedGroups:
    """What became of the groups of accepted leases."""

    find: FindLease
    used: set[str] = field(default_factory=set)
    """Groups that were trained on or withdrawn: they must not be trained on again."""
    released: set[str] = field(default_factory=set)
    """Groups accepted without every check that may be trained on, because a later full check of their node passed."""
    batches: set[int] = field(default_factory=set)
    """Versions whose batch is formed."""
    chunks: dict[tuple[int, str], dict[int, str]] = field(default_factory=dict)
    """The lease that was accepted first for each chunk of an evaluation, which is named by version and label."""
    evaluated: set[tuple[int, str]] = field(default_factory=set)

    def withdraw(self, group_ids: list[str]) -> None:
        self.used.update(group_ids)

    def release(self, body: dict[str, Any], rejected_seq: int) -> None:
        """Checks that held groups are released by a later submission of their node that was drawn for every check and accepted.

        `rejected_seq` is the number of the node's last rejection, which withdrew all groups before it.
        """
        because = self.find(body["because"])
        passed = because.end == "accepted" and because.checks == "full"
        if not (passed and because.node == body["node"] and is_draw_open(because.draw_rate, because.purpose)):
            raise Contradiction(
                f"lease {body['because']} releases groups, but did not pass a full check that was drawn for it"
            )
        for group in body["group_ids"]:
            lease = self.find(_lease_of(group))
            if lease.node != body["node"] or not rejected_seq < lease.received_seq < because.received_seq:
                raise Contradiction(f"group {group} is released by a check that does not come after it")
        self.released.update(body["group_ids"])

    def form(self, body: dict[str, Any], max_unchecked_share: float | None, max_lag: int | None) -> None:
        """Checks a batch. Ledgers of release 0.1.0 have no `max_unchecked_share`: their unchecked groups were not held."""
        version, group_ids = body["version"], body["group_ids"]
        if version in self.batches:
            raise Contradiction(f"the batch of version {version} is formed a second time")
        self.batches.add(version)
        unchecked, rewards = 0, []
        for group in group_ids:
            lease = self.find(_lease_of(group))
            self._check_group(group, lease)
            if max_lag is not None and not 0 <= version - lease.policy_version <= max_lag:
                raise Contradiction(
                    f"group {group} by version {lease.policy_version} is in the batch of version {version}; max_lag is {max_lag}"
                )
            if lease.checks != "full":
                unchecked += 1
                if max_unchecked_share is not None and group not in self.released:
                    raise Contradiction(
                        f"group {group} is trained on without a full check of its node after it"
                    )
            self.used.add(group)
            rewards += _rewards_of(group, lease)
        most = len(group_ids) * (1.0 if max_unchecked_share is None else max_unchecked_share)
        if unchecked > most + 1e-9:
            raise Contradiction(f"the batch has {unchecked} unchecked groups, at most {most:g} are allowed")
        if rewards:
            _compare(f"the mean reward of the batch of version {version}", body["reward_mean"], rewards)

    def _check_group(self, group: str, lease: ReplayedLease) -> None:
        if group in self.used or lease.end != "accepted":
            raise Contradiction(f"group {group} is trained on twice, or was not accepted")
        if lease.purpose != "train":
            raise Contradiction(f"group {group} is trained on, but its lease is held-out work")
        if lease.num_prompts and _index_of(group) >= lease.num_prompts:
            raise Contradiction(f"group {group} is trained on, but its lease has {lease.num_prompts} prompts")
        rewards = _rewards_of(group, lease)
        if rewards and max(rewards) == min(rewards):
            raise Contradiction(f"group {group} is trained on, but all of its rewards are equal")

    def add_chunk(self, lease_id: str, lease: ReplayedLease) -> None:
        """Notes an accepted eval lease. The first that is accepted for a chunk counts."""
        if lease.versions:
            self.chunks.setdefault((lease.versions[0], lease.task), {}).setdefault(lease.chunk, lease_id)

    def complete_evaluation(self, body: dict[str, Any]) -> None:
        """Checks that the result of a held-out evaluation is the mean of its accepted answers."""
        key = (body["version"], body.get("task", ""))
        if key in self.evaluated:
            raise Contradiction(
                f"the evaluation of version {key[0]} by {key[1]!r} is completed a second time"
            )
        self.evaluated.add(key)
        leases = [self.find(lease_id) for lease_id in self.chunks.get(key, {}).values()]
        if not key[1] or not all(lease.samples for lease in leases):
            return  # ledgers of release 0.1.0 have no label or number of samples
        rewards = [reward for lease in leases for reward in lease.rewards]
        if not rewards:
            raise Contradiction(f"the evaluation of version {key[0]} by {key[1]!r} has no accepted answers")
        if len(rewards) != body["rollouts"]:
            raise Contradiction(
                f"the evaluation of version {key[0]} by {key[1]!r} has {body['rollouts']} rollouts, {len(rewards)} were accepted"
            )
        _compare(f"the result of version {key[0]} by {key[1]!r}", body["reward_mean"], rewards)


def _lease_of(group: str) -> str:
    """Returns the lease of a group, whose id is LEASE-NUMBER. Another spelling of the number would name the same group twice."""
    lease_id, _, number = group.rpartition("-")
    if str(int(number)) != number:
        raise Contradiction(f"{group[:64]!r} is not the id of a group")
    return lease_id


def _index_of(group: str) -> int:
    return int(group.rpartition("-")[2])


def _rewards_of(group: str, lease: ReplayedLease) -> list[float]:
    """Returns the rewards of a group; none if the ledger does not have the number of samples."""
    start = _index_of(group) * lease.samples
    return lease.rewards[start : start + lease.samples]


def _compare(what: str, recorded: float, rewards: list[float]) -> None:
    mean = math.fsum(rewards) / len(rewards)
    if not math.isclose(recorded, mean, rel_tol=ROUNDING, abs_tol=ROUNDING):
        raise Contradiction(f"{what} is recorded as {recorded:g}, the accepted answers give {mean:g}")
