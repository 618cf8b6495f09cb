"""Whether the coordinator's own loops still go round, and whether there is room for what it writes."""

import time
from dataclasses import dataclass, field

STALLED_S = 30.0
"""The housekeeping ticks once a second; without it leases and claims never run out."""


@dataclass
class Vitals:
    """When each loop last went round, by the monotonic clock."""

    loops: dict[str, float] = field(default_factory=dict)
    no_space: str = ""
    """Where room is missing and what to do, while it is (space.py)."""
    tell_again_s: float = 0.0

    def beat(self, loop: str) -> None:
        self.loops[loop] = time.monotonic()

    def stalled(self) -> list[str]:
        now_s = time.monotonic()
        standing = [
            f"{name} has stood still for {now_s - at_s:.0f} s"
            for name, at_s in self.loops.items()
            if now_s - at_s > STALLED_S
        ]
        return [self.no_space, *standing] if self.no_space else standing
