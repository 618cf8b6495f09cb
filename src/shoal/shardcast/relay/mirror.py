"""The relay's loops: follow upstreams, and download their versions shard by shard.

    one thread per upstream   ask for a newer manifest -> check signature, run and order -> add the version to the store
    one thread for downloads  newest incomplete version -> download -> complete -> next

A version that was begun is finished before a newer one, as long as shards keep coming: otherwise a publisher that is faster
than the link would keep every version incomplete. Versions that were missed are skipped first and downloaded later, newest
first, as far back as the store keeps them and their deltas need them.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

from shoal.files import DiskFull
from shoal.net.waiting import DeadlinePassed, NotYet, Stopped, wait_for
from shoal.shardcast.assembly import Assembly
from shoal.shardcast.client.download import Download
from shoal.shardcast.client.http_source import Connections, NotOnRelay, RelayFailed, ask_latest, ask_manifest
from shoal.shardcast.client.relay_choice import RelayChoice, TicketSource
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

POLL_S, MIN_POLL_S = 10.0, 0.5
"""How long an upstream may hold a request for a newer version, and the least time between two requests."""
STALL_S = 15.0
"""Time without progress after which another incomplete version gets its turn. A shard that grows is progress."""
PAUSE_S = 1.0
LOG_DISK_FULL_S = 30.0
WARN_AFTER_S = 60.0

UpstreamUrl = Callable[[], str]
"""Returns the URL to follow now, or raises NotYet: an origin may restart at another address."""


class Mirror:
    """Copies versions from upstreams into a store. `on_complete` is called with each version that became complete."""

    def __init__(
        self,
        store: VersionStore,
        upstreams: Sequence[UpstreamUrl],
        *,
        log: Log,
        stop: threading.Event,
        on_complete: Callable[[int], None] = lambda version: None,
        ticket: TicketSource | None = None,
    ) -> None:
        self._store, self._upstreams = store, upstreams
        self._log, self._stop = log, stop
        self._on_complete = on_complete
        self._choice = RelayChoice(ticket=ticket)
        self._urls = [""] * len(upstreams)
        """Last URL of each upstream. Not a dictionary: one that grows in a thread must not be iterated in another."""
        self._rejected: set[int] = set()
        self._log_disk_full_at_s = 0.0
        self._threads = [threading.Thread(target=self._download_loop, name="downloads", daemon=True)]
        self._threads += [
            threading.Thread(target=self._follow_loop, args=(index,), name=f"upstream-{index}", daemon=True)
            for index in range(len(upstreams))
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raises RuntimeError if a thread ended although `stop` is not set."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead and not self._stop.is_set():
            raise RuntimeError(
                f"the mirror's {', '.join(dead)} thread stopped unexpectedly; the log above says why"
            )

    def close(self, timeout_s: float = 0.5) -> None:
        """Waits for the threads, after `stop` was set. One that waits for an answer may run until its timeout."""
        self._store.close()
        end_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    # -- learning about versions ------------------------------------------------------------------------

    def _follow_loop(self, index: int) -> None:
        with Connections(self._choice.ticket) as connections:
            while not self._stop.is_set():
                try:
                    wait_for(
                        "an answer from upstream",
                        lambda: self._poll(connections, index),
                        deadline_s=WARN_AFTER_S,
                        log=self._log,
                        stop=self._stop,
                    )
                except DeadlinePassed as passed:
                    self._log.warning(f"{passed}; still trying")
                except Stopped:
                    return

    def _poll(self, connections: Connections, index: int) -> None:
        """Asks one upstream for a newer version. Raises NotYet if it does not answer; "nothing new" is an answer."""
        url = self._upstreams[index]().rstrip("/")
        self._urls[index] = url
        newest = self._store.newest
        after = -1 if newest is None else newest
        asked_s = time.monotonic()
        try:
            self._add_missing_bases(connections, url)
            sealed = ask_latest(connections, url, after=after, wait_s=POLL_S)
            if sealed is None or self._stop.is_set():
                # A server that is shutting down, or does not know long polls, answers at once: limit the rate.
                self._stop.wait(max(0.0, MIN_POLL_S - (time.monotonic() - asked_s)))
                return
            if sealed.body.version <= after:
                raise Rejected(
                    "request.conflict",
                    f"upstream offered version {sealed.body.version} as newer than {after}; ignored",
                )
            self._store.begin(sealed)
            self._log.info("new version", version=sealed.body.version, upstream=url)
            self._add_missed_versions(connections, url, sealed.body.version)
        except (NotOnRelay, RelayFailed, Rejected, OSError) as reason:
            if isinstance(reason, DiskFull):
                self._log_disk_full(reason)
            raise NotYet(f"{url}: {reason}") from None

    def _add_missed_versions(self, connections: Connections, url: str, newest: int) -> None:
        oldest = max(0, newest - self._store.keep_versions + 1)
        for version in range(newest - 1, oldest - 1, -1):
            if self._store.get(version) is None:
                self._add_version(connections, url, version)
        self._add_missing_bases(connections, url)

    def _add_missing_bases(self, connections: Connections, url: str) -> None:
        """Adds the versions that deltas build on, however old: without them a client cannot use the deltas."""
        asked: set[int] = set()
        while missing := set(self._store.missing_bases()) - asked:
            version = max(missing)
            asked.add(version)
            self._add_version(connections, url, version)

    def _add_version(self, connections: Connections, url: str, version: int) -> None:
        try:
            sealed = ask_manifest(connections, url, version)
        except NotOnRelay:
            return
        self._store.begin(sealed)

    # -- downloading them -------------------------------------------------------------------------------

    def _download_loop(self) -> None:
        progressing: int | None = None  # continue with this version
        stuck: int | None = None  # try another version first
        while not self._stop.is_set():
            version = self._next_version(progressing, stuck)
            if version is None:
                self._store.changed.wait(lambda: self._next_version(None, None) is not None, 0.5)
                continue
            progressing, stuck = (version, None) if self._attempt(version) else (None, version)

    def _next_version(self, progressing: int | None, stuck: int | None) -> int | None:
        wanted = [version for version in self._store.incomplete() if version not in self._rejected]
        if progressing in wanted:
            return progressing
        others = [version for version in wanted if version != stuck]
        return max(others or wanted, default=None)

    def _attempt(self, version: int) -> bool:
        """Downloads one version until it is complete or stalls; returns whether shards arrived."""
        try:
            with self._store.writing(version) as assembly:
                return self._download(version, assembly)
        except KeyError:  # the store has just deleted the version because it is too old
            return False
        except DiskFull as reason:
            self._log_disk_full(reason)
        except OSError as error:
            self._log.warning(f"version {version}: {error}; will retry")
        self._stop.wait(PAUSE_S)
        return False

    def _log_disk_full(self, reason: DiskFull) -> None:
        """Logs the first time, and then every LOG_DISK_FULL_S."""
        if (now_s := time.monotonic()) >= self._log_disk_full_at_s:
            self._log_disk_full_at_s = now_s + LOG_DISK_FULL_S
            self._log.error(f"cannot store new versions: {reason}")

    def _download(self, version: int, assembly: Assembly) -> bool:
        started_s, num_missing = time.monotonic(), len(assembly.missing())
        self._choice.update(filter(None, self._urls))
        problem = ""
        try:
            assembly.reuse_files([self._store.path(other) for other in reversed(self._store.complete())])
            Download(assembly, self._choice, log=self._log, stop=self._stop).run(math.inf, stall_s=STALL_S)
        except Stopped:
            return False
        except Rejected as rejected:
            self._rejected.add(version)
            self._log.error(f"version {version} cannot be stored and is skipped: {rejected}")
            return False
        except DeadlinePassed as passed:
            problem = str(passed)
        if assembly.complete:
            took_s = round(time.monotonic() - started_s, 2)
            self._log.info("complete", version=version, num_bytes=assembly.num_bytes, last_s=took_s)
            self._on_complete(version)
            return True
        progressed = len(assembly.missing()) < num_missing
        if not progressed:
            self._log.warning(f"no progress: {problem}")
            self._refresh_manifest(version)
            self._stop.wait(PAUSE_S)
        return progressed

    def _refresh_manifest(self, version: int) -> None:
        """Asks for the manifest again: a publisher that lost its old versions sends the same version in another form."""
        with Connections(self._choice.ticket) as connections:
            for url in self._choice.urls:
                try:
                    self._add_version(connections, url, version)
                except (RelayFailed, Rejected, OSError) as reason:
                    self._log.warning(
                        f"cannot refresh the manifest of version {version} from {url}: {reason}"
                    )
