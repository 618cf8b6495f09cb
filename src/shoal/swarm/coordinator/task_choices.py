"""Repeats, from a ledger, how seeds chose the task and the problems of every train lease. Pure functions.

Seeds are known only after their epoch is revealed, and the weights of problems depend on the rewards before each lease. So leases and
rewards are kept in their order, and checked after the last event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.swarm.coordinator.rules.difficulty import choose_attempts, next_rate, problem_numbers
from shoal.wire.seeded_draw import choose_task


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
        """Raises ValueError for the first lease whose task or problems do not follow from its seed and the rewards before it.

        `seed_of` returns None for a lease whose epoch is not revealed; such a lease is not checked.
        """
        rates: dict[str, dict[int, float]] = {}
        sizes: dict[str, int] = {}
        for lease_id, rewards in self.order:
            lease = self.leases[lease_id]
            if lease.attempts and lease.num_problems != sizes.setdefault(lease.task, lease.num_problems):
                # Another number gives other problems to the same seed.
                raise ValueError(
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
            raise ValueError(f"lease {lease_id} is of task {lease.task!r}, its seed draws {drawn!r}")
        if not lease.attempts:
            return
        if problem_numbers(seed, lease.attempts, lease.num_problems) != list(lease.problems):
            raise ValueError(f"lease {lease_id} has problems that its seed and attempts do not give")
        if lease.unit != lease_id:  # repeated work has the attempts of its first lease
            first = self.leases[lease.unit]
            wanted = first.attempts[: lease.num_prompts]
        else:
            wanted = choose_attempts(seed, lease.num_prompts, lease.num_problems, rates.get)
        if lease.attempts != wanted:
            raise ValueError(f"lease {lease_id} has attempts {lease.attempts}, the pass rates give {wanted}")
