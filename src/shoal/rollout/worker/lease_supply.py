"""The next lease, with its weights, while the device still works on the last one.

    order ──▶ ask for a lease ──▶ have its weights ──▶ take            beside it: new versions are fetched as they appear
                                                   └─▶ close: what was not taken is given back

How many leases a node may hold is the coordinator's to say: one at first, two once it is trusted. Whoever has as many as it
may gets one of them again; then there is nothing to fetch ahead until one is delivered.
"""

import math
import threading
import time
from collections.abc import Callable
from functools import partial

from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.rollout.worker.errand import Errand
from shoal.rollout.worker.losses import Losses
from shoal.rollout.worker.session import LeaseLost, Session
from shoal.rollout.worker.utilisation import Doing
from shoal.rollout.worker.version_cache import PolicyShelf
from shoal.telemetry import Log
from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.lease import Lease

LOOK_S = 0.1
ASK_AGAIN_S = 30.0
"""Of a coordinator that allows no more leases now. It may come to trust us without one being delivered."""
LOOKS_PER_HEARTBEAT = 3
"""How often the newest version is asked for: the coordinator sets its heartbeats by what it can answer."""
NEWEST_S = (0.5, 5.0)
"""At least and at most, between two such questions."""
LEAD_TIMES, LEAD_MORE_S = 2.0, 0.1
"""How long before it is needed the next lease is ordered: so many times what the last orders took, and a little more."""
AFTER_LOSS_S = 1.0
"""Pause after a lost lease, so that a worker that cannot deliver does not burn leases."""


