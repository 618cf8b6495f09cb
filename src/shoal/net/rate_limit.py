"""How often somebody may ask: a token bucket per name. Pure: the clock is passed in."""

from dataclasses import dataclass, field

MOST_NAMES = 65536
"""Full buckets are forgotten first: they say nothing."""


@dataclass(slots=True)
class Buckets:
    """`rate` tokens a second for each name, up to `burst` at once."""

    rate: float
    burst: float
    _levels: dict[str, tuple[float, float]] = field(default_factory=dict)

    def wait_s(self, name: str, now_s: float) -> float:
        """0 and a token is taken; or how long until there is one."""
        level, at_s = self._levels.get(name, (self.burst, now_s))
        level = min(self.burst, level + max(0.0, now_s - at_s) * self.rate)
        if level < 1.0:
            self._levels[name] = (level, now_s)
            return (1.0 - level) / self.rate
        if len(self._levels) >= MOST_NAMES:
            self._forget(now_s)
        self._levels[name] = (level - 1.0, now_s)
        return 0.0

    def _forget(self, now_s: float) -> None:
        self._levels = {
            name: (level, at_s)
            for name, (level, at_s) in self._levels.items()
            if level + (now_s - at_s) * self.rate < self.burst
        }
