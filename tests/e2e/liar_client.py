"""A client made of the worker's parts that lets a test send anything at any point."""

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.model.tokenizer import Tokenizer
from shoal.net.http_client import Refused, SignedClient
from shoal.rollout.engine.api import Behaviour, Engine, make_requests, make_table
from shoal.rollout.engine.torch_engine import TorchEngine
from shoal.rollout.worker.session import CoordinatorSession, LeaseLost, join
from shoal.rollout.worker.version_cache import VersionCache
from shoal.rollout.worker.worker_folder import WorkerFolder
from shoal.telemetry import Log
from shoal.wire.lease import Lease, Receipt
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import AskLease, AskUpload, LeaseStatus, Submit, Upload
from shoal.wire.record import Sealed
from shoal.wire.rollouts import FORMAT, SCHEMA, Rollout, RolloutTable, encode

WAIT_S = 90.0
"""A limit that only a hang reaches."""
TRIES = 8
ANY_LEASE = "f" * 32
ENDLESS = 64 << 20
"""A stream that is not cut after this many bytes counts as endless. Kernel buffers hold some of them."""


class Made(NamedTuple):
    """A file and the version that it claims."""

    data: bytes
    version: int


class Liar:
    """A node that is enrolled, has a session and can do honest work. The test decides what it sends."""

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        address: str | None = None,
        invite: str = "",
        behaviour: Behaviour | None = None,
    ) -> None:
        """Enrols a node. `address` is the loopback address that it comes from; by default that of everybody else."""
        folder.mkdir(parents=True)
        if invite:
            (folder / "invite.txt").write_text(invite)
        log = Log("liar")
        worker_folder = WorkerFolder(folder)
        transport = httpx2.HTTPTransport(verify=False, local_address=address)
        self.client = SignedClient(
            url, worker_folder.key, log=log, stop=threading.Event(), transport=transport
        )
        self.node = worker_folder.key.public
        self._since_seq = self._ledger_seq()
        joined = join(self.client, worker_folder, deadline_s=WAIT_S, log=log)
        self.epoch, self.authority = joined.epoch, url.removeprefix("http://")
        self.session = CoordinatorSession(self.client, joined, deadline_s=WAIT_S, log=log)
        self._versions = VersionCache(worker_folder, self.session, log=log)
        self._behaviour = behaviour or Behaviour()
        self._engine: Engine = self._behaviour.engine(
            TorchEngine(
                compute_dtype=self._behaviour.compute_dtype(joined.info.spec.compute_dtype),
                proof=joined.info.spec.proof,
                max_rows=64,
            )
        )

    # -- as a worker of this behaviour would, by default an honest one ----------------------------------------

    def work(self, lease: Lease) -> RolloutTable:
        self._versions.ensure(lease, stop=self.client.stop, wait_for_newest=True)
        policy = self._versions.choose(lease)
        self._versions.load(policy, self._engine)
        self._engine.submit(make_requests(lease, self._engine.tokenizer))
        finished = []
        while self._engine.has_work:
            finished += self._engine.step()
        return self._behaviour.table(make_table(lease, policy.version, finished), lease)

    def made(self, lease: Lease) -> Made:
        """Returns the file of `work`."""
        table = self.work(lease)
        return Made(encode(table), table.policy_version)

    def tokenizer(self, lease: Lease) -> Tokenizer:
        """Returns the tokenizer of a leased version, for files that are made without its model."""
        self._versions.ensure(lease, stop=self.client.stop, wait_for_newest=True)
        self._versions.load(self._versions.choose(lease), self._engine)
        return self._engine.tokenizer

    def ask_lease_once(self) -> Lease:
        """Returns a lease, or raises Refused where a worker would wait."""
        ask = AskLease(epoch=self.epoch)
        return self.client.call("POST", "/v1/leases", ask, Sealed[Lease]).body

    def deliver(self, make: Callable[[Lease], Made]) -> LeaseStatus:
        """Takes a lease, makes a file, uploads and submits it, and returns the verdict. Tries again if the work became stale."""
        for _ in range(TRIES):
            lease = self.session.ask_lease()
            try:
                made = make(lease)
            except LeaseLost as lost:  # on a busy machine its versions may be gone before they were fetched
                self.session.abandon(lease, str(lost))
                continue
            self.session.deliver(lease, made.data, policy_version=made.version)
            status = self.verdict_on(lease)
            if status.code != "void.stale":
                break
        return status

    def verdict_on(self, lease: Lease) -> LeaseStatus:
        """Waits for the verdict on a submission and returns it."""
        give_up_s = time.monotonic() + WAIT_S
        while time.monotonic() < give_up_s:
            status = self.session.ask_status(lease.lease_id)
            if status is not None and status.code is not None:
                return status
            time.sleep(0.1)
        raise AssertionError(f"no verdict on lease {lease.lease_id} within {WAIT_S:.0f} s")

    # -- one request at a time --------------------------------------------------------------------------------

    def ask_upload(self, lease_id: str, num_bytes: int, sha256: str) -> Upload:
        ask = AskUpload(epoch=self.epoch, num_bytes=num_bytes, sha256=sha256)
        return self.client.call("POST", f"/v1/leases/{lease_id}/upload", ask, Upload)

    def submit(self, lease_id: str, data: bytes, version: int) -> Sealed[Receipt]:
        ask = Submit(epoch=self.epoch, num_bytes=len(data), sha256=sha256_of(data), policy_version=version)
        return self.client.call("POST", f"/v1/leases/{lease_id}/submit", ask, Sealed[Receipt])

    # -- public state ---------------------------------------------------------------------------------

    def events_since_it_enrolled(self) -> list[LedgerEvent]:
        events: list[LedgerEvent] = []
        seq = self._since_seq
        while page := httpx2.get(f"{self.client.url}/v1/ledger?from_seq={seq}", timeout=WAIT_S).json():
            events += [LedgerEvent.model_validate(event) for event in page]
            seq = events[-1].seq + 1
        return events

    def _ledger_seq(self) -> int:
        return int(httpx2.get(f"{self.client.url}/healthz", timeout=WAIT_S).json()["ledger_seq"])

    def close(self) -> None:
        self.client.close()


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    """Makes a call that must be refused and returns the code."""
    try:
        answer = call(*arguments)
    except Refused as refused:
        return refused.code
    raise AssertionError(f"not refused, but answered {answer!r}")


