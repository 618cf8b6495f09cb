"""Trust: a pure function of a node's standing, an event and the time; and how many checks and leases a standing gives.

    probation ──N checked and accepted in a row──▶ trusted
        ▲                │                            │ a rejection, from anywhere
        │                ▼                            ▼
    a day and 10 N good ones ◀──────────────────── quarantined ──a second rejection──▶ banned

A void submission changes nothing, except void.uncertain: it resets the streak, so that the next submissions are checked.
A submission that was accepted without every check builds no trust.
"""

import hashlib
import hmac
import math
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.wire.codes import ACCEPTED

REDEEM_S = 24 * 3600.0
REDEEM_TIMES = 10
"""A quarantine ends after REDEEM_S and this many times the accepted submissions that end a probation, whichever is later."""
LAPSES_END_TRUST = 5
"""A trusted node that lets this many leases in a row expire is back on probation."""
LONGEST_BACKOFF_S = 3600.0


class Trust(StrEnum):
    """How far the swarm trusts a node."""

    PROBATION = "probation"
    TRUSTED = "trusted"
    QUARANTINED = "quarantined"
    BANNED = "banned"
    RETIRED = "retired"
    """The node left the run itself."""


class VerdictKind(StrEnum):
    """What a verdict says about the node."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    VOID = "void"


class TrustEvent(StrEnum):
    """An event that can change a standing."""

    ACCEPTED = "accepted"
    """A submission passed every check."""
    TAKEN_ON_TRUST = "taken on trust"
    """A submission passed the cheap checks; the draw did not choose it for the others."""
    REJECTED = "rejected"
    UNCERTAIN = "uncertain"
    """A submission was void because it was suspicious but not certainly false."""
    LAPSED = "lapsed"
    """A lease expired before the node delivered."""
    QUARANTINE = "quarantine"
    BAN = "ban"
    RESTORE = "restore"
    """The last three are actions of the operator."""
    UPHELD = "upheld"
    """The operator agreed with an appeal: one rejection was wrong."""
    LEAVE = "leave"
    RETURN = "return"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStanding:
    """A node's trust, and the counts that decide how it changes."""

    trust: Trust
    since_s: float = 0.0
    """Time of the last change of trust."""
    streak: int = 0
    """Submissions in a row that passed every check."""
    rejected: int = 0
    lapses: int = 0
    """Leases in a row that expired before the node delivered."""
    lapsed_s: float = 0.0
    """Time of the last one."""


def verdict_kind(code: str) -> VerdictKind:
    if code == ACCEPTED:
        return VerdictKind.ACCEPTED
    return VerdictKind.REJECTED if code.startswith("reject.") else VerdictKind.VOID


def next_standing(
    standing: NodeStanding, event: TrustEvent, now_s: float, *, trusted_after: int
) -> NodeStanding:
    """Returns the standing after one more event."""
    if standing.trust is Trust.BANNED and event not in (TrustEvent.RESTORE, TrustEvent.UPHELD):
        return standing
    if event in _WORK:
        return _after_work(standing, event, now_s, trusted_after)
    return _after_order(standing, event, now_s)


_WORK = (
    TrustEvent.ACCEPTED,
    TrustEvent.TAKEN_ON_TRUST,
    TrustEvent.REJECTED,
    TrustEvent.UNCERTAIN,
    TrustEvent.LAPSED,
)


def _after_work(standing: NodeStanding, event: TrustEvent, now_s: float, trusted_after: int) -> NodeStanding:
    if event is TrustEvent.ACCEPTED:
        return _after_success(replace(standing, streak=standing.streak + 1, lapses=0), now_s, trusted_after)
    if event is TrustEvent.TAKEN_ON_TRUST:
        return replace(standing, lapses=0)
    if event is TrustEvent.REJECTED:
        rejected = standing.rejected + 1
        fallen = replace(standing, rejected=rejected, streak=0)
        return _move(fallen, Trust.QUARANTINED if rejected == 1 else Trust.BANNED, now_s)
    if event is TrustEvent.LAPSED:
        lapsed = replace(standing, lapses=standing.lapses + 1, lapsed_s=now_s)
        if standing.trust is Trust.TRUSTED and lapsed.lapses >= LAPSES_END_TRUST:
            return _move(replace(lapsed, streak=0), Trust.PROBATION, now_s)
        return lapsed
    assert event is TrustEvent.UNCERTAIN
    return replace(standing, streak=0)


def _after_success(standing: NodeStanding, now_s: float, trusted_after: int) -> NodeStanding:
    if standing.trust is Trust.PROBATION and standing.streak >= trusted_after:
        return _move(standing, Trust.TRUSTED, now_s)
    redeemed = standing.streak >= REDEEM_TIMES * trusted_after and now_s - standing.since_s >= REDEEM_S
    if standing.trust is Trust.QUARANTINED and redeemed:
        return _move(replace(standing, streak=0), Trust.PROBATION, now_s)
    return standing


def _after_order(standing: NodeStanding, event: TrustEvent, now_s: float) -> NodeStanding:
    if event is TrustEvent.UPHELD:
        return _after_appeal(replace(standing, rejected=max(0, standing.rejected - 1)), now_s)
    if event is TrustEvent.LEAVE:
        # Otherwise a node could end its quarantine by leaving and coming back.
        return standing if standing.trust is Trust.QUARANTINED else _move(standing, Trust.RETIRED, now_s)
    if event is TrustEvent.RETURN:
        # It may have left before its last submission was refused.
        back = Trust.QUARANTINED if standing.rejected else Trust.PROBATION
        left = standing.trust is Trust.RETIRED
        return _move(replace(standing, streak=0), back, now_s) if left else standing
    if event is TrustEvent.RESTORE:
        standing = replace(standing, rejected=0, lapses=0)
    return _move(replace(standing, streak=0), _ORDERED[event], now_s)


