"""What every request works with: the coordinator (configuration, keys, database, object store, clock) and the transaction."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from sqlalchemy import Connection, Delete, Insert, Row, Update, exists, func, insert, select, update

from shoal.net.object_store import LocalStore, ObjectStore
from shoal.net.s3_store import Credentials, S3Address, S3Store
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.rules.backpressure import Backpressure
from shoal.swarm.coordinator.store import ledger_chain
from shoal.swarm.coordinator.store.database import Database, WriteGroup
from shoal.swarm.coordinator.store.ledger_chain import NewEvent, log_event
from shoal.swarm.coordinator.store.schema import SCHEMA_VERSION, batches, calibrations, ledger, policies, run
from shoal.swarm.coordinator.store.statements import Statement, TableStatements
from shoal.tasks import Finite, Task, make_task
from shoal.tasks.datasets.file_options import with_files_from
from shoal.tasks.registry import keep_task_files
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key, Role
from shoal.wire.proof_noise import LaterNoise
from shoal.wire.run_spec import PROTOCOL, EvalSpec, RunSpec, TaskSpec

DATABASE_FILE = "shoal.db"

_NEWEST = Statement(select(func.max(policies.c.version)))
_FINISHED = Statement(select(run.c.finished_version))


class Transaction:
    """One request or one round of housekeeping: all of its changes are committed, or none. Ledger events are part of them.

    Read from `db`. Write with `insert`, `update` and `write` only: they note that the request has written, and a request that is
    refused after that is undone.
    """

    def __init__(self, group: WriteGroup, now_s: float, actor: str) -> None:
        self.db, self.now_s, self.actor = group.db, now_s, actor
        self.events: list[NewEvent] = []
        self.node: Row[Any] | None = None
        """The calling node's row as it was when the transaction began; None for a role and for housekeeping."""
        self.network = ""
        """Network prefix that the request came from; empty if it is not known, for a role and for housekeeping."""
        self._group = group

    def insert(self, table: TableStatements, **values: Any) -> None:
        """Inserts a row with these values; all other columns are NULL."""
        self._group.has_written = True
        table.insert(self.db, values)

    def update(self, table: TableStatements, key: Any, **values: Any) -> None:
        """Sets these columns of the row with this key."""
        self._group.has_written = True
        table.update(self.db, key, values)

    def write(self, statement: Insert | Update | Delete) -> None:
        self._group.has_written = True
        self.db.execute(statement)

    def write_many(self, statement: Statement, rows: list[dict[str, Any]]) -> None:
        self._group.has_written = True
        statement.run_many(self.db, rows)

    def record(self, type: str, **body: Any) -> int:
        """Appends a ledger event and returns its number."""
        if self.events:
            last = self.events[-1].event
            head = (last.seq, last.hash)
        else:
            if self._group.ledger_head is None:
                self._group.ledger_head = ledger_chain.read_head(self.db)
            head = self._group.ledger_head
        self.events.append(ledger_chain.next_event(head, type, self.actor, body, self.now_s))
        return self.events[-1].event.seq

    def after_commit(self, act: Callable[[], None]) -> None:
        """Calls `act` when the group is on disk, even if this request is refused; not if the group is redone or lost."""
        self._group.after_commit.append(act)

    def caller(self) -> Row[Any]:
        """Returns the row of the node that sent the request."""
        assert self.node is not None, "the route admits only enrolled nodes"
        return self.node

    def check_session(self, epoch: int) -> None:
        """Raises Rejected unless `epoch` is the newest session of the calling node."""
        newest = self.caller().session_epoch
        if epoch != newest:
            raise Rejected(
                "request.stale_epoch",
                f"session {epoch} of node {self.actor[:16]}, but its newest is {newest}",
            )

    def flush(self) -> None:
        """Writes the ledger events of the request."""
        if self.events:
            ledger_chain.append(self.db, self.events)
            last = self.events[-1].event
            self._group.ledger_head = (last.seq, last.hash)


STALLED_S = 30.0
"""A loop that did not run for this long has stopped. Housekeeping runs once a second; without it no lease or claim expires."""


