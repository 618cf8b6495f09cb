"""The live page of a run. All viewers share one snapshot, and each viewer receives only the sections that changed.

    tables --(at most once a second)--> sections --(server-sent events)--> viewers

Without viewers nothing is computed. If a snapshot takes long, snapshots are taken less often, so that they use at most SHARE
of a core.
"""

import asyncio
import gzip
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files

from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.net.rate_limit import viewer_network
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http.router import query_number
from shoal.swarm.coordinator.views.page_snapshot import make_curve, take_snapshot
from shoal.swarm.coordinator.views.stats import read_reports
from shoal.wire.codes import Rejected
from shoal.wire.messages import StepReport

MAX_VIEWERS = 256
VIEWERS_PER_ADDRESS = 16
"""Event streams of one address: a few people behind one router, but not enough to lock out everybody else."""
PERIOD_S = 1.0
LONGEST_PERIOD_S = 30.0
SHARE = 0.006
"""Share of a core that snapshots may use. Together with sending them to ten viewers it stays below 1%."""
QUIET_S = 10.0
"""Longest time without an event. Without keep-alives proxies close the connection, and a viewer cannot detect a lost one."""
RETRY_MS = 2000
"""Time after which a browser reconnects."""

MAX_CURVES = 64
"""Parts of the curve that are kept until the next snapshot, for viewers that look at the same part."""
Endpoint = Callable[[Request], Awaitable[Response]]

PAGE_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/rollouts.js": ("rollouts.js", "text/javascript"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(slots=True, eq=False)
class Viewer:
    """One event stream."""

    address: str
    ended: bool = False
    """Whether another viewer has taken its place."""


class Feed:
    """The sections of the page by name, each with the number of the snapshot that last changed it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._steps: list[StepReport] = []
        self._sections: dict[str, tuple[int, str]] = {}
        self._curves: dict[tuple[int, int], str] = {}
        self._serial = 0
        self._next_s = float("-inf")
        self._taking, self._drawing = asyncio.Lock(), asyncio.Lock()
        self._closed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.viewers = 0
        self._by_address: dict[str, list[Viewer]] = {}
        self.snapshots = 0

    # -- one snapshot -----------------------------------------------------------------------------------

    async def fresh(self) -> str:
        """Returns the whole snapshot as JSON, at most one period old."""
        await self._refresh()
        return self._object(since=0)

    async def _refresh(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._taking:
            if time.monotonic() < self._next_s:
                return
            sections, cost_s = await run_in_threadpool(self._take)
            pause_s = min(LONGEST_PERIOD_S, max(PERIOD_S, cost_s / SHARE))
            # Slightly early, because a viewer that wakes just before the next snapshot is due would wait a whole period more.
            self._next_s = time.monotonic() + pause_s * 0.98
            self._serial += 1
            self._curves.clear()
            for name, text in sections.items():
                if self._sections.get(name, (0, ""))[1] != text:
                    self._sections[name] = (self._serial, text)

    async def curve(self, first: int, last: int) -> str:
        """Returns the steps from version `first` to `last` as a curve, for a viewer that zooms in."""
        await self._refresh()
        async with self._drawing:
            if (first, last) not in self._curves:
                steps = [step for step in self._steps if first <= step.version <= last]
                text = (await run_in_threadpool(make_curve, steps)).model_dump_json()
                if len(self._curves) >= MAX_CURVES:
                    self._curves.clear()
                self._curves[first, last] = text
            return self._curves[first, last]

    def _take(self) -> tuple[dict[str, str], float]:
        """Returns every section as JSON, and the CPU time that it took."""
        began_s = time.thread_time()
        with self._coordinator.database.read() as db:
            # Reports of steps never change, so only new ones are read.
            self._steps += read_reports(db, self._steps[-1].version if self._steps else 0)
            snapshot = take_snapshot(db, self._coordinator, make_curve(self._steps))
        self.snapshots += 1
        sections = {name: to_json(section).decode() for name, section in snapshot}
        return sections, time.thread_time() - began_s

    def _object(self, since: int) -> str:
        """Returns a JSON object with the sections that changed after snapshot `since`."""
        changed = (f'"{name}":{text}' for name, (serial, text) in self._sections.items() if serial > since)
        return "{" + ",".join(changed) + "}"

    # -- viewers ----------------------------------------------------------------------------------------

    @contextmanager
    def count_viewer(self, address: str) -> Iterator[Viewer]:
        """Counts a viewer for the duration of the block. Raises Rejected if all viewers, or those of its address, are too many."""
        here = len(self._by_address.get(address, ()))
        if here >= VIEWERS_PER_ADDRESS or not self._make_room(here):
            limit = (
                f"{MAX_VIEWERS} viewers" if here < VIEWERS_PER_ADDRESS else f"{here} viewers of your address"
            )
            raise Rejected(
                "request.too_many",
                f"the page has {limit} already, which is the limit",
                retry_after_s=RETRY_MS / 1000,
            )
        viewer = Viewer(address)
        self.viewers += 1
        self._by_address.setdefault(address, []).append(viewer)
        try:
            yield viewer
        finally:
            self._end(viewer)

    def _make_room(self, here: int) -> bool:
        """Returns whether there is room for a viewer of an address that has `here` of them.

        If there is none, the newest viewer of the address with the most viewers is ended, provided that this address has more viewers
        than the new one would have. So a few addresses cannot lock out all others.
        """
        if self.viewers < MAX_VIEWERS:
            return True
        most = max(self._by_address.values(), key=len)
        if len(most) <= here + 1:
            return False
        self._end(most[-1])
        return True

    def _end(self, viewer: Viewer) -> None:
        if viewer.ended:
            return
        viewer.ended = True
        self.viewers -= 1
        others = self._by_address[viewer.address]
        others.remove(viewer)
        if not others:
            del self._by_address[viewer.address]

    async def events(self, viewer: Viewer) -> AsyncIterator[str]:
        """Yields the events for one viewer: first all sections, then those that change."""
        sent, sent_at_s = 0, time.monotonic()
        yield f"retry: {RETRY_MS}\n\n"
        while not self._closed.is_set() and not viewer.ended:
            await self._refresh()
            if self._serial > sent and (text := self._object(since=sent)) != "{}":
                # JSON contains no raw newlines, so one data line is enough.
                yield f"id: {self._serial}\ndata: {text}\n\n"
                sent_at_s = time.monotonic()
            elif time.monotonic() - sent_at_s > QUIET_S:
                yield ": keep-alive\n\n"
                sent_at_s = time.monotonic()
            sent = self._serial
            wait_s = min(QUIET_S, max(0.05, self._next_s - time.monotonic()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), wait_s)

    def close(self) -> None:
        """Ends all event streams, so that a stopping server need not wait for viewers. May be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closed.set)


