"""Accounts of lost leases: what a node, an owner and a network delivered limits what they may let go.

A lease is lost if it ends without valid work: given back, expired, stale at receipt, suspicious, unreadable,
refused. An account has the number of lost leases that are not made up for. Accepted work lowers it, and it halves with every half-life.
It decides two things:

    open leases    as many as the account's terms allow, fewer while leases are lost
    next lease     at once while one more loss stays within the free losses, otherwise when enough of them have decayed

The free losses of owners and networks grow with what they deliver, so many honest nodes at one university are not limited. A
network's account limits only its nodes that have not delivered more than they lost: a node that delivers has an account of its own, and must
not wait because of its neighbours.

An honest node that loses a share p of its leases has an account that is a random walk: up by 1 with probability p, down by 1
otherwise. It reaches 8 with probability (p / (1 - p))^8 at any time: 2e-8 for p = 0.1. Nothing here reads a clock: callers pass
the time.
"""

import math
from dataclasses import dataclass, replace

WEIGHTS = {
    "void.abandoned": 1.0,
    "void.expired": 1.0,
    "void.stale": 1.0,
    "void.uncertain": 1.0,
    "void.unchecked": 1.0,
    "void.infra": 0.5,
}
"""Losses that a lease counts as, by the code with which it ended. A failure of the swarm counts half: a node can provoke some of them."""


@dataclass(frozen=True, slots=True)
class AccountTerms:
    """The limits of one kind of account."""

    free: float
    """Losses that cost nothing."""
    free_per_delivery: float
    """Free losses that each accepted submission adds, until it has decayed."""
    paid_by_delivery: float
    """Losses that an accepted submission makes up for."""
    open: int = 0
    """Open leases without any delivery; each accepted submission adds one. 0: a node's trust decides (rules/trust.py)."""


NODE = AccountTerms(free=8, free_per_delivery=0, paid_by_delivery=1)
OWNER = AccountTerms(free=16, free_per_delivery=0.5, paid_by_delivery=1, open=64)
NETWORK = AccountTerms(free=32, free_per_delivery=0.5, paid_by_delivery=0.5, open=64)


@dataclass(frozen=True, slots=True)
class LeaseAccount:
    """Lost and delivered leases, both decayed until `at_s`."""

    lost: float = 0.0
    delivered: float = 0.0
    at_s: float = 0.0


def weight_of(code: str) -> float:
    """Returns how many losses a lease that ended with `code` counts as; 0 for accepted work and for actions of the operator."""
    return 1.0 if code.startswith("reject.") else WEIGHTS.get(code, 0.0)


def decayed(account: LeaseAccount, now_s: float, half_life_s: float) -> LeaseAccount:
    """Returns the account at a later time."""
    kept = 0.5 ** (max(0.0, now_s - account.at_s) / half_life_s)
    return LeaseAccount(account.lost * kept, account.delivered * kept, max(now_s, account.at_s))


def after_loss(account: LeaseAccount, weight: float) -> LeaseAccount:
    """Returns the account after one more lost lease."""
    return replace(account, lost=account.lost + weight)


def after_delivery(account: LeaseAccount, terms: AccountTerms) -> LeaseAccount:
    """Returns the account after one more accepted submission."""
    return replace(
        account, lost=max(0.0, account.lost - terms.paid_by_delivery), delivered=account.delivered + 1
    )


def wait_s(account: LeaseAccount, terms: AccountTerms, half_life_s: float) -> float:
    """Returns how long to wait for the next lease: until one more loss stays within the free losses; 0 if it does now."""
    most = _free(account, terms) - 1
    return half_life_s * math.log2(account.lost / most) if account.lost > most else 0.0


def most_open(account: LeaseAccount, terms: AccountTerms, usual: int | None = None) -> int:
    """Returns how many leases may be open: `usual`, or what the terms say; fewer while leases are lost, but at least one."""
    most = terms.open + account.delivered if usual is None else usual
    left = 1 - account.lost / _free(account, terms)
    # Rounded up: a single loss must not take the second lease from a node that holds two.
    return max(1, math.ceil(most * left))


def delivers_more(account: LeaseAccount, accepted: int) -> bool:
    """Returns whether a node has delivered more than it lost, so that its network's account does not limit it."""
    return accepted > 0 and account.lost <= account.delivered


def _free(account: LeaseAccount, terms: AccountTerms) -> float:
    return terms.free + terms.free_per_delivery * account.delivered