@dataclass
class Health:
    """Records when the background loops of the coordinator last ran, and whether its disk is full."""

    loops: dict[str, float] = field(default_factory=dict)
    """Time of the last round of each loop, by the monotonic clock."""
    no_space: str = ""
    """The folder that is full and what to do, while it is full (disk_full.py)."""
    tell_again_s: float = 0.0
    """Time when the full disk may be logged again."""

    def beat(self, loop: str) -> None:
        """Notes that a loop has finished a round."""
        self.loops[loop] = time.monotonic()

    def stalled(self) -> list[str]:
        """Returns the problems as sentences: a full disk, and loops that have stopped."""
        now_s = time.monotonic()
        stopped = [
            f"{name} has not run for {now_s - at_s:.0f} s"
            for name, at_s in self.loops.items()
            if now_s - at_s > STALLED_S
        ]
        return [self.no_space, *stopped] if self.no_space else stopped


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A task that leases pose problems of: its public spec, and the task itself."""

    spec: TaskSpec
    task: Task


@dataclass(frozen=True, kw_only=True)
class Coordinator:
    """A run with everything its requests need: configuration, keys, database, object store and clock."""

    config: CoordinatorConfig
    spec: RunSpec
    trained: tuple[LeasedTask, ...]
    """The tasks that are trained on, in the order of `spec.tasks`."""
    evaluated: tuple[tuple[EvalSpec, LeasedTask], ...]
    """The held-out evaluations."""
    run_key: Key
    roles: Mapping[str, Role]
    """Public key to the role it holds."""
    database: Database
    store: ObjectStore
    data: Path
    """The task's files, named by their SHA-256 digests: for validators and the trainer."""
    clock: Callable[[], float]
    log: Log
    health: Health = field(default_factory=Health)
    backpressure: Backpressure = field(default_factory=Backpressure)

    @contextmanager
    def transaction(
        self, actor: str | None = None, *, group: WriteGroup | None = None
    ) -> Iterator[Transaction]:
        """Opens a transaction by `actor`, or by the run key. It is part of `group`, or else committed alone."""
        with contextlib.ExitStack() as stack:
            if group is None:
                group = stack.enter_context(self.database.group())
            else:
                stack.enter_context(group.request())
            transaction = Transaction(group, self.clock(), actor or self.run_key.public)
            yield transaction
            transaction.flush()
            for new in transaction.events:
                transaction.after_commit(partial(log_event, self.log, new.event))

    @property
    def folder(self) -> Path:
        return self.data.parent

    def num_problems(self, title: str) -> int:
        """Returns the number of training problems of a task with difficulty sampling."""
        task = next(one.task for one in self.trained if one.spec.title == title)
        assert isinstance(task, Finite), "difficulty sampling of other tasks is refused"
        return task.size("train")

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
    settings: Mapping[str, Any] | None = None,
) -> Coordinator:
    """Opens the coordinator of `dir`, and creates it there first if it is new. Raises ValueError for the folder of another run.

    With `config.database` the tables are in PostgreSQL. Several coordinators may share them, with the same keys and objects;
    then `dir` is a folder that all of them see. With `config.store` uploads go to an object store; without `credentials`, boto3
    looks for them. `settings` are further settings of the run file; the ledger records them, and every change of them.
    """
    dir.mkdir(parents=True, exist_ok=True)
    keys, data = dir / "keys", dir / "data"
    spec = spec.with_tasks(partial(keep_task_files, folder=data, reports=dir))
    roles = {Key.load_or_create(keys / f"{role}.key").public: role for role in get_args(Role)}
    run_key = Key.load_or_create(keys / "run.key")
    store: ObjectStore = LocalStore(dir / "objects")
    if config.store:
        store = _open_s3(config.store, credentials, folder=f"{spec.run}-{run_key.public[:16]}", log=log)
    coordinator = Coordinator(
        config=config,
        spec=spec,
        trained=tuple(_leased_task(one, data) for one in spec.tasks),
        evaluated=tuple((one, _leased_task(one.task, data)) for one in config.evaluations(spec)),
        run_key=run_key,
        roles=roles,
        database=Database(config.database or dir / DATABASE_FILE),
        store=store,
        data=data,
        clock=clock,
        log=log,
    )
    _open_run(coordinator, dir, settings)
    return coordinator


def _leased_task(spec: TaskSpec, data: Path) -> LeasedTask:
    task = make_task(with_files_from(spec, data))
    if spec.difficulty and not isinstance(task, Finite):
        raise ValueError(
            f"task {spec.title!r}: difficulty = true needs a task with a known number of problems, such as a data set; this one "
            "generates its problems: remove the key"
        )
    return LeasedTask(spec, task)


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


