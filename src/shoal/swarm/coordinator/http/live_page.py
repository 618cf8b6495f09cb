"""The page, live: one snapshot at a time however many look, and to each viewer only the sections that changed.

    tables --(at most once a second)--> sections --(server-sent events)--> viewers

With nobody looking nothing is computed. A snapshot that has become dear is taken less often: it gets SHARE of a core.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.views.page_snapshot import make_curve, read_reports, take_snapshot
from shoal.wire.codes import Rejected
from shoal.wire.messages import StepReport
from shoal.wire.page_data import Snapshot

MAX_VIEWERS = 256
PERIOD_S = 1.0
LONGEST_PERIOD_S = 30.0
SHARE = 0.006
"""Of a core, for snapshots. Sending them to ten viewers takes far less than what is left of a hundredth."""
QUIET_S = 10.0
"""A word at least so often, so that proxies keep the connection and a viewer can tell silence from loss."""
RETRY_MS = 2000

PAGE_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Feed:
    """Sections by name, each with the number of the snapshot that last changed it."""

    def __init__(self, coordinator: Coordinator, *, period_s: float = PERIOD_S) -> None:
        self._coordinator, self._period_s = coordinator, period_s
        self._steps: list[StepReport] = []
        self._sections: dict[str, tuple[int, str]] = {}
        self._serial = 0
        self._next_s = float("-inf")
        self._taking = asyncio.Lock()
        self._closed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.viewers = 0
        self.snapshots = 0

    # -- one snapshot -----------------------------------------------------------------------------------

    async def fresh(self) -> str:
        """The whole snapshot as JSON, at most a period old."""
        await self._refresh()
        return self._object(since=0)

    async def _refresh(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._taking:
            if time.monotonic() < self._next_s:
                return
            sections, cost_s = await run_in_threadpool(self._take)
            pause_s = min(LONGEST_PERIOD_S, max(self._period_s, cost_s / SHARE))
            # A tick early is no harm; a viewer who wakes a moment too soon would wait a whole period more.
            self._next_s = time.monotonic() + pause_s * 0.98
            self._serial += 1
            for name, text in sections.items():
                if self._sections.get(name, (0, ""))[1] != text:
                    self._sections[name] = (self._serial, text)

    def _take(self) -> tuple[dict[str, str], float]:
        """Every section as JSON, and the processor time it took."""
        began_s = time.thread_time()
        with self._coordinator.database.read() as db:
            # Steps never change: only the new ones are read.
            self._steps += read_reports(db, self._steps[-1].version if self._steps else 0)
            snapshot = take_snapshot(db, self._coordinator, make_curve(self._steps))
        self.snapshots += 1
        return sections_of(snapshot), time.thread_time() - began_s

    def _object(self, since: int) -> str:
        changed = (f'"{name}":{text}' for name, (serial, text) in self._sections.items() if serial > since)
        return "{" + ",".join(changed) + "}"

    # -- viewers ----------------------------------------------------------------------------------------

    @contextmanager
    def seat(self) -> Iterator[None]:
        """One of so many; Rejected if all are taken."""
        if self.viewers >= MAX_VIEWERS:
            raise Rejected(
                "request.too_many", f"{MAX_VIEWERS} viewers look on already", retry_after_s=RETRY_MS / 1000
            )
        self.viewers += 1
        try:
            yield
        finally:
            self.viewers -= 1

    async def events(self) -> AsyncIterator[str]:
        """For one viewer: everything first, then what changes."""
        sent, spoke_s = 0, time.monotonic()
        yield f"retry: {RETRY_MS}\n\n"
        while not self._closed.is_set():
            await self._refresh()
            if self._serial > sent and (text := self._object(since=sent)) != "{}":
                # JSON has no bare newlines, so an event is one line.
                yield f"id: {self._serial}\ndata: {text}\n\n"
                spoke_s = time.monotonic()
            elif time.monotonic() - spoke_s > QUIET_S:
                yield ": still here\n\n"
                spoke_s = time.monotonic()
            sent = self._serial
            await self._pause()

    async def _pause(self) -> None:
        wait_s = min(QUIET_S, max(0.05, self._next_s - time.monotonic()))
        try:
            await asyncio.wait_for(self._closed.wait(), wait_s)
        except TimeoutError:
            return

    def close(self) -> None:
        """From any thread: viewers are let go, so that a server which stops need not wait for them."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closed.set)


class EventStream(StreamingResponse):
    """A viewer holds a seat for as long as the answer lasts, however it ends."""

    def __init__(self, feed: Feed, seat: ExitStack) -> None:
        # nginx would hold events back until a buffer is full.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(feed.events(), media_type="text/event-stream", headers=headers)
        self._seat = seat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._seat:
            await super().__call__(scope, receive, send)


def sections_of(snapshot: Snapshot) -> dict[str, str]:
    return {name: _section(snapshot, name) for name in Snapshot.model_fields}


def _section(snapshot: Snapshot, name: str) -> str:
    text = snapshot.model_dump_json(include={name})
    return text[len(name) + 4 : -1]  # without {"name": and }


# -- routes -----------------------------------------------------------------------------------------------


def page_routes(feed: Feed) -> list[Route]:
    """The page's files, its data as JSON, and the same as events."""

    async def look(request: Request) -> Response:
        headers = {"Cache-Control": "no-store"}
        return Response(await feed.fresh(), media_type="application/json", headers=headers)

    async def follow(request: Request) -> Response:
        seat = ExitStack()
        seat.enter_context(feed.seat())
        return EventStream(feed, seat)

    routes: dict[str, Callable[[Request], Awaitable[Response]]] = {"/v1/page": look, "/v1/events": follow}
    routes |= {path: _file(page_file(name), kind) for path, (name, kind) in PAGE_FILES.items()}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()]


def page_file(name: str) -> bytes:
    return (files("shoal.swarm.coordinator.http") / "page" / name).read_bytes()


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return endpoint
