"""Liveness: never -> live -> late -> offline, a pure function of the last sign of life and the time.

Any sign of life makes a node live again. Going offline touches leases, never trust.
"""

from enum import StrEnum

LATE_AFTER, OFFLINE_AFTER = 3, 8
"""In heartbeats: 45 s and 120 s of the default 15 s."""


class Liveness(StrEnum):
    NEVER = "never"
    LIVE = "live"
    LATE = "late"
    OFFLINE = "offline"


def liveness(last_seen_s: float | None, now_s: float, heartbeat_s: float) -> Liveness:
    if last_seen_s is None:
        return Liveness.NEVER
    silent_s = now_s - last_seen_s
    if silent_s < LATE_AFTER * heartbeat_s:
        return Liveness.LIVE
    return Liveness.LATE if silent_s < OFFLINE_AFTER * heartbeat_s else Liveness.OFFLINE
