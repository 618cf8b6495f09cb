"""Credit: verified output tokens times the model's factor; for rounded weights also times their share of credit.

Credit is held for a day, then final. Pure functions.

While credit is held, credit that was given without every check is revoked if the node is caught. So a false submission that
the draw did not choose gains nothing for a day, and being caught costs everything that was earned unchecked that day.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.swarm.coordinator.rules.trust import Trust

WEIGHTS = "weights"
"""Key of a verdict's evidence: the format that the worker declared its weights to be rounded to."""
_SUSPENDED = (Trust.QUARANTINED, Trust.BANNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earning:
    """The credit of one accepted lease."""

    lease_id: str
    amount: int
    given_at_s: float
    checked: bool
    """True if every check was run; False if only the cheap ones were."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Balance:
    """The credit of a node."""

    final: int
    held: int


def amount(output_tokens: int, factor: float, share: float = 1.0) -> int:
    """Returns the credit for a number of verified output tokens. `share` is below 1 for tokens made with rounded weights."""
    return int(output_tokens * factor * share)


def weights_share(evidence: Mapping[str, object], admitted: Mapping[str, float | None]) -> float | None:
    """Returns the share of credit for the weights that a verdict's evidence names; None if the run does not admit them."""
    format = evidence.get(WEIGHTS)
    return 1.0 if format is None else admitted.get(str(format))


def held_since_s(trust: Trust, trust_since_s: float, now_s: float, hold_s: float) -> float:
    """Returns the time after which given credit is still held. In quarantine no credit becomes final: its start counts as now."""
    return (min(now_s, trust_since_s) if trust in _SUSPENDED else now_s) - hold_s


def balance(earnings: Iterable[Earning], since_s: float) -> Balance:
    """Returns the sums of final and held credit, without what was revoked."""
    final = held = 0
    for earning in earnings:
        if earning.revoked:
            continue
        if earning.given_at_s > since_s:
            held += earning.amount
        else:
            final += earning.amount
    return Balance(final, held)


def to_revoke(earnings: Iterable[Earning], since_s: float) -> list[Earning]:
    """Returns the earnings that a rejection revokes: those that are held and were not checked fully."""
    return [
        earning
        for earning in earnings
        if not earning.checked and not earning.revoked and earning.given_at_s > since_s
    ]
