"""Fill one assembly from several relays at once.

A few streams, each with a run of shards in hand, asked for as one range:

    take shards -> draw a relay -> for each: fetch -> verify and write -> account

A run is one shard from a relay that is slow or not known yet, and many from a fast one: asking takes time too.

    right bytes       the relay's share grows with its bandwidth
    not there yet     neither good nor bad; it is asked again a little later
    broken, hung      counts as zero bandwidth; the shard goes to another relay
    wrong bytes       the relay is dropped for this download, and the log says so

When no shard is left to take, one that another relay would probably bring sooner, or that has been under way for long, is
asked for a second time; the first right answer counts. No relay ever holds more than its share of the streams, nor all of them, and one that has
delivered nothing yet holds one at most. So a slow or hung relay does not set the time.
"""

import contextlib
import math
import random
import threading
import time
from collections import deque
from dataclasses import dataclass

from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.shardcast.assembly import Assembly, Shard, WrongBytes
from shoal.shardcast.client.fetch_progress import Progress
from shoal.shardcast.client.http_source import Broken, Connections, NotThere, ask_shards
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

NUM_STREAMS, MAX_STREAMS = 4, 12
"""From one relay, and from all of them: shards in flight, and so in memory."""
FIRST_STREAMS, FAST_BYTES_PER_S = 2, 100e6
"""With a single relay to ask, two streams begin, and no more join them while it is so fast: it is near then, and threads that wake
each other for every shard cost more than they bring. A slow or far one is asked by all."""
RUN_S, RUN_BYTES = 0.2, 32 << 20
"""What one question is for: shards that should come within so long, and not more than so many bytes."""
LAST_RUN_S = 0.02
"""Towards the end a question is for less, but not for less than should come within this: asking has its price."""
SECOND_TRY_S = 1.0
WATCH_S = 0.2
"""How often the streams as a whole are looked at."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0


class NoRelayLeft(DeadlinePassed):
    """None is known, or all were dropped: waiting longer would bring nothing."""


@dataclass(eq=False, slots=True)
class _Try:
    shards: deque[Shard]
    """Consecutive, those still to come; the first is coming now."""
    relay: str
    started_s: float
    """When the first was asked for, or the one before it had come."""
    judged: bool = False
    """Its relay has already been counted as failed for it."""


class Download:
    """One run per object. `choice` is this object's alone while it runs."""

    def __init__(self, assembly: Assembly, choice: RelayChoice, *, log: Log, stop: threading.Event) -> None:
        self._assembly, self._choice = assembly, choice
        self._log, self._stop = log, stop
        self._version = assembly.manifest.version
        lock = threading.RLock()  # guards all below
        self._turn = threading.Condition(lock)  # streams wait here for something to do
        self._news = threading.Condition(lock)  # who watches them, here: it need not wake up for each shard
        self._pending = deque(assembly.missing())
        self._tries: list[_Try] = []
        self._dropped: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._pauses: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}
        self._failure: OSError | Rejected | None = None
        self._over = False
        self._forward_s = 0.0
        self._streams: list[threading.Thread] = []

    def run(self, deadline_s: float, *, patience_s: float | None = None) -> None:
        """Return when every file is whole. What has come stays on disk, whatever happens.

        With `patience_s` it gives up early, when no shard has come for that long: for those who know another way.
        """
        if self._assembly.complete:
            return
        try:
            num_bytes, had = (
                sum(entry.num_bytes for entry in self._assembly.entries),
                self._assembly.num_bytes_here,
            )
            with Progress(self._version, num_bytes=num_bytes, had=had, log=self._log) as progress:
                self._watch(deadline_s, deadline_s if patience_s is None else patience_s, progress)
        finally:
            # Streams that hang end by their own timeouts; what they bring is no longer looked at.
            with self._turn:
                self._over = True
                self._turn.notify_all()

    def _watch(self, deadline_s: float, patience_s: float, progress: Progress) -> None:
        self._forward_s = time.monotonic()
        give_up_s = self._forward_s + deadline_s
        while not self._assembly.complete:
            with self._turn:
                if self._failure is not None:
                    raise self._failure
                left = [url for url in self._choice.urls if url not in self._dropped]
                now_s = time.monotonic()
                if not left:
                    raise NoRelayLeft(
                        f"version {self._version} did not come: there is no relay left to ask; {self._state()}; name another"
                    )
                if now_s >= min(give_up_s, self._forward_s + patience_s):
                    within_s = min(deadline_s, patience_s)
                    raise DeadlinePassed(
                        f"version {self._version} did not come within {within_s:.1f} s: {self._state()}; "
                        "name more relays, or give it longer"
                    )
                self._add_streams()
                progress.show(self._assembly.num_bytes_here, self._state)
                self._news.wait(min(WATCH_S, give_up_s - now_s))
            if self._stop.is_set():
                raise Stopped(f"stopped while fetching version {self._version}")

    def _state(self) -> str:
        num_shards = sum(len(entry.shards) for entry in self._assembly.entries)
        relays = [f"{url}: {self._reasons.get(url, 'nothing to complain of')}" for url in self._choice.urls]
        return f"{len(self._assembly.missing())} of {num_shards} shards missing; {'; '.join(relays) or 'no relay known'}"

    def _add_streams(self) -> None:
        """As many as are worth having now; they stay to the end."""
        relays = [self._choice.standing(url) for url in self._choice.urls]
        num = min(MAX_STREAMS, NUM_STREAMS - 1 + len(relays), len(self._streams) + len(self._pending))
        if len(relays) == 1 and (not self._streams or (relays[0].bandwidth or 0.0) > FAST_BYTES_PER_S):
            num = min(num, FIRST_STREAMS)
        while len(self._streams) < num:
            name = f"shards-{len(self._streams)}"
            self._streams.append(threading.Thread(target=self._stream, name=name, daemon=True))
            self._streams[-1].start()

    # -- a stream ---------------------------------------------------------------------------------------

    def _stream(self) -> None:
        with Connections(self._choice.ticket) as connections:
            while (job := self._take()) is not None:
                self._attempt(connections, job)

    def _take(self) -> _Try | None:
        """The next shards and the relay to ask for them; None when all is over."""
        with self._turn:
            while not self._over:
                shard = self._next_shard()
                relays = self._relays_for(shard) if shard is not None else []
                if shard is not None and relays:
                    relay = self._choice.pick(relays, random.random())
                    job = _Try(self._run_from(shard, relay), relay, time.monotonic())
                    self._tries.append(job)
                    return job
                self._turn.wait(0.05)
        return None

    def _next_shard(self) -> Shard | None:
        if self._pending:
            return self._pending[0]
        now_s = time.monotonic()
        for job in self._tries:
            for shard in job.shards if self._is_slow(job, now_s) else ():
                if sum(shard in other.shards for other in self._tries) == 1:
                    return shard
        return None

    def _is_slow(self, job: _Try, now_s: float) -> bool:
        """Whether what it is to bring is worth asking for elsewhere too."""
        waited_s = now_s - job.started_s
        if waited_s > SECOND_TRY_S:
            return True
        known_s = {
            url: job.shards[0].num_bytes / bandwidth
            for url in self._choice.urls
            if job.shards and url not in self._dropped and (bandwidth := self._choice.standing(url).bandwidth)
        }
        if job.relay not in known_s:
            return False
        expected_s = known_s.pop(job.relay) * sum(other.relay == job.relay for other in self._tries)
        late = waited_s > 3 * expected_s + 0.1
        return late or expected_s - waited_s > 2 * min(known_s.values(), default=math.inf)

    def _run_from(self, shard: Shard, relay: str) -> deque[Shard]:
        """The shard, and those after it that its relay is likely to send as fast as we should like."""
        run = deque([shard])
        if not self._pending:
            return run  # it is somebody else's already
        self._pending.popleft()
        bytes_per_s = (self._choice.standing(relay).bandwidth or 0.0) / NUM_STREAMS
        most = min(RUN_BYTES, RUN_S * bytes_per_s) // shard.num_bytes
        # Towards the end in smaller portions, so that all streams end together.
        left = len(self._pending) + 1
        worth = min(LAST_RUN_S * bytes_per_s // shard.num_bytes, left // 2)
        most = min(most, max(left // (2 * NUM_STREAMS), worth))
        while len(run) < most and self._pending and _follows(run[-1], self._pending[0]):
            run.append(self._pending.popleft())
        return run

    def _relays_for(self, shard: Shard) -> list[str]:
        now_s = time.monotonic()
        asked = {job.relay for job in self._tries if shard in job.shards}
        left = [url for url in self._choice.urls if url not in self._dropped]
        return [
            url
            for url, share in self._choice.shares(left).items()
            if url not in asked
            and self._not_before_s.get(url, 0.0) <= now_s
            and sum(job.relay == url for job in self._tries) < self._most_tries(url, share)
        ]

    def _most_tries(self, url: str, share: float) -> int:
        """At once, of one relay: its share of the streams, so that slow ones do not hold them all while a fast one is
        idle. And if it hangs, a stream must be left that can go elsewhere."""
        if self._choice.standing(url).bandwidth is None:
            return 1
        return NUM_STREAMS if share == 1 else min(math.ceil(share * NUM_STREAMS), NUM_STREAMS - 1)

    def _attempt(self, connections: Connections, job: _Try) -> None:
        try:
            data_of = ask_shards(
                connections, job.relay, self._version, tuple(job.shards), give_up=lambda: self._over
            )
            with contextlib.closing(data_of):
                for data in data_of:
                    shard, took_s = job.shards[0], time.monotonic() - job.started_s
                    if self._over:
                        break
                    self._assembly.write(shard, data)
                    self._delivered(job, shard, took_s)
        except NotThere as reason:
            self._settle(job, str(reason), failed=False)
        except Broken as reason:
            self._settle(job, str(reason), failed=True)
        except WrongBytes as reason:
            self._log.warning(f"relay dropped: it sent wrong bytes: {reason}", relay=job.relay)
            self._settle(job, f"dropped, wrong bytes: {reason}", failed=True, drop=True)
        except (OSError, Rejected) as failure:
            with self._turn:
                self._failure = failure
                self._news.notify()
            self._settle(job, str(failure), failed=False)
        else:
            with self._turn:
                self._tries.remove(job)
                self._turn.notify_all()

    # -- accounts ---------------------------------------------------------------------------------------

    def _delivered(self, job: _Try, shard: Shard, took_s: float) -> None:
        with self._turn:
            job.shards.popleft()
            job.started_s = self._forward_s = time.monotonic()
            if self._over:
                return
            # Shards that come from one relay at the same time share its link: what counts is what they make together.
            at_once = sum(other.relay == job.relay for other in self._tries)
            self._choice.delivered(job.relay, at_once * shard.num_bytes / max(took_s, 1e-6))
            self._pauses.pop(job.relay, None)
            overdue = [other for other in self._tries if job.started_s - other.started_s > SECOND_TRY_S]
            for other in overdue:
                if not other.judged and shard in other.shards:  # it was asked first, and overtaken
                    other.judged = True
                    self._choice.failed(other.relay)
            if not self._pending and self._assembly.complete:
                self._news.notify()

    def _settle(self, job: _Try, reason: str, *, failed: bool, drop: bool = False) -> None:
        with self._turn:
            self._tries.remove(job)
            if self._over:
                return
            self._reasons[job.relay] = reason
            if failed and not job.judged:
                self._choice.failed(job.relay)
            if drop:
                self._dropped.add(job.relay)
                self._news.notify()
            pause_s = self._pauses.get(job.relay, FIRST_PAUSE_S)
            self._pauses[job.relay] = min(2 * pause_s, LONGEST_PAUSE_S)
            self._not_before_s[job.relay] = time.monotonic() + pause_s
            for shard in job.shards:
                here = self._assembly.verified(shard.name, shard.start, shard.stop)
                if not here and all(shard not in other.shards for other in self._tries):
                    self._pending.append(shard)  # last: the others need not wait for what does not come
            self._turn.notify_all()


def _follows(one: Shard, other: Shard) -> bool:
    return (one.name, one.index + 1) == (other.name, other.index)
