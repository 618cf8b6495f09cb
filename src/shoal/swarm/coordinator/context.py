"""The coordinator as a value: terms, keys, database, store and clock. And the transaction, the unit of all it does."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sqlalchemy import Connection, Row, func, insert, select, update

from shoal.net.object_store import LocalStore, ObjectStore
from shoal.net.s3_store import Credentials, S3Address, S3Store
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.event_log import tell
from shoal.swarm.coordinator.leases.pending_upload import Expected
from shoal.swarm.coordinator.rules.backpressure import Turnstile
from shoal.swarm.coordinator.store.database import Database
from shoal.swarm.coordinator.store.ledger_chain import LedgerWriter
from shoal.swarm.coordinator.store.recent import Recent
from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, policies, run
from shoal.swarm.coordinator.store.statements import Statement
from shoal.swarm.coordinator.store.turn import Turn
from shoal.swarm.coordinator.views.health import Vitals
from shoal.tasks import Task, make_task
from shoal.tasks.datasets.file_options import keep_files, with_files_from
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.ledger import LedgerEvent
from shoal.wire.messages import Role
from shoal.wire.run_spec import PROTOCOL, RunSpec

DATABASE_FILE = "shoal.db"

_NEWEST = Statement(select(func.max(policies.c.version)))
_FINISHED = Statement(select(run.c.finished_version))
_PAUSED = Statement(select(run.c.paused))


class Transaction:
    """What one request or one round of housekeeping does, all or nothing, with the ledger events that tell of it."""

    def __init__(self, turn: Turn, now_s: float, actor: str) -> None:
        self.turn, self.db, self.now_s, self.actor = turn, turn.db, now_s, actor
        self.ledger = LedgerWriter(turn, now_s)
        self.node: Row[Any] | None = None
        """The node that asks, as it was when the transaction began; None for a role and for housekeeping."""

    def is_finished(self, spec: RunSpec) -> bool:
        return self.turn.recall(finished_version) == spec.last_version

    def record(self, type: str, **body: Any) -> int:
        """Append a ledger event; its number."""
        return self.ledger.append(type, self.actor, body)


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    config: CoordinatorConfig
    spec: RunSpec
    task: Task
    run_key: Key
    roles: Mapping[str, Role]
    """Public key to the role it holds."""
    database: Database
    store: ObjectStore
    data: Path
    """The task's files, under their SHA-256 digests: for validators and the trainer."""
    clock: Callable[[], float]
    log: Log
    vitals: Vitals = field(default_factory=Vitals)
    turnstile: Turnstile = field(default_factory=Turnstile)
    expected: "Recent[Expected]" = field(default_factory=Recent)
    """Uploads that this process gave a name to, by that name."""

    @contextmanager
    def transaction(self, actor: str | None = None, *, undo: bool = True) -> Iterator[Transaction]:
        """`actor` is whose doing it is; the run key's by default. `undo` is the database's."""
        with self.database.transaction(undo=undo):
            turn = self.database.turn()
            assert turn is not None, "a transaction is a turn, or part of one"
            transaction = Transaction(turn, self.clock(), actor or self.run_key.public)
            yield transaction
            transaction.ledger.flush()
        events = transaction.ledger.events
        if events:
            self.database.when_committed(lambda: self._tell(events))

    def _tell(self, events: list[LedgerEvent]) -> None:
        """Only now is it true."""
        for event in events:
            tell(self.log, event)

    def close(self) -> None:
        self.database.close()
        self.store.close()


