"""Reads a coordinator's public routes, with errors that name the URL and what to check."""

import time
from contextlib import AbstractContextManager
from typing import TypeVar

import httpx2

from shoal.net.http_client import Unreachable
from shoal.wire.codes import Rejected
from shoal.wire.record import Record

TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 512 << 20
ANSWER_S = 600.0
"""Seconds that a whole answer may take. `timeout_s` bounds the pause between two pieces of it."""

R = TypeVar("R", bound=Record)


class PublicApi(AbstractContextManager["PublicApi"]):
    """A client for the routes that need no signature. Use it as a context manager."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._http = httpx2.Client(base_url=self.url + "/", timeout=timeout_s)

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> bytes:
        """Returns the body of a successful answer. Raises Unreachable otherwise."""
        body = self.find(path)
        if body is None:
            raise self._not_a_coordinator(f"{path} gives HTTP 404")
        return body

    def find(self, path: str) -> bytes | None:
        """Like `get`, but returns None where the coordinator answers 404."""
        try:
            with self._http.stream("GET", path.removeprefix("/")) as answer:
                body = self._read_body(answer, path)
        except httpx2.HTTPError as error:
            raise Unreachable(
                f"{self.url}: {type(error).__name__}: {error}; check the URL, and that the coordinator runs there"
            ) from None
        if answer.status_code == 404:
            return None
        if not answer.is_success:
            raise self._not_a_coordinator(f"{path} gives HTTP {answer.status_code}")
        return body

    def _read_body(self, answer: httpx2.Response, path: str) -> bytes:
        """Returns the body. The coordinator may be a stranger's, whose answer never ends."""
        body, give_up_s = bytearray(), time.monotonic() + ANSWER_S
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise self._not_a_coordinator(f"{path} gives more than {MAX_ANSWER_BYTES:,} bytes")
            if time.monotonic() > give_up_s:
                raise self._not_a_coordinator(f"{path} takes more than {ANSWER_S:.0f} s")
        return bytes(body)

    def read(self, path: str, kind: type[R]) -> R:
        """Returns the record at `path`. Raises Unreachable if the answer is something else."""
        try:
            return kind.parse(self.get(path))
        except Rejected as rejected:
            raise self._not_a_coordinator(rejected.detail) from None

    def _not_a_coordinator(self, answer: str) -> Unreachable:
        return Unreachable(f"{self.url} does not answer like a coordinator ({answer}); check the URL")
