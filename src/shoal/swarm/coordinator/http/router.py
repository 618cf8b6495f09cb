"""The router of signed requests: plain ASGI from the socket to the writer thread, because nearly all requests are signed.

A framework's path from a URL to a function, with its request object and two layers of error handling, cost as much as checking
the signature. Requests that match no signed route go to the framework. The functions that make responses are at the end.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.net.object_store import LocalStore
from shoal.net.rate_limit import (
    BEHIND_PROXY,
    PROXY_HEADERS,
    Buckets,
    is_local,
    network_prefix,
    retry_after_header,
)
from shoal.swarm.coordinator import disk_full
from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.http.auth import Caller, admitted
from shoal.swarm.coordinator.leases.uploads import UPLOAD_PATH
from shoal.swarm.coordinator.store.database import WriteGroup
from shoal.swarm.coordinator.store.writer import Writer
from shoal.tasks.task_errors import TaskError, print_trace
from shoal.wire.codes import CODES, Rejected
from shoal.wire.messages import ProblemDetails
from shoal.wire.record import Record
from shoal.wire.request import Signer, Target, verify_head, verify_request

SMALL_BODY = 16 << 10
"""Enough for every request of a node."""
LARGE_BODY = 4 << 20
"""Enough for manifests of large models and verdicts on large leases."""
BODY_S = 20.0
"""Body timeout; guards against slow clients that hold connections open."""

_HEADERS = {b"host", b"content-digest", b"signature-input", b"signature", b"content-length"}
_OPEN, _CLOSE = "{", "}"
_TOKEN = re.compile(r"[0-9a-f]{64}")
"""The name of an upload. Others are not looked up: PostgreSQL fails on a NUL character."""

_NUMBER = re.compile(r"[0-9]{1,15}")

UploadReceiver = Callable[[str, str, Receive], Awaitable[Response]]
"""Receives the body of an upload: token, declared length, and where the body comes from."""
Before = Callable[[Coordinator, str, Any], Callable[[WriteGroup], None] | None]
"""Does slow work before the transaction of a request, given the key and the parsed path parameter. Returns a function that writes its
result in a separate transaction, or None."""


STORE_QUESTIONS = 10.0
"""Attempts to submit a lease at once, if its upload is in an object store; then one a second."""
MOST_SESSIONS, SESSIONS_PER_S = 60.0, 1 / 30
"""Sessions that one key may begin or end at once, and after that per second."""
MOST_ENROLMENTS, ENROLMENTS_PER_S = 256.0, 1.0
"""Enrolments that one network may send at once, and after that per second."""
PROXIED_SHARE = 8
"""Factor on the limit of enrolments for nodes whose network a reverse proxy hides: they all share one limit."""


@dataclass(frozen=True, slots=True)
class SignedRoute:
    """A route for signed requests. `act` gets the transaction, the coordinator, the path parameter and the record, if any."""

    method: str
    path: str
    callers: frozenset[Caller]
    act: Callable[..., Record | Response]
    takes: type[Record] | None = None
    """The record in the request's body; None if the request has no body."""
    gives: type[Record] | None = None
    """The record in the answer; None if the answer is bytes."""
    max_body: int = SMALL_BODY
    before: Before | None = None
    """Called only if uploads go to an object store."""

    @property
    def parameter(self) -> str:
        """Returns the name of the part of the path that varies; "" if no part does."""
        return self.path.partition(_OPEN)[2].partition(_CLOSE)[0]


@dataclass(frozen=True, slots=True)
class PublicRoute:
    """A route for unsigned GET requests, answered from one consistent view of the database."""

    view: Callable[[Connection, Coordinator, Request], Record | list[Record]]
    gives: type[Record]
    many: bool = False
    """Whether the answer is a list of records."""
    query: tuple[str, ...] = ()
    """Names of the numbers that the query may have."""
    texts: tuple[str, ...] = ()
    """Names of the texts that the query may have."""
    is_limited: bool = False
    """Whether the work depends on the query: then few requests are answered at a time, and each address may ask only so often."""
    is_costly: bool = False
    """Whether the answer sums over whole tables: then it is cached for a moment, and each address may ask only so often."""


