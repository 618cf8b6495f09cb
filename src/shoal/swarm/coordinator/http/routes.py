"""The route tables: who may call each route, the records it takes and gives, and the function that does the work.

docs/wire/api.md lists the routes; openapi.py describes them from these tables.
"""

import re
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from shoal.net.object_store import LocalStore, check_digest
from shoal.swarm.coordinator.context import Coordinator, Transaction, is_finished, run_state
from shoal.swarm.coordinator.http.auth import Caller
from shoal.swarm.coordinator.http.router import LARGE_BODY, PublicRoute, SignedRoute, query_number
from shoal.swarm.coordinator.leases import (
    batches,
    issue,
    lifecycle,
    submissions,
    transcripts,
    uploads,
    verdicts,
)
from shoal.swarm.coordinator.leases.lease_rows import LEASE_ID, get_status
from shoal.swarm.coordinator.membership import admin_actions, admission, nodes, relays, revocation, versions
from shoal.swarm.coordinator.store import ledger_chain
from shoal.swarm.coordinator.store.database import WriteGroup
from shoal.swarm.coordinator.views import stats
from shoal.swarm.coordinator.views.page_snapshot import node_page
from shoal.wire.codes import Rejected
from shoal.wire.keys import PUBLIC_KEY
from shoal.wire.lease import Lease, Receipt, Verdict
from shoal.wire.ledger import LedgerEvent, LedgerHead
from shoal.wire.manifest import Manifest
from shoal.wire.messages import (
    Abandon,
    AdminOrder,
    Announce,
    Appeal,
    AskClaim,
    AskLease,
    AskUpload,
    Batch,
    Claim,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    History,
    Info,
    LeaseStatus,
    Leave,
    NodeView,
    OpenSession,
    Origin,
    Recorded,
    RelayReport,
    RevokeKey,
    RunList,
    Session,
    Stats,
    Submit,
    Upload,
)
from shoal.wire.page_data import NodePage, RolloutPage
from shoal.wire.record import Record, Sealed
from shoal.wire.ticket import Ticket

_VERSION = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")
MAX_QUERY_TEXT = 200
WITHHELD = (
    "Answers to held-out problems are shown when the run is finished: a worker could learn the expected answers from them. "
    "The operator reads them with shoal rollouts FOLDER --held-out."
)


def parse_lease_id(text: str) -> str:
    if not LEASE_ID.fullmatch(text):
        raise Rejected("request.not_found", f"{text[:80]!r} is not a lease id")
    return text


def parse_version(text: str) -> int:
    if not _VERSION.fullmatch(text):
        raise Rejected("request.not_found", f"{text[:80]!r} is not a policy version")
    return int(text)


# -- signed routes ----------------------------------------------------------------------------------------


def get_object(tx: Transaction, coordinator: Coordinator, sha256: str) -> Response:
    """Answers with a submission or a file of the task, or with a redirect to the object store."""
    path = coordinator.data / sha256
    if isinstance(coordinator.store, LocalStore):
        stored = coordinator.store.path(sha256)
        path = stored if stored.exists() else path
    elif (submitted := uploads.find_submitted(tx.db, sha256)) is not None:
        return RedirectResponse(coordinator.store.read_url(submitted), status_code=307)
    if not path.exists():
        raise Rejected("request.not_found", f"no object {sha256}")
    return FileResponse(path, media_type="application/octet-stream")


def get_batch(tx: Transaction, coordinator: Coordinator, version: int) -> Batch:
    """Returns the batch of `version`, and forms it if enough groups are ready. A batch never changes.

    A batch is formed for the newest version, and then for the one after it: the trainer takes its next step while the version
    that it made last is still being published.
    """
    batch = batches.find_batch(tx.db, version)
    if batch is not None:
        return batch
    state = run_state(tx.db)
    newest = state.newest_version
    if newest is not None and version < newest:
        raise Rejected("request.not_found", f"version {version} never had a batch; the newest is {newest}")
    if newest is None or version > newest + state.batch_formed:
        raise Rejected("request.conflict", f"version {version} is not published; announce it first")
    if version >= coordinator.spec.last_version:
        raise Rejected("request.conflict", f"version {version} is the last: there is no step after it")
    batch = batches.form_batch(tx, coordinator, version)
    if batch is None:
        raise Rejected(
            "request.too_early",
            stats.waiting_for(stats.read_situation(tx.db, coordinator)),
            retry_after_s=coordinator.config.retry_s,
        )
    return batch


