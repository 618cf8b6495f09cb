"""Tries the relays in the background: fetches a signed manifest from each URL before leases name it, and again from time to time.

    report of a new URL -> not named -> trial succeeds -> named -> two trials in a row fail -> not named -> ...

A request never waits for a trial. A slow relay delays only its own trials.
"""

import json
import threading
from typing import Any

from sqlalchemy import Row, update
from sqlalchemy.exc import DBAPIError

from shoal.shardcast.client.http_source import Connections, NotOnRelay, RelayFailed, ask_manifest
from shoal.swarm.coordinator.context import Coordinator, newest_version
from shoal.swarm.coordinator.membership.relays import REPORTS, make_ticket
from shoal.swarm.coordinator.rules.node_status import Liveness, liveness
from shoal.swarm.coordinator.store.schema import relays
from shoal.wire.codes import Rejected
from shoal.wire.ticket import to_header

POLL_S = 0.5
TRY_EVERY_S = 30.0
"""Seconds between two trials of a relay that works."""
RETRY_S = 5.0
"""Seconds between two trials of a relay that failed."""
FAILURES = 2
"""Trials in a row that must fail before a relay is no longer named: one may fail because the relay is busy."""
MAX_AT_ONCE = 16


class RelayTrials:
    """Tries the relays of one run. `poll` starts the trials that are due, each in a thread of its own."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()  # guards both fields below
        self._running: set[str] = set()
        self._failures: dict[str, int] = {}

    def poll(self) -> list[threading.Thread]:
        """Starts the trials that are due and returns their threads."""
        now_s = self._coordinator.clock()
        with self._coordinator.database.read() as db:
            rows, newest = REPORTS.rows(db), newest_version(db)
        threads = []
        for row in rows:
            claimed = [
                version for version in json.loads(row.versions) if newest is not None and version <= newest
            ]
            if not claimed or not self._is_due(row, now_s):
                continue
            with self._lock:
                if row.url in self._running or len(self._running) >= MAX_AT_ONCE:
                    continue
                self._running.add(row.url)
            arguments = (row, max(claimed))
            thread = threading.Thread(target=self._try, args=arguments, name="relay-trial", daemon=True)
            thread.start()
            threads.append(thread)
        return threads

    def _is_due(self, row: Row[Any], now_s: float) -> bool:
        if liveness(row.last_seen_s, now_s, self._coordinator.config.heartbeat_s) is Liveness.OFFLINE:
            return False
        failed = bool(row.problem) or self._failures.get(row.url, 0) > 0
        return row.tried_at_s is None or now_s - row.tried_at_s >= (RETRY_S if failed else TRY_EVERY_S)

    def _try(self, row: Row[Any], version: int) -> None:
        try:
            self._note(row, self._problem(row.url, version))
        except (OSError, DBAPIError, self._coordinator.database.driver_error) as error:
            # A full disk, or a coordinator that stops: the next poll tries again.
            self._coordinator.log.warning(f"the trial of relay {row.url} was not recorded: {error}")
        finally:
            with self._lock:
                self._running.discard(row.url)

    def _problem(self, url: str, version: int) -> str:
        """Fetches the manifest of a version; returns what went wrong, or ""."""
        coordinator = self._coordinator
        ticket = make_ticket(coordinator, coordinator.run_key.public, coordinator.clock())
        try:
            with Connections(lambda: to_header(ticket)) as connections:
                manifest = ask_manifest(connections, url, version).open(coordinator.run_key.public)
        except (NotOnRelay, RelayFailed, Rejected) as error:
            return f"the coordinator cannot fetch version {version} from it: {error}"[:300]
        if manifest.run != coordinator.spec.run:
            return f"it serves run {manifest.run[:80]!r}"
        return ""

    def _note(self, row: Row[Any], problem: str) -> None:
        with self._lock:
            failures = self._failures[row.url] = self._failures.get(row.url, 0) + 1 if problem else 0
        named = not row.problem
        if named and problem and failures < FAILURES:
            problem = ""
        if bool(problem) == named:
            how = f"leases no longer name it: {problem}" if problem else "it works; leases may name it"
            self._coordinator.log.info(f"relay {row.url}: {how}")
        with self._coordinator.transaction() as tx:
            # Not for another key that took over the URL meanwhile: it is tried on its own.
            tried = (relays.c.url == row.url, relays.c.key == row.key)
            tx.write(update(relays).where(*tried).values(problem=problem, tried_at_s=tx.now_s))


def start_trials(coordinator: Coordinator, stop: threading.Event) -> None:
    """Tries the relays of a run in the background until `stop`, unless the run file says not to."""
    if not coordinator.config.try_relays:
        return
    trials = RelayTrials(coordinator)

    def loop() -> None:
        while not stop.wait(POLL_S):
            try:
                trials.poll()
            except (OSError, DBAPIError, coordinator.database.driver_error) as error:
                if not stop.is_set():
                    coordinator.log.warning(f"relays cannot be tried now, will retry: {error}")
            coordinator.health.beat("relay trials")

    coordinator.health.beat("relay trials")
    threading.Thread(target=loop, name="relay-trials", daemon=True).start()