class Supply:
    """`session` and `stop` are its own: `close` sets `stop`, which ends what it waits for."""

    def __init__(
        self,
        session: Session,
        shelf: PolicyShelf,
        losses: Losses,
        *,
        ahead: bool,
        deadline_s: float,
        log: Log,
    ) -> None:
        """`ahead`: fetch new versions as they appear, and do with an older one until the newest is here."""
        self._session, self._shelf, self._losses = session, shelf, losses
        self._ahead, self._deadline_s, self._log = ahead, deadline_s, log
        self._stop = session.stop
        self._errand: Errand[Lease] | None = None
        self._watch: Errand[None] | None = None
        self._ended = threading.Event()
        self._held: dict[str, Lease] = {}
        """Not taken yet."""
        self._taken: set[str] = set()
        """Begun, or just delivered: the coordinator may give one again that it had not heard of when we asked."""
        self._delivered: list[str] = []
        self._waited_since_s: float | None = None
        self._took_s = math.inf
        self._refused = ""
        """Why the last version could not be had ahead of time, so that it is said once."""
        self.doing = Doing.WAITING

    @property
    def lead_s(self) -> float:
        """When to order: so long before the lease is needed. Not earlier, for a lease names the versions of its day."""
        return LEAD_TIMES * self._took_s + LEAD_MORE_S

    def order(self) -> None:
        """Begin to look for the next lease, unless that is under way or done."""
        if self._errand is None:
            self._errand = Errand("supply", self._find)
        if self._watch is None:
            self._watch = Errand("new versions", self._watch_versions)

    def take(self, on_wait: Callable[[Doing], None]) -> Lease:
        """The next lease, once a version for it is here. `on_wait` is called while it is not, and may raise."""
        self.order()
        assert self._errand is not None
        self._waited_since_s = time.monotonic()
        self._look_at_watch()
        while not self._errand.wait(0.0):
            on_wait(self.doing)
            self._look_at_watch()
            self._errand.wait(LOOK_S)
        errand, self._errand, self._waited_since_s = self._errand, None, None
        lease = errand.result()
        self._taken.add(lease.lease_id)
        del self._held[lease.lease_id]
        return lease

    def _look_at_watch(self) -> None:
        """It ends when we do. Else an error ended it, and without it a worker would go by versions long gone."""
        if self._watch is not None and self._watch.wait(0.0) and not self._stop.is_set():
            self._watch.result()

    def ended(self, lease: Lease, *, delivered: bool) -> None:
        """A lease that was taken has ended: there may be room for another. One that was lost may be given again."""
        if delivered:
            self._delivered.append(lease.lease_id)
        else:
            self._taken.discard(lease.lease_id)
        self._ended.set()

    def close(self, wait_s: float, *, give_back: str | None) -> None:
        """Look for nothing more; give back, for this reason, what was not taken."""
        self._stop.set()
        give_up_s = time.monotonic() + wait_s
        for errand in (self._errand, self._watch):
            if errand is not None:
                errand.wait(max(0.0, give_up_s - time.monotonic()))
        if give_back is not None:
            giving = Errand("giving back", lambda: self._give_back(give_back))
            giving.wait(max(0.0, give_up_s - time.monotonic()))
        self._errand = self._watch = None
        self._session.close()

    def _give_back(self, reason: str) -> None:
        for lease in list(self._held.values()):
            self._session.abandon(lease, reason)
        self._held.clear()

    # -- in a thread of its own --------------------------------------------------------------------------------

    def _find(self) -> Lease:
        started_s = time.monotonic()
        while True:
            self.doing = Doing.WAITING
            lease = self._next_lease()
            self.doing = Doing.FETCHING
            try:
                self._shelf.have(lease, stop=self._stop, patient=not self._ahead)
            except LeaseLost as lost:
                del self._held[lease.lease_id]
                self._losses.lost(lease, lost, self._session)
                if self._stop.wait(AFTER_LOSS_S):
                    raise Stopped("stopped after a lost lease") from None
                continue
            took_s = time.monotonic() - started_s
            before_s = self._took_s if math.isfinite(self._took_s) else took_s
            self._took_s = max(took_s, (before_s + took_s) / 2)  # one that came fast may have been luck
            return lease

    def _next_lease(self) -> Lease:
        """One that we do not hold."""
        while True:
            self._ended.clear()  # before asking: what ends from here on may make room
            while self._delivered:  # the coordinator knows of these, so it will not give them again
                self._taken.discard(self._delivered.pop())
            lease = self._ask()
            if lease.lease_id not in self._taken:
                self._held[lease.lease_id] = lease
                self._losses.began()
                if self._stop.is_set():
                    raise Stopped("stopped while a lease was on its way")
                return lease
            self._wait_for_room()

    def _ask(self) -> Lease:
        while True:
            try:
                return self._session.ask_lease()
            except DeadlinePassed:
                # Nobody is kept waiting while the device has work.
                since_s = self._waited_since_s
                if since_s is not None and time.monotonic() - since_s >= self._deadline_s:
                    raise

    def _wait_for_room(self) -> None:
        give_up_s = time.monotonic() + ASK_AGAIN_S
        while time.monotonic() < give_up_s and not self._ended.wait(LOOK_S):
            if self._stop.is_set():
                raise Stopped("stopped while waiting for room for a lease")

    def _watch_versions(self) -> None:
        stocking: Errand[None] | None = None
        reachable = True
        least_s, most_s = NEWEST_S
        pause_s = min(most_s, max(least_s, self._session.terms.heartbeat_s / LOOKS_PER_HEARTBEAT))
        while not self._stop.wait(pause_s):
            try:
                newest = self._session.ask_newest_version()
                reachable = True
            except (Refused, Unreachable) as error:
                if reachable:
                    self._log.warning("nobody says which version is the newest; going on", reason=error)
                reachable, newest = False, None
            if newest is None:
                continue
            self._shelf.heard_of([newest])
            if stocking is not None and stocking.wait(0.0):
                stocking.result()
                stocking = None
            # In a thread of its own: what is on its way may be given up by what is heard meanwhile.
            if self._ahead and stocking is None and self._shelf.lacks(newest):
                stocking = Errand("stock", partial(self._stock, newest))

    def _stock(self, version: int) -> None:
        try:
            self._shelf.stock(version, stop=self._stop)
            self._refused = ""
        except (CorruptData, DeadlinePassed, Rejected, Refused, Unreachable, OSError) as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._log.warning("a new version cannot be had ahead of time", reason=error)
        except Stopped:
            return