# -- files that no worker of ours would write ------------------------------------------------------------------


def write_parquet(
    columns: dict[str, Any],
    *,
    lease_id: str,
    version: int,
    compression: str = "zstd",
    dictionary: bool = False,
) -> bytes:
    """Returns the columns unchanged and in their order, with a footer that names the lease."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, SCHEMA, compression=compression, use_dictionary=dictionary, store_schema=False
    ) as writer:
        writer.write_table(pa.Table.from_pydict(columns, schema=SCHEMA))
        writer.add_key_value_metadata(
            {
                "shoal.format": FORMAT,
                "shoal.lease_id": lease_id,
                "shoal.policy_version": str(version),
                "nonce": secrets.token_hex(
                    8
                ),  # makes each file unique: a copy would be refused for being a copy
            }
        )
    return bytes(sink.getvalue())


def columns_of(rows: tuple[Rollout, ...]) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}


def bomb(count: int, *, dictionary: bool) -> bytes:
    """One row whose answer is `count` zeros: a few kilobytes at most, hundreds of megabytes once decoded.

    It takes seconds to make, so it is made before the lease; `aimed` makes it one for the lease.
    """
    zeros = pa.ListArray.from_arrays(
        pa.array([0, count], pa.int32()), pa.repeat(pa.scalar(0, pa.int32()), count)
    )
    columns: dict[str, Any] = {
        "prompt_index": [0],
        "sample_index": [0],
        "prompt_tokens": [[1]],
        "output_tokens": zeros.cast(SCHEMA.field("output_tokens").type),
        "logprobs": [[-1.0]],
        "finish": [0],
        "proof": [b""],
    }
    return write_parquet(columns, lease_id=ANY_LEASE, version=0, dictionary=dictionary)


def aimed(data: bytes, lease: Lease) -> Made:
    """Writes the lease's id into the footer, which is plain text without a checksum."""
    return Made(data.replace(ANY_LEASE.encode(), lease.lease_id.encode()), lease.policies[-1].version)


# -- bytes on a socket ------------------------------------------------------------------------------------------


def stream_forever(authority: str, head: str, chunk: bytes) -> tuple[str, int]:
    """Sends a request whose body does not end. Returns the status line and how many bytes were sent before the cut."""
    host, port = authority.rsplit(":", 1)
    sent = 0
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        raw.sendall(head.encode())
        try:
            while sent < ENDLESS:
                raw.sendall(chunk)
                sent += len(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return _first_line(raw), sent


def _first_line(raw: socket.socket) -> str:
    try:
        return raw.recv(4096).split(b"\r\n", 1)[0].decode("latin-1")
    except ConnectionResetError:
        return ""  # the connection was cut before the answer could be read