def note_arrived(coordinator: Coordinator, key: str, lease_id: str) -> Callable[[WriteGroup], None] | None:
    """Asks the object store whether a lease's upload has arrived; returns the write that notes it."""
    arrived = uploads.find_arrived(coordinator, key, lease_id)
    return None if arrived is None else partial(uploads.mark_stored, coordinator, arrived)


_NEWCOMER: frozenset[Caller] = frozenset({"newcomer", "node"})
_NODE: frozenset[Caller] = frozenset({"node"})
_EVEN_BANNED: frozenset[Caller] = frozenset({"node", "banned"})
_ADMIN: frozenset[Caller] = frozenset({"admin"})
_TRAINER: frozenset[Caller] = frozenset({"trainer"})
_VALIDATOR: frozenset[Caller] = frozenset({"validator"})
_RELAY: frozenset[Caller] = frozenset({"relay"})
_REPORTER: frozenset[Caller] = _RELAY | {"newcomer"}
"""A new relay's key is unknown until its first report, whose delegation says whose key it is."""
_MEMBER = _NODE | _TRAINER | _VALIDATOR | _RELAY


PATH_PARSERS: dict[str, Callable[[str], str | int]] = {
    "lease_id": parse_lease_id,
    "version": parse_version,
    "name": check_digest,
    "action": str,
}

SIGNED_ROUTES = (
    SignedRoute("POST", "/v1/enrol", _NEWCOMER, admission.enrol, Enrol, Enrolled),
    SignedRoute("POST", "/v1/session", _NODE, nodes.open_session, OpenSession, Session),
    SignedRoute("POST", "/v1/heartbeat", _NODE, nodes.heartbeat, Heartbeat, HeartbeatReply),
    SignedRoute("POST", "/v1/leases", _NODE, issue.ask_lease, AskLease, Sealed[Lease]),
    SignedRoute("GET", "/v1/leases/{lease_id}", _NODE, get_status, None, LeaseStatus),
    SignedRoute("POST", "/v1/leases/{lease_id}/upload", _NODE, uploads.ask_upload, AskUpload, Upload),
    SignedRoute(
        "POST",
        "/v1/leases/{lease_id}/submit",
        _NODE,
        submissions.submit,
        Submit,
        Sealed[Receipt],
        before=note_arrived,
    ),
    SignedRoute("POST", "/v1/leases/{lease_id}/abandon", _NODE, lifecycle.abandon, Abandon, LeaseStatus),
    SignedRoute("POST", "/v1/leases/{lease_id}/appeal", _EVEN_BANNED, revocation.appeal, Appeal, Recorded),
    SignedRoute("POST", "/v1/leave", _NODE, nodes.leave, Leave, Recorded),
    SignedRoute("POST", "/v1/keys/revoke", _NEWCOMER, admin_actions.revoke_key, RevokeKey, Recorded),
    SignedRoute("POST", "/v1/admin/{action}", _ADMIN, admin_actions.give_order, AdminOrder, Recorded),
    SignedRoute("POST", "/v1/checks/claim", _VALIDATOR, verdicts.claim, AskClaim, Claim),
    SignedRoute("GET", "/v1/checks/{lease_id}", _VALIDATOR, verdicts.look_again, None, Claim),
    SignedRoute(
        "POST",
        "/v1/checks/{lease_id}/verdict",
        _VALIDATOR,
        verdicts.give_verdict,
        Verdict,
        LeaseStatus,
        max_body=LARGE_BODY,
    ),
    SignedRoute("GET", "/v1/objects/{name}", _TRAINER | _VALIDATOR, get_object, None, None),
    SignedRoute("POST", "/v1/policies", _TRAINER, versions.announce, Announce, Recorded, max_body=LARGE_BODY),
    SignedRoute("GET", "/v1/batches/{version}", _TRAINER, get_batch, None, Batch),
    SignedRoute("POST", "/v1/relays", _REPORTER, relays.report, RelayReport, HeartbeatReply),
    SignedRoute("POST", "/v1/tickets", _MEMBER, relays.issue_ticket, None, Sealed[Ticket]),
)


# -- public routes ----------------------------------------------------------------------------------------


class HealthView(Record):
    run: str
    ledger_seq: int


def get_health(db: Connection, coordinator: Coordinator, request: Request) -> HealthView:
    return HealthView(run=coordinator.spec.run, ledger_seq=ledger_chain.read_head(db)[0])


