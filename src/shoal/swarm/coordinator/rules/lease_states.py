"""The states of a lease, and the table of events that lead from one state to the next.

    issued -> uploading -> submitted -> checking -> accepted | rejected | void
                              ^------------'            a claim that ran out

Every lease reaches exactly one of the last three and stays there, with one exception: an accepted lease whose credit is still
held is revoked if its node is caught. The lease's code says why it ended.
"""

from enum import StrEnum

from shoal.wire.codes import Rejected


class LeaseState(StrEnum):
    ISSUED = "issued"
    UPLOADING = "uploading"
    SUBMITTED = "submitted"
    CHECKING = "checking"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    VOID = "void"
    REVOKED = "revoked"


AWAITED = (LeaseState.ISSUED, LeaseState.UPLOADING)
"""The node has not submitted yet."""
OPEN = (*AWAITED, LeaseState.SUBMITTED, LeaseState.CHECKING)
TERMINAL = (LeaseState.ACCEPTED, LeaseState.REJECTED, LeaseState.VOID, LeaseState.REVOKED)


class LeaseEvent(StrEnum):
    UPLOAD = "upload"
    SUBMIT = "submit"
    CLAIM = "claim"
    RELEASE = "release"
    """The claim ran out."""
    ACCEPT = "accept"
    REJECT = "reject"
    VOID = "void"
    REVOKE = "revoke"


# A verdict may arrive after its claim ran out: the work is done, and the first verdict counts.
_NEXT: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.ISSUED, LeaseEvent.UPLOAD): LeaseState.UPLOADING,
    (LeaseState.ISSUED, LeaseEvent.VOID): LeaseState.VOID,
    (LeaseState.UPLOADING, LeaseEvent.UPLOAD): LeaseState.UPLOADING,
    (LeaseState.UPLOADING, LeaseEvent.SUBMIT): LeaseState.SUBMITTED,
    (LeaseState.UPLOADING, LeaseEvent.VOID): LeaseState.VOID,
    (LeaseState.SUBMITTED, LeaseEvent.CLAIM): LeaseState.CHECKING,
    (LeaseState.SUBMITTED, LeaseEvent.ACCEPT): LeaseState.ACCEPTED,
    (LeaseState.SUBMITTED, LeaseEvent.REJECT): LeaseState.REJECTED,
    (LeaseState.SUBMITTED, LeaseEvent.VOID): LeaseState.VOID,
    (LeaseState.CHECKING, LeaseEvent.RELEASE): LeaseState.SUBMITTED,
    (LeaseState.CHECKING, LeaseEvent.ACCEPT): LeaseState.ACCEPTED,
    (LeaseState.CHECKING, LeaseEvent.REJECT): LeaseState.REJECTED,
    (LeaseState.CHECKING, LeaseEvent.VOID): LeaseState.VOID,
}


def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Returns the state that `event` leads to. Raises Rejected if a lease in `state` cannot have that event."""
    if (state, event) == (LeaseState.ACCEPTED, LeaseEvent.REVOKE):
        return LeaseState.REVOKED
    if state in TERMINAL:
        raise Rejected("request.lease_closed", f"the lease has ended: {state.value}")
    if (state, event) not in _NEXT:
        raise Rejected("request.conflict", f"a lease that is {state.value} cannot {event.value}")
    return _NEXT[state, event]
