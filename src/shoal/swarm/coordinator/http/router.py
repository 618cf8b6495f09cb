"""Where signed requests come in: plain ASGI from the socket to the desk, for they are nearly all that comes.

A framework's way from a path to a function, with its request object and two layers of error handling, cost as much as
checking the signature. Whatever is not a signed route is the framework's.
"""

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.net.object_store import LocalStore
from shoal.net.rate_limit import Buckets
from shoal.swarm.coordinator import disk_full
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http.auth import BODY_S, admitted
from shoal.swarm.coordinator.http.handlers import Call, SignedRoute
from shoal.swarm.coordinator.http.live_page import Feed
from shoal.swarm.coordinator.http.responses import as_described, problem, send_json, to_json
from shoal.swarm.coordinator.http.upload_receiver import Receiver, check_length
from shoal.swarm.coordinator.leases import uploads
from shoal.swarm.coordinator.membership import nodes
from shoal.swarm.coordinator.store.door import Knock, has_beaten
from shoal.swarm.coordinator.store.needs import Needs
from shoal.swarm.coordinator.store.writer import Desk
from shoal.wire.codes import Rejected
from shoal.wire.messages import Heartbeat
from shoal.wire.request import Signer, Target, verify_request

Found = tuple[SignedRoute, dict[str, str]]

_ONCE = {b"host", b"content-digest", b"signature-input", b"signature", b"content-length"}
_OPEN, _CLOSE = "{", "}"


class RouteTable:
    """Method and path to a signed route. A path has at most one part that varies, the fourth: /v1/leases/{lease_id}/submit."""

    def __init__(self, routes: Iterable[SignedRoute]) -> None:
        self._plain: dict[tuple[str, str], SignedRoute] = {}
        self._varying: dict[tuple[str, str, str], tuple[SignedRoute, str]] = {}
        for route in routes:
            before, brace, rest = route.path.partition(_OPEN)
            if not brace:
                self._plain[route.method, route.path] = route
                continue
            name, _, after = rest.partition(_CLOSE)
            assert before.count("/") == 3 and _OPEN not in after, (
                f"{route.path}: only the fourth part may vary"
            )
            self._varying[route.method, before, after] = (route, name)

    def find(self, method: str, path: str) -> Found | None:
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain, {}
        parts = path.split("/", 4)
        if len(parts) < 4 or not parts[3]:
            return None
        after = f"/{parts[4]}" if len(parts) == 5 else ""
        varying = self._varying.get((method, f"/{parts[1]}/{parts[2]}/", after))
        return None if varying is None else (varying[0], {varying[1]: parts[3]})


