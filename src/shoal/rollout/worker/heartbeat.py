"""What a worker reports about itself: its status, its utilisation, and the heartbeats that carry them."""

import threading
import time
from collections.abc import Callable
from enum import Enum

from shoal.net.http_client import Refused, Unreachable
from shoal.net.waiting import LinkedEvent
from shoal.rollout.worker.session import CoordinatorSession, LeftRun, WorkerExit
from shoal.telemetry import Log

MIN_PAUSE_S = 0.1
CLOSE_S = 2.0


class Activity(Enum):
    """What a worker does. At every moment it does exactly one of these."""

    STARTING = "starting"
    """Until the first row: joining, the first lease, the first weights, building the model. Happens once."""
    GENERATING = "generating"
    WITHOUT_WORK = "without work"
    """The coordinator answered that it has no work for this node yet."""
    WAITING = "waiting for a lease"
    LIMITED = "holding all leases it may"
    """Until the last submission is delivered, or the node is trusted."""
    FETCHING = "waiting for weights"
    SWAPPING = "swapping weights"
    PACKING = "packing rows"
    DELIVERING = "waiting for an upload"
    PAUSED = "paused"


_NOT_COUNTED = (Activity.STARTING, Activity.PAUSED)


class Utilisation:
    """Adds up the seconds spent in each activity. Only the worker's main thread writes; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._activity, self._since_s = Activity.STARTING, clock()
        self._spent_s = dict.fromkeys(Activity, 0.0)

    def begin(self, activity: Activity) -> None:
        """Switches to `activity`. Everything before the first GENERATING counts as STARTING."""
        if self._activity is Activity.STARTING and activity is not Activity.GENERATING:
            return
        now_s = self._clock()
        self._spent_s[self._activity] += now_s - self._since_s
        self._activity, self._since_s = activity, now_s

    def spent_s(self) -> dict[Activity, float]:
        current, now_s = self._activity, self._clock()
        return {
            each: self._spent_s[each] + (now_s - self._since_s if each is current else 0.0)
            for each in Activity
        }

    @property
    def busy_share(self) -> float:
        """Share of the time since the first row in which the device generated, pauses not counted."""
        return self._share(self.spent_s(), Activity.GENERATING)

    @property
    def busy_share_of_work(self) -> float:
        """Share of the time since the first row in which the device generated, without the time in which the run had no work."""
        spent_s = self.spent_s()
        spent_s[Activity.WITHOUT_WORK] = 0.0
        return self._share(spent_s, Activity.GENERATING)

    def describe(self) -> str:
        """Returns the share of each activity, as "generating 97.4%, waiting for a lease 2.6%"."""
        spent_s = self.spent_s()
        parts = [
            f"{each.value} {self._share(spent_s, each):.1%}"
            for each in Activity
            if each not in _NOT_COUNTED and spent_s[each] > 0
        ]
        return ", ".join(parts) or "nothing generated"

    @staticmethod
    def _share(spent_s: dict[Activity, float], activity: Activity) -> float:
        total_s = sum(spent for each, spent in spent_s.items() if each not in _NOT_COUNTED)
        return spent_s[activity] / total_s if total_s > 0 else 0.0


class WorkerStatus:
    """What the next heartbeat says. The worker's main thread writes it, the heartbeat thread reads it."""

    def __init__(self) -> None:
        self.phase = Activity.STARTING.value
        self.policy_version: int | None = None
        self.tokens_per_s = 0.0
        self.utilisation = Utilisation()
        self.fetching: tuple[int, int, int] | None = None
        """While a version is fetched: the version, the bytes that are here, all its bytes."""

    def begin(self, activity: Activity, phase: str = "") -> None:
        """Switches to an activity; `phase` says more about it."""
        self.phase = phase or activity.value
        if activity is Activity.FETCHING and (fetching := self.fetching) is not None:
            version, have, total = fetching
            self.phase += f": version {version}, {have / 1e6:.0f} of {total / 1e6:.0f} MB"
        self.utilisation.begin(activity)

    def note_fetched(self, version: int, have: int, total: int) -> None:
        self.fetching = None if have >= total else (version, have, total)

    def describe(self) -> dict[str, object]:
        """Returns the contents of status.json, for the owner's view."""
        return {
            "phase": self.phase,
            "policy_version": self.policy_version,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "busy_share": round(self.utilisation.busy_share, 4),
            "fetching": self.fetching,
        }


class HeartbeatThread:
    """Sends heartbeats until `stop` is set, in a thread and on a connection of its own.

    With the worker's own connection a long step would look like a dead worker. When the coordinator ends the session,
    `left` says why, and `stop` is set to end the worker's waits.
    """

    def __init__(self, session: CoordinatorSession, status: WorkerStatus, *, log: Log) -> None:
        self.left: LeftRun | None = None
        self._session, self._status, self._log = session, status, log
        self._stop = session.stop
        assert isinstance(self._stop, LinkedEvent), (
            "setting the process's own event would end more than this worker"
        )
        self._reachable = True
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        self._session.close()

    def _run(self) -> None:
        try:
            pause_s = 0.0
            while not self._stop.wait(pause_s):
                pause_s = self._beat()
        except LeftRun as left:
            self.left = left
        finally:
            self._stop.set()

    def _beat(self) -> float:
        """Sends one heartbeat and returns the seconds until the next."""
        status, heartbeat_s = self._status, self._session.joined.heartbeat_s
        try:
            reply = self._session.heartbeat(status.phase, status.policy_version, status.tokens_per_s)
        except Unreachable as error:
            if self._reachable:
                self._log.warning("the coordinator does not answer heartbeats; continuing", reason=error)
            self._reachable = False
            return heartbeat_s
        except Refused as refused:
            self._log.warning("a heartbeat was refused", reason=refused)
            return heartbeat_s
        self._reachable = True
        if reply.finished:
            raise LeftRun(WorkerExit.FINISHED, "the coordinator says so")
        return max(reply.next_in_s, MIN_PAUSE_S)
