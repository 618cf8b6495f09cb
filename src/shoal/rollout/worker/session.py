"""A worker's session with the coordinator: every request that a worker makes.

Every answer that carries authority (a lease, a manifest, a receipt) counts only under the run key that was pinned at
the first contact. Every wait has a deadline and names what it waits for.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import shoal
from shoal.net.http_client import FailureReceiver, Refused, SignedClient, Tickets, Unreachable
from shoal.net.waiting import DeadlinePassed, NotYet, wait_for
from shoal.rollout.worker.worker_folder import PinnedRun, WorkerFolder
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.lease import Lease, Receipt
from shoal.wire.manifest import Manifest
from shoal.wire.messages import (
    ABANDON_REASON,
    Abandon,
    AskLease,
    AskUpload,
    Enrol,
    Enrolled,
    Heartbeat,
    HeartbeatReply,
    Info,
    LeaseStatus,
    Leave,
    OpenSession,
    Recorded,
    Session,
    Submit,
    Upload,
)
from shoal.wire.record import Record, Sealed
from shoal.wire.requirements import Capabilities
from shoal.wire.run_spec import PROTOCOL

R = TypeVar("R", bound=Record)

SOFTWARE = f"shoal {shoal.__version__}"
POLL_S = 0.1


class WorkerExit(Enum):
    """Why a worker ended."""

    FINISHED = "the run is finished"
    STOPPED = "stopped by request"
    EJECTED = "ejected from the run"
    REPLACED = "another process uses this node's key"
    LEFT = "left the run"


class LeftRun(Exception):
    """The session is over: the coordinator will not accept further requests, or the owner asked to leave."""

    def __init__(self, exit: WorkerExit, reason: str) -> None:
        super().__init__(f"{exit.value}: {reason}")
        self.exit = exit


class LeaseLost(Exception):
    """No submission will be made for this lease. If `still_open`, the coordinator must be told so."""

    def __init__(self, reason: str, *, still_open: bool) -> None:
        super().__init__(reason)
        self.still_open = still_open


_LEASE_OVER = (
    "request.lease_closed", "request.conflict", "request.not_yours", "request.not_found", "request.too_large"
)  # fmt: skip
"""Refusals after which a lease cannot be submitted any more."""


class ServerClock:
    """The coordinator's time: its last answer plus the time that has passed here since.

    This machine's own clock is not used. It may be set, or the machine may have slept, and a lease must not seem
    expired because of that.
    """

    def __init__(self, server_time_s: float) -> None:
        self.update(server_time_s)

    def update(self, server_time_s: float) -> None:
        self._ahead_s = server_time_s - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._ahead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """What the coordinator answered when this worker joined."""

    info: Info
    epoch: int
    heartbeat_s: float
    clock: ServerClock
    """Lease deadlines are in the coordinator's time."""


def join(
    client: SignedClient,
    folder: WorkerFolder,
    *,
    capabilities: Capabilities | None = None,
    deadline_s: float,
    log: Log,
) -> JoinedRun:
    """Checks that the coordinator serves the run that this folder belongs to, enrols and opens a session."""
    try:
        what = f"the coordinator at {client.url}"
        info = client.call_until(what, "GET", "/v1/info", None, Info, deadline_s=deadline_s)
    except DeadlinePassed as passed:
        raise DeadlinePassed(f"{passed}. Check the URL, and that the coordinator runs there") from None
    clock = ServerClock(info.server_time_s)
    if info.protocol != PROTOCOL:
        raise ValueError(
            f"{client.url} speaks protocol {info.protocol} ({info.software}), this is {SOFTWARE} with protocol {PROTOCOL}; "
            "install the version that the run uses"
        )
    folder.pin(PinnedRun(run=info.spec.run, run_key=info.run_key), client.url)
    enrol = Enrol(protocol=PROTOCOL, software=SOFTWARE, **folder.credentials(info, log))
    with _raise_left_run():
        enrolled = client.call_until("enrolment", "POST", "/v1/enrol", enrol, Enrolled, deadline_s=deadline_s)
        ask = OpenSession(software=SOFTWARE, capabilities=capabilities)
        opened = client.call_until("a session", "POST", "/v1/session", ask, Session, deadline_s=deadline_s)
    log.info(
        f"joined run {info.spec.run!r}", node=enrolled.node[:16], trust=enrolled.trust, session=opened.epoch
    )
    return JoinedRun(info=info, epoch=opened.epoch, heartbeat_s=opened.heartbeat_s, clock=clock)


