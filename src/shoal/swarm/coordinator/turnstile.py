"""How long nodes without work are told to wait: so that all of them together ask no more than the coordinator has time for.

A thousand idle nodes that ask twice a second would be most of what it does. Who waits is not counted, only how often somebody was
turned away: that rate times the wait they had been told is how many there are. Pure: the clock is passed in.
"""

import random
from dataclasses import dataclass

ASKS_PER_S = 200.0
"""Of all nodes without work together: a tenth of what one core answers."""
LONGEST_S = 30.0
WINDOW_S = 1.0


@dataclass(slots=True)
class Turnstile:
    _began_s: float = 0.0
    _turned_away: int = 0
    _wait_s: float = 0.0

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
