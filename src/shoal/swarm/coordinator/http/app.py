"""The coordinator as an ASGI app: public routes here, signed ones in entrance.py, uploads in receiving.py. docs/wire/api.md lists them."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http import openapi
from shoal.swarm.coordinator.http.handlers import parse_version
from shoal.swarm.coordinator.http.live_page import Feed, page_routes
from shoal.swarm.coordinator.http.responses import JSON, as_described, problem, to_json
from shoal.swarm.coordinator.http.router import Entrance, failure
from shoal.swarm.coordinator.http.signed_routes import SIGNED_ROUTES
from shoal.swarm.coordinator.http.upload_receiver import Receiver
from shoal.swarm.coordinator.membership import nodes, versions
from shoal.swarm.coordinator.store import ledger_chain
from shoal.swarm.coordinator.store.door import open_door
from shoal.swarm.coordinator.store.writer import Desk
from shoal.swarm.coordinator.views import node_views, prometheus, stats
from shoal.swarm.coordinator.views.page_snapshot import node_page
from shoal.wire.codes import Rejected
from shoal.wire.keys import PUBLIC_KEY
from shoal.wire.ledger import LedgerEvent, LedgerHead
from shoal.wire.manifest import Manifest
from shoal.wire.messages import History, Info, NodeView, Origin, RunList, Stats
from shoal.wire.page_data import NodePage
from shoal.wire.record import Record, Sealed

Endpoint = Callable[[Request], Awaitable[Response]]

_NUMBER = re.compile(r"[0-9]{1,15}")


def make_app(coordinator: Coordinator, *, authorities: frozenset[str] | None = None) -> Entrance:
    """`authorities` are the HOST:PORT names that a signed request may be for; None takes any."""
    desk = Desk(coordinator.database, partial(open_door, coordinator))
    receiver = Receiver(coordinator, desk)
    routes = [Route("/metrics", _metrics(coordinator), methods=["GET"])]
    routes += [
        Route(path, _public(coordinator, route), methods=["GET"]) for path, route in PUBLIC_ROUTES.items()
    ]
    routes.append(Route("/openapi.json", _description(), methods=["GET"]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(desk.close)

    feed = Feed(coordinator)
    app = Starlette(routes=[*routes, *page_routes(feed)], lifespan=lifespan)
    app.router.redirect_slashes = False
    _answer_errors(app, coordinator)
    return Entrance(
        coordinator, SIGNED_ROUTES, desk, receiver=receiver, rest=app, feed=feed, authorities=authorities
    )


# -- public routes ----------------------------------------------------------------------------------------

View = Callable[[Connection, Coordinator, Request], Record | list[Record]]


@dataclass(frozen=True, slots=True)
class PublicRoute:
    view: View
    gives: type[Record]
    many: bool = False
    """Whether it answers with a list of them."""
    query: tuple[str, ...] = ()
    """Names of the numbers it may be asked with."""


def _public(coordinator: Coordinator, route: PublicRoute) -> Endpoint:
    def look(request: Request) -> Response:
        with coordinator.database.read() as db:
            answer = route.view(db, coordinator, request)
        if isinstance(answer, Record):
            return _json(as_described(answer, route.gives))
        return _json([as_described(record, route.gives) for record in answer])

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(look, request)

    return endpoint


def _description() -> Endpoint:
    text = openapi.document(SIGNED_ROUTES, PUBLIC_ROUTES)

    async def endpoint(request: Request) -> Response:
        return Response(text, media_type="application/json")

    return endpoint


def _metrics(coordinator: Coordinator) -> Endpoint:
    def look() -> str:
        with coordinator.database.read() as db:
            return prometheus.exposition(db, coordinator)

    async def endpoint(request: Request) -> Response:
        return Response(await run_in_threadpool(look), media_type="text/plain; version=0.0.4")

    return endpoint


def handle_ready(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    prometheus.check_ready(coordinator)
    return Health(run=coordinator.spec.run, ledger_seq=ledger_chain.head_seq(db))


def handle_node(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return node_views.views(db, [nodes.get_node(db, _node_id(request))], coordinator)[0]


def handle_node_page(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return node_page(db, coordinator, _node_id(request))


def _node_id(request: Request) -> str:
    key = str(request.path_params["node"])
    if not PUBLIC_KEY.fullmatch(key):
        raise Rejected("request.not_found", f"{key[:80]!r} is not a node id: 64 hex digits")
    return key


def handle_policy(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return versions.get_manifest(db, parse_version(request.path_params["version"]))


def handle_ledger(db: Connection, coordinator: Coordinator, request: Request) -> list[Record]:
    from_seq = _number(request, "from_seq", 1)
    limit = _number(request, "limit", ledger_chain.PAGE)
    return [*ledger_chain.read_page(db, from_seq, min(limit, ledger_chain.PAGE))]


class Health(Record):
    run: str
    ledger_seq: int


PUBLIC_ROUTES: dict[str, PublicRoute] = {
    "/healthz": PublicRoute(
        lambda db, coordinator, request: Health(
            run=coordinator.spec.run, ledger_seq=ledger_chain.head_seq(db)
        ),
        Health,
    ),
    "/readyz": PublicRoute(handle_ready, Health),
    "/v1/info": PublicRoute(lambda db, coordinator, request: stats.info(db, coordinator), Info),
    "/v1/runs": PublicRoute(lambda db, coordinator, request: stats.runs(db, coordinator), RunList),
    "/v1/stats": PublicRoute(lambda db, coordinator, request: stats.stats(db, coordinator), Stats),
    "/v1/history": PublicRoute(lambda db, coordinator, request: stats.history(db), History),
    "/v1/nodes/{node}": PublicRoute(handle_node, NodeView),
    "/v1/nodes/{node}/page": PublicRoute(handle_node_page, NodePage),
    "/v1/origin": PublicRoute(lambda db, coordinator, request: versions.origin(db), Origin),
    "/v1/policies/latest": PublicRoute(
        lambda db, coordinator, request: versions.get_manifest(db, None), Sealed[Manifest]
    ),
    "/v1/policies/{version}": PublicRoute(handle_policy, Sealed[Manifest]),
    "/v1/ledger": PublicRoute(handle_ledger, LedgerEvent, many=True, query=("from_seq", "limit")),
    "/v1/ledger/head": PublicRoute(
        lambda db, coordinator, request: ledger_chain.signed_head(
            db, coordinator.spec.run, coordinator.run_key
        ),
        Sealed[LedgerHead],
    ),
}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not _NUMBER.fullmatch(text):
        raise Rejected("request.malformed", f"{name}={text[:32]!r} is not a number")
    return int(text)


# -- answers ----------------------------------------------------------------------------------------------


def _json(answer: Record | Sequence[Record]) -> Response:
    return Response(to_json(answer), media_type=JSON)


def _answer_errors(app: Starlette, coordinator: Coordinator) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Rejected)
        now_s = coordinator.clock()
        return problem(error.code, error.detail, now_s=now_s, retry_after_s=error.retry_after_s)

    async def refuse_route(request: Request, error: Exception) -> Response:
        told = f"there is no {request.method} {request.url.path[:200]}"
        return problem("request.not_found", told, now_s=coordinator.clock())

    async def fail(request: Request, error: Exception) -> Response:
        # The traceback goes to the server's own log.
        return failure(coordinator, request.scope, error)

    app.add_exception_handler(Rejected, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(Exception, fail)
