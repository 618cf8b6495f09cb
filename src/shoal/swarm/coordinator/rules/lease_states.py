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


_VERDICTS = {
    LeaseEvent.ACCEPT: LeaseState.ACCEPTED,
    LeaseEvent.REJECT: LeaseState.REJECTED,
    LeaseEvent.VOID: LeaseState.VOID,
}
_NEXT: dict[LeaseState, dict[LeaseEvent, LeaseState]] = {
    LeaseState.ISSUED: {LeaseEvent.UPLOAD: LeaseState.UPLOADING, LeaseEvent.VOID: LeaseState.VOID},
    LeaseState.UPLOADING: {
        LeaseEvent.UPLOAD: LeaseState.UPLOADING,
        LeaseEvent.SUBMIT: LeaseState.SUBMITTED,
        LeaseEvent.VOID: LeaseState.VOID,
    },
    # A verdict may arrive after its claim ran out: the work is done, and the first verdict counts.
    LeaseState.SUBMITTED: {LeaseEvent.CLAIM: LeaseState.CHECKING, **_VERDICTS},
    LeaseState.CHECKING: {LeaseEvent.RELEASE: LeaseState.SUBMITTED, **_VERDICTS},
    LeaseState.ACCEPTED: {LeaseEvent.REVOKE: LeaseState.REVOKED},
}


def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """Returns the state that `event` leads to. Raises Rejected if a lease in `state` cannot have that event."""
    after = _NEXT.get(state, {}).get(event)
    if after is not None:
        return after
    if state in TERMINAL:
        raise Rejected("request.lease_closed", f"the lease has ended: {state.value}")
    raise Rejected("request.conflict", f"a lease that is {state.value} cannot {event.value}")
