"""The ticket: the coordinator's word, for a quarter of an hour, that a key belongs to the run.

A relay that serves members only checks it with nothing but the run key and its clock. Whoever holds one can use it, so it
lives short, and a node that was ejected gets no other. docs/wire/ticket.md has a golden vector.
"""

import base64
import binascii

from pydantic import Field

from shoal.wire.codes import Rejected
from shoal.wire.record import Sealable, Sealed

TICKET_S = 900.0
CLOCK_SKEW_S = 300.0
"""A relay's clock may be so far off."""
SCHEME = "Shoal-Ticket "


class Ticket(Sealable):
    run: str
    holder: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The public key that asked for it; for the relay's log."""
    expires_at_s: float

    @classmethod
    def tag(cls) -> str:
        return "shoal/ticket/1"


def to_header(sealed: Sealed[Ticket]) -> str:
    """The value of the Authorization header that shows it."""
    return SCHEME + base64.urlsafe_b64encode(sealed.canonical()).decode()


def check_ticket(header: str, *, run: str, run_key: str, now_s: float) -> Ticket:
    """The ticket that a header shows, if it is good now; else Rejected."""
    if not header.startswith(SCHEME):
        raise Rejected("request.unsigned", "only members of the run are served here; show a ticket")
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
            f"the ticket ended {now_s - ticket.expires_at_s:.0f} s ago by the relay's clock",
        )
    return ticket