_ORDERED = {
    TrustEvent.QUARANTINE: Trust.QUARANTINED,
    TrustEvent.BAN: Trust.BANNED,
    TrustEvent.RESTORE: Trust.PROBATION,
}


def _after_appeal(standing: NodeStanding, now_s: float) -> NodeStanding:
    if standing.trust not in (Trust.QUARANTINED, Trust.BANNED):
        return standing
    if standing.rejected == 0:
        return _move(standing, Trust.PROBATION, now_s)
    return _move(standing, Trust.QUARANTINED if standing.rejected == 1 else Trust.BANNED, now_s)


def _move(standing: NodeStanding, trust: Trust, now_s: float) -> NodeStanding:
    return standing if trust is standing.trust else replace(standing, trust=trust, since_s=now_s)


# -- checks and leases ------------------------------------------------------------------------------------


def check_rate(standing: NodeStanding, *, floor: float) -> float:
    """Returns the share of a node's submissions that get every check."""
    if standing.trust is not Trust.TRUSTED:
        return 1.0
    return max(floor, 1.0 / max(1, standing.streak))


def check_draw(epoch_secret: bytes, lease_id: str, sha256: str) -> float:
    """Returns the draw that decides which checks a submission gets, in [0, 1).

    It is HMAC-SHA256(epoch secret, "check/" lease id "/" SHA-256 of the submission), first 8 bytes, divided by 2^64. The secret
    is revealed later, so a worker cannot predict the draw, and anybody can verify it afterwards.
    """
    digest = hmac.new(epoch_secret, f"check/{lease_id}/{sha256}".encode(), hashlib.sha256).digest()
    # 53 bits are exactly a float, so every machine computes the same number.
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def gets_every_check(epoch_secret: bytes, lease_id: str, sha256: str, rate: float) -> bool:
    """Returns whether the draw chooses a submission for every check; `rate` is from `check_rate`."""
    return check_draw(epoch_secret, lease_id, sha256) < rate


MAX_FABRICATED = 0.0005
"""Largest expected share of fabricated groups among those trained on, in a run of any length and with any number of liars. Half of
the 0.1 % that is promised, because single runs vary."""


def is_usable(draw: float, rate: float, max_unchecked_share: float) -> bool:
    """Returns whether the groups of a submission that its draw spared may be used after a later check.

    Each check makes room for so many of them that they are at most `max_unchecked_share` of what is used, and the same draw chooses
    them. A node does not know the draw, so each of its lies that may be trained on comes with a check of a lie: in expectation
    share / (1 - share) of its lies are used before it is caught, however it chooses them.
    """
    return draw * (1.0 - max_unchecked_share) < rate


def checks_before_release(check_rate: float, max_unchecked_share: float) -> float:
    """Returns how many submissions of a node must pass every check in a row before groups of its spared ones are used.

    They are so many that the lies which are used before it is caught are less than MAX_FABRICATED of its work, also if it begins to
    lie after exactly these. A short run therefore uses nothing unchecked. Infinite if neither limit bounds the lies.
    """
    by_rate = (1.0 - check_rate) / check_rate if check_rate else math.inf
    by_share = max_unchecked_share / (1.0 - max_unchecked_share) if max_unchecked_share < 1 else math.inf
    return min(by_rate, by_share) / MAX_FABRICATED


def is_draw_open(rate: float, purpose: str) -> bool:
    """Returns whether a node could not know that its submission would get every check, so that passing it says something about
    the submissions that were spared. Held-out work and submissions drawn at rate 1 always get every check."""
    return purpose == "train" and rate < 1.0


def open_leases(standing: NodeStanding, *, most: int, trusted_after: int) -> int:
    """Returns how many leases a node may hold: one; a trusted node two, doubled by each further streak, halved by each lapse."""
    if standing.trust is not Trust.TRUSTED:
        return 1
    earned = 1 << min(16, max(1, standing.streak // trusted_after))
    return max(1, min(most, earned) >> min(16, standing.lapses))


def lease_prompts(standing: NodeStanding, *, most: int) -> int:
    """Returns how many prompts the node's next lease may have: `most`, halved by each lapse."""
    return max(1, most >> min(16, standing.lapses))


def owed_lease_s(standing: NodeStanding, *, lease_s: float, num_prompts: int) -> float:
    """Returns the time for work that the node owes. Each prompt gets as long as in a lease that lapses have shortened, but no prompt
    is left out: a node that let a lease expire could otherwise drop its second half."""
    return lease_s * num_prompts / lease_prompts(standing, most=num_prompts)


def next_lease_s(standing: NodeStanding, *, lease_s: float) -> float:
    """Returns the time from which the node may get a lease. The first lapse costs nothing; each one after the second doubles the wait."""
    if standing.lapses < 2:
        return 0.0
    wait_s = min(LONGEST_BACKOFF_S, lease_s * 2.0 ** min(20, standing.lapses - 2))
    return standing.lapsed_s + wait_s