def get_ready(db: Connection, coordinator: Coordinator, request: Request) -> HealthView:
    """Raises Rejected if a background loop has stalled."""
    if stalled := coordinator.health.stalled():
        raise Rejected("request.not_ready", "; ".join(stalled), retry_after_s=5.0)
    return get_health(db, coordinator, request)


def get_node_view(db: Connection, coordinator: Coordinator, request: Request) -> NodeView:
    return stats.node_views(db, [nodes.get_node(db, _node_id(request))], coordinator)[0]


def get_node_page(db: Connection, coordinator: Coordinator, request: Request) -> NodePage:
    return node_page(db, coordinator, _node_id(request))


def _node_id(request: Request) -> str:
    key = str(request.path_params["node"])
    if not PUBLIC_KEY.fullmatch(key):
        raise Rejected("request.not_found", f"{key[:80]!r} is not a node id: 64 hex digits")
    return key


def get_policy(db: Connection, coordinator: Coordinator, request: Request) -> Sealed[Manifest]:
    return versions.get_manifest(db, parse_version(request.path_params["version"]))


def get_ledger(db: Connection, coordinator: Coordinator, request: Request) -> list[Record]:
    from_seq = query_number(request, "from_seq", 1)
    limit = query_number(request, "limit", ledger_chain.PAGE)
    return [*ledger_chain.read_page(db, from_seq, min(limit, ledger_chain.PAGE))]


def get_rollouts(db: Connection, coordinator: Coordinator, request: Request) -> RolloutPage:
    held_out = request.query_params.get("held_out", "") not in ("", "0")
    if held_out and not coordinator.config.show_held_out and not is_finished(db, coordinator.spec):
        return RolloutPage(groups=(), next=None, withheld=WITHHELD)
    texts = {name: _text(request, name) for name in ("task", "node", "search")}
    return transcripts.read_rollouts(
        db,
        transcripts.RolloutQuery(
            held_out=held_out,
            version=_number_or_none(request, "version"),
            reward=_reward(request),
            before=_number_or_none(request, "before"),
            limit=max(1, query_number(request, "limit", 8)),
            **texts,
        ),
    )


def _text(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if "\0" in text:  # PostgreSQL cannot compare with it
        raise Rejected("request.malformed", f"{name}={text[:32]!r} contains a NUL character")
    return text[:MAX_QUERY_TEXT]


def _number_or_none(request: Request, name: str) -> int | None:
    return query_number(request, name, 0) if request.query_params.get(name) else None


def _reward(request: Request) -> float | None:
    text = request.query_params.get("reward", "")
    if not text:
        return None
    if not _DECIMAL.fullmatch(text):
        raise Rejected("request.malformed", f"reward={text[:32]!r} is not a number")
    return float(text)


PUBLIC_ROUTES: dict[str, PublicRoute] = {
    "/healthz": PublicRoute(get_health, HealthView),
    "/readyz": PublicRoute(get_ready, HealthView),
    "/v1/info": PublicRoute(lambda db, coordinator, request: stats.info(db, coordinator), Info),
    "/v1/runs": PublicRoute(
        lambda db, coordinator, request: stats.runs(db, coordinator), RunList, is_costly=True
    ),
    "/v1/stats": PublicRoute(
        lambda db, coordinator, request: stats.stats(db, coordinator), Stats, is_costly=True
    ),
    "/v1/history": PublicRoute(lambda db, coordinator, request: stats.history(db), History, is_costly=True),
    "/v1/nodes/{node}": PublicRoute(get_node_view, NodeView),
    "/v1/nodes/{node}/page": PublicRoute(get_node_page, NodePage, is_limited=True),
    "/v1/rollouts": PublicRoute(
        get_rollouts,
        RolloutPage,
        query=("version", "before", "limit", "held_out"),
        texts=("task", "node", "reward", "search"),
        is_limited=True,
    ),
    "/v1/origin": PublicRoute(lambda db, coordinator, request: versions.origin(db), Origin),
    "/v1/policies/latest": PublicRoute(
        lambda db, coordinator, request: versions.get_manifest(db, None), Sealed[Manifest]
    ),
    "/v1/policies/{version}": PublicRoute(get_policy, Sealed[Manifest]),
    "/v1/ledger": PublicRoute(get_ledger, LedgerEvent, many=True, query=("from_seq", "limit")),
    "/v1/ledger/head": PublicRoute(
        lambda db, coordinator, request: ledger_chain.signed_head(
            db, coordinator.spec.run, coordinator.run_key
        ),
        Sealed[LedgerHead],
    ),
}
