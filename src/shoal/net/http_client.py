"""The client's side of the coordinator: signs each request, checks each answer, bounds each wait."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from shoal.net.presign import upload_headers
from shoal.net.waiting import NotYet, wait_for
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.messages import Problem, Upload
from shoal.wire.record import Record
from shoal.wire.request import Target, sign_request

R = TypeVar("R", bound=Record)
T = TypeVar("T")

TIMEOUT = httpx2.Timeout(30.0, connect=5.0)

_TRY_AGAIN = ("request.too_early", "request.paused", "request.too_many", "request.no_space", "request.failed")


class Refused(Exception):
    """The server answered, and said no. `problem.code` says why."""

    def __init__(self, what: str, problem: Problem) -> None:
        super().__init__(f"{what}: {problem.code}: {problem.detail} ({problem.fix})")
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.code


class Unreachable(Exception):
    """No answer, or none that makes sense. Trying again may help."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One address of a coordinator."""

    url: str
    authority: str
    """As httpx2 will write it into the Host header: lower case, and no port where it is the scheme's own."""
    prefix: str

    @classmethod
    def to(cls, url: str) -> "_Way":
        parts = _parse_url(url)
        return cls(url.rstrip("/"), parts.netloc.decode("ascii"), parts.path.rstrip("/"))


