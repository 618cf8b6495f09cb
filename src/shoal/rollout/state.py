"""What a worker keeps in its folder between starts.

node.key     who it is
run.json     which run it works for: the name and key the coordinator showed the first time
lock         held while a worker runs here
versions/    policy versions it has fetched
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import Record


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

    def pin(self, shown: PinnedRun, url: str) -> None:
        """Remember the run on first contact; afterwards refuse any other.

        Leases and manifests count by the run key, so whoever could swap it could hand this machine anything.
        """
        if not self._run_file.exists():
            partial = self._run_file.with_suffix(".partial")
            partial.write_text(shown.model_dump_json() + "\n", encoding="utf-8")
            partial.replace(self._run_file)
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
