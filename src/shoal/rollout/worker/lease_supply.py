"""Gets the next lease, with its weights, while the device still works on the last one.

    order ──▶ ask for a lease ──▶ fetch its weights ──▶ take
                                                    └─▶ stop: what was not taken is given back

The coordinator decides how many leases a node may hold: one at first, several once it is trusted, so that one can be
uploaded and one generated while the next is fetched. A node that holds as many as it may gets one of them again; then there
is nothing to fetch until one is delivered.
"""

import math
import threading
import time
from collections.abc import Callable
from functools import partial

from shoal.background import BackgroundTask
from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, LinkedEvent, Stopped
from shoal.rollout.worker.heartbeat import Activity
from shoal.rollout.worker.session import CoordinatorSession, LeaseLost
from shoal.rollout.worker.version_cache import VersionCache
from shoal.telemetry import Log
from shoal.wire.lease import Lease

POLL_S = 0.1
ASK_AGAIN_S = 30.0
"""Pause before asking again while the node holds all leases it may: it may become trusted without a delivery."""
LEAD_FACTOR, LEAD_EXTRA_S = 2.0, 0.1
"""The next lease is ordered this many times the usual wait, plus this, before it is needed."""
PAUSE_AFTER_LOSS_S = 1.0
"""Pause after a lost lease, so that a worker that cannot deliver does not use up leases."""

SessionOpener = Callable[[threading.Event], CoordinatorSession]
"""Opens a session with a connection of its own, whose waits end when the event is set."""


