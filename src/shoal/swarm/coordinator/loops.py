"""Whether the coordinator's own loops still go round."""

import time
from dataclasses import dataclass, field

STALLED_S = 30.0
"""The housekeeping ticks once a second; without it leases and claims never run out."""


@dataclass
class Vitals:
    """When each loop last went round, by the monotonic clock."""

    loops: dict[str, float] = field(default_factory=dict)

    def beat(self, loop: str) -> None:
        self.loops[loop] = time.monotonic()

    def stalled(self) -> list[str]:
        now_s = time.monotonic()
        return [
            f"{name} has stood still for {now_s - at_s:.0f} s"
            for name, at_s in self.loops.items()
            if now_s - at_s > STALLED_S
        ]
