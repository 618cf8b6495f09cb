"""Downloads the missing shards of one assembly from several relays at once.

Each of a few threads repeats:

    take consecutive shards -> sample a relay -> for each shard: receive -> verify and write -> update statistics

A request is for one shard from a relay that is slow or unknown, and for many from a fast one, because each request costs time.

    right bytes       the relay's bandwidth estimate goes up
    not there yet     no effect; the relay is asked again a little later
    error, timeout    counts as zero bandwidth; the shard goes to another relay
    wrong bytes       the relay is not asked again in this download, and the log says so

When no shard is left to take, a shard that another relay would probably deliver sooner, or that has taken long, is requested a
second time; the first right answer counts. A relay gets at most its share of the threads and never all of them, and one that
has delivered nothing yet gets one. So a slow or hanging relay does not determine the duration.

A shard that grows counts as progress, for the timeouts and for the choice of what to request again: over a slow link a large shard
may take minutes. So does one that grows at a relay, which can send it only when it is complete there. The last source (the origin) is asked only while all relays together deliver less than LAST_SOURCE_BYTES_PER_S.
"""

import contextlib
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.net.waiting import DeadlinePassed, Stopped
from shoal.shardcast.assembly import Assembly, Shard, WrongBytes
from shoal.shardcast.client.http_source import (
    PROGRESS_BYTES,
    Connections,
    NotOnRelay,
    RelayFailed,
    ask_shards,
)
from shoal.shardcast.client.relay_choice import RelayChoice
from shoal.telemetry import Log
from shoal.wire.codes import Rejected