class LeaseSupply:
    """The leases of one worker, from asking until they are delivered or lost.

    `order`, `take` and `stop` belong to the main thread. `delivered` and `lost` may be called from any thread.
    Leases are found in a background thread; a second one watches for new versions.
    """

    def __init__(
        self,
        open_session: SessionOpener,
        versions: VersionCache,
        *,
        stop: threading.Event,
        prefetch: bool,
        deadline_s: float,
        log: Log,
    ) -> None:
        """Sets up the supply; with `prefetch`, new versions are fetched as they appear, and an older one is enough until then."""
        self._open_session, self._versions, self._worker_stop = open_session, versions, stop
        self._prefetch, self._deadline_s, self._log = prefetch, deadline_s, log
        self._session: CoordinatorSession | None = None
        """Open while leases are looked for. It has its own connection and stop event, so that `stop` can end its waits."""
        self._search: BackgroundTask[Lease] | None = None
        self._watch: BackgroundTask[None] | None = None
        self._activity = Activity.WAITING
        """What the search waits for."""
        self._held: dict[str, Lease] = {}
        """Leases that were not taken yet, by id."""
        self._taken: set[str] = set()
        """Ids of leases that were taken. The coordinator may give one again if it had not received the submission yet."""
        self._delivered: list[str] = []
        """Ids that can leave `_taken` before the next request: the coordinator knows of their submissions."""
        self._ended = threading.Event()
        """Set when a taken lease has ended, so that the node may hold another."""
        self._taking_since_s: float | None = None
        self._search_s = math.inf
        """Estimate of how long a search takes, from the last searches."""
        self._no_submission_since_s: float | None = None
        """When the first lease after the last submission was received."""

    @property
    def lead_s(self) -> float:
        """How long before a lease is needed it should be ordered. An earlier lease would name older versions."""
        return LEAD_FACTOR * self._search_s + LEAD_EXTRA_S

    def order(self) -> None:
        """Starts to look for the next lease, unless a search is under way or done."""
        if self._session is None:
            self._session = self._open_session(LinkedEvent(self._worker_stop))
        if self._search is None:
            self._search = BackgroundTask("lease search", partial(self._find, self._session))
        if self._watch is None:
            watch = partial(self._versions.watch, self._session.stop, fetch_ahead=self._prefetch)
            self._watch = BackgroundTask("version watch", watch)

    def take(self, on_wait: Callable[[Activity], None]) -> Lease:
        """Returns the next lease, once a version for it is here. Calls `on_wait` meanwhile, which may raise."""
        self.order()
        assert self._search is not None
        self._taking_since_s = time.monotonic()
        self._raise_watch_error()
        while not self._search.done:
            on_wait(self._activity)
            self._raise_watch_error()
            self._search.wait(POLL_S)
        search, self._search, self._taking_since_s = self._search, None, None
        lease = search.result()
        self._taken.add(lease.lease_id)
        del self._held[lease.lease_id]
        return lease

    def delivered(self, lease: Lease) -> None:
        """Records that a taken lease was submitted."""
        self._no_submission_since_s = None
        self._delivered.append(lease.lease_id)
        self._ended.set()

    def lost(self, lease: Lease, error: LeaseLost, session: CoordinatorSession) -> None:
        """Logs that a lease is lost and gives it back.

        Raises DeadlinePassed if there was no submission for `deadline_s`.
        """
        self._count_lease()
        self._log.warning("the lease is lost", lease=lease.lease_id, reason=error)
        if error.still_open:
            session.abandon(lease, str(error))
        # After giving it back: before that the coordinator could give the same lease again, as if it were new.
        self._held.pop(lease.lease_id, None)
        self._taken.discard(lease.lease_id)
        self._ended.set()
        since_s = self._no_submission_since_s
        idle_s = 0.0 if since_s is None else time.monotonic() - since_s
        if idle_s >= self._deadline_s:
            raise DeadlinePassed(
                f"{idle_s:.0f} s without a submission; the last lease was lost because {error}. Check that the relays "
                "can be reached from here, and that this machine is fast enough for the run's leases"
            )

    def excuse_pause(self) -> None:
        """Starts the time without a submission again: the owner paused the worker."""
        self._no_submission_since_s = None

    def stop(self, wait_s: float, *, give_back: str | None) -> None:
        """Stops looking for leases within `wait_s`, and gives back those not taken with this reason.

        With None they are not given back. A later `order` starts again.
        """
        session, self._session = self._session, None
        if session is None:
            return
        session.stop.set()
        end_s = time.monotonic() + wait_s
        for task in (self._search, self._watch):
            if task is not None:
                task.wait(max(0.0, end_s - time.monotonic()))
        if give_back is not None:
            giving = BackgroundTask("give back", partial(self._give_back, session, give_back))
            giving.wait(max(0.0, end_s - time.monotonic()))
        self._search = self._watch = None
        session.close()

    def _give_back(self, session: CoordinatorSession, reason: str) -> None:
        # One by one: if this takes longer than `stop` waits, a later search may hold other leases by then.
        for lease in list(self._held.values()):
            session.abandon(lease, reason)
            self._held.pop(lease.lease_id, None)

    def _raise_watch_error(self) -> None:
        """Raises the error that ended the watch: without the watch a worker would use versions long out of date."""
        if self._watch is not None and self._watch.done and not self._worker_stop.is_set():
            self._watch.result()

    # -- in the search thread ------------------------------------------------------------------------------

    def _find(self, session: CoordinatorSession) -> Lease:
        """Returns a lease whose weights are here."""
        started_s = time.monotonic()
        while True:
            lease = self._ask_new_lease(session)
            self._activity = Activity.FETCHING
            try:
                self._versions.ensure(lease, stop=session.stop, wait_for_newest=not self._prefetch)
            except LeaseLost as error:
                self.lost(lease, error, session)
                if session.stop.wait(PAUSE_AFTER_LOSS_S):
                    raise Stopped("stopped after a lost lease") from None
                continue
            took_s = time.monotonic() - started_s
            before_s = self._search_s if math.isfinite(self._search_s) else took_s
            # One fast search must not shorten it at once.
            self._search_s = max(took_s, (before_s + took_s) / 2)
            return lease

    def _ask_new_lease(self, session: CoordinatorSession) -> Lease:
        """Returns a lease that this worker does not hold yet."""
        while True:
            self._ended.clear()  # before the request: a lease that ends during it may allow another
            while self._delivered:
                self._taken.discard(self._delivered.pop())
            self._activity = Activity.WAITING
            lease = self._ask_until_needed(session)
            if lease.lease_id not in self._taken:
                if session.stop.is_set():
                    # `stop` may have given up waiting, and would not give this lease back.
                    session.abandon(lease, "the worker stopped while it asked for a lease")
                    raise Stopped("stopped while asking for a lease")
                self._held[lease.lease_id] = lease
                self._count_lease()
                return lease
            self._activity = Activity.LIMITED
            self._wait_until_one_ends(session.stop)

    def _ask_until_needed(self, session: CoordinatorSession) -> Lease:
        """Asks for a lease. The deadline counts from when the device waits for it: before that nothing is lost."""

        def heard(failure: Refused | Unreachable) -> None:
            # A refusal means that the run has no work; such time is not counted as waiting for a lease.
            refused = isinstance(failure, Refused)
            self._activity = Activity.WITHOUT_WORK if refused else Activity.WAITING

        while True:
            try:
                return session.ask_lease(heard, holds=[*self._held, *self._taken])
            except DeadlinePassed:
                since_s = self._taking_since_s
                if since_s is not None and time.monotonic() - since_s >= self._deadline_s:
                    raise

    def _wait_until_one_ends(self, stop: threading.Event) -> None:
        end_s = time.monotonic() + ASK_AGAIN_S
        while time.monotonic() < end_s and not self._ended.wait(POLL_S):
            if stop.is_set():
                raise Stopped("stopped while this node held all leases that it may hold")

    def _count_lease(self) -> None:
        if self._no_submission_since_s is None:
            self._no_submission_since_s = time.monotonic()
