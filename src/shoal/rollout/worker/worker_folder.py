"""What a worker keeps in its folder between starts.

node.key     who it is
run.json     which run it works for: the name and key the coordinator showed the first time
lock         held while a worker runs here
versions/    policy versions it has fetched
delegation.json, invite.txt
             what its owner put there: an owner's word for the key, an invitation
entry_points.json
             other addresses of the coordinator, as it told them
last/        the last file it made, and the lease it answers: for `shoal check-local`
paused, leaving
             what its owner asked for by `shoal pause` and `shoal leave`
work.json    the proof of work it found for a run that asks for one
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.delegation import read_delegation, solve_work
from shoal.wire.keys import Key
from shoal.wire.lease import Lease
from shoal.wire.messages import Info
from shoal.wire.record import Record

MAX_WORK_BITS = 32


class PinnedRun(Record):
    run: str
    run_key: str


class State:
    """The folder of one worker. Made by `open_state`, which holds its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = Key.load_or_create(folder / "node.key")
        self.versions = folder / "versions"
        self.versions.mkdir(exist_ok=True)
        self._run_file = folder / "run.json"

    def entry_points(self) -> list[str]:
        """Other addresses of the coordinator, as it told them when we last joined."""
        known = _read(self.folder / "entry_points.json")
        return [url for url in known if isinstance(url, str)] if isinstance(known, list) else []

    def remember_entry_points(self, urls: tuple[str, ...]) -> None:
        _write(self.folder / "entry_points.json", json.dumps(urls))

    def paused(self) -> bool:
        return (self.folder / "paused").exists()

    def leaving(self) -> bool:
        return (self.folder / "leaving").exists()

    def has_left(self) -> None:
        (self.folder / "leaving").unlink(missing_ok=True)

    def keep(self, lease: Lease, policy_version: int, data: bytes) -> None:
        """The last file, before it is sent."""
        folder = self.folder / "last"
        folder.mkdir(exist_ok=True)
        (folder / "rollouts.parquet").write_bytes(data)
        told = {"policy_version": policy_version, "lease": lease.model_dump(mode="json")}
        _write(folder / "lease.json", json.dumps(told))  # another thread may be reading

    def kept_versions(self) -> set[int]:
        """The version that made the last file; none before the first."""
        told = _read(self.folder / "last" / "lease.json")
        version = told.get("policy_version") if isinstance(told, dict) else None
        return {version} if isinstance(version, int) else set()

    def credentials(self, info: Info, log: Log) -> dict[str, Any]:
        """What Enrol says beside protocol and software: whatever the folder holds, and work where the run asks for it."""
        found: dict[str, Any] = {}
        if (path := self.folder / "delegation.json").exists():
            found["delegation"] = read_delegation(path)
        if (path := self.folder / "invite.txt").exists():
            found["invite"] = path.read_text(encoding="utf-8").strip()[:100]
        if info.admission == "work":
            found["work"] = self._work(info, log)
        return found

    def _work(self, info: Info, log: Log) -> str:
        path = self.folder / "work.json"
        kept = _read(path)
        if isinstance(kept, dict) and kept.get("run_key") == info.run_key and "nonce" in kept:
            return str(kept["nonce"])
        if info.work_bits > MAX_WORK_BITS:
            raise ValueError(
                f"the run asks for {info.work_bits} bits of work; more than {MAX_WORK_BITS} would take days"
            )
        log.info("the run asks newcomers for a proof of work; finding one", bits=info.work_bits)
        nonce = solve_work(info.run_key, self.key.public, info.work_bits)
        _write(path, json.dumps({"run_key": info.run_key, "nonce": nonce}))
        return nonce

    def pin(self, shown: PinnedRun, url: str) -> None:
        """Remember the run on first contact; afterwards refuse any other.

        Leases and manifests count by the run key, so whoever could swap it could hand this machine anything.
        """
        if not self._run_file.exists():
            _write(self._run_file, shown.model_dump_json() + "\n")
            return
        try:
            pinned = PinnedRun.parse(self._run_file.read_bytes())
        except Rejected as rejected:
            raise ValueError(
                f"{self._run_file} cannot be read: {rejected.detail}; delete it to join anew"
            ) from None
        if shown != pinned:
            raise ValueError(
                f"{url} shows run {shown.run!r} with key {shown.run_key[:16]}, but this folder works for run "
                f"{pinned.run!r} with key {pinned.run_key[:16]}. Either somebody else answers there, or the run was begun "
                f"anew: if you trust it, choose another --dir or delete {self._run_file}"
            )


def _read(path: Path) -> Any:
    """What can be had again elsewhere: None where it is not there, or where a crash or a full disk cut it off."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def is_held(folder: Path) -> bool:
    """Whether a worker runs there."""
    path = folder / "lock"
    if not path.exists():
        return False
    with path.open("a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def open_state(folder: Path) -> Iterator[State]:
    """The folder, locked: two workers with one key would fence each other off without end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read(20).strip() or "unknown"
            raise ValueError(
                f"{folder} is in use by another worker (process {holder}); stop that one or choose another --dir"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield State(folder)
