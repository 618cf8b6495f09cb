"""A worker's session with the coordinator: all that is said between the two, except heartbeats.

Every answer that carries authority (a lease, a manifest, a receipt) counts only under the run key that was pinned at
the first contact. Every wait is bounded and says what it waits for.
"""

import hashlib
import time
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import shoal
from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.net.ticket_client import Tickets
from shoal.net.waiting import DeadlinePassed, NotYet, wait_for
from shoal.rollout.worker.worker_folder import PinnedRun, State
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, Receipt
from shoal.wire.manifest import Manifest
from shoal.wire.messages import (
    Abandon,
    AskLease,
    AskUpload,
    Enrol,
    Enrolled,
    Info,
    LeaseStatus,
    Leave,
    OpenSession,
    Recorded,
    Submit,
    Upload,
)
from shoal.wire.messages import Session as SessionTerms
from shoal.wire.record import Record, Sealed
from shoal.wire.requirements import Capabilities
from shoal.wire.run_spec import PROTOCOL

R = TypeVar("R", bound=Record)

SOFTWARE = f"shoal {shoal.__version__}"


class Exit(Enum):
    """Why a worker ended, in words."""

    FINISHED = "the run is finished"
    STOPPED = "stopped by request"
    EJECTED = "ejected from the run"
    REPLACED = "another process uses this node's key"
    LEFT = "left the run"


class Left(Exception):
    """The coordinator has no further use for this session."""

    def __init__(self, exit: Exit, reason: str) -> None:
        super().__init__(f"{exit.value}: {reason}")
        self.exit = exit


class LeaseLost(Exception):
    """This lease will not be delivered on. `still_open`: the coordinator does not know yet, so give it back."""

    def __init__(self, reason: str, *, still_open: bool) -> None:
        super().__init__(reason)
        self.still_open = still_open


def leaving(refused: Refused) -> Left | None:
    """The refusals after which there is nothing left to ask for."""
    if refused.code == "request.banned":
        return Left(Exit.EJECTED, refused.problem.detail)
    if refused.code == "request.stale_epoch":
        return Left(Exit.REPLACED, f"{refused.problem.detail}; {refused.problem.fix}")
    return None


