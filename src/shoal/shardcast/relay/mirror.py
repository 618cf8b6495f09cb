"""The relay's loop: follow upstreams, bring their versions here, shard by shard, for ever.

    per upstream   ask for anything newer -> check signature, run and order -> make it known here
    one filler     newest version that is not complete -> download -> complete -> next

A version that was begun is finished before a newer one is, as long as shards keep coming: a publisher faster than
the link would otherwise see nothing completed. Versions in between that were missed are skipped, then filled in,
newest first, as far back as the store keeps them and as those need them.
"""

import threading
import time
from collections.abc import Callable, Sequence

from shoal.net.waiting import DeadlinePassed, NotYet, Stopped, wait_for
from shoal.shardcast.assembly import Assembly, reuse_files
from shoal.shardcast.client.download import Download
from shoal.shardcast.client.http_source import Broken, Connections, NotThere, ask_latest, ask_manifest
from shoal.shardcast.client.relay_choice import RelayChoice, TicketSource
from shoal.shardcast.disk import NoRoom
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

POLL_S, SHORTEST_POLL_S = 10.0, 0.5
TRY_S = 15.0
PAUSE_S = 1.0
TELL_EVERY_S = 30.0
"""That there is no room."""
COMPLAIN_S = 60.0

Upstream = Callable[[], str]
"""Gives the URL to follow now, or raises NotYet: an origin may come back at another address."""