@contextmanager
def _raise_left_run() -> Iterator[None]:
    """Raises LeftRun for a refusal that ends the session. Other refusals are raised as they are."""
    try:
        yield
    except Refused as refused:
        if refused.code == "request.banned":
            raise LeftRun(WorkerExit.EJECTED, refused.problem.detail) from None
        if refused.code == "request.stale_epoch":
            reason = f"{refused.problem.detail}; {refused.problem.fix}"
            raise LeftRun(WorkerExit.REPLACED, reason) from None
        raise


class CoordinatorSession:
    """The requests of a joined worker. They raise LeftRun when the session is over, LeaseLost when a lease is.

    Setting `stop` ends every wait with Stopped.
    """

    def __init__(self, client: SignedClient, joined: JoinedRun, *, deadline_s: float, log: Log) -> None:
        self.joined = joined
        self._client, self._deadline_s, self._log = client, deadline_s, log
        self.tickets = Tickets(client, log=log)
        self.stop = client.stop

    def close(self) -> None:
        self._client.close()

    # -- leases --------------------------------------------------------------------------------------------

    def time_left_s(self, lease: Lease) -> float:
        return lease.deadline_s - self.joined.clock.now_s()

    def ask_lease(
        self, heard: FailureReceiver = lambda failure: None, *, holds: Iterable[str] | None = None
    ) -> Lease:
        """Returns a lease of this node: one that a crash interrupted and that is still open, otherwise a new one.

        With `holds`, the ids of the leases that this worker has, an open one that is not among them is returned first. Calls
        `heard` with every answer that there is none yet.
        """
        ask = AskLease(epoch=self.joined.epoch, holds=None if holds is None else tuple(holds))
        with _raise_left_run():
            sealed = self._client.call_until(
                "a lease", "POST", "/v1/leases", ask, Sealed[Lease], deadline_s=self._deadline_s, heard=heard
            )
        lease = sealed.open(self.joined.info.run_key)
        expected = (self.joined.info.spec.run, self._client.key.public)
        if (lease.run, lease.node) != expected:
            raise ValueError(
                f"the coordinator gave a lease of run {lease.run!r} for node {lease.node[:16]}, expected {expected}"
            )
        return lease

    def deliver(self, lease: Lease, data: bytes, *, policy_version: int) -> Receipt:
        """Uploads and submits `data` and returns the checked receipt. All attempts together end at the lease's deadline.

        Every step can be repeated safely.
        """
        if len(data) > lease.max_bytes:
            raise LeaseLost(
                f"the file has {len(data)} bytes, the lease allows {lease.max_bytes}", still_open=True
            )
        end_s = time.monotonic() + self.time_left_s(lease)
        sha256 = hashlib.sha256(data).hexdigest()
        fields = {"epoch": self.joined.epoch, "num_bytes": len(data), "sha256": sha256}
        self._upload(lease, AskUpload.model_validate(fields), data, end_s)
        submit = Submit.model_validate(fields | {"policy_version": policy_version})
        sealed = self._call_for_lease("a receipt", lease, "/submit", submit, Sealed[Receipt], end_s)
        receipt = sealed.open(self.joined.info.run_key)
        if (receipt.lease_id, receipt.sha256) != (lease.lease_id, sha256):
            raise LeaseLost(
                f"the receipt is for {receipt.sha256} on lease {receipt.lease_id}, not for what was sent",
                still_open=False,
            )
        return receipt

    def abandon(self, lease: Lease, reason: str) -> None:
        """Gives a lease back so that another node can work on it. Makes one attempt: the lease expires anyway."""
        body = Abandon(epoch=self.joined.epoch, reason=reason[:ABANDON_REASON])
        try:
            self._client.call("POST", f"/v1/leases/{lease.lease_id}/abandon", body, LeaseStatus)
        except (Unreachable, Refused) as error:
            self._log.warning("could not give the lease back; it expires by itself", reason=error)

    def ask_status(self, lease_id: str) -> LeaseStatus | None:
        """Returns the state of a lease, or None if the coordinator does not answer. Makes one attempt."""
        try:
            return self._client.call("GET", f"/v1/leases/{lease_id}", None, LeaseStatus)
        except (Unreachable, Refused):
            return None

    # -- versions ------------------------------------------------------------------------------------------

    def ask_newest_version(self) -> int | None:
        """Returns the newest published version, or None before the first. Makes one attempt."""
        info = self._client.call("GET", "/v1/info", None, Info)
        self.joined.clock.update(info.server_time_s)
        return info.newest_version

    def ask_manifest(self, version: int, *, deadline_s: float) -> Sealed[Manifest]:
        """Returns a version's manifest; raises Rejected unless the run key signed it for this run and version."""
        sealed = self._client.call_until(
            f"the manifest of version {version}",
            "GET",
            f"/v1/policies/{version}",
            None,
            Sealed[Manifest],
            deadline_s=deadline_s,
        )
        manifest = sealed.open(self.joined.info.run_key)
        if (manifest.run, manifest.version) != (self.joined.info.spec.run, version):
            raise Rejected(
                "request.conflict",
                f"asked for version {version}, got {manifest.version} of run {manifest.run!r}",
            )
        return sealed

    # -- the session itself --------------------------------------------------------------------------------

    def heartbeat(self, phase: str, policy_version: int | None, tokens_per_s: float) -> HeartbeatReply:
        """Sends one heartbeat. Makes one attempt."""
        beat = Heartbeat(
            epoch=self.joined.epoch,
            phase=phase[:300],
            policy_version=policy_version,
            tokens_per_s=tokens_per_s,
        )
        with _raise_left_run():
            return self._client.call("POST", "/v1/heartbeat", beat, HeartbeatReply)

    def leave(self) -> None:
        """Tells the coordinator to give this node no more leases until it joins again."""
        ask = Leave(epoch=self.joined.epoch)
        with _raise_left_run():
            self._client.call_until(
                "to leave", "POST", "/v1/leave", ask, Recorded, deadline_s=self._deadline_s
            )

    def _upload(self, lease: Lease, ask: AskUpload, data: bytes, end_s: float) -> None:
        """Uploads until `end_s`. Each attempt asks for the URL again: an interrupted upload may need a new one."""

        def attempt() -> None:
            upload = self._call_for_lease("an upload URL", lease, "/upload", ask, Upload, end_s)
            try:
                self._client.put_upload(upload, data)
            except Unreachable as error:
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code in _LEASE_OVER:
                    raise
                # The upload was interrupted, or there are too many at once.
                raise NotYet(str(refused), refused.problem.retry_after_s) from None

        with _raise_lease_lost():
            wait_for("the upload", attempt, deadline_s=_left_s(end_s), log=self._log, stop=self._client.stop)

    def _call_for_lease(
        self, what: str, lease: Lease, action: str, body: Record, reply: type[R], end_s: float
    ) -> R:
        path = f"/v1/leases/{lease.lease_id}{action}"
        with _raise_lease_lost(), _raise_left_run():
            return self._client.call_until(what, "POST", path, body, reply, deadline_s=_left_s(end_s))


def _left_s(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())


@contextmanager
def _raise_lease_lost() -> Iterator[None]:
    """Raises LeaseLost for a wait that reached the lease's deadline, and for a refusal after which it cannot be submitted."""
    try:
        yield
    except DeadlinePassed as passed:
        raise LeaseLost(str(passed), still_open=True) from None
    except Refused as refused:
        if refused.code not in _LEASE_OVER:
            raise
        # A conflict may leave the lease open: its version is stale, and the node's next lease has the same seed and newer ones.
        still_open = refused.code in ("request.too_large", "request.conflict")
        raise LeaseLost(str(refused), still_open=still_open) from None
