"""Credit: verified output tokens times the model's factor, held for a day, then final. Pure.

What was accepted on trust, without the dear checks, is revoked when the node is caught while it is held. So a lie that
the draw spared gains nothing until a day of honest-looking draws has passed, and costs all that the day earned unchecked.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.swarm.coordinator.rules.trust import Trust

_SUSPENDED = (Trust.QUARANTINED, Trust.BANNED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Earning:
    """The credit of one accepted lease."""

    lease_id: str
    amount: int
    given_at_s: float
    checked: bool
    """By every check; False: taken on trust."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class Balance:
    final: int
    held: int


def amount(output_tokens: int, factor: float) -> int:
    return int(output_tokens * factor)


def held_since_s(trust: Trust, trust_since_s: float, now_s: float, hold_s: float) -> float:
    """Credit given after this is held. In quarantine nothing becomes final: the clock stands still."""
    return (min(now_s, trust_since_s) if trust in _SUSPENDED else now_s) - hold_s


def balance(earnings: Iterable[Earning], since_s: float) -> Balance:
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
    """What a rejection takes with it."""
    return [
        earning
        for earning in earnings
        if not earning.checked and not earning.revoked and earning.given_at_s > since_s
    ]