class RouteTable:
    """Finds a signed route by method and path. At most the fourth part of a path varies: /v1/leases/{lease_id}/submit."""

    def __init__(self, routes: Iterable[SignedRoute]) -> None:
        self._plain: dict[tuple[str, str], SignedRoute] = {}
        self._varying: dict[tuple[str, str, str], SignedRoute] = {}
        for route in routes:
            before, brace, rest = route.path.partition(_OPEN)
            if not brace:
                self._plain[route.method, route.path] = route
                continue
            after = rest.partition(_CLOSE)[2]
            assert before.count("/") == 3 and _OPEN not in after, (
                f"{route.path}: only the fourth part may vary"
            )
            self._varying[route.method, before, after] = route

    def find(self, method: str, path: str) -> tuple[SignedRoute, str | None] | None:
        """Returns the route and the part of the path that varies; None if no signed route matches."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain, None
        parts = path.split("/", 4)
        if len(parts) < 4 or not parts[3]:
            return None
        after = f"/{parts[4]}" if len(parts) == 5 else ""
        varying = self._varying.get((method, f"/{parts[1]}/{parts[2]}/", after))
        return None if varying is None else (varying, parts[3])


class Router:
    """An ASGI app: answers signed routes and uploads, and passes all other requests to `public`."""

    def __init__(
        self,
        coordinator: Coordinator,
        routes: Iterable[SignedRoute],
        parsers: Mapping[str, Callable[[str], str | int]],
        writer: Writer,
        *,
        receive_upload: UploadReceiver,
        public: Starlette,
        authorities: frozenset[str] | None,
    ) -> None:
        """`parsers` parse the part of a path that varies, by its name there."""
        self._coordinator, self._writer, self.public = coordinator, writer, public
        self._parsers = parsers
        self._receive_upload, self._authorities = receive_upload, authorities
        self._routes = RouteTable(routes)
        self._has_object_store = not isinstance(coordinator.store, LocalStore)
        rate = coordinator.config.requests_per_s
        self._buckets = Buckets(rate=rate, burst=10 * rate)
        self._store_questions = Buckets(rate=1.0, burst=STORE_QUESTIONS)
        self._sessions = Buckets(rate=SESSIONS_PER_S, burst=MOST_SESSIONS)
        self._network_sessions = Buckets(rate=ENROLMENTS_PER_S, burst=MOST_ENROLMENTS)
        self._enrolments = Buckets(rate=ENROLMENTS_PER_S, burst=MOST_ENROLMENTS)
        self._proxied = Buckets(rate=PROXIED_SHARE * ENROLMENTS_PER_S, burst=PROXIED_SHARE * MOST_ENROLMENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes.find(scope["method"], scope["path"])
        token = self._upload_token(scope) if found is None else None
        answer: bytes | Response
        try:
            if found is not None:
                answer = await self._answer(*found, scope, receive)
            elif token is not None:
                length = _read_headers(scope["headers"]).get("content-length", "0")
                answer = await self._receive_upload(token, length, receive)
            else:
                await self.public(scope, receive, send)
                return
        except Rejected as error:
            answer = problem(self._coordinator, error)
        except Exception as error:
            full = disk_full.report(self._coordinator, error)
            if full is None:
                await failure(self._coordinator, scope, error)(scope, receive, send)
                raise  # the server logs the traceback
            refusal = Rejected("request.no_space", full, retry_after_s=disk_full.RETRY_S)
            answer = problem(self._coordinator, refusal)
        if isinstance(answer, bytes):
            await send_json(send, answer)
        else:
            await answer(scope, receive, send)

    async def _answer(
        self, route: SignedRoute, value: str | None, scope: Scope, receive: Receive
    ) -> bytes | Response:
        headers = _read_headers(scope["headers"])
        length = headers.get("content-length")
        check_length(length or "0", route.max_body)
        if route.max_body > SMALL_BODY and (length is None or int(length) > SMALL_BODY):
            self._check_large(route, scope, headers)
        body = await _read_body(receive, route.max_body)
        # In the event loop, not in the writer thread: signatures are checked while other requests are executed.
        signer = self._verify(scope, headers, body)
        part = None if value is None else self._parsers[route.parameter](value)
        if route.before is not None and self._has_object_store:
            # All requests to the object store share a few threads.
            check_rate(
                self._store_questions,
                f"{signer.key} {part}",
                self._coordinator.clock(),
                f"a lease may be submitted {STORE_QUESTIONS:g} times, and then once a second",
            )
            note = await run_in_threadpool(route.before, self._coordinator, signer.key, part)
            if note is not None:
                await self._writer.run(note)
        network = network_of(scope)
        self._check_ledger_rate(route.path, signer, network, is_proxied=not network or BEHIND_PROXY in scope)
        return await self._writer.run(partial(self._execute, route, part, body, signer, network))

    def _verify(self, scope: Scope, headers: Mapping[str, str], body: bytes) -> Signer:
        """Returns who signed the request; raises Rejected if the signature is not valid or the key asks too often."""
        target = self._target(scope, headers)
        now_s = self._coordinator.clock()
        signer = verify_request(headers, target, body, now_s=now_s)
        # After the signature is checked, so that nobody can use up another key's share. Roles have no limit.
        if signer.key not in self._coordinator.roles:
            limit = self._coordinator.config.requests_per_s
            check_rate(self._buckets, signer.key, now_s, f"a key may ask {limit:g} times a second")
        return signer

    def _check_large(self, route: SignedRoute, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raises Rejected before a large body is read, unless a key of the run sends it: strangers could otherwise fill the memory."""
        signer = verify_head(headers, self._target(scope, headers), now_s=self._coordinator.clock())
        if self._coordinator.roles.get(signer.key) not in route.callers:
            raise Rejected(
                "request.not_allowed",
                f"this route is for {' or '.join(sorted(route.callers))}; {signer.key[:16]} is no key of the run",
            )

    def _target(self, scope: Scope, headers: Mapping[str, str]) -> Target:
        """Returns what the signature of a request is for. Raises Rejected if it is for another server."""
        authority = headers.get("host", "").lower()
        # Otherwise a request signed for another server could be sent here, with that server's name in its Host header.
        if self._authorities is not None and authority not in self._authorities:
            raise Rejected(
                "request.bad_signature",
                f"the request is for {authority[:80]!r}; this coordinator is {', '.join(sorted(self._authorities))}",
            )
        # The path as it was sent: decoding it first would let two spellings share one signature.
        return Target(
            method=scope["method"],
            authority=authority,
            path=scope["raw_path"].decode("latin-1"),
            query=scope["query_string"].decode("latin-1"),
        )

    def _check_ledger_rate(self, path: str, signer: Signer, network: str, *, is_proxied: bool) -> None:
        """Raises Rejected if a key begins or ends sessions, or a network enrols keys, more often than honest ones do.

        Each of these appends to the ledger, which is never cut.
        """
        now_s, most, per_s = self._coordinator.clock(), MOST_ENROLMENTS, ENROLMENTS_PER_S
        if path in ("/v1/session", "/v1/leave"):
            rule = f"a key may begin and end {MOST_SESSIONS:g} sessions, and then one every {1 / SESSIONS_PER_S:.0f} s"
            check_rate(self._sessions, signer.key, now_s, rule)
            if network:
                rule = f"network {network} may begin and end {most:g} sessions, and then {per_s:g} a second"
                check_rate(self._network_sessions, network, now_s, rule)
        elif path == "/v1/enrol":
            if network:
                rule = f"network {network} may enrol {most:g} keys, and then {per_s:g} a second"
                check_rate(self._enrolments, network, now_s, rule)
            # Nodes behind a proxy share a larger limit: a local client could otherwise avoid its own by sending a proxy's header.
            if is_proxied:
                most, per_s = PROXIED_SHARE * most, PROXIED_SHARE * per_s
                rule = (
                    f"all nodes behind a proxy together may enrol {most:g} keys, and then {per_s:g} a second"
                )
                check_rate(self._proxied, "", now_s, rule)

    def _execute(
        self,
        route: SignedRoute,
        part: str | int | None,
        body: bytes,
        signer: Signer,
        network: str,
        group: WriteGroup,
    ) -> bytes | Response:
        """Runs in the writer thread: executes one signed request as part of `group`."""
        coordinator = self._coordinator
        with admitted(coordinator, group, signer, route.callers, network=network) as tx:
            arguments: list[Any] = [tx, coordinator]
            if part is not None:
                arguments.append(part)
            if route.takes is not None:
                arguments.append(route.takes.parse(body or b"{}"))
            answer = route.act(*arguments)
            return answer if isinstance(answer, Response) else to_json(answer, route.gives)

    def _upload_token(self, scope: Scope) -> str | None:
        """Returns the token of an upload's path; None if the request is not an upload."""
        if scope["method"] != "PUT" or not scope["path"].startswith(UPLOAD_PATH):
            return None
        token: str = scope["path"].removeprefix(UPLOAD_PATH)
        return token if _TOKEN.fullmatch(token) else None


