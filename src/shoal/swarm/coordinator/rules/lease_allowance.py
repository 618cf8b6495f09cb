"""The allowance of a node for leases that it does not answer: what it delivered limits what it may let go.

Each node has a bucket of tokens. A lease that ends void takes tokens out, whatever the way: given back, expired, stale, suspicious,
uncheckable. An accepted submission puts one in, and so does time. A node without a token gets no new lease. Work that went
stale in the queue of the validators takes none. A node that delivers never notices it; a key that takes leases and gives them back
gets BURST of them, and then one every quarter of `lease_s`.

Nothing here reads a clock: callers pass the time. The buckets are in memory: a restart of the coordinator fills them.
"""

from dataclasses import dataclass, field

BURST = 8.0
"""Tokens of a new node."""
MOST = 64.0
"""Most tokens of a node: each accepted submission raises the limit by one, up to this."""
WEIGHTS = {
    "void.abandoned": 1.0,
    "void.expired": 1.0,
    "void.stale": 1.0,
    "void.uncertain": 1.0,
    "void.unchecked": 1.0,
    "void.infra": 0.5,
}
"""Tokens that a lease takes by the code with which it ended. A failure of the swarm costs half: a node can provoke some of them."""
MAX_NODES = 65536
"""Number of buckets at which full ones are removed."""


@dataclass(slots=True)
class LeaseAllowance:
    """The buckets of all nodes. A node without a bucket has a full one."""

    _levels: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Tokens of a node, and the time when they were counted."""

    def wait_s(self, node: str, now_s: float, *, accepted: int, refill_s: float) -> float:
        """Returns how long a node must wait for its next lease; 0 if it has a token. Changes nothing."""
        level = self._level(node, now_s, accepted=accepted, refill_s=refill_s)
        return max(0.0, (1.0 - level) * refill_s)

    def count_void(self, node: str, code: str, now_s: float, *, accepted: int, refill_s: float) -> None:
        """Takes the tokens of a lease that ended with `code`."""
        weight = WEIGHTS.get(code, 0.0)
        if weight:
            if len(self._levels) >= MAX_NODES:
                self._levels = {
                    one: (level, at_s)
                    for one, (level, at_s) in self._levels.items()
                    if level + (now_s - at_s) / refill_s < BURST
                }
            level = self._level(node, now_s, accepted=accepted, refill_s=refill_s)
            self._levels[node] = (max(0.0, level - weight), now_s)

    def count_accepted(self, node: str) -> None:
        """Puts a token into the bucket of a node whose submission was accepted."""
        if node in self._levels:
            level, at_s = self._levels[node]
            self._levels[node] = (level + 1.0, at_s)

    def _level(self, node: str, now_s: float, *, accepted: int, refill_s: float) -> float:
        most = min(MOST, BURST + accepted)
        if node not in self._levels:
            return most
        level, at_s = self._levels[node]
        return min(most, level + max(0.0, now_s - at_s) / refill_s)
