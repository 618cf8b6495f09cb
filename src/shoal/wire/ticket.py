"""The ticket: the coordinator's statement, valid for 15 minutes, that a key belongs to the run.

A relay that serves members only needs nothing but the run key and its clock to check a ticket. Any process that has a
ticket can use it, so it expires soon, and an ejected node gets no new one. docs/wire/ticket.md has a test vector.
"""

import base64
import binascii

from pydantic import Field

from shoal.wire.codes import Rejected
from shoal.wire.record import Sealable, Sealed

TICKET_S = 900.0
CLOCK_SKEW_S = 300.0
"""Seconds by which a relay's clock may be wrong."""
SCHEME = "Shoal-Ticket "


class Ticket(Sealable):
    """A statement, sealed by the run key, that `holder` belongs to the run until `expires_at_s`."""

    tag = "shoal/ticket/1"
    run: str
    holder: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The public key that asked for the ticket; for the relay's log."""
    expires_at_s: float


def to_header(sealed: Sealed[Ticket]) -> str:
    """Returns the value of the Authorization header that carries the ticket."""
    return SCHEME + base64.urlsafe_b64encode(sealed.canonical()).decode()


def check_ticket(header: str, *, run: str, run_key: str, now_s: float) -> Ticket:
    """Returns the ticket in a client's Authorization header. Raises Rejected if it is not valid now."""
    if not header.startswith(SCHEME):
        raise Rejected("request.unsigned", "this relay serves members of the run only; send a ticket")
    try:
        data = base64.b64decode(header.removeprefix(SCHEME), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise Rejected("request.malformed", "the ticket is not base64") from None
    ticket = Sealed[Ticket].parse(data).open(run_key)
    if ticket.run != run:
        raise Rejected("request.bad_signature", f"the ticket is for run {ticket.run[:80]!r}, not {run!r}")
    if ticket.expires_at_s + CLOCK_SKEW_S < now_s:
        raise Rejected(
            "request.expired",
            f"the ticket expired {now_s - ticket.expires_at_s:.0f} s ago by the relay's clock",
        )
    return ticket
