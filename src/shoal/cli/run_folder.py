"""Reads the folder of a run on this machine, such as `out/demo`: ledger, figures, submitted files and versions.

No coordinator has to run, one may run, and nothing is changed.
"""

import hashlib
import json
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from shoal.cli.ui.values import best_version, held_out_means
from shoal.shardcast.archive import VersionArchive
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import DATABASE_FILE, spec_now
from shoal.swarm.coordinator.leases.verdicts import stored_claim
from shoal.swarm.coordinator.store import schema
from shoal.swarm.coordinator.store.database import read_only
from shoal.swarm.coordinator.store.ledger_chain import read_page
from shoal.swarm.coordinator.views.stats import history, stats
from shoal.tasks.datasets.file_options import with_files_from
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.keys import Key
from shoal.wire.ledger import LedgerEvent
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Claim, Evaluation, History, Stats
from shoal.wire.run_spec import RunSpec

PAGE = 1000
BEST, NEWEST = "best", "newest"


def is_run_folder(path: Path) -> bool:
    """Returns whether a run's tables are in this folder or in its subfolder `coordinator`."""
    return any((place / DATABASE_FILE).exists() for place in (path, path / "coordinator")) or (
        (path / "run.toml").exists() and bool(config_of(path).database)
    )


def read_run_file(folder: Path) -> dict[str, Any]:
    """Returns the tables of a run folder's run file; none if it has no such file."""
    file = folder / "run.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def config_of(folder: Path) -> CoordinatorConfig:
    """Returns the section [coordinator] of the run's file. Other sections may name files of another machine."""
    return CoordinatorConfig.parse(json.dumps(read_run_file(folder).get("coordinator", {})))


def coordinator_folder(folder: Path) -> Path:
    """Returns the coordinator's folder of a run's folder, or the folder itself if it is the coordinator's."""
    return folder / "coordinator" if (folder / "coordinator").is_dir() else folder


def find_database(folder: Path) -> Path:
    for path in (folder / "coordinator" / DATABASE_FILE, folder / DATABASE_FILE):
        if path.exists():
            return path
    if not folder.exists():
        raise ValueError(
            f"no folder {folder}; give a run's folder, such as out/NAME, or a URL: http://HOST:PORT"
        )
    raise ValueError(
        f"{folder} holds no run: neither {DATABASE_FILE} nor coordinator/{DATABASE_FILE}; give a run's folder, such as out/NAME, or a URL"
    )


def named_version(
    name: str, where: object, read_evaluations: Callable[[], Iterable[Evaluation]]
) -> int | None:
    """Returns the version that `best` or a number names; None for `newest`. `where` is the run, for messages."""
    if name == NEWEST:
        return None
    if name == BEST:
        means = held_out_means(read_evaluations())
        if not means:
            raise ValueError(
                f"{where} has no complete held-out evaluation yet; name a version instead, or newest"
            )
        return best_version(means)
    if not name.isdecimal():
        raise ValueError(f"--version {name}: use a number, best or newest")
    return int(name)


@dataclass(frozen=True)
class FolderTerms:
    """The parts of a coordinator that the views need (views/stats.py), read from a run's folder."""

    config: CoordinatorConfig
    spec: RunSpec
    clock: Callable[[], float]
    folder: Path


