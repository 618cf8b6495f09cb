"""A synchronous HTTP transport that calls an ASGI app directly, without a socket or a server.

All apps share one event loop in one thread, as they would behind a server. Starting and stopping a server took longer than most
tests; tests of the server itself use a real socket (`SmallSwarm(..., on_socket=True)`).
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

import httpx2

TIMEOUT_S = 60.0
PORT = 8700
"""The port in the address of a coordinator that is called in process; nothing listens there."""


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="in-process-apps", daemon=True).start()
    return loop


class InProcessTransport(httpx2.BaseTransport):
    """Passes requests for PORT to the app that `find_app` returns: a coordinator that is reopened has a new one.

    Other requests, such as uploads to an object store, go over a socket.
    """

    def __init__(self, find_app: Callable[[], Any], address: str = "127.0.0.1") -> None:
        self._find_app, self._address = find_app, address
        self._others = httpx2.HTTPTransport(verify=False)

    def close(self) -> None:
        self._others.close()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.port != PORT:
            return self._others.handle_request(request)
        body = request.read()
        return asyncio.run_coroutine_threadsafe(self._call(request, body), event_loop()).result(TIMEOUT_S)

    async def _call(self, request: httpx2.Request, body: bytes) -> httpx2.Response:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port),
            "client": (self._address, 40000),
            "root_path": "",
            "state": {},
        }
        pieces: AsyncIterator[dict[str, Any]] = _body(body)
        status, headers, content = 0, [], bytearray()
        answered = asyncio.Event()

        async def receive() -> dict[str, Any]:
            async for message in pieces:
                return message
            await answered.wait()  # an app that is told of a disconnect stops sending
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", []))
            elif message["type"] == "http.response.body":
                content.extend(message.get("body", b""))
                if not message.get("more_body"):
                    answered.set()

        try:
            await self._find_app()(scope, receive, send)
        except Exception:
            # A server logs the exception after the app has answered with a 500; any other exception fails the test.
            if status != 500:
                raise
        return httpx2.Response(status, headers=headers, content=bytes(content), request=request)


async def _body(content: bytes) -> AsyncIterator[dict[str, Any]]:
    """Yields the request's body in pieces of 64 KiB, as a socket delivers it."""
    step = 1 << 16
    for start in range(0, max(len(content), 1), step):
        yield {
            "type": "http.request",
            "body": content[start : start + step],
            "more_body": start + step < len(content),
        }
