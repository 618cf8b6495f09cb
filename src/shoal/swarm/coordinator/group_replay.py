"""Repeats, from a ledger, which groups were held, withdrawn and trained on, and the results of held-out evaluations. Pure functions.

Each method takes the body of one event. It raises Contradiction if no honest coordinator could have written it after the events before.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.coordinator.rules.trust import is_draw_open
from shoal.swarm.coordinator.secret_replay import Contradiction, FindLease
from shoal.swarm.coordinator.task_choices import ReplayedLease

ROUNDING = 1e-6
"""Relative difference between a recorded mean and ours that the order of a sum explains."""


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
            raise Contradiction(f"lease {body['because']} releases groups, but passed no full check by lot")
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
