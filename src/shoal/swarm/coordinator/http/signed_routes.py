"""The signed routes: who may call each, what it takes and gives, and what does it (handlers.py)."""

from shoal.swarm.coordinator.http import handlers
from shoal.swarm.coordinator.http.auth import LARGE_BODY
from shoal.swarm.coordinator.http.handlers import SignedRoute
from shoal.swarm.coordinator.store.door import Caller
from shoal.swarm.coordinator.store.needs import Needs
from shoal.wire.lease import Lease, Receipt, Verdict
from shoal.wire.messages import (
    Abandon,
    AdminOrder,
    Announce,
    Appeal,
    AskLease,
    AskUpload,
    Batch,
    Claim,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    LeaseStatus,
    Leave,
    OpenSession,
    Recorded,
    RelayReport,
    RevokeKey,
    Session,
    Submit,
    Upload,
)
from shoal.wire.record import Sealed
from shoal.wire.ticket import Ticket

_NEWCOMER: frozenset[Caller] = frozenset({"newcomer", "node"})
_NODE: frozenset[Caller] = frozenset({"node"})
_EVEN_BANNED: frozenset[Caller] = frozenset({"node", "banned"})
_ADMIN: frozenset[Caller] = frozenset({"admin"})
_TRAINER: frozenset[Caller] = frozenset({"trainer"})
_VALIDATOR: frozenset[Caller] = frozenset({"validator"})
_RELAY: frozenset[Caller] = frozenset({"relay"})

SIGNED_ROUTES = (
    SignedRoute(
        method="POST",
        path="/v1/enrol",
        callers=_NEWCOMER,
        handle=handlers.handle_enrol,
        takes=Enrol,
        gives=Enrolled,
    ),
    SignedRoute(
        method="POST",
        path="/v1/session",
        callers=_NODE,
        handle=handlers.handle_session,
        takes=OpenSession,
        gives=Session,
    ),
    SignedRoute(
        method="POST",
        path="/v1/heartbeat",
        callers=_NODE,
        handle=handlers.handle_heartbeat,
        takes=Heartbeat,
        gives=HeartbeatReply,
        beats=True,
    ),
    SignedRoute(
        method="POST",
        path="/v1/leases",
        callers=_NODE,
        handle=handlers.handle_ask_lease,
        takes=AskLease,
        gives=Sealed[Lease],
        needs=lambda key, lease_id: Needs(node=key),
    ),
    SignedRoute(
        method="GET",
        path="/v1/leases/{lease_id}",
        callers=_NODE,
        handle=handlers.handle_lease_status,
        gives=LeaseStatus,
    ),
    SignedRoute(
        method="POST",
        path="/v1/leases/{lease_id}/upload",
        callers=_NODE,
        handle=handlers.handle_ask_upload,
        takes=AskUpload,
        gives=Upload,
        needs=lambda key, lease_id: Needs(lease_id=lease_id, upload=True),
    ),
    SignedRoute(
        method="POST",
        path="/v1/leases/{lease_id}/submit",
        callers=_NODE,
        handle=handlers.handle_submit,
        takes=Submit,
        gives=Sealed[Receipt],
        needs=lambda key, lease_id: Needs(lease_id=lease_id, upload=True, submission=True),
        prepare=handlers.look_in_store,
    ),
    SignedRoute(
        method="POST",
        path="/v1/leases/{lease_id}/abandon",
        callers=_NODE,
        handle=handlers.handle_abandon,
        takes=Abandon,
        gives=LeaseStatus,
    ),
    SignedRoute(
        method="POST",
        path="/v1/leases/{lease_id}/appeal",
        callers=_EVEN_BANNED,
        handle=handlers.handle_appeal,
        takes=Appeal,
        gives=Recorded,
    ),
    SignedRoute(
        method="POST",
        path="/v1/leave",
        callers=_NODE,
        handle=handlers.handle_leave,
        takes=Leave,
        gives=Recorded,
    ),
    SignedRoute(
        method="POST",
        path="/v1/keys/revoke",
        callers=_NEWCOMER,
        handle=handlers.handle_revoke_key,
        takes=RevokeKey,
        gives=Recorded,
    ),
    SignedRoute(
        method="POST",
        path="/v1/admin/{action}",
        callers=_ADMIN,
        handle=handlers.handle_order,
        takes=AdminOrder,
        gives=Recorded,
    ),
    SignedRoute(
        method="POST",
        path="/v1/checks/claim",
        callers=_VALIDATOR,
        handle=handlers.handle_claim,
        gives=Claim,
        needs=lambda key, lease_id: Needs(claims=True),
    ),
    SignedRoute(
        method="GET",
        path="/v1/checks/{lease_id}",
        callers=_VALIDATOR,
        handle=handlers.handle_look_again,
        gives=Claim,
    ),
    SignedRoute(
        method="POST",
        path="/v1/checks/{lease_id}/verdict",
        callers=_VALIDATOR,
        handle=handlers.handle_verdict,
        takes=Verdict,
        gives=LeaseStatus,
        needs=lambda key, lease_id: Needs(lease_id=lease_id, submission=True, judged=True),
        max_body=LARGE_BODY,
    ),
    SignedRoute(
        method="GET",
        path="/v1/objects/{name}",
        callers=_TRAINER | _VALIDATOR,
        handle=handlers.handle_get_object,
    ),
    SignedRoute(
        method="POST",
        path="/v1/policies",
        callers=_TRAINER,
        handle=handlers.handle_announce,
        takes=Announce,
        gives=Recorded,
        max_body=LARGE_BODY,
    ),
    SignedRoute(
        method="GET",
        path="/v1/batches/{version}",
        callers=_TRAINER,
        handle=handlers.handle_get_batch,
        gives=Batch,
    ),
    SignedRoute(
        method="POST",
        path="/v1/relays",
        callers=_RELAY,
        handle=handlers.handle_relay_report,
        takes=RelayReport,
        gives=HeartbeatReply,
    ),
    SignedRoute(
        method="POST",
        path="/v1/tickets",
        callers=_NODE | _TRAINER | _VALIDATOR | _RELAY,
        handle=handlers.handle_ticket,
        gives=Sealed[Ticket],
    ),
)
