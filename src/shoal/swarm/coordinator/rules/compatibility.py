"""Compatibility of clients: ok, outdated (until a grace period ends) or incompatible. Pure functions; callers pass the time."""

import re
from dataclasses import dataclass
from enum import StrEnum

_SOFTWARE = re.compile(r"shoal ([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?.*")


class Compatibility(StrEnum):
    """The result of the comparison. An OUTDATED client may work until its grace period ends, an INCOMPATIBLE one may not."""

    OK = "ok"
    OUTDATED = "outdated"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a coordinator requires of clients. `min_software` is "shoal X.Y.Z", or empty."""

    protocol: int
    min_software: str = ""
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SoftwareFit:
    """What is known about a client. `outdated_at_s` is the time when it was first seen with software that is too old."""

    speaks_protocol: bool = True
    outdated_at_s: float | None = None


def update_fit(
    fit: SoftwareFit, *, protocol: int, software: str, demands: Demands, now_s: float
) -> SoftwareFit:
    """Returns what is known after a client named its protocol and software. The grace period starts the first time only."""
    if protocol != demands.protocol:
        return SoftwareFit(speaks_protocol=False, outdated_at_s=fit.outdated_at_s)
    if not is_older(software, demands.min_software):
        return SoftwareFit()
    return SoftwareFit(outdated_at_s=now_s if fit.outdated_at_s is None else fit.outdated_at_s)


def compatibility(fit: SoftwareFit, demands: Demands, now_s: float) -> Compatibility:
    """Returns whether the client is compatible at `now_s`."""
    if not fit.speaks_protocol:
        return Compatibility.INCOMPATIBLE
    if fit.outdated_at_s is None:
        return Compatibility.OK
    over = now_s >= fit.outdated_at_s + demands.grace_s
    return Compatibility.INCOMPATIBLE if over else Compatibility.OUTDATED


def is_older(software: str, wanted: str) -> bool:
    """Returns whether Shoal's version in `software` is below that in `wanted`. False for other software, whose versions cannot be compared."""
    has, wants = parse_software(software), parse_software(wanted)
    return has is not None and wants is not None and has < wants


def parse_software(text: str) -> tuple[int, int, int] | None:
    """Returns the version numbers in "shoal X.Y.Z"; None for other software."""
    match = _SOFTWARE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
