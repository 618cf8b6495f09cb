"""What each signed route does. A handler parses the body into a record, acts in the request's transaction, and
answers with a record; anything else is a Rejected."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.responses import FileResponse, RedirectResponse, Response

from shoal.net.object_store import LocalStore, check_digest
from shoal.swarm.coordinator.context import Coordinator, Transaction, newest_version
from shoal.swarm.coordinator.http.auth import SMALL_BODY
from shoal.swarm.coordinator.leases import batches, issue, lifecycle, submissions, uploads, verdicts
from shoal.swarm.coordinator.leases.pending_upload import Expected
from shoal.swarm.coordinator.membership import admin_actions, nodes, relays, revocation, versions
from shoal.swarm.coordinator.store.door import Caller
from shoal.swarm.coordinator.store.needs import Needs
from shoal.swarm.coordinator.views import stats
from shoal.wire.codes import Rejected
from shoal.wire.lease import Verdict
from shoal.wire.messages import (
    Abandon,
    AdminOrder,
    Announce,
    Appeal,
    AskLease,
    AskUpload,
    Enrol,
    Heartbeat,
    Leave,
    OpenSession,
    RelayReport,
    RevokeKey,
    Submit,
)
from shoal.wire.record import Record
from shoal.wire.request import Signer

Prepare = Callable[[Coordinator, Signer, str], Expected | None]

_VERSION = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One signed request, past the door: who asks is `tx.actor`."""

    coordinator: Coordinator
    tx: Transaction
    body: bytes
    path: Mapping[str, str]

    @property
    def lease_id(self) -> str:
        lease_id = self.path["lease_id"]
        if not lifecycle.LEASE_ID.fullmatch(lease_id):
            raise Rejected("request.not_found", f"{lease_id[:80]!r} is not a lease id")
        return lease_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRoute:
    method: str
    path: str
    callers: frozenset[Caller]
    handle: Callable[[Call], Record | Response]
    takes: type[Record] | None = None
    """What its body is; None: it has none."""
    gives: type[Record] | None = None
    """What its answer is; None: bytes."""
    max_body: int = SMALL_BODY
    prepare: "Prepare | None" = None
    """What takes time and needs no transaction, done before one begins; what it found is then noted in one of its own."""
    needs: Callable[[str, str], Needs] | None = None
    """What it will ask of the tables, by the key that asks and the lease its path names."""
    beats: bool = False
    """Those of a turn with which all is well are done together (door.py); `handle` has the others."""


def parse_version(text: str) -> int:
    if not _VERSION.fullmatch(text):
        raise Rejected("request.not_found", f"{text[:80]!r} is not a policy version")
    return int(text)


def handle_enrol(call: Call) -> Record:
    return nodes.enrol(call.tx, call.coordinator, Enrol.parse(call.body))


def handle_session(call: Call) -> Record:
    return nodes.open_session(call.tx, call.coordinator, OpenSession.parse(call.body))


def handle_heartbeat(call: Call) -> Record:
    return nodes.heartbeat(call.tx, call.coordinator, Heartbeat.parse(call.body))


def handle_ticket(call: Call) -> Record:
    return relays.issue_ticket(call.tx, call.coordinator)


def handle_ask_lease(call: Call) -> Record:
    return issue.ask_lease(call.tx, call.coordinator, AskLease.parse(call.body))


def handle_ask_upload(call: Call) -> Record:
    return uploads.ask_upload(call.tx, call.coordinator, call.lease_id, AskUpload.parse(call.body))


def handle_submit(call: Call) -> Record:
    return submissions.submit(call.tx, call.coordinator, call.lease_id, Submit.parse(call.body))


def look_in_store(coordinator: Coordinator, signer: Signer, lease_id: str) -> Expected | None:
    """Where uploads go to a store elsewhere, a submission is when we ask it whether they came."""
    if isinstance(coordinator.store, LocalStore):
        return None
    return uploads.arrived(coordinator, signer.key, lease_id)


def handle_abandon(call: Call) -> Record:
    return lifecycle.abandon(call.tx, call.coordinator, call.lease_id, Abandon.parse(call.body))


def handle_lease_status(call: Call) -> Record:
    return lifecycle.status(lifecycle.own_lease(call.tx, call.lease_id))


def handle_appeal(call: Call) -> Record:
    return revocation.appeal(call.tx, call.lease_id, Appeal.parse(call.body))


def handle_leave(call: Call) -> Record:
    return nodes.leave(call.tx, call.coordinator, Leave.parse(call.body))


def handle_revoke_key(call: Call) -> Record:
    return admin_actions.revoke_key(call.tx, call.coordinator, RevokeKey.parse(call.body))


def handle_order(call: Call) -> Record:
    return admin_actions.give_order(
        call.tx, call.coordinator, call.path["action"], AdminOrder.parse(call.body)
    )


def handle_claim(call: Call) -> Record:
    return verdicts.claim(call.tx, call.coordinator)


def handle_look_again(call: Call) -> Record:
    return verdicts.look_again(call.tx, call.coordinator, call.lease_id)


def handle_verdict(call: Call) -> Record:
    return verdicts.give_verdict(call.tx, call.coordinator, call.lease_id, Verdict.parse(call.body))


def handle_get_object(call: Call) -> Response:
    """A submission, or a file of the task: read here, or where the answer sends the reader."""
    coordinator, sha256 = call.coordinator, check_digest(call.path["name"])
    path = coordinator.data / sha256
    if isinstance(coordinator.store, LocalStore):
        stored = coordinator.store.path(sha256)
        path = stored if stored.exists() else path
    elif (submitted := uploads.find_submitted(call.tx.db, sha256)) is not None:
        return RedirectResponse(coordinator.store.read_url(submitted), status_code=307)
    if not path.exists():
        raise Rejected("request.not_found", f"no object {sha256}")
    return FileResponse(path, media_type="application/octet-stream")


def handle_announce(call: Call) -> Record:
    return versions.announce(call.tx, call.coordinator, Announce.parse(call.body))


def handle_relay_report(call: Call) -> Record:
    return relays.report(call.tx, call.coordinator, RelayReport.parse(call.body))


def handle_get_batch(call: Call) -> Record:
    """A batch once formed is the same for ever. A new one is formed for the newest version, and, when that has its batch, for
    the one after it: a trainer takes its next step while the version it made last is still on its way out."""
    tx, coordinator, version = call.tx, call.coordinator, parse_version(call.path["version"])
    batch = batches.find_batch(tx.db, version)
    if batch is not None:
        return batch
    newest = newest_version(tx.db)
    if newest is not None and version < newest:
        raise Rejected("request.not_found", f"version {version} never had a batch; the newest is {newest}")
    coming = newest is not None and version == newest + 1 and batches.is_formed(tx.db, newest)
    if newest is None or (version > newest and not coming):
        raise Rejected("request.conflict", f"version {version} is not published; announce it first")
    if version >= coordinator.spec.last_version:
        raise Rejected("request.conflict", f"version {version} is the last: there is no step after it")
    batch = batches.form_batch(tx, coordinator, version)
    if batch is None:
        raise Rejected(
            "request.too_early",
            stats.waiting_sentence(tx.db, coordinator),
            retry_after_s=coordinator.config.retry_s,
        )
    return batch