def open_coordinator(
    config: CoordinatorConfig,
    spec: RunSpec,
    dir: Path,
    *,
    log: Log,
    clock: Callable[[], float] = time.time,
    credentials: Credentials | None = None,
) -> Coordinator:
    """The coordinator that lives in `dir`, made there first if need be. Refuses the folder of another run.

    With `config.database` the tables are in PostgreSQL. Several coordinators may share one, with the same keys and objects:
    then `dir` is a folder they all see. With `config.store` uploads go to an object store; without `credentials`, boto3 looks for them.
    """
    dir.mkdir(parents=True, exist_ok=True)
    keys, data = dir / "keys", dir / "data"
    spec = spec.model_copy(update={"task": keep_files(spec.task, data)})
    roles = {Key.load_or_create(keys / f"{role}.key").public: role for role in get_args(Role)}
    run_key = Key.load_or_create(keys / "run.key")
    store: ObjectStore = LocalStore(dir / "objects")
    if config.store:
        store = _open_s3(config.store, credentials, folder=f"{spec.run}-{run_key.public[:16]}", log=log)
    coordinator = Coordinator(
        config=config,
        spec=spec,
        task=make_task(with_files_from(spec.task, data)),
        run_key=run_key,
        roles=roles,
        database=Database(config.database or dir / DATABASE_FILE),
        store=store,
        data=data,
        clock=clock,
        log=log,
    )
    _open_run(coordinator, dir)
    return coordinator


def _open_s3(url: str, credentials: Credentials | None, *, folder: str, log: Log) -> S3Store:
    address = S3Address.parse(url)
    store = S3Store(address, credentials, folder=folder)
    try:
        weaknesses = store.check()
    except ValueError:
        store.close()
        raise
    for weakness in weaknesses:
        log.warning(f"the object store {weakness}")
    return store


def _open_run(coordinator: Coordinator, dir: Path) -> None:
    spec, key = coordinator.spec, coordinator.run_key.public
    with coordinator.transaction() as tx:
        found = tx.db.execute(select(run)).one_or_none()
        if found is not None:
            _check_same_run(found, spec, key, dir)
            _check_last_version(newest_version(tx.db), spec, dir)
        text, terms = spec.model_dump_json(), json.dumps(coordinator.config.terms())
        if found is not None and (found.spec, found.terms) == (text, terms):
            return
        if found is None:
            row = {
                "name": spec.run,
                "run_key": key,
                "schema_version": SCHEMA_VERSION,
                "spec": text,
                "paused": 0,
            }
            tx.db.execute(insert(run).values(**row, terms=terms))
        else:
            tx.db.execute(update(run).values(spec=text, terms=terms))
        # The terms stand in the ledger, and so does every change of them.
        tx.record(
            "run.opened",
            run=spec.run,
            run_key=key,
            protocol=PROTOCOL,
            spec=spec.model_dump(mode="json"),
            terms=coordinator.config.terms(),
        )


def _check_same_run(found: Any, spec: RunSpec, key: str, dir: Path) -> None:
    if found.name != spec.run:
        raise ValueError(f"{dir} holds run {found.name!r}, not {spec.run!r}; choose another folder")
    if found.run_key != key:
        raise ValueError(
            f"{dir} holds a run of key {found.run_key[:16]}, but keys/run.key is {key[:16]}; put the run's own key back"
        )
    if found.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"{dir} has a database of layout {found.schema_version}, this software reads {SCHEMA_VERSION}; "
            "finish the run with the version that began it"
        )


def _check_last_version(newest: int | None, spec: RunSpec, dir: Path) -> None:
    if newest is not None and newest > spec.last_version:
        raise ValueError(
            f"{dir} has published version {newest}, past last_version={spec.last_version}; raise last_version"
        )


def newest_version(db: Connection) -> int | None:
    """The clock; None before version 0 is published."""
    version: int | None = _NEWEST.value(db)
    return version


def finished_version(db: Connection) -> int | None:
    """The last version of a run that was over; None before that."""
    version: int | None = _FINISHED.value(db)
    return version


def is_finished(db: Connection, spec: RunSpec) -> bool:
    return finished_version(db) == spec.last_version


def is_paused(db: Connection) -> bool:
    return bool(_PAUSED.value(db))


def finish(tx: Transaction, version: int) -> None:
    tx.db.execute(update(run).values(finished_version=version))
    tx.record("run.finished", version=version)