def check_rate(buckets: Buckets, name: str, now_s: float, rule: str) -> None:
    """Takes a token of `name`. Raises Rejected, with the rule that it broke, if it has none left."""
    if wait_s := buckets.wait_s(name, now_s):
        raise Rejected("request.too_many", rule, retry_after_s=wait_s)


def failure(coordinator: Coordinator, scope: Scope, error: Exception) -> Response:
    """Logs an internal error and returns an answer without its details."""
    first_line = str(error).partition("\n")[0]
    if isinstance(error, TaskError):  # the operator's own code: the log needs its traceback
        coordinator.log.error(first_line)
        print_trace(error.trace)
    else:
        coordinator.log.error(
            f"{scope['method']} {scope['path'][:200]} failed: {type(error).__name__}: {first_line}"
        )
    return problem(coordinator, Rejected("request.failed", "an error on our side; it is logged"))


def network_of(scope: Scope) -> str:
    """Returns the network prefix of the client; empty if a reverse proxy hides it, because all nodes would share one account.

    The header of a proxy only switches the account off, and only where the other side is on this machine or in a private network.
    Its value is not used: any client in a private network can send it. A proxy on this machine is believed before this
    (rate_limit.with_client_address).
    """
    client = scope.get("client")
    address = client[0] if client else ""
    proxied = is_local(address) and any(name in PROXY_HEADERS for name, _ in scope["headers"])
    return "" if proxied else network_prefix(address)


