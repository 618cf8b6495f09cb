"""Backpressure on nodes without work: how long they are told to wait, and which of them come first.

A thousand idle nodes that ask twice a second would be most of the coordinator's load. Nodes are not counted for this: the rate of
refusals times the wait that was told is the number of nodes that wait.

Proven nodes and others have a wait of their own, and a proven node that comes back early is not counted again. Otherwise a few new
keys, which cost nothing, could ask without pause, and every node would be told to wait as long as for thousands of nodes.

A node that was refused and is expected back comes before a node that was not refused. Otherwise nodes that ask the moment they are
done would take every free place, and a node that asks rarely would never get one.

Nothing here reads a clock or draws random numbers: callers pass both in.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

ASKS_PER_S = 200.0
"""Requests a second of all proven nodes without work together, and of all others: a tenth of what one core answers."""
LONGEST_S = 30.0
WINDOW_S = 1.0
LATE_S = 1.0
"""A refused node keeps its place for this long after it should have come back."""
EARLY_SHARE = 0.5
"""A proven node that comes back within this share of its wait is not counted again."""
SPREAD = (0.75, 1.25)
"""Range of the factor on long waits: nodes that were refused together must not come back together."""


@dataclass(slots=True)
class RefusalRate:
    """The refusals of one kind of nodes, and the wait that follows from their rate."""

    began_s: float = 0.0
    refusals: int = 0
    wait_s: float = 0.0

    def count(self, now_s: float, *, least_s: float) -> None:
        """Counts one refusal, and adapts the wait once a WINDOW_S."""
        self.refusals += 1
        window_s = now_s - self.began_s
        if window_s >= WINDOW_S:
            # After a quiet time the window is long and the rate low, as it should be.
            waiting = self.refusals / window_s * max(self.wait_s, least_s)
            self.wait_s = min(LONGEST_S, waiting / ASKS_PER_S)
            self.began_s, self.refusals = now_s, 0


class KeptPlace(NamedTuple):
    """The place of a refused node."""

    due_s: float
    """A request before this time is refused as too early."""
    back_by_s: float
    """The node loses its place if it has not come back by this time."""
    accepted: int


@dataclass(slots=True)
class Backpressure:
    proven: RefusalRate = field(default_factory=RefusalRate)
    others: RefusalRate = field(default_factory=RefusalRate)
    """Refusals of nodes that are not proven. They keep no places: new keys could otherwise block the queue."""
    _places: dict[str, KeptPlace] = field(default_factory=dict)
    """Places of refused proven nodes. They are not sorted by time: a node that was refused under high load was told to wait longer."""
    _pruned_s: float = 0.0

    def wait_s(self, *, proven: bool, least_s: float, spread: float) -> float:
        """Returns how long a node that is refused now should wait. `spread` is a factor drawn from SPREAD. Changes nothing."""
        wait_s = (self.proven if proven else self.others).wait_s
        return least_s if wait_s <= least_s else wait_s * spread

    def keep_place(
        self, node: str, now_s: float, wait_s: float, *, accepted: int = 0, least_s: float
    ) -> None:
        """Counts the refusal of a proven node, and lets it come before others until it is back, or LATE_S late."""
        place = self._places.get(node)
        if place is not None and now_s < place.due_s:
            return
        self.proven.count(now_s, least_s=least_s)
        self._places[node] = KeptPlace(now_s + EARLY_SHARE * wait_s, now_s + wait_s + LATE_S, accepted)

    def release_place(self, node: str) -> None:
        self._places.pop(node, None)

    def ahead_of(self, node: str, now_s: float, record: int = 0) -> int:
        """Returns how many nodes come before this one: all that keep a place, unless it is one of them. Nodes with fewer than `record`
        accepted submissions do not count."""
        if now_s >= self._pruned_s + LATE_S:
            self._places = {one: place for one, place in self._places.items() if place.back_by_s >= now_s}
            self._pruned_s = now_s
        if node in self._places:
            return 0
        return sum(place.accepted >= record for place in self._places.values())
