"""Liveness, measured speed and software of nodes. Pure functions; callers pass the time.

Liveness goes never -> live -> late -> offline by the time of the last request. Any request makes a node live again. Going
offline affects leases, never trust.

Speed is measured in rows per second between receipts. A node fetches its next lease while it works on another one, so its time
on a lease begins with the lease or with the previous receipt, whichever is later: time in which a lease waits does not count.

A node's software is outdated from the time when it was first seen with a version that is too old.
"""

import re
from enum import StrEnum

LATE_AFTER, OFFLINE_AFTER = 3, 8
"""Heartbeats without a request until a node is late and offline: 45 s and 120 s with the default of 15 s."""
OLD_WEIGHT = 0.7
"""Weight of the earlier average in a new average of the speed."""
SHORTEST_S = 1e-3
"""Lower bound of a measured time, which prevents a division by zero."""


class Liveness(StrEnum):
    """How recently a node or relay sent a request."""

    NEVER = "never"
    LIVE = "live"
    LATE = "late"
    OFFLINE = "offline"


def liveness(last_seen_s: float | None, now_s: float, heartbeat_s: float) -> Liveness:
    """Returns the liveness of a node whose last request was at `last_seen_s`."""
    if last_seen_s is None:
        return Liveness.NEVER
    silent_s = now_s - last_seen_s
    if silent_s < LATE_AFTER * heartbeat_s:
        return Liveness.LIVE
    return Liveness.LATE if silent_s < OFFLINE_AFTER * heartbeat_s else Liveness.OFFLINE


def rows_per_s(
    num_rows: int, *, issued_at_s: float, previous_receipt_s: float | None, received_at_s: float
) -> float:
    """Returns the speed at which a lease's rows were generated."""
    began_s = issued_at_s if previous_receipt_s is None else max(issued_at_s, previous_receipt_s)
    return num_rows / max(SHORTEST_S, received_at_s - began_s)


def averaged_speed(before: float, now: float) -> float:
    """Returns the new average speed. `before` is 0 for a node that was never measured.

    Times per row are averaged, not rates: a node that works on two leases at once delivers one late and the other right after
    it, and only the sum of both times gives its real speed.
    """
    return now if before == 0 else 1 / (OLD_WEIGHT / before + (1 - OLD_WEIGHT) / now)


_SOFTWARE = re.compile(r"shoal ([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?.*")


def outdated_since_s(
    before_s: float | None, software: str, *, min_software: str, now_s: float
) -> float | None:
    """Returns since when a client has had software that is too old; None if it is not. `before_s` is the last result for it."""
    if not is_older(software, min_software):
        return None
    return now_s if before_s is None else before_s


def is_older(software: str, wanted: str) -> bool:
    """Returns whether Shoal's version in `software` is below that in `wanted`. False for other software, whose versions cannot be compared."""
    has, wants = parse_software(software), parse_software(wanted)
    return has is not None and wants is not None and has < wants


def parse_software(text: str) -> tuple[int, int, int] | None:
    """Returns the version numbers in "shoal X.Y.Z"; None for other software."""
    match = _SOFTWARE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