class Mirror:
    """`start` and `close` from any thread. `on_complete` is called with each version that became complete."""

    def __init__(
        self,
        store: VersionStore,
        upstreams: Sequence[Upstream],
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
        self._urls: dict[int, str] = {}
        self._refused: set[int] = set()
        self._tell_again_s = 0.0
        self._threads = [threading.Thread(target=self._fill_loop, name="filler", daemon=True)]
        for index in range(len(upstreams)):
            self._threads.append(
                threading.Thread(
                    target=self._follow_loop, args=(index,), name=f"upstream-{index}", daemon=True
                )
            )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise if a loop has ended although nobody asked it to."""
        dead = [thread.name for thread in self._threads if not thread.is_alive()]
        if dead and not self._stop.is_set():
            raise RuntimeError(f"the mirror's {', '.join(dead)} ended by itself; the log above says why")

    def close(self, timeout_s: float = 0.5) -> None:
        """After `stop` is set. A thread that waits for an answer may outlive this by its timeout; it changes nothing."""
        self._store.close()
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))

    # -- learning of versions ---------------------------------------------------------------------------

    def _follow_loop(self, index: int) -> None:
        with Connections(self._choice.ticket) as connections:
            while not self._stop.is_set():
                try:
                    wait_for(
                        "word from upstream",
                        lambda: self._poll(connections, index),
                        deadline_s=COMPLAIN_S,
                        log=self._log,
                        stop=self._stop,
                    )
                except DeadlinePassed as passed:
                    self._log.warning(f"{passed}; still trying")
                except Stopped:
                    return

    def _poll(self, connections: Connections, index: int) -> None:
        """One question to one upstream. Silence from it is no error; that there is no answer at all is."""
        url = self._upstreams[index]().rstrip("/")
        self._urls[index] = url
        after = self._store.newest
        after = -1 if after is None else after
        asked_s = time.monotonic()
        try:
            self._complete_chains(connections, url)
            sealed = ask_latest(connections, url, after=after, wait_s=POLL_S)
            if sealed is None or self._stop.is_set():
                # A server that is closing, or knows no long polls, answers at once: do not hammer it.
                self._stop.wait(max(0.0, SHORTEST_POLL_S - (time.monotonic() - asked_s)))
                return
            if sealed.body.version <= after:
                raise Rejected(
                    "request.conflict",
                    f"version {sealed.body.version} was offered as newer than {after}; going back is refused",
                )
            self._store.begin(sealed)
            self._log.info("new version", version=sealed.body.version, upstream=url)
            self._fill_gaps(connections, url, sealed.body.version)
        except (NotThere, Broken, Rejected, OSError) as reason:
            if isinstance(reason, NoRoom):
                self._say(reason)
            raise NotYet(f"{url}: {reason}") from None

    def _fill_gaps(self, connections: Connections, url: str, newest: int) -> None:
        oldest = max(0, newest - self._store.keep_versions + 1)
        for version in range(newest - 1, oldest - 1, -1):
            if self._store.get(version) is None:
                self._learn_of(connections, url, version)
        self._complete_chains(connections, url)

    def _complete_chains(self, connections: Connections, url: str) -> None:
        """A version that comes as a delta is of use only together with those it builds on, however old they are."""
        asked: set[int] = set()
        while lacking := set(self._store.lacking()) - asked:
            version = max(lacking)
            asked.add(version)
            self._learn_of(connections, url, version)

    def _learn_of(self, connections: Connections, url: str, version: int) -> None:
        try:
            sealed = ask_manifest(connections, url, version)
        except NotThere:
            return
        self._store.begin(sealed)

    # -- bringing them here -----------------------------------------------------------------------------

    def _fill_loop(self) -> None:
        stay: int | None = None  # the version that is making progress
        leave: int | None = None  # the version that was just tried in vain
        while not self._stop.is_set():
            version = self._next(stay, leave)
            if version is None:
                self._store.changed.wait(lambda: self._next(None, None) is not None, 0.5)
                continue
            stay, leave = (version, None) if self._try(version) else (None, version)

    def _next(self, stay: int | None, leave: int | None) -> int | None:
        wanted = [version for version in self._store.incomplete() if version not in self._refused]
        if stay in wanted:
            return stay
        others = [version for version in wanted if version != leave]
        return max(others or wanted, default=None)

    def _try(self, version: int) -> bool:
        """Some time on one version; whether that brought it forward."""
        try:
            with self._store.writing(version) as assembly:
                return self._advance(version, assembly)
        except KeyError:  # the store has just deleted it as too old
            return False
        except NoRoom as reason:
            self._say(reason)
        except OSError as error:
            self._log.warning(f"version {version}: {error}; will try again")
        self._stop.wait(PAUSE_S)
        return False

    def _say(self, reason: NoRoom) -> None:
        """At once, and then now and again: others need the log too."""
        if (now_s := time.monotonic()) >= self._tell_again_s:
            self._tell_again_s = now_s + TELL_EVERY_S
            self._log.error(f"nothing new can be kept: {reason}")

    def _advance(self, version: int, assembly: Assembly) -> bool:
        began_s, before = time.monotonic(), len(assembly.missing())
        self._choice.update(self._urls.values())
        problem = ""
        try:
            reuse_files(assembly, [self._store.path(other) for other in reversed(self._store.complete())])
            Download(assembly, self._choice, log=self._log, stop=self._stop).run(TRY_S)
        except Stopped:
            return False
        except Rejected as rejected:
            self._refused.add(version)
            self._log.error(f"version {version} is given up: {rejected}")
            return False
        except DeadlinePassed as passed:
            problem = str(passed)
        if assembly.complete:
            took_s = round(time.monotonic() - began_s, 2)
            num_bytes = sum(entry.num_bytes for entry in assembly.entries)
            self._log.info("complete", version=version, num_bytes=num_bytes, last_s=took_s)
            self._on_complete(version)
            return True
        forward = len(assembly.missing()) < before
        if not forward:
            self._log.warning(f"no progress: {problem}")
            self._ask_again(version)
            self._stop.wait(PAUSE_S)
        return forward

    def _ask_again(self, version: int) -> None:
        """Its publisher may have come back without what it sent, and sends the same version in another way."""
        with Connections(self._choice.ticket) as connections:
            for url in self._choice.urls:
                try:
                    self._learn_of(connections, url, version)
                except (Broken, Rejected, OSError) as reason:
                    self._log.warning(f"version {version} anew from {url}: {reason}")
