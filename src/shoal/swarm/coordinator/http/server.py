"""The coordinator as a process: opens the runs' folders, serves their ASGI apps, and runs housekeeping until it is told to stop.

/runs/NAME/...      the run of that name
/v1/runs            all runs, the one that needs workers most first
/healthz, /readyz   whether all runs are well
anything else       the first run, so that a pool of one run needs no prefix
"""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.files import hold_lock
from shoal.net.http_server import MAX_CONNECTIONS, Server, allow_open_files, authority, listen
from shoal.net.rate_limit import Buckets, viewer_network, with_client_address
from shoal.net.s3_store import Credentials, S3Store
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import Coordinator, newest_version, open_coordinator
from shoal.swarm.coordinator.housekeeping import resume, run_housekeeping
from shoal.swarm.coordinator.http import openapi
from shoal.swarm.coordinator.http.live_page import Endpoint, Feed, page_routes
from shoal.swarm.coordinator.http.router import (
    JSON,
    PublicRoute,
    Router,
    check_rate,
    failure,
    problem,
    to_json,
)
from shoal.swarm.coordinator.http.routes import PATH_PARSERS, PUBLIC_ROUTES, SIGNED_ROUTES
from shoal.swarm.coordinator.http.upload_receiver import Receiver
from shoal.swarm.coordinator.leases import uploads
from shoal.swarm.coordinator.leases.issue import check_upload_limit
from shoal.swarm.coordinator.membership.relay_trials import start_trials
from shoal.swarm.coordinator.store.writer import Writer
from shoal.swarm.coordinator.views import prometheus, stats
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.messages import RunList, RunView
from shoal.wire.run_spec import RunSpec

PREFIX = "/runs/"
CACHE_S = 1.0
"""Seconds for which the answer of a costly public route is cached."""
LEDGER_PAGES = 2
"""Pages of the ledger that are read at the same time. Further readers wait, so that they do not delay the nodes' requests."""
SEARCHES = 2
"""Searches for rollouts that run at the same time."""
COSTLY_PER_S = 20.0
"""Requests a second that one address may send to costly public routes; ten times as many at once."""
_WILDCARDS = ("0.0.0.0", "::", "")


# -- the app of one run -----------------------------------------------------------------------------------


class RunApp:
    """The ASGI app of one run."""

    def __init__(
        self, coordinator: Coordinator, *, authorities: frozenset[str] | None = None, cache_s: float = CACHE_S
    ) -> None:
        """`authorities` are the HOST:PORT names that a signed request may be for; None accepts any."""
        self.coordinator = coordinator
        self.feed = Feed(coordinator)
        self._writer = Writer(coordinator.database)
        self._receiver = Receiver(coordinator, self._writer)
        self.public = _public_app(coordinator, self.feed, cache_s)
        self._router = Router(
            coordinator,
            SIGNED_ROUTES,
            PATH_PARSERS,
            self._writer,
            receive_upload=self._receiver.receive,
            public=self.public,
            authorities=authorities,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send, [self])
        else:
            await self._router(with_client_address(scope), receive, send)

    def close(self) -> None:
        """Ends the threads of the app. Call it when no request comes in any more."""
        self._writer.close()
        self._receiver.close()


async def _run_lifespan(receive: Receive, send: Send, apps: Sequence[RunApp]) -> None:
    assert (await receive())["type"] == "lifespan.startup"
    await send({"type": "lifespan.startup.complete"})
    assert (await receive())["type"] == "lifespan.shutdown"
    for app in apps:
        await run_in_threadpool(app.close)
    await send({"type": "lifespan.shutdown.complete"})