class EventStream(StreamingResponse):
    """The response with a viewer's events. The viewer is counted until the response ends, by disconnect or error too."""

    def __init__(self, feed: Feed, viewer: Viewer, counted: ExitStack, *, is_compressed: bool) -> None:
        # Without X-Accel-Buffering nginx would buffer events until its buffer is full.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        content: AsyncIterator[str | bytes] = feed.events(viewer)
        if is_compressed:
            headers["Content-Encoding"] = "gzip"
            content = _compressed(feed.events(viewer))
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._counted = counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted:
            await super().__call__(scope, receive, send)


async def _compressed(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Yields the events compressed. Each is flushed, so that a browser can read it at once."""
    stream = zlib.compressobj(3, wbits=31)
    async for event in events:
        yield stream.compress(event.encode()) + stream.flush(zlib.Z_SYNC_FLUSH)
    yield stream.flush()


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


# -- routes -----------------------------------------------------------------------------------------------


def page_routes(feed: Feed, limited: Callable[[Endpoint], Endpoint]) -> list[Route]:
    """Returns the routes of the page: its files, its data as JSON, and its data as events.

    `limited` adds the limit of costly public routes to an endpoint.
    """

    def uncached(text: str) -> Response:
        return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})

    async def get_page(request: Request) -> Response:
        return uncached(await feed.fresh())

    async def get_curve(request: Request) -> Response:
        first, last = query_number(request, "first", 0), query_number(request, "last", 10**15 - 1)
        return uncached(await feed.curve(first, last))

    async def get_events(request: Request) -> Response:
        counted = ExitStack()
        address = request.client.host if request.client is not None else ""
        viewer = counted.enter_context(feed.count_viewer(viewer_network(address)))
        return EventStream(feed, viewer, counted, is_compressed=_takes_gzip(request))

    routes: dict[str, Endpoint] = {
        "/v1/page": limited(get_page),
        "/v1/events": get_events,
        "/v1/curve": limited(get_curve),
    }
    routes |= {path: _file(page_file(name), kind) for path, (name, kind) in PAGE_FILES.items()}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()]


def page_file(name: str) -> bytes:
    """Returns the content of one of the page's files."""
    return (files("shoal.swarm.coordinator.http") / "page" / name).read_bytes()


def _file(content: bytes, media_type: str) -> Endpoint:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "ETag": tag,
        "Vary": "Accept-Encoding",
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    small = gzip.compress(content, 9, mtime=0)

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request):
            return Response(small, media_type=media_type, headers=headers | {"Content-Encoding": "gzip"})
        return Response(content, media_type=media_type, headers=headers)

    return endpoint