class Entrance:
    """An ASGI app: signed routes itself, all else by `rest`."""

    def __init__(
        self,
        coordinator: Coordinator,
        routes: Iterable[SignedRoute],
        desk: Desk,
        *,
        receiver: Receiver,
        rest: Starlette,
        feed: Feed,
        authorities: frozenset[str] | None,
    ) -> None:
        self.feed, self._receiver = feed, receiver
        self._coordinator, self._desk, self.rest = coordinator, desk, rest
        self._authorities = authorities
        self._routes = RouteTable(routes)
        rate = coordinator.config.requests_per_s
        self._buckets = Buckets(rate=rate, burst=10 * rate)

    def close(self) -> None:
        """When nothing comes in any more."""
        self._desk.close()
        self._receiver.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
        token = None if found is not None else _uploaded(scope)
        if found is None and token is None:
            await self.rest(scope, receive, send)
            return
        answer: bytes | Response
        try:
            if found is not None:
                answer = await self._answer(found, scope, receive)
            else:
                assert token is not None
                length = _headers_of(scope["headers"]).get("content-length", "0")
                answer = await self._receiver.take(token, length, receive)
        except Rejected as error:
            now_s = self._coordinator.clock()
            answer = problem(error.code, error.detail, now_s=now_s, retry_after_s=error.retry_after_s)
        except Exception as error:
            words = disk_full.missing(self._coordinator, error)
            if words is None:
                await failure(self._coordinator, scope, error)(scope, receive, send)
                raise  # the server logs where it came from
            now_s = self._coordinator.clock()
            answer = problem("request.no_space", words, now_s=now_s, retry_after_s=disk_full.RETRY_S)
        if isinstance(answer, bytes):
            await send_json(send, answer)
        else:
            await answer(scope, receive, send)

    async def _answer(self, way: Found, scope: Scope, receive: Receive) -> bytes | Response:
        route, path = way
        headers = _headers_of(scope["headers"])
        body = await _read_body(headers.get("content-length"), receive, route.max_body)
        # Here, and not at the desk: the signature is checked while others' requests are acted on.
        signer = self._signer(scope, headers, body)
        if route.prepare is not None and not isinstance(self._coordinator.store, LocalStore):
            found = await run_in_threadpool(route.prepare, self._coordinator, signer, path["lease_id"])
            if found is not None:
                await self._desk.do(
                    partial(uploads.mark_stored, self._coordinator, found),
                    Needs(lease_id=found.lease_id, upload=True),
                )
        beat = Heartbeat.parse(body) if route.beats else None
        needs = route.needs(signer.key, path.get("lease_id", "")) if route.needs is not None else None
        knock = Knock(signer=signer, allowed=route.callers, beat=beat, needs=needs)
        return await self._desk.do(partial(self._act, route, path, body, signer), knock)

    def _signer(self, scope: Scope, headers: dict[str, str], body: bytes) -> Signer:
        authority = headers.get("host", "").lower()
        # Else a request signed for another server could be carried here, with that server's name in its Host header.
        if self._authorities is not None and authority not in self._authorities:
            raise Rejected(
                "request.bad_signature",
                f"the request is for {authority[:80]!r}; this coordinator is {', '.join(sorted(self._authorities))}",
            )
        # The path as it was sent: decoding it first would let two spellings share one signature.
        target = Target(
            method=scope["method"],
            authority=authority,
            path=scope["raw_path"].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
        )
        now_s = self._coordinator.clock()
        signer = verify_request(headers, target, body, now_s=now_s)
        # After the signature: nobody can use up another's share. The run's own roles are not counted.
        if signer.key not in self._coordinator.roles and (wait_s := self._buckets.wait_s(signer.key, now_s)):
            limit = self._coordinator.config.requests_per_s
            raise Rejected(
                "request.too_many", f"a key may ask {limit:g} times a second", retry_after_s=wait_s
            )
        return signer

    def _act(self, route: SignedRoute, path: dict[str, str], body: bytes, signer: Signer) -> bytes | Response:
        coordinator = self._coordinator
        turn = coordinator.database.turn()
        if route.beats and turn is not None and has_beaten(turn, signer):
            return to_json(as_described(nodes.reply(turn, coordinator), route.gives))
        with admitted(coordinator, signer, route.callers) as tx:
            answer = route.handle(Call(coordinator=coordinator, tx=tx, body=body, path=path))
            return answer if isinstance(answer, Response) else to_json(as_described(answer, route.gives))


def failure(coordinator: Coordinator, scope: Scope, error: Exception) -> Response:
    """An error of ours is logged; a stranger gets no more than that there was one."""
    first_line = str(error).partition("\n")[0]
    coordinator.log.error(
        f"{scope['method']} {scope['path'][:200]} failed: {type(error).__name__}: {first_line}"
    )
    return problem("request.failed", "an error on our side; it is logged", now_s=coordinator.clock())


def _uploaded(scope: Scope) -> str | None:
    """The name under which bytes come; None if it is no upload."""
    if scope["type"] != "http" or scope["method"] != "PUT" or not scope["path"].startswith(uploads.PATH):
        return None
    token: str = scope["path"].removeprefix(uploads.PATH)
    return token if token and "/" not in token else None


def _headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Those that matter here, each of which may stand there once."""
    headers: dict[str, str] = {}
    for name, value in raw:
        if name in _ONCE:
            text = name.decode("latin-1")
            if text in headers:
                raise Rejected("request.bad_signature", f"the header {text} stands there more than once")
            headers[text] = value.decode("latin-1")
    return headers


async def _read_body(declared: str | None, receive: Receive, max_bytes: int) -> bytes:
    """The body, refused by its declared length, or at the first byte past `max_bytes`."""
    check_length(declared or "0", max_bytes)
    pieces, received = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                message: Any = await receive()
                if message["type"] == "http.disconnect":
                    raise TimeoutError
                pieces.append(message.get("body", b""))
                received += len(pieces[-1])
                if received > max_bytes:
                    raise Rejected(
                        "request.too_large", f"the body passed the {max_bytes} bytes this route takes"
                    )
                more = message.get("more_body", False)
    except TimeoutError:
        raise Rejected("request.malformed", f"the body did not arrive within {BODY_S:.0f} s") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
