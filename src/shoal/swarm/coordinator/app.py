"""The coordinator as an ASGI app: routes to handlers, refusals to problems. docs/wire/api.md lists the routes."""

import asyncio
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.net.buckets import Buckets
from shoal.net.objects import Incoming, LocalStore
from shoal.swarm.coordinator import ledger, nodes, openapi, policies, stats, uploads, vitals
from shoal.swarm.coordinator.auth import admitted, read_body, refuse_long_body, signer_of
from shoal.swarm.coordinator.coordinator import Coordinator
from shoal.swarm.coordinator.desk import Desk
from shoal.swarm.coordinator.expected import Expected
from shoal.swarm.coordinator.feed import Feed, page_routes
from shoal.swarm.coordinator.handlers import SIGNED_ROUTES, Call, SignedRoute, parse_version
from shoal.swarm.coordinator.snapshot import node_page
from shoal.wire.codes import CODES, Rejected
from shoal.wire.keys import PUBLIC_KEY
from shoal.wire.ledger import LedgerEvent, LedgerHead
from shoal.wire.manifest import Manifest
from shoal.wire.messages import History, Info, NodeView, Origin, Problem, RunList, Stats
from shoal.wire.record import Record, Sealed
from shoal.wire.request import Signer
from shoal.wire.snapshot import NodePage

Endpoint = Callable[[Request], Awaitable[Response]]

UPLOAD_IDLE_S = 30.0
"""An upload that stands still for so long is given up; the client may begin it again."""
UPLOADS_AT_ONCE = 2
"""Per name: one that stalled and the one that replaces it."""

_NUMBER = re.compile(r"[0-9]{1,15}")


def make_app(coordinator: Coordinator, *, authorities: frozenset[str] | None = None) -> Starlette:
    """`authorities` are the HOST:PORT names that a signed request may be for; None takes any."""
    desk = Desk(coordinator.database)
    rate = coordinator.config.requests_per_s
    entrance = Entrance(authorities, Buckets(rate=rate, burst=10 * rate))
    routes = [
        Route(route.path, _signed(coordinator, route, entrance, desk), methods=[route.method])
        for route in SIGNED_ROUTES
    ]
    routes.append(Route("/v1/objects/{name}", _receive_object(coordinator, desk), methods=["PUT"]))
    routes.append(Route("/metrics", _metrics(coordinator), methods=["GET"]))
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
    app.state.feed = feed
    app.router.redirect_slashes = False
    _answer_errors(app, coordinator)
    return app


# -- signed routes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entrance:
    """What a signed request must pass before anything is done about it."""

    authorities: frozenset[str] | None
    buckets: Buckets

    def signer(self, coordinator: Coordinator, request: Request, body: bytes) -> Signer:
        now_s = coordinator.clock()
        signer = signer_of(request, body, authorities=self.authorities, now_s=now_s)
        # After the signature: nobody can use up another's share. The run's own roles are not counted.
        if signer.key not in coordinator.roles and (wait_s := self.buckets.wait_s(signer.key, now_s)):
            limit = coordinator.config.requests_per_s
            raise Rejected(
                "request.too_many", f"a key may ask {limit:g} times a second", retry_after_s=wait_s
            )
        return signer


def _signed(coordinator: Coordinator, route: SignedRoute, entrance: Entrance, desk: Desk) -> Endpoint:
    def act(request: Request, body: bytes, signer: Signer) -> Response:
        if route.quick is not None:
            quick = route.quick(coordinator, signer, body)
            if quick is not None:
                return _json(_as_described(quick, route.gives))
        with admitted(coordinator, signer, route.callers) as tx:
            call = Call(coordinator=coordinator, tx=tx, body=body, path=request.path_params)
            answer = route.handle(call)
            return answer if isinstance(answer, Response) else _json(_as_described(answer, route.gives))

    async def endpoint(request: Request) -> Response:
        body = await read_body(request, route.max_body)
        # Here, and not at the desk: the signature is checked while others' requests are acted on.
        signer = entrance.signer(coordinator, request, body)
        if route.prepare is not None:
            lease_id = request.path_params["lease_id"]
            found = await run_in_threadpool(route.prepare, coordinator, signer, lease_id)
            if found is not None:
                await desk.do(partial(uploads.mark_stored, coordinator, found))
        return await desk.do(partial(act, request, body, signer))

    return endpoint


# -- uploads ----------------------------------------------------------------------------------------------


def _receive_object(coordinator: Coordinator, desk: Desk) -> Endpoint:
    arriving: Counter[str] = Counter()
    store = coordinator.store

    def expected_under(token: str) -> Expected:
        with coordinator.database.read() as db:
            return uploads.expected_under(db, token, coordinator.clock())

    async def endpoint(request: Request) -> Response:
        token = request.path_params["name"]
        if not isinstance(store, LocalStore):
            raise Rejected("request.not_found", "uploads of this run go to its object store")
        expected = await run_in_threadpool(expected_under, token)
        refuse_long_body(request, expected.num_bytes)
        if arriving[token] >= UPLOADS_AT_ONCE:
            raise Rejected("request.too_many", "this upload is under way already", retry_after_s=1.0)
        arriving[token] += 1
        try:
            incoming = store.receive(token, expected.sha256, expected.num_bytes)
            await _receive(request, incoming, expected.expires_at_s - coordinator.clock())
        finally:
            arriving[token] -= 1
            if not arriving[token]:
                del arriving[token]
        await desk.do(partial(uploads.mark_stored, coordinator, expected))
        return Response(status_code=204)

    return endpoint


