"""A worker's folder: what it keeps between starts.

node.key            the node's private key
node.json           the run that `shoal join` chose
run.json            name and key of the run, as the coordinator showed them at the first contact
lock                held while a worker runs here; contains its process id
versions/           policy versions that were fetched
entry_points.json   other addresses of the coordinator, as it named them
delegation.json     an owner's signature for the node's key; put here by the owner
invite.txt          an invitation; put here by the owner or by `shoal join --invite`
work.json           the proof of work found for a run that asks for one
last/               the last submitted file and its lease, for `shoal check-local`
paused, leaving     exist after `shoal pause` and `shoal leave`
status.json         what the worker does, for the view of `shoal join`
cache/, worker.log  caches of libraries, and the worker's log, if `shoal join` started it at a terminal
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.files import hold_lock, is_locked, write_bytes_atomically
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.delegation import read_delegation, solve_work
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.messages import Info
from shoal.wire.record import Record

MAX_WORK_BITS = 32
PAUSE_NOW = "now"
"""Contents of the file `paused` after `shoal pause --now`."""
STATUS_FILE, LOG_FILE = "status.json", "worker.log"
NODE_FILES = (
    "node.key", "node.json", "run.json", "lock", "versions", "entry_points.json", "delegation.json", "invite.txt",
    "work.json", "last", "paused", "leaving", STATUS_FILE, LOG_FILE, f"{LOG_FILE}.1", "cache",
)  # fmt: skip
"""Everything that a worker or `shoal join` writes into the folder; `shoal remove` deletes these."""


class PinnedRun(Record):
    """Contents of run.json."""

    run: str
    run_key: str


class WorkerFolder:
    """The folder of one worker. `open_worker_folder` makes it and holds its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = Key.load_or_create(folder / "node.key")
        self.versions = folder / "versions"
        self.versions.mkdir(exist_ok=True)
        self._run_file = folder / "run.json"

    def entry_points(self) -> list[str]:
        """Returns other addresses of the coordinator, as it named them when this worker last joined."""
        known = _read_json(self.folder / "entry_points.json")
        return [url for url in known if isinstance(url, str)] if isinstance(known, list) else []

    def store_entry_points(self, urls: tuple[str, ...]) -> None:
        _write_json(self.folder / "entry_points.json", urls)

    def is_paused(self) -> bool:
        """Returns whether the owner asked for a pause with `shoal pause`."""
        return (self.folder / "paused").exists()

    def must_pause_now(self) -> bool:
        """Returns whether the owner asked, with `shoal pause --now`, to give the current lease back."""
        try:
            return (self.folder / "paused").read_text(encoding="ascii") == PAUSE_NOW
        except (OSError, ValueError):
            return False

    def is_leaving(self) -> bool:
        """Returns whether the owner asked the worker to leave with `shoal leave`."""
        return (self.folder / "leaving").exists()

    def clear_leaving(self) -> None:
        (self.folder / "leaving").unlink(missing_ok=True)

    def store_status(self, status: dict[str, object]) -> None:
        with suppress(OSError):  # a full disk must not end the thread: the next status is written again
            _write_json(self.folder / STATUS_FILE, status)

    def store_last_submission(self, lease: Lease, policy_version: int, data: bytes) -> None:
        """Stores a file and its lease, before the file is sent."""
        folder = self.folder / "last"
        folder.mkdir(exist_ok=True)
        (folder / "rollouts.parquet").write_bytes(data)
        _write_json(
            folder / "lease.json", {"policy_version": policy_version, "lease": lease.model_dump(mode="json")}
        )

    def last_submission_versions(self) -> set[int]:
        """Returns the version that generated the last file; empty before the first."""
        stored = _read_json(self.folder / "last" / "lease.json")
        version = stored.get("policy_version") if isinstance(stored, dict) else None
        return {version} if isinstance(version, int) else set()

    def credentials(self, info: Info, log: Log) -> dict[str, Any]:
        """Returns the fields of Enrol that the folder has, and a proof of work if the run asks for one."""
        found: dict[str, Any] = {}
        if (path := self.folder / "delegation.json").exists():
            found["delegation"] = read_delegation(path)
        if (path := self.folder / "invite.txt").exists():
            found["invite"] = path.read_text(encoding="utf-8").strip()[:100]
        if info.admission == "work":
            found["work"] = self._proof_of_work(info, log)
        return found

    def _proof_of_work(self, info: Info, log: Log) -> str:
        path = self.folder / "work.json"
        stored = _read_json(path)
        if isinstance(stored, dict) and stored.get("run_key") == info.run_key and "nonce" in stored:
            return str(stored["nonce"])
        if info.work_bits > MAX_WORK_BITS:
            raise ValueError(
                f"the run asks for {info.work_bits} bits of work; more than {MAX_WORK_BITS} would take days"
            )
        log.info("the run asks new nodes for a proof of work; computing it", bits=info.work_bits)
        nonce = solve_work(info.run_key, self.key.public, info.work_bits)
        _write_json(path, {"run_key": info.run_key, "nonce": nonce})
        return nonce

    def pin(self, shown: PinnedRun, url: str) -> None:
        """Stores the run at the first contact; afterwards raises ValueError for any other run.

        Leases and manifests count by the run key: an attacker who could replace it could make this machine run anything.
        """
        if not self._run_file.exists():
            write_bytes_atomically(self._run_file, shown.model_dump_json().encode() + b"\n")
            return
        try:
            pinned = PinnedRun.parse(self._run_file.read_bytes())
        except Rejected as rejected:
            raise ValueError(
                f"{self._run_file} cannot be read: {rejected.detail}; delete it to join again"
            ) from None
        if shown != pinned:
            raise ValueError(
                f"{url} shows run {shown.run!r} with key {shown.run_key[:16]}, but this folder works for run "
                f"{pinned.run!r} with key {pinned.run_key[:16]}. Either another server answers there, or the run was started "
                f"again: if you trust it, choose another --dir or delete {self._run_file}"
            )


def _read_json(path: Path) -> Any:
    """Returns the contents of a file, or None if it is missing or cut off by a crash or a full disk.

    Only for contents that can be made again.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write_json(path: Path, value: Any) -> None:
    write_bytes_atomically(path, json.dumps(value).encode(), durable=False)


def is_in_use(folder: Path) -> bool:
    """Returns whether a worker runs in the folder."""
    return is_locked(folder / "lock")


@contextmanager
def open_worker_folder(folder: Path) -> Iterator[WorkerFolder]:
    """Opens the folder and holds its lock; raises AlreadyLocked if another worker has it.

    Two workers with one key would replace each other's session without end.
    """
    lock = folder / "lock"
    holder = lock.read_text(encoding="ascii").strip()[:20] if lock.exists() else ""
    message = f"{folder} is in use by another worker (process {holder or 'unknown'}); stop that one or choose another --dir"
    with hold_lock(lock, message=message):
        lock.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield WorkerFolder(folder)