def _read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the headers that the router uses; raises Rejected if one of them is repeated."""
    headers: dict[str, str] = {}
    for name, value in raw:
        if name in _HEADERS:
            text = name.decode("latin-1")
            if text in headers:
                raise Rejected("request.bad_signature", f"duplicate header {text}")
            headers[text] = value.decode("latin-1")
    return headers


async def _read_body(receive: Receive, max_bytes: int) -> bytes:
    """Returns the body; raises Rejected at the first byte past `max_bytes`."""
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
                        "request.too_large", f"the body passed the {max_bytes} bytes that this route takes"
                    )
                more = message.get("more_body", False)
    except TimeoutError:
        raise Rejected("request.malformed", f"the body did not arrive within {BODY_S:.0f} s") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


JSON = "application/json"


def to_json(answer: Record | Sequence[Record], gives: type[Record] | None) -> bytes:
    """Returns an answer of one or several records, after checking that they have the type that /openapi.json names."""
    records = [answer] if isinstance(answer, Record) else answer
    wrong = [type(one) for one in records if gives is None or not isinstance(one, gives)]
    assert not wrong, f"/openapi.json says {gives}, not {wrong[0]}"
    text = ",".join(record.model_dump_json() for record in records)
    return (text if isinstance(answer, Record) else f"[{text}]").encode()


def problem(coordinator: Coordinator, refusal: Rejected) -> Response:
    meaning, wait_s = CODES[refusal.code], refusal.retry_after_s
    body = ProblemDetails(
        code=refusal.code,
        detail=refusal.detail,
        fix=meaning.remedy,
        retry_after_s=wait_s,
        server_time_s=coordinator.clock(),
    )
    headers = {} if wait_s is None else {"Retry-After": retry_after_header(wait_s)}
    return Response(
        body.model_dump_json(),
        status_code=meaning.status,
        media_type="application/problem+json",
        headers=headers,
    )


async def send_json(send: Send, content: bytes) -> None:
    """Sends JSON as plain ASGI messages: a framework's response object costs more than most of our requests."""
    headers = [(b"content-length", b"%d" % len(content)), (b"content-type", JSON.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def query_number(request: Request, name: str, default: int) -> int:
    """Returns a number of the query; raises Rejected unless it has 1 to 15 digits and nothing else."""
    text = request.query_params.get(name, str(default))
    if not _NUMBER.fullmatch(text):
        raise Rejected("request.malformed", f"{name}={text[:32]!r} is not a number")
    return int(text)


def check_length(declared: str, max_bytes: int) -> None:
    """Raises Rejected if the declared length of a body is no number or too large. Runs before a byte is read."""
    if not _NUMBER.fullmatch(declared):
        raise Rejected("request.malformed", f"Content-Length is {declared[:32]!r}, expected a number")
    if int(declared) > max_bytes:
        raise Rejected("request.too_large", f"{declared} bytes announced, {max_bytes} allowed here")
