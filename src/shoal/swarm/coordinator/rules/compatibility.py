"""Compatibility: ok, outdated (until a grace ends), incompatible; a pure function of what is known, what a client says
of itself, and the time."""

import re
from dataclasses import dataclass
from enum import StrEnum

_SOFTWARE = re.compile(r"shoal ([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?.*")


class Compatibility(StrEnum):
    OK = "ok"
    OUTDATED = "outdated"
    INCOMPATIBLE = "incompatible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a coordinator asks of clients. `min_software` is "shoal X.Y.Z", or empty."""

    protocol: int
    min_software: str = ""
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """What is known of a client. `outdated_at_s` is when it was first seen with software that is too old."""

    speaks_protocol: bool = True
    outdated_at_s: float | None = None


def meet(fit: Fit, *, protocol: int, software: str, demands: Demands, now_s: float) -> Fit:
    """A client says what it is. The grace runs from the first time: saying it again does not lengthen it."""
    if protocol != demands.protocol:
        return Fit(speaks_protocol=False, outdated_at_s=fit.outdated_at_s)
    if not is_older(software, demands.min_software):
        return Fit()
    return Fit(outdated_at_s=now_s if fit.outdated_at_s is None else fit.outdated_at_s)


def compatibility(fit: Fit, demands: Demands, now_s: float) -> Compatibility:
    if not fit.speaks_protocol:
        return Compatibility.INCOMPATIBLE
    if fit.outdated_at_s is None:
        return Compatibility.OK
    over = now_s >= fit.outdated_at_s + demands.grace_s
    return Compatibility.INCOMPATIBLE if over else Compatibility.OUTDATED


def is_older(software: str, wanted: str) -> bool:
    """Only Shoal's own numbers can be compared; other software that speaks the protocol is taken at its word."""
    has, wants = parse_software(software), parse_software(wanted)
    return has is not None and wants is not None and has < wants


def parse_software(text: str) -> tuple[int, int, int] | None:
    match = _SOFTWARE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))
