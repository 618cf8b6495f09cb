"""What a worker's time goes into. At every moment it does exactly one thing, so the shares add up to 1."""

import time
from collections.abc import Callable
from enum import Enum


class Doing(Enum):
    STARTING = "starting"
    """Until the first row: joining, the first lease, the first weights, building the model. Happens once."""
    GENERATING = "generating"
    WAITING = "waiting for a lease"
    FETCHING = "waiting for weights"
    SWAPPING = "swapping weights"
    DELIVERING = "waiting for an upload"
    PAUSED = "paused"


_NOT_COUNTED = (Doing.STARTING, Doing.PAUSED)


class TimeUse:
    """Written by the worker's main thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing, self._since_s = Doing.STARTING, clock()
        self._spent_s = dict.fromkeys(Doing, 0.0)

    def begin(self, doing: Doing) -> None:
        """From now on it does this. Whatever comes before the first generating is starting."""
        if self._doing is Doing.STARTING and doing is not Doing.GENERATING:
            return
        now_s = self._clock()
        self._spent_s[self._doing] += now_s - self._since_s
        self._doing, self._since_s = doing, now_s

    def spent_s(self) -> dict[Doing, float]:
        doing, now_s = self._doing, self._clock()
        return {
            each: self._spent_s[each] + (now_s - self._since_s if each is doing else 0.0) for each in Doing
        }

    @property
    def busy_share(self) -> float:
        """Of the time since the first row, pauses of its owner left out, that in which the device generated."""
        return self._share(self.spent_s(), Doing.GENERATING)

    def in_words(self) -> str:
        spent_s = self.spent_s()
        parts = [
            f"{each.value} {self._share(spent_s, each):.1%}"
            for each in Doing
            if each not in _NOT_COUNTED and spent_s[each] > 0
        ]
        return ", ".join(parts) or "nothing generated"

    @staticmethod
    def _share(spent_s: dict[Doing, float], doing: Doing) -> float:
        total_s = sum(spent for each, spent in spent_s.items() if each not in _NOT_COUNTED)
        return spent_s[doing] / total_s if total_s > 0 else 0.0