class SignedClient:
    """Talks to one coordinator with one key. `log` and `stop` serve the waits of `call_until`.

    Each method makes exactly one attempt unless its name says otherwise, and a signature is made for each attempt:
    a retry is a new request with a new nonce.
    """

    def __init__(
        self,
        url: str,
        key: Key,
        *,
        log: Log,
        stop: threading.Event | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._ways = [_Way.to(url)]
        self.key = key
        self.stop = stop or threading.Event()
        self._log = log
        self._http = httpx2.Client(timeout=TIMEOUT, transport=transport, follow_redirects=False)

    @property
    def url(self) -> str:
        """Where the next request goes."""
        return self._ways[0].url

    def also(self, urls: Iterable[str]) -> None:
        """Other ways to the same coordinator: when one does not answer, the next attempt takes the next."""
        for url in urls:
            way = _Way.to(url)
            if way not in self._ways:
                self._ways.append(way)

    def _try_another_way(self) -> None:
        self._ways = [*self._ways[1:], self._ways[0]]  # at once: other threads may be asking too

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Record | None, reply: type[R]) -> R:
        """One signed request; the parsed answer, or Refused, or Unreachable."""
        content = body.model_dump_json().encode() if body is not None else b""
        response = self.send(method, path, content)
        try:
            return reply.parse(response.content)
        except Rejected as rejected:
            raise Unreachable(
                f"{method} {self.url}{path}: an answer we cannot read: {rejected.detail}"
            ) from None

    def send(self, method: str, path: str, content: bytes = b"") -> httpx2.Response:
        """One signed request; the raw answer if it is a success."""
        return _checked(f"{method} {path}", self._send(method, path, content))

    def _send(self, method: str, path: str, content: bytes = b"") -> httpx2.Response:
        way = self._ways[0]
        full_path, _, query = (way.prefix + path).partition("?")
        target = Target(method=method, authority=way.authority, path=full_path, query=query)
        headers = sign_request(self.key, target, content, now_s=time.time())
        if content:
            headers["Content-Type"] = "application/json"
        try:
            return self._http.request(method, way.url + path, content=content, headers=headers)
        except httpx2.HTTPError as error:
            self._try_another_way()
            raise Unreachable(f"{method} {way.url}{path}: {type(error).__name__}: {error}") from None

    def fetch_object(self, sha256: str) -> bytes:
        """The bytes of this digest, from the coordinator or from the store it names. ValueError if others come."""
        what = f"GET /v1/objects/{sha256}"
        response = self._send("GET", f"/v1/objects/{sha256}")
        if response.status_code == 307:
            # The URL is the permission: the store gets no signature of ours.
            response = self._elsewhere("GET", response.headers.get("location", ""))
            if not response.is_success:
                raise Unreachable(f"{what}: the object store says HTTP {response.status_code}")
        data = _checked(what, response).content
        if (found := hashlib.sha256(data).hexdigest()) != sha256:
            raise ValueError(f"object {sha256}: {len(data)} bytes of another digest came, {found}")
        return data

    def fetch_object_until(self, what: str, sha256: str, *, deadline_s: float) -> bytes:
        """`fetch_object`, again and again in the same way as `call_until`."""
        return self._until(what, lambda: self.fetch_object(sha256), deadline_s)

    def put_upload(self, upload: Upload, data: bytes) -> None:
        """Upload to the place the coordinator chose. The headers are ours: a URL cannot make us say anything else."""
        if not upload.url:
            self.put_bytes(upload.path, data)
            return
        headers = upload_headers(hashlib.sha256(data).hexdigest(), len(data))
        response = self._elsewhere("PUT", upload.url, data, headers)
        # 412: an earlier attempt arrived, and its answer was lost. The name is ours alone.
        if not response.is_success and response.status_code != 412:
            raise Unreachable(
                f"PUT to the object store: HTTP {response.status_code}: {response.text[:200]!r}"
            )

    def _elsewhere(
        self, method: str, url: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        try:
            return self._http.request(method, url, content=data or None, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            place = url.partition("?")[0][:200]
            raise Unreachable(f"{method} {place}: {type(error).__name__}: {error}") from None

    def put_bytes(self, path: str, data: bytes) -> None:
        """Upload to a path the coordinator chose: the path itself is the permission."""

        def pieces() -> Iterator[bytes]:
            for start in range(0, len(data), 1 << 20):
                yield data[start : start + (1 << 20)]

        way = self._ways[0]
        try:
            response = self._http.put(
                way.url + path, content=pieces(), headers={"Content-Length": str(len(data))}
            )
        except httpx2.HTTPError as error:
            self._try_another_way()
            raise Unreachable(f"PUT {way.url}{path}: {type(error).__name__}: {error}") from None
        _checked("PUT object", response)

    def call_until(
        self, what: str, method: str, path: str, body: Record | None, reply: type[R], *, deadline_s: float
    ) -> R:
        """`call`, again and again while the server is away, failing, or says it is too early. Other refusals pass."""
        return self._until(what, lambda: self.call(method, path, body, reply), deadline_s)

    def get_until(
        self, what: str, path: str, reply: type[R], *, deadline_s: float, heard: Callable[[str], None]
    ) -> R:
        """The same for a GET, and `heard` is told every reason why it was not there yet."""
        return self._until(what, lambda: self.call("GET", path, None, reply), deadline_s, heard)

    def send_until(
        self, what: str, method: str, path: str, content: bytes = b"", *, deadline_s: float
    ) -> httpx2.Response:
        """`send`, again and again in the same way."""
        return self._until(what, lambda: self.send(method, path, content), deadline_s)

    def _until(
        self,
        what: str,
        once: Callable[[], T],
        deadline_s: float,
        heard: Callable[[str], None] = lambda reason: None,
    ) -> T:
        def attempt() -> T:
            try:
                return once()
            except Unreachable as error:
                heard(str(error))
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code not in _TRY_AGAIN:
                    raise
                heard(refused.problem.detail)
                raise NotYet(refused.problem.detail, refused.problem.retry_after_s) from None

        return wait_for(what, attempt, deadline_s=deadline_s, log=self._log, stop=self.stop)


def _parse_url(url: str) -> httpx2.URL:
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL("")
    if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
        raise ValueError(f"coordinator URL {url!r} must look like http://HOST:PORT")
    return parts


def _checked(what: str, response: httpx2.Response) -> httpx2.Response:
    if response.is_success:
        return response
    try:
        problem = Problem.parse(response.content)
    except Rejected:
        raise Unreachable(
            f"{what} at {response.url.scheme}://{response.url.netloc.decode()}: HTTP {response.status_code} "
            f"without a problem we know: {response.text[:200]!r}"
        ) from None
    raise Refused(what, problem)