async def _receive(request: Request, incoming: Incoming, left_s: float) -> None:
    """Every byte to the disk, counted and hashed; nothing stays behind if it breaks off or outlasts its lease."""
    complete, clock = False, asyncio.get_running_loop().time
    end_s = clock() + left_s
    try:
        async with asyncio.timeout_at(min(end_s, clock() + UPLOAD_IDLE_S)) as patience:
            async for piece in request.stream():
                patience.reschedule(min(end_s, clock() + UPLOAD_IDLE_S))
                await run_in_threadpool(incoming.write, piece)
        await run_in_threadpool(incoming.finish)
        complete = True
    except (TimeoutError, ClientDisconnect):
        raise Rejected("request.wrong_digest", "the upload broke off") from None
    finally:
        if not complete:
            incoming.discard()


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
            return _json(_as_described(answer, route.gives))
        return _json([_as_described(record, route.gives) for record in answer])

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
            return vitals.exposition(db, coordinator)

    async def endpoint(request: Request) -> Response:
        return Response(await run_in_threadpool(look), media_type="text/plain; version=0.0.4")

    return endpoint


def handle_ready(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    vitals.check_ready(coordinator)
    return Health(run=coordinator.spec.run, ledger_seq=ledger.head_seq(db))


def handle_node(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return nodes.views(db, [nodes.get_node(db, _node_id(request))], coordinator)[0]


def handle_node_page(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return node_page(db, coordinator, _node_id(request))


def _node_id(request: Request) -> str:
    key = str(request.path_params["node"])
    if not PUBLIC_KEY.fullmatch(key):
        raise Rejected("request.not_found", f"{key[:80]!r} is not a node id: 64 hex digits")
    return key


def handle_policy(db: Connection, coordinator: Coordinator, request: Request) -> Record:
    return policies.get_manifest(db, parse_version(request.path_params["version"]))


def handle_ledger(db: Connection, coordinator: Coordinator, request: Request) -> list[Record]:
    from_seq = _number(request, "from_seq", 1)
    limit = _number(request, "limit", ledger.PAGE)
    return [*ledger.read_page(db, from_seq, min(limit, ledger.PAGE))]


class Health(Record):
    run: str
    ledger_seq: int


PUBLIC_ROUTES: dict[str, PublicRoute] = {
    "/healthz": PublicRoute(
        lambda db, coordinator, request: Health(run=coordinator.spec.run, ledger_seq=ledger.head_seq(db)),
        Health,
    ),
    "/readyz": PublicRoute(handle_ready, Health),
    "/v1/info": PublicRoute(lambda db, coordinator, request: stats.info(db, coordinator), Info),
    "/v1/runs": PublicRoute(lambda db, coordinator, request: stats.runs(db, coordinator), RunList),
    "/v1/stats": PublicRoute(lambda db, coordinator, request: stats.stats(db, coordinator), Stats),
    "/v1/history": PublicRoute(lambda db, coordinator, request: stats.history(db), History),
    "/v1/nodes/{node}": PublicRoute(handle_node, NodeView),
    "/v1/nodes/{node}/page": PublicRoute(handle_node_page, NodePage),
    "/v1/origin": PublicRoute(lambda db, coordinator, request: policies.origin(db), Origin),
    "/v1/policies/latest": PublicRoute(
        lambda db, coordinator, request: policies.get_manifest(db, None), Sealed[Manifest]
    ),
    "/v1/policies/{version}": PublicRoute(handle_policy, Sealed[Manifest]),
    "/v1/ledger": PublicRoute(handle_ledger, LedgerEvent, many=True, query=("from_seq", "limit")),
    "/v1/ledger/head": PublicRoute(
        lambda db, coordinator, request: ledger.signed_head(db, coordinator.spec.run, coordinator.run_key),
        Sealed[LedgerHead],
    ),
}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not _NUMBER.fullmatch(text):
        raise Rejected("request.malformed", f"{name}={text[:32]!r} is not a number")
    return int(text)


# -- answers ----------------------------------------------------------------------------------------------


def _as_described(answer: Record, gives: type[Record] | None) -> Record:
    assert gives is not None and isinstance(answer, gives), f"/openapi.json says {gives}, not {type(answer)}"
    return answer


def _json(answer: Record | Sequence[Record]) -> Response:
    if isinstance(answer, Record):
        content = answer.model_dump_json()
    else:
        content = f"[{','.join(record.model_dump_json() for record in answer)}]"
    return Response(content, media_type="application/json")


def _answer_errors(app: Starlette, coordinator: Coordinator) -> None:
    def problem(code: str, detail: str, retry_after_s: float | None = None) -> Response:
        meaning = CODES[code]
        body = Problem(
            code=code,
            detail=detail,
            fix=meaning.remedy,
            retry_after_s=retry_after_s,
            server_time_s=coordinator.clock(),
        )
        headers = {} if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
        return Response(
            body.model_dump_json(),
            status_code=meaning.status,
            media_type="application/problem+json",
            headers=headers,
        )

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Rejected)
        return problem(error.code, error.detail, error.retry_after_s)

    async def refuse_route(request: Request, error: Exception) -> Response:
        return problem("request.not_found", f"there is no {request.method} {request.url.path[:200]}")

    async def fail(request: Request, error: Exception) -> Response:
        # The traceback goes to the server's own log; a stranger gets no more than that it failed.
        first_line = str(error).partition("\n")[0]
        coordinator.log.error(
            f"{request.method} {request.url.path[:200]} failed: {type(error).__name__}: {first_line}"
        )
        return problem("request.failed", "an error on our side; it is logged")

    app.add_exception_handler(Rejected, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(Exception, fail)