_LEASE_OVER = (
    "request.lease_closed",
    "request.conflict",
    "request.not_yours",
    "request.not_found",
    "request.too_large",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the coordinator told us when we joined."""

    info: Info
    epoch: int
    heartbeat_s: float
    clock: "ServerClock"
    """Deadlines are the server's."""


class ServerClock:
    """The coordinator's time by its last word, and what has gone by here since. Not by this machine's clock, which may be set, and
    may have slept: a lease must not seem over because of that."""

    def __init__(self, server_time_s: float) -> None:
        self.heard(server_time_s)

    def heard(self, server_time_s: float) -> None:
        self._ahead_s = server_time_s - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._ahead_s


def join(
    client: SignedClient, state: State, *, brings: Capabilities | None = None, deadline_s: float, log: Log
) -> Terms:
    """Meet the coordinator, check that it is the run we know, enrol and open a session."""
    try:
        what = f"the coordinator at {client.url}"
        info = client.call_until(what, "GET", "/v1/info", None, Info, deadline_s=deadline_s)
    except DeadlinePassed as passed:
        raise DeadlinePassed(f"{passed}. Check the URL, and that the coordinator runs there") from None
    clock = ServerClock(info.server_time_s)
    if info.protocol != PROTOCOL:
        raise ValueError(
            f"{client.url} speaks protocol {info.protocol} ({info.software}), this is {SOFTWARE} with protocol {PROTOCOL}; "
            "install the version the run uses"
        )
    state.pin(PinnedRun(run=info.spec.run, run_key=info.run_key), client.url)
    enrol = Enrol(protocol=PROTOCOL, software=SOFTWARE, **state.credentials(info, log))
    try:
        enrolled = client.call_until("enrolment", "POST", "/v1/enrol", enrol, Enrolled, deadline_s=deadline_s)
        told = brings if "capabilities" in info.features else None
        ask = OpenSession(software=SOFTWARE, capabilities=told)
        opened = client.call_until(
            "a session", "POST", "/v1/session", ask, SessionTerms, deadline_s=deadline_s
        )
    except Refused as refused:
        raise leaving(refused) or refused from None
    log.info(
        f"joined run {info.spec.run!r}", node=enrolled.node[:16], trust=enrolled.trust, session=opened.epoch
    )
    return Terms(info=info, epoch=opened.epoch, heartbeat_s=opened.heartbeat_s, clock=clock)


class Session:
    """What a joined worker asks of the coordinator. Raises Left when the session is over, LeaseLost for a lease."""

    def __init__(self, client: SignedClient, terms: Terms, *, deadline_s: float, log: Log) -> None:
        self.terms = terms
        self._client, self._deadline_s, self._log = client, deadline_s, log
        self.tickets = Tickets(client, log=log)
        self.stop = client.stop

    def close(self) -> None:
        self._client.close()

    def time_left_s(self, lease: Lease) -> float:
        return lease.deadline_s - self.terms.clock.now_s()

    def ask_lease(self) -> Lease:
        """A lease of ours: the one a crash interrupted, if the coordinator still holds it open, else a new one."""
        ask = AskLease(epoch=self.terms.epoch)
        sealed = self._until("a lease", "POST", "/v1/leases", ask, Sealed[Lease], deadline_s=self._deadline_s)
        lease = sealed.open(self.terms.info.run_key)
        expected = (self.terms.info.spec.run, self._client.key.public)
        if (lease.run, lease.node) != expected:
            raise ValueError(
                f"the coordinator gave a lease of run {lease.run!r} for node {lease.node[:16]}, expected {expected}"
            )
        return lease

    def ask_newest_version(self) -> int | None:
        """One attempt."""
        info = self._client.call("GET", "/v1/info", None, Info)
        self.terms.clock.heard(info.server_time_s)
        return info.newest_version

    def ask_manifest(self, version: int) -> Sealed[Manifest]:
        """One attempt. Rejected if the run key did not sign it for this run and version."""
        path = f"/v1/policies/{version}"
        sealed = self._client.call("GET", path, None, Sealed[Manifest])
        manifest = sealed.open(self.terms.info.run_key)
        if (manifest.run, manifest.version) != (self.terms.info.spec.run, version):
            raise Rejected(
                "request.conflict",
                f"asked for version {version}, got {manifest.version} of run {manifest.run!r}",
            )
        return sealed

    def deliver(self, lease: Lease, data: bytes, *, policy_version: int) -> Receipt:
        """Upload and submit; safe to repeat at every point. The receipt is checked."""
        if len(data) > lease.max_bytes:
            raise LeaseLost(
                f"the file has {len(data)} bytes, the lease allows {lease.max_bytes}", still_open=True
            )
        sha256 = hashlib.sha256(data).hexdigest()
        left_s = self.time_left_s(lease)
        what = {"epoch": self.terms.epoch, "num_bytes": len(data), "sha256": sha256}
        self._upload(lease, AskUpload.model_validate(what), data, deadline_s=left_s)
        submit = Submit.model_validate(what | {"policy_version": policy_version})
        sealed = self._on_lease("a receipt", lease, "/submit", submit, Sealed[Receipt], deadline_s=left_s)
        receipt = sealed.open(self.terms.info.run_key)
        if (receipt.lease_id, receipt.sha256) != (lease.lease_id, sha256):
            raise LeaseLost(
                f"the receipt is for {receipt.sha256} on lease {receipt.lease_id}, not for what was sent",
                still_open=False,
            )
        return receipt

    def abandon(self, lease: Lease, reason: str) -> None:
        """Give a lease back so that another node can have its work. One attempt: it runs out by itself anyway."""
        body = Abandon(epoch=self.terms.epoch, reason=reason[:300])
        try:
            self._client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", body, LeaseStatus)
        except (Unreachable, Refused) as error:
            self._log.warning("could not give the lease back; it runs out by itself", reason=error)

    def leave(self) -> None:
        """No more leases for this node, until it joins again."""
        ask = Leave(epoch=self.terms.epoch)
        self._until("to leave", "POST", "/v1/leave", ask, Recorded, deadline_s=self._deadline_s)

    def ask_status(self, lease_id: str) -> LeaseStatus | None:
        """What became of a lease; None if the coordinator does not say right now."""
        try:
            return self._client.call("GET", f"/v1/leases/{lease_id}", None, LeaseStatus)
        except (Unreachable, Refused):
            return None

    def _upload(self, lease: Lease, ask: AskUpload, data: bytes, *, deadline_s: float) -> None:
        """Asking for the place is part of each attempt: an upload that was cut off may need a new one."""

        def attempt() -> None:
            upload = self._on_lease("a place to upload", lease, "/upload", ask, Upload, deadline_s=deadline_s)
            try:
                self._client.put_upload(upload, data)
            except Unreachable as error:
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code in _LEASE_OVER:
                    raise self._lost(refused) from None
                raise NotYet(str(refused), refused.problem.retry_after_s) from None  # broke off, or too many

        try:
            wait_for("the upload", attempt, deadline_s=deadline_s, log=self._log, stop=self._client.stop)
        except DeadlinePassed as passed:
            raise LeaseLost(str(passed), still_open=True) from None

    def _on_lease(
        self, what: str, lease: Lease, action: str, body: Record, reply: type[R], *, deadline_s: float
    ) -> R:
        try:
            return self._until(
                what, "POST", f"/v1/leases/{lease.lease_id}{action}", body, reply, deadline_s=deadline_s
            )
        except Refused as refused:
            raise self._lost(refused) from None
        except DeadlinePassed as passed:
            raise LeaseLost(str(passed), still_open=True) from None

    def _until(
        self, what: str, method: str, path: str, body: Record | None, reply: type[R], *, deadline_s: float
    ) -> R:
        try:
            return self._client.call_until(what, method, path, body, reply, deadline_s=deadline_s)
        except Refused as refused:
            raise leaving(refused) or refused from None

    def _lost(self, refused: Refused) -> Exception:
        if refused.code in _LEASE_OVER:
            return LeaseLost(str(refused), still_open=refused.code == "request.too_large")
        return refused