def _open_run(coordinator: Coordinator, dir: Path, settings: Mapping[str, Any] | None) -> None:
    spec, key = coordinator.spec, coordinator.run_key.public
    with coordinator.transaction() as tx:
        found = tx.db.execute(select(run)).one_or_none()
        if found is not None:
            _check_same_run(found, newest_version(tx.db), spec, key, dir)
        text, terms = spec.model_dump_json(), json.dumps(coordinator.config.terms())
        same_settings = settings is None or _recorded_settings(tx.db) == settings
        if found is not None and (found.spec, found.terms) == (text, terms) and same_settings:
            return
        if found is None:
            row = {
                "name": spec.run,
                "run_key": key,
                "schema_version": SCHEMA_VERSION,
                "spec": text,
                "paused": 0,
            }
            tx.write(insert(run).values(**row, terms=terms))
        else:
            tx.write(update(run).values(spec=text, terms=terms))
        # A replay of the ledger needs the terms and every change of them.
        tx.record(
            "run.opened",
            run=spec.run,
            run_key=key,
            protocol=PROTOCOL,
            spec=spec.model_dump(mode="json"),
            terms=coordinator.config.terms(),
            **({} if settings is None else {"settings": dict(settings)}),
        )


def _recorded_settings(db: Connection) -> dict[str, Any] | None:
    """Returns the settings in the newest `run.opened`; None if it has none."""
    query = select(ledger.c.body).where(ledger.c.type == "run.opened").order_by(ledger.c.seq.desc()).limit(1)
    body = db.execute(query).scalar_one_or_none()
    return None if body is None else json.loads(body).get("settings")


def _check_same_run(found: Any, newest: int | None, spec: RunSpec, key: str, dir: Path) -> None:
    if found.name != spec.run:
        raise ValueError(f"{dir} holds run {found.name!r}, not {spec.run!r}; choose another folder")
    if found.run_key != key:
        raise ValueError(
            f"{dir} holds a run of key {found.run_key[:16]}, but keys/run.key is {key[:16]}; put the run's own key back"
        )
    if newest is not None and newest > spec.last_version:
        raise ValueError(
            f"{dir} has published version {newest}, past last_version={spec.last_version}; raise last_version"
        )


def spec_now(db: Connection, spec: RunSpec) -> RunSpec:
    """Returns the run's terms with the calibrations that were repeated."""
    found = [LaterNoise.parse(body) for body in db.execute(select(calibrations.c.body)).scalars()]
    later = tuple(sorted(found, key=lambda one: (one.from_version, one.measured_version)))
    return spec.model_copy(update={"later_noise": later}) if later else spec


class RunState(NamedTuple):
    """The state of the whole run, read in one statement."""

    newest_version: int | None
    """None before version 0 is published."""
    finished_version: int | None
    """The last version of a run that is over; None before that."""
    paused: bool
    batch_formed: bool
    """Whether the trainer has its batch of the newest version."""
    next_formed: bool
    """Whether it also has the batch of the version after it."""


_NEWEST_VERSION = select(func.max(policies.c.version)).scalar_subquery()
_RUN_STATE = Statement(
    select(
        _NEWEST_VERSION.label("newest_version"),
        run.c.finished_version,
        run.c.paused,
        exists().where(batches.c.version == _NEWEST_VERSION).label("batch_formed"),
        exists().where(batches.c.version == _NEWEST_VERSION + 1).label("next_formed"),
    )
)


def run_state(db: Connection) -> RunState:
    row = _RUN_STATE.row(db)
    assert row is not None, "an open run has its row"
    return RunState(
        newest_version=row.newest_version,
        finished_version=row.finished_version,
        paused=bool(row.paused),
        batch_formed=bool(row.batch_formed),
        next_formed=bool(row.next_formed),
    )


def newest_version(db: Connection) -> int | None:
    """Returns the newest published version; None before version 0 is published."""
    version: int | None = _NEWEST.value(db)
    return version


def is_finished(db: Connection, spec: RunSpec) -> bool:
    """Returns whether the run is over. A finished run that is resumed with a higher last version is not."""
    return bool(_FINISHED.value(db) == spec.last_version)
