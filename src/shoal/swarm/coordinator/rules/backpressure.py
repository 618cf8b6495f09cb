"""How long nodes without work are told to wait, so that all of them together ask no more than the coordinator has time for; and who
of them comes before others.

A thousand idle nodes that ask twice a second would be most of what it does. For the time to wait nobody is counted, only how often
somebody was turned away: that rate times the wait they had been told is how many there are.

Whoever was turned away and is expected back comes before a node that was not: those that ask the moment they are done would else take
every place as it becomes free, and one that only looks in now and then would never find one. Pure: the clock is passed in.
"""

import random
from dataclasses import dataclass, field

ASKS_PER_S = 200.0
"""Of all nodes without work together: a tenth of what one core answers."""
LONGEST_S = 30.0
WINDOW_S = 1.0
LATE_S = 1.0
"""A node that was turned away may be back so much later than it was told, and still comes first."""


@dataclass(slots=True)
class Turnstile:
    _began_s: float = 0.0
    _turned_away: int = 0
    _wait_s: float = 0.0
    _back_by_s: dict[str, float] = field(default_factory=dict)
    """Of the nodes that were turned away. Not in order: what was told while there was a crowd lasts longer than what is told now."""
    _looked_s: float = 0.0

    def turn_away(self, node: str, now_s: float, *, least_s: float) -> float:
        """How long to wait. Until it is back, others that ask come after it."""
        wait_s = self.wait_s(now_s, least_s=least_s)
        self._back_by_s.pop(node, None)
        self._back_by_s[node] = now_s + wait_s + LATE_S
        return wait_s

    def let_in(self, node: str) -> None:
        self._back_by_s.pop(node, None)

    def ahead_of(self, node: str, now_s: float) -> int:
        """Nodes that come before this one: all that were turned away, unless it is one of them."""
        if now_s >= self._looked_s + LATE_S:
            self._back_by_s = {one: by_s for one, by_s in self._back_by_s.items() if by_s >= now_s}
            self._looked_s = now_s
        return 0 if node in self._back_by_s else len(self._back_by_s)

    def wait_s(self, now_s: float, *, least_s: float) -> float:
        """For one more that is turned away."""
        self._turned_away += 1
        window_s = now_s - self._began_s
        if window_s >= WINDOW_S:
            # After a quiet time the window is long and the rate low, as it should be.
            waiting = self._turned_away / window_s * max(self._wait_s, least_s)
            self._wait_s = min(LONGEST_S, waiting / ASKS_PER_S)
            self._began_s, self._turned_away = now_s, 0
        if self._wait_s <= least_s:
            return least_s
        # Spread out: those who were turned away together must not come back together.
        return self._wait_s * random.uniform(0.75, 1.25)
