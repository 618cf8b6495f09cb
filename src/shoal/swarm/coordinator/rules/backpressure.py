"""Backpressure on nodes without work: how long they are told to wait, and which of them come first.

A thousand idle nodes that ask twice a second would be most of the coordinator's load. Nodes are not counted for this: the rate of
refusals times the wait that was told is the number of nodes that wait.

A node that was refused and is expected back comes before a node that was not refused. Otherwise nodes that ask the moment they are
done would take every free place, and a node that asks rarely would never get one.

Nothing here reads a clock or draws random numbers: callers pass both in.
"""

from dataclasses import dataclass, field

ASKS_PER_S = 200.0
"""Requests a second of all nodes without work together: a tenth of what one core answers."""
LONGEST_S = 30.0
WINDOW_S = 1.0
LATE_S = 1.0
"""A refused node keeps its place for this long after it should have come back."""
SPREAD = (0.75, 1.25)
"""Range of the factor on long waits: nodes that were refused together must not come back together."""


@dataclass(slots=True)
class Backpressure:
    _began_s: float = 0.0
    _refusals: int = 0
    _wait_s: float = 0.0
    _back_by_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When each refused node must be back, and its accepted submissions. Not sorted: a wait told under high load ends later than
    one told now."""
    _pruned_s: float = 0.0

    def wait_s(self, *, least_s: float, spread: float) -> float:
        """Returns how long a node that is refused now should wait. `spread` is a factor drawn from SPREAD. Changes nothing."""
        return least_s if self._wait_s <= least_s else self._wait_s * spread

    def count_refusal(self, now_s: float, *, least_s: float) -> None:
        """Counts one refusal, and adapts the wait once a WINDOW_S."""
        self._refusals += 1
        window_s = now_s - self._began_s
        if window_s >= WINDOW_S:
            # After a quiet time the window is long and the rate low, as it should be.
            waiting = self._refusals / window_s * max(self._wait_s, least_s)
            self._wait_s = min(LONGEST_S, waiting / ASKS_PER_S)
            self._began_s, self._refusals = now_s, 0

    def keep_place(self, node: str, now_s: float, wait_s: float, accepted: int = 0) -> None:
        """Lets a refused node come before others until it is back, or LATE_S late."""
        self._back_by_s[node] = (now_s + wait_s + LATE_S, accepted)

    def release_place(self, node: str) -> None:
        self._back_by_s.pop(node, None)

    def ahead_of(self, node: str, now_s: float, record: int = 0) -> int:
        """Returns how many nodes come before this one: all that keep a place, unless it is one of them. Nodes with fewer than `record`
        accepted submissions do not count."""
        if now_s >= self._pruned_s + LATE_S:
            self._back_by_s = {one: kept for one, kept in self._back_by_s.items() if kept[0] >= now_s}
            self._pruned_s = now_s
        if node in self._back_by_s:
            return 0
        return sum(accepted >= record for _, accepted in self._back_by_s.values())
