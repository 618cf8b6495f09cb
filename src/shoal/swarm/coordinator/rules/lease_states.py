"""What a lease can be. leases.py has what leads from one to the next."""

from enum import StrEnum


class State(StrEnum):
    ISSUED = "issued"
    UPLOADING = "uploading"
    SUBMITTED = "submitted"
    CHECKING = "checking"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    VOID = "void"
    REVOKED = "revoked"


AWAITED = (State.ISSUED, State.UPLOADING)
"""The node has yet to deliver."""
OPEN = (*AWAITED, State.SUBMITTED, State.CHECKING)
TERMINAL = (State.ACCEPTED, State.REJECTED, State.VOID, State.REVOKED)