class RunFolder(AbstractContextManager["RunFolder"]):
    """A run's folder, open for reading. Use it as a context manager."""

    def __init__(self, folder: Path, database: str = "") -> None:
        """`database` is the URL of the run's PostgreSQL, in the place of the one that the run file names."""
        self.folder = folder
        self.config = config_of(folder)
        self._coordinator = coordinator_folder(folder)
        self._stack = ExitStack()
        where = database or self.config.database or find_database(folder)
        self.db = self._stack.enter_context(read_only(where))
        # The layout first: in another layout the other columns may be missing.
        layout = self.db.execute(select(schema.run.c.schema_version)).scalar_one_or_none()
        if layout != schema.SCHEMA_VERSION:
            self._stack.close()
            raise ValueError(
                f"{folder} holds no run of layout {schema.SCHEMA_VERSION}; use the release of Shoal that ran it"
            )
        held = self.db.execute(schema.run.select()).one()
        self.spec = spec_now(self.db, RunSpec.parse(held.spec))
        self.run_key = str(held.run_key)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- the ledger and figures ---------------------------------------------------------------------------

    def events(self) -> Iterator[LedgerEvent]:
        """Yields all events of the ledger. Their hashes are not checked."""
        seq = 1
        while page := read_page(self.db, seq, PAGE):
            yield from page
            seq = page[-1].seq + 1

    def key(self) -> Key:
        """Returns the run's key. Raises CorruptData if it is not the one that the run began with."""
        path = self._coordinator / "keys" / "run.key"
        key = Key.load(path)
        if key.public != self.run_key:
            raise CorruptData(
                f"{path} has the public key {key.public[:16]}, the run's is {self.run_key[:16]}"
            )
        return key

    def stats(self) -> Stats:
        """Returns the figures that the run's coordinator would show now."""
        return stats(self.db, self._terms(time.time))

    def terms_at_end(self) -> FolderTerms:
        """Returns the terms of views that show the run as it was at its last event."""
        newest = select(func.coalesce(func.max(schema.ledger.c.time_s), 0.0))
        last_s = float(self.db.execute(newest).scalar_one())
        return self._terms(lambda: last_s)

    def _terms(self, clock: Callable[[], float]) -> FolderTerms:
        return FolderTerms(config=self.config, spec=self.spec, clock=clock, folder=self._coordinator)

    def history(self) -> History:
        """Returns every step and every held-out evaluation."""
        return history(self.db)

    @property
    def base_model(self) -> str:
        """Returns the run file's `model`; empty if the folder has no run file."""
        return str(read_run_file(self.folder).get("run", {}).get("model", ""))

    # -- submissions --------------------------------------------------------------------------------------

    def local_spec(self) -> RunSpec:
        """Returns the run's terms with a task that reads the coordinator's copies of its files.

        A Python file that the folder's run file names is not allowed by that: a stranger may have made the folder.
        """
        return self.spec.with_tasks(lambda task: with_files_from(task, self._coordinator / "data"))

    def claim(self, lease_id: str) -> Claim:
        """Returns a submission for an audit."""
        return stored_claim(self.db, lease_id)

    def read_object(self, sha256: str) -> bytes:
        """Returns a submitted file. Raises OSError if the folder has no such file, ValueError if its bytes have another digest."""
        path = self._coordinator / "objects" / sha256[:2] / sha256
        try:
            data = path.read_bytes()
        except OSError as error:
            raise OSError(
                f"{path}: {str(error.strerror).lower()}; copy the coordinator's objects/ into the run's folder"
            ) from None
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{path} has another digest than its name")
        return data

    # -- versions -----------------------------------------------------------------------------------------

    @property
    def archive(self) -> VersionArchive:
        """Returns the versions that the run's trainer keeps on this machine."""
        trainer = self.folder / "trainer"
        return VersionArchive(trainer / "archive", trainer / "versions")

    def find_version(self, name: str) -> int:
        """Returns the version that `best`, `newest` or a number names. Raises ValueError if it is not here."""
        named = named_version(name, self.folder, lambda: self.history().evaluations)
        versions = self.archive.versions()
        if not versions:
            raise ValueError(
                f"{self.folder / 'trainer'} has no version; did the run's trainer run elsewhere?"
            )
        return versions[-1] if named is None else named

    def restore(self, version: int, out: Path) -> Manifest:
        """Writes the files of a version to the folder `out`, verified with the run's key, and returns its manifest."""
        try:
            return self.archive.restore(version, out, run_key=self.run_key)
        except Rejected as rejected:
            raise CorruptData(rejected.detail) from None