def _public_app(coordinator: Coordinator, feed: Feed, cache_s: float) -> Starlette:
    """Returns the framework's app for unsigned requests."""
    cache = AnswerCache(coordinator, cache_s)
    pages, searches = asyncio.Semaphore(LEDGER_PAGES), asyncio.Semaphore(SEARCHES)

    def look(route: PublicRoute, request: Request) -> Response:
        with coordinator.database.read() as db:
            answer = route.view(db, coordinator, request)
        return Response(to_json(answer, route.gives), media_type=JSON)

    def look_at_metrics(request: Request) -> Response:
        with coordinator.database.read() as db:
            return Response(prometheus.exposition(db, coordinator), media_type=prometheus.MEDIA_TYPE)

    def endpoint(route: PublicRoute) -> Endpoint:
        view = partial(look, route)
        if route.is_limited:
            return cache.limited(_in_thread(view, searches))
        return cache.cached(view) if route.is_costly else _in_thread(view, pages if route.many else None)

    description = openapi.document(SIGNED_ROUTES, PUBLIC_ROUTES)

    async def describe(request: Request) -> Response:
        return Response(description, media_type=JSON)

    endpoints = {path: endpoint(route) for path, route in PUBLIC_ROUTES.items()}
    endpoints |= {"/metrics": cache.cached(look_at_metrics), "/openapi.json": describe}
    routes = [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
    app = Starlette(routes=[*routes, *page_routes(feed, cache.limited)])
    app.router.redirect_slashes = False
    _answer_errors(app, coordinator)
    return app


def _in_thread(view: Callable[[Request], Response], limit: asyncio.Semaphore | None) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        async with limit or contextlib.nullcontext():
            return await run_in_threadpool(view, request)

    return endpoint


class AnswerCache:
    """Answers of costly public routes, which anybody may ask for without a key.

    An answer is cached for `cache_s`, so that any number of clients cost one computation at a time. One address may ask only
    COSTLY_PER_S times a second.
    """

    def __init__(self, coordinator: Coordinator, cache_s: float) -> None:
        self._clock, self._cache_s = coordinator.clock, cache_s
        self._buckets = Buckets(rate=COSTLY_PER_S, burst=10 * COSTLY_PER_S)

    def cached(self, view: Callable[[Request], Response]) -> Endpoint:
        lock, answer, until_s = asyncio.Lock(), Response(), float("-inf")

        async def endpoint(request: Request) -> Response:
            nonlocal answer, until_s
            self._check_rate(request)
            async with lock:
                if time.monotonic() >= until_s:
                    answer = await run_in_threadpool(view, request)
                    until_s = time.monotonic() + self._cache_s
            return answer

        return endpoint

    def limited(self, endpoint: Endpoint) -> Endpoint:
        """Returns the endpoint with the limit for each address, without a cache."""

        async def check_first(request: Request) -> Response:
            self._check_rate(request)
            return await endpoint(request)

        return check_first

    def _check_rate(self, request: Request) -> None:
        address = request.client.host if request.client is not None else ""
        rule = f"one address may ask {COSTLY_PER_S:g} times a second for what is computed over all tables"
        check_rate(self._buckets, viewer_network(address), self._clock(), rule)


def _answer_errors(app: Starlette, coordinator: Coordinator) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Rejected)
        return problem(coordinator, error)

    async def refuse_route(request: Request, error: Exception) -> Response:
        detail = f"there is no {request.method} {request.url.path[:200]}"
        return problem(coordinator, Rejected("request.not_found", detail))

    async def fail(request: Request, error: Exception) -> Response:
        return failure(coordinator, request.scope, error)

    app.add_exception_handler(Rejected, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(Exception, fail)


# -- several runs behind one address ----------------------------------------------------------------------


class RunPool:
    """An ASGI app over the apps of several runs. Each run has its own folder, keys, ledger and trust."""

    def __init__(self, apps: Sequence[RunApp]) -> None:
        self._apps = {app.coordinator.spec.run: app for app in apps}
        assert len(self._apps) == len(apps), "two runs have the same name"
        self._first = apps[0]
        cache = AnswerCache(self._first.coordinator, CACHE_S)
        self._list_cached = cache.cached(lambda _: Response(to_json(self._list(), RunList), media_type=JSON))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _run_lifespan(receive, send, list(self._apps.values()))
            return
        name, path = self._split(scope["path"])
        if path == "/v1/runs" and scope["method"] == "GET" and len(self._apps) > 1:
            try:
                answer = await self._list_cached(Request(with_client_address(scope), receive))
            except Rejected as error:
                answer = problem(self._first.coordinator, error)
            await answer(scope, receive, send)
        elif name is None:
            await self._answer_for_all(scope, receive, send)
        elif name in self._apps:
            # `raw_path` stays as it was sent, because the signature covers it.
            await self._apps[name]({**scope, "path": path}, receive, send)
        else:
            known = ", ".join(self._apps)
            unknown = Rejected("request.not_found", f"no run {name[:80]!r} here; there are {known}")
            await problem(self._first.coordinator, unknown)(scope, receive, send)

    def close_feeds(self) -> None:
        for app in self._apps.values():
            app.feed.close()

    @staticmethod
    def _split(path: str) -> tuple[str | None, str]:
        """Returns the run's name and the rest of the path; None for a path without a name."""
        if not path.startswith(PREFIX):
            return None, path
        name, slash, rest = path.removeprefix(PREFIX).partition("/")
        return name, slash + rest or "/"

    async def _answer_for_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/readyz":
            for name, app in self._apps.items():
                if stalled := app.coordinator.health.stalled():
                    not_ready = Rejected("request.not_ready", f"{name}: {'; '.join(stalled)}")
                    await problem(app.coordinator, not_ready)(scope, receive, send)
                    return
        await self._first(scope, receive, send)

    def _list(self) -> RunList:
        """Returns all runs by need: finished runs last, then by live workers for each group of a step."""
        found: list[tuple[bool, float, RunView]] = []
        for name, app in self._apps.items():
            with app.coordinator.database.read() as db:
                view = stats.runs(db, app.coordinator).runs[0]
            share = view.live_workers / app.coordinator.config.groups_per_step
            found.append((view.finished, share, view.model_copy(update={"path": PREFIX + name})))
        found.sort(key=lambda entry: entry[:2])
        return RunList(runs=tuple(view for _, _, view in found))


# -- the process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """One run and its folder."""

    config: CoordinatorConfig
    spec: RunSpec
    dir: Path
    credentials: Credentials | None = None
    """Credentials of its object store, if it has one."""
    settings: Mapping[str, Any] | None = None
    """Settings of the run file that the ledger records besides the terms."""


def run_pool(
    runs: Sequence[Hosting],
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves the runs until `stop`. `on_ready` gets the URL once the server answers (port 0 takes a free port).

    With PostgreSQL several coordinators may serve one run from one folder.
    """
    names = [run.spec.run for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs of one coordinator must have different names: {', '.join(names)}")
    with contextlib.ExitStack() as stack:
        # Requests leave no reference cycles, and searching for them took 5 % of the time: let the garbage collector run rarely.
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        coordinators = [stack.enter_context(_opened(run)) for run in runs]
        for coordinator in coordinators:
            if isinstance(coordinator.store, S3Store):
                arguments = (coordinator, coordinator.store, stop)
                sweep = threading.Thread(
                    target=uploads.keep_sweeping, args=arguments, name="sweep", daemon=True
                )
                sweep.start()
            start_trials(coordinator, stop)
        _serve(coordinators, host, port, stop, on_ready)


@contextmanager
def _opened(run: Hosting) -> Iterator[Coordinator]:
    with contextlib.nullcontext() if run.config.database else hold_run_folder(run.dir):
        coordinator = open_coordinator(
            run.config,
            run.spec,
            run.dir,
            log=Log("coordinator"),
            credentials=run.credentials,
            settings=run.settings,
        )
        try:
            check_upload_limit(coordinator)
            resume(coordinator)
            yield coordinator
        finally:
            coordinator.close()


def hold_run_folder(dir: Path) -> contextlib.AbstractContextManager[None]:
    """Holds the folder of a run for one coordinator. Raises AlreadyLocked if another one runs in it."""
    message = f"a coordinator is already running in {dir}; stop it first"
    return hold_lock(dir / "coordinator.lock", message=message)


def _serve(
    coordinators: Sequence[Coordinator],
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None,
) -> None:
    sock = listen(host, port)
    allow_open_files(MAX_CONNECTIONS + 500, coordinators[0].log)
    port = int(sock.getsockname()[1])
    url = f"http://{authority(host, port)}"
    pool = RunPool([_make_app(coordinator, host, port, url) for coordinator in coordinators])
    server = Server(pool, sock, on_close=pool.close_feeds)
    server.start()
    try:
        if on_ready is not None:
            on_ready(url)
        run_housekeeping(coordinators, stop, check=server.check)
    finally:
        server.close()


def _make_app(coordinator: Coordinator, host: str, port: int, url: str) -> RunApp:
    authorities = known_authorities(host, port, coordinator.config.authorities)
    with coordinator.database.read() as db:
        newest = newest_version(db)
    coordinator.log.info("serving", url=url, run=coordinator.spec.run, newest_version=newest)
    if authorities is None:
        coordinator.log.warning("signed requests for any host name are accepted; set coordinator.authorities")
    return RunApp(coordinator, authorities=authorities)


def known_authorities(host: str, port: int, named: tuple[str, ...]) -> frozenset[str] | None:
    """Returns the HOST:PORT names that a signed request may be for; None if they cannot be known, which accepts any."""
    if host in _WILDCARDS and not named:
        return None
    own = {authority(host, port), *(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))}
    return frozenset(name.lower() for name in own | set(named))