NUM_STREAMS, MAX_STREAMS = 4, 12
"""Threads for one relay, and for all relays together. Each holds one shard in memory."""
FIRST_STREAMS, FAST_BYTES_PER_S = 2, 100e6
"""With a single relay the download begins with two threads, and stays with two while the relay is faster than this: it is near
then, and threads that wake each other for every shard cost more than they bring."""
REQUEST_S, REQUEST_BYTES = 0.2, 32 << 20
"""Size of one request: the shards that should arrive within this time, at most this many bytes."""
LAST_REQUEST_S = 0.02
"""Towards the end requests get smaller, but not smaller than what should arrive within this time."""
SECOND_REQUEST_S = 1.0
"""A shard that takes longer than this is requested from a second relay."""
LAST_SOURCE_S, LAST_SOURCE_BYTES_PER_S = 3.0, 256e3
"""The last source is asked after this time in which the relays delivered less than this."""
CHECK_EVERY_S = 0.2
"""How often the download as a whole is checked."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
LOG_AFTER_S, LOG_EVERY_S = 2.0, 5.0
"""When progress is logged first, and then how often."""


class NoRelayLeft(DeadlinePassed):
    """No relay is known, or all sent wrong bytes: waiting longer would not help."""


@dataclass(eq=False, slots=True)
class _ShardRequest:
    shards: deque[Shard]
    """Consecutive shards that have not arrived yet; the first one is arriving now."""
    relay: str
    started_s: float
    """When the first shard was requested, or the one before it arrived."""
    num_bytes: int = 0
    """Bytes of the first shard that have arrived."""
    grew_s: float = 0.0
    """When its last byte arrived."""
    counted_as_failed: bool = False


class Download:
    """Downloads one assembly; `run` once per object. No other thread may use `choice` meanwhile."""

    def __init__(self, assembly: Assembly, choice: RelayChoice, *, log: Log, stop: threading.Event) -> None:
        self._assembly, self._choice = assembly, choice
        self._log, self._stop = log, stop
        self._version = assembly.manifest.version
        lock = threading.RLock()  # guards all fields below
        self._work = threading.Condition(lock)  # threads without work wait here
        self._news = threading.Condition(lock)  # `run` waits here, so that it does not wake up for each shard
        self._pending = deque(assembly.missing())
        self._requests: list[_ShardRequest] = []
        self._dropped: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._pauses_s: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}
        self._failure: OSError | Rejected | None = None
        self._over = False
        self._progress_s = 0.0  # when the last shard or the last PROGRESS_BYTES of one arrived
        self._unproven_bytes = 0  # bytes since then
        self._at_relays: dict[tuple[str, str], int] = {}  # bytes of a file that a relay said it has received
        self._claimed_bytes = 0  # how much those numbers have grown in all
        self._window_s, self._window_bytes = 0.0, 0  # what relays delivered lately, without the last source
        self._asks_last = False
        self._threads: list[threading.Thread] = []

    def run(self, deadline_s: float, *, stall_s: float | None = None) -> None:
        """Returns when every file is complete. What has arrived stays on disk, whatever happens.

        Raises DeadlinePassed after `deadline_s`, or when no shard has grown for `stall_s`; NoRelayLeft, Stopped, and
        OSError if the disk fails.
        """
        if self._assembly.complete:
            return
        progress = _ProgressLog(self._version, self._assembly, self._log)
        self._progress_s = self._window_s = time.monotonic()
        end_s = self._progress_s + deadline_s
        try:
            while not self._assembly.complete:
                with self._work:
                    if self._failure is not None:
                        raise self._failure
                    self._check_time(deadline_s, end_s, deadline_s if stall_s is None else stall_s)
                    self._update_sources()
                    self._start_threads()
                    progress.log_if_due(self._state)
                    have = self._assembly.num_bytes_verified + sum(one.num_bytes for one in self._requests)
                    self._report_progress(have)
                    self._news.wait(min(CHECK_EVERY_S, end_s - time.monotonic()))
                if self._stop.is_set():
                    raise Stopped(f"stopped while fetching version {self._version}")
        finally:
            # Threads that hang end by their own timeouts; what they receive is ignored.
            with self._work:
                self._over = True
                self._work.notify_all()
            # However it ended: otherwise a receiver would show this download until the next one.
            self._report_progress(self._assembly.num_bytes)

    def _report_progress(self, have: int) -> None:
        if self._choice.on_progress is not None:
            total = self._assembly.num_bytes
            self._choice.on_progress(self._version, min(have, total), total)

    def _check_time(self, deadline_s: float, end_s: float, stall_s: float) -> None:
        if all(url in self._dropped for url in self._choice.urls):
            raise NoRelayLeft(
                f"cannot download version {self._version}: no usable relay; {self._state()}; name another relay"
            )
        if time.monotonic() >= min(end_s, self._progress_s + stall_s):
            raise DeadlinePassed(
                f"version {self._version} did not arrive within {min(deadline_s, stall_s):.1f} s: {self._state()}; "
                "name more relays, or allow more time"
            )

    def _state(self) -> str:
        num_shards = sum(len(entry.shards) for entry in self._assembly.entries)
        relays = [f"{url}: {self._reasons.get(url, 'no error')}" for url in self._choice.urls]
        return f"{len(self._assembly.missing())} of {num_shards} shards missing; {'; '.join(relays) or 'no relay known'}"

    def _update_sources(self) -> None:
        """Decides from time to time whether the last source is asked: while the relays deliver next to nothing."""
        waited_s = time.monotonic() - self._window_s
        relays = [url for url in self._choice.urls if url != self._choice.last]
        if not self._choice.last or (waited_s < LAST_SOURCE_S and not self._dropped.issuperset(relays)):
            return
        asks = self._dropped.issuperset(relays) or self._window_bytes < waited_s * LAST_SOURCE_BYTES_PER_S
        if asks and not self._asks_last and relays:
            self._log.warning(
                f"version {self._version}: relays deliver too little, asking the origin too",
                origin=self._choice.last,
                relays=self._state(),
            )
        self._asks_last = asks
        self._window_s, self._window_bytes = time.monotonic(), 0
        self._work.notify_all()

    def _sources(self) -> list[str]:
        """Returns what may be asked: the relays that were not dropped, and the last source if they deliver too little."""
        return [
            url
            for url in self._choice.urls
            if url not in self._dropped and (url != self._choice.last or self._asks_last)
        ]

    def _start_threads(self) -> None:
        """Starts as many threads as are useful now; they run until the end."""
        relays = [self._choice.stats[url] for url in self._sources()]
        num = min(MAX_STREAMS, NUM_STREAMS - 1 + len(relays), len(self._threads) + len(self._pending))
        if len(relays) == 1 and (not self._threads or (relays[0].bandwidth or 0.0) > FAST_BYTES_PER_S):
            num = min(num, FIRST_STREAMS)
        while len(self._threads) < num:
            name = f"shards-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._download_shards, name=name, daemon=True))
            self._threads[-1].start()

    # -- in a thread ------------------------------------------------------------------------------------

    def _download_shards(self) -> None:
        with Connections(self._choice.ticket, self._choice.limit) as connections:
            while (request := self._next_request()) is not None:
                self._receive(connections, request)

    def _next_request(self) -> _ShardRequest | None:
        """Waits for shards to request and a relay to ask; returns None when the download is over."""
        with self._work:
            while not self._over:
                shard = self._next_shard()
                relays = self._relays_for(shard) if shard is not None else []
                if shard is not None and relays:
                    relay = self._choice.pick(relays, random.random())
                    request = _ShardRequest(self._take_run(shard, relay), relay, time.monotonic())
                    self._requests.append(request)
                    return request
                self._work.wait(0.05)
        return None

    def _next_shard(self) -> Shard | None:
        """Returns the next pending shard; without one, a shard of a slow request that was requested only once."""
        if self._pending:
            return self._pending[0]
        now_s = time.monotonic()
        for request in self._requests:
            for shard in request.shards if self._is_slow(request, now_s) else ():
                if sum(shard in other.shards for other in self._requests) == 1:
                    return shard
        return None

    def _is_slow(self, request: _ShardRequest, now_s: float) -> bool:
        """Returns whether another relay would probably deliver the request's next shard sooner."""
        waited_s = now_s - request.started_s
        if waited_s > SECOND_REQUEST_S:
            return not self._arrives_soon(request, now_s)
        expected_s = {
            url: request.shards[0].num_bytes / bandwidth
            for url in self._sources()
            if request.shards and (bandwidth := self._choice.stats[url].bandwidth)
        }
        if request.relay not in expected_s:
            return False
        own_s = expected_s.pop(request.relay) * self._num_requests_to(request.relay)
        is_late = waited_s > 3 * own_s + 0.1
        return is_late or own_s - waited_s > 2 * min(expected_s.values(), default=math.inf)

    def _arrives_soon(self, request: _ShardRequest, now_s: float) -> bool:
        """Returns whether the rest of a growing shard should arrive before another relay could send the whole of it.

        Without this, every large shard on a slow link would be requested twice, and the link would carry both.
        """
        if not request.shards or not request.num_bytes or now_s - request.grew_s > SECOND_REQUEST_S:
            return False
        shard = request.shards[0]
        bytes_per_s = request.num_bytes / (request.grew_s - request.started_s + 1e-6)
        left_s = (shard.num_bytes - request.num_bytes) / bytes_per_s
        others = [self._choice.stats[url].bandwidth for url in self._sources() if url != request.relay]
        if any(bandwidth is None for bandwidth in others):
            return left_s < SECOND_REQUEST_S
        return left_s < min(
            (shard.num_bytes / max(1.0, bandwidth or 0.0) for bandwidth in others), default=math.inf
        )

    def _take_run(self, shard: Shard, relay: str) -> deque[Shard]:
        """Takes the shard and those after it that the relay should deliver within REQUEST_S."""
        run = deque([shard])
        if not self._pending:
            return run  # a second request for a shard that another relay is sending
        self._pending.popleft()
        bytes_per_s = (self._choice.stats[relay].bandwidth or 0.0) / NUM_STREAMS
        max_shards = min(REQUEST_BYTES, REQUEST_S * bytes_per_s) // shard.num_bytes
        # Smaller requests towards the end, so that all threads finish at about the same time.
        num_left = len(self._pending) + 1
        min_shards = min(LAST_REQUEST_S * bytes_per_s // shard.num_bytes, num_left // 2)
        max_shards = min(max_shards, max(num_left // (2 * NUM_STREAMS), min_shards))
        while len(run) < max_shards and self._pending and _follows(run[-1], self._pending[0]):
            run.append(self._pending.popleft())
        return run

    def _relays_for(self, shard: Shard) -> list[str]:
        """Returns the relays that may be asked for the shard now."""
        now_s = time.monotonic()
        asked = {request.relay for request in self._requests if shard in request.shards}
        return [
            url
            for url, share in self._choice.shares(self._sources()).items()
            if url not in asked
            and self._not_before_s.get(url, 0.0) <= now_s
            and self._num_requests_to(url) < self._max_requests_to(url, share)
        ]

    def _num_requests_to(self, url: str) -> int:
        return sum(request.relay == url for request in self._requests)

    def _max_requests_to(self, url: str, share: float) -> int:
        """Returns how many requests one relay may have at once: its share of the threads, so that slow relays do not occupy
        all of them, and one less than all, so that a thread is left if it hangs."""
        if self._choice.stats[url].bandwidth is None:
            return 1
        return NUM_STREAMS if share == 1 else min(math.ceil(share * NUM_STREAMS), NUM_STREAMS - 1)

    def _receive(self, connections: Connections, request: _ShardRequest) -> None:
        try:
            received = ask_shards(
                connections,
                request.relay,
                self._version,
                tuple(request.shards),
                cancelled=lambda: self._over,
                received=partial(self._count_bytes, request),
            )
            with contextlib.closing(received):
                for data in received:
                    shard, took_s = request.shards[0], time.monotonic() - request.started_s
                    if self._over:
                        break
                    self._assembly.write(shard, data)
                    self._count_delivery(request, shard, took_s)
        except NotOnRelay as reason:
            self._count_at_relay(request, reason.arrived)
            self._end_request(request, str(reason), failed=False)
        except RelayFailed as reason:
            self._end_request(request, str(reason), failed=True)
        except WrongBytes as reason:
            self._log.warning(f"relay dropped because it sent wrong bytes: {reason}", relay=request.relay)
            self._end_request(request, f"dropped, wrong bytes: {reason}", failed=True, drop=True)
        except (OSError, Rejected) as failure:
            with self._work:
                self._failure = failure
                self._news.notify()
            self._end_request(request, str(failure), failed=False)
        else:
            with self._work:
                self._requests.remove(request)
                self._work.notify_all()

    # -- statistics -------------------------------------------------------------------------------------

    def _count_bytes(self, request: _ShardRequest, num_bytes: int) -> None:
        """Counts bytes of a shard that is still arriving. Single bytes are no progress, or they could stop every timeout."""
        with self._work:
            request.num_bytes += num_bytes
            request.grew_s = time.monotonic()
            if request.relay != self._choice.last:
                self._window_bytes += num_bytes
            self._count_growth(request.shards[0].name, num_bytes)

    def _count_at_relay(self, request: _ShardRequest, arrived: int) -> None:
        """Counts what a relay has received of a file, and cannot send yet, since it was asked last.

        No more than twice the bytes that are downloaded: a relay that lies must not stop every timeout.
        """
        with self._work:
            file = request.relay, request.shards[0].name
            grew = arrived - self._at_relays.get(file, arrived)
            self._at_relays[file] = arrived
            if grew > 0 and self._claimed_bytes < 2 * self._assembly.num_bytes:
                self._claimed_bytes += grew
                self._count_growth(request.shards[0].name, grew)

    def _count_growth(self, name: str, num_bytes: int) -> None:
        self._assembly.count_received(name, num_bytes)
        self._unproven_bytes += num_bytes
        if self._unproven_bytes >= PROGRESS_BYTES:
            self._progress_s, self._unproven_bytes = time.monotonic(), 0

    def _count_delivery(self, request: _ShardRequest, shard: Shard, took_s: float) -> None:
        with self._work:
            request.shards.popleft()
            self._progress_s, self._unproven_bytes = time.monotonic(), 0
            request.started_s, request.num_bytes = self._progress_s, 0
            if self._over:
                return
            # Simultaneous requests to one relay share its link: its bandwidth is what they deliver together.
            at_once = self._num_requests_to(request.relay)
            self._choice.delivered(request.relay, at_once * shard.num_bytes / max(took_s, 1e-6))
            self._pauses_s.pop(request.relay, None)
            for other in self._requests:
                overdue = request.started_s - other.started_s > SECOND_REQUEST_S
                if overdue and not other.counted_as_failed and shard in other.shards:
                    other.counted_as_failed = True
                    self._choice.failed(other.relay)
            if not self._pending and self._assembly.complete:
                self._news.notify()

    def _end_request(self, request: _ShardRequest, reason: str, *, failed: bool, drop: bool = False) -> None:
        """Puts missing shards back and pauses the relay."""
        with self._work:
            self._requests.remove(request)
            if self._over:
                return
            self._reasons[request.relay] = reason
            if failed and not request.counted_as_failed:
                self._choice.failed(request.relay)
            if drop:
                self._dropped.add(request.relay)
                self._news.notify()
            pause_s = self._pauses_s.get(request.relay, FIRST_PAUSE_S)
            self._pauses_s[request.relay] = min(2 * pause_s, MAX_PAUSE_S)
            self._not_before_s[request.relay] = time.monotonic() + pause_s
            for shard in request.shards:
                requested = any(shard in other.shards for other in self._requests)
                if not requested and not self._assembly.has(shard):
                    self._pending.append(shard)  # at the end: other shards need not wait for this one
            self._work.notify_all()


class _ProgressLog:
    """Logs how far a download is, if it takes longer than LOG_AFTER_S."""

    def __init__(self, version: int, assembly: Assembly, log: Log) -> None:
        self._version, self._assembly, self._log = version, assembly, log
        self._started_s = time.monotonic()
        self._logged_s = self._started_s - LOG_EVERY_S + LOG_AFTER_S
        self._bytes_before = assembly.num_bytes_verified

    def log_if_due(self, state: Callable[[], str]) -> None:
        """Logs a line such as "fetching version 7: [######    ] 57 % of 269 MB, 38 MB/s", and `state()`."""
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        verified, total = self._assembly.num_bytes_verified, self._assembly.num_bytes
        share = verified / max(1, total)
        speed = (verified - self._bytes_before) / max(1e-6, now_s - self._started_s)
        bar = "#" * int(10 * share)
        self._log.info(
            f"fetching version {self._version}: [{bar:<10}] {100 * share:.0f} % of {total / 1e6:.0f} MB, "
            f"{speed / 1e6:.3g} MB/s; {state()}"
        )


def _follows(shard: Shard, other: Shard) -> bool:
    return (shard.name, shard.index + 1) == (other.name, other.index)
