"""Client of the coordinator: signs each request, checks each answer, limits each wait."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2

from shoal.files import write_atomically
from shoal.net.object_store import upload_headers
from shoal.net.rate_limit import BandwidthLimit
from shoal.net.waiting import NotYet, wait_for
from shoal.telemetry import Log
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.messages import ProblemDetails, Upload
from shoal.wire.record import Record, Sealed
from shoal.wire.request import Target, sign_request
from shoal.wire.ticket import TICKET_S, Ticket, to_header

R = TypeVar("R", bound=Record)
T = TypeVar("T")

TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
TICKET_RENEW_S = TICKET_S / 2
"""A new ticket is requested this long before the old one expires; until then the old one is used."""
TICKET_PAUSE_S = 5.0
"""Pause after a failed request for a ticket."""

_RETRYABLE = ("request.too_early", "request.paused", "request.too_many", "request.no_space", "request.failed")


class Refused(Exception):
    """The server answered with a ProblemDetails. `problem.code` says why."""

    def __init__(self, what: str, problem: ProblemDetails) -> None:
        super().__init__(f"{what}: {problem.code}: {problem.detail} ({problem.fix})")
        self.problem = problem

    @property
    def code(self) -> str:
        """Returns the stable code of the problem, for example "request.too_early"."""
        return self.problem.code


class Unreachable(Exception):
    """The server did not answer, or its answer cannot be understood. A retry may help."""


FailureReceiver = Callable[[Refused | Unreachable], None]
"""Receives each failure that is retried."""


@dataclass(frozen=True, slots=True)
class _CoordinatorUrl:
    """One URL of a coordinator, with the parts that a signature covers."""

    url: str
    authority: str
    """The Host header as httpx2 writes it: lower case, without the scheme's default port."""
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "_CoordinatorUrl":
        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL:
            parts = httpx2.URL("")
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo:
            raise ValueError(f"coordinator URL {url!r} must look like http://HOST:PORT")
        return cls(url.rstrip("/"), parts.netloc.decode("ascii"), parts.path.rstrip("/"))


class SignedClient:
    """Talks to one coordinator with one key.

    Each method makes one attempt unless its name ends in `_until`; those use `log` and `stop` while they wait. Every
    attempt has its own signature and nonce.
    """

    def __init__(
        self,
        url: str,
        key: Key,
        *,
        log: Log,
        stop: threading.Event | None = None,
        transport: httpx2.BaseTransport | None = None,
        upload_limit: BandwidthLimit | None = None,
    ) -> None:
        """`upload_limit` bounds the bytes per second of uploads; other requests are small."""
        self._upload_limit = upload_limit
        self._urls = [_CoordinatorUrl.parse(url)]
        self.key = key
        self.stop = stop or threading.Event()
        self._log = log
        self._http = httpx2.Client(timeout=TIMEOUT, transport=transport, follow_redirects=False)

    @property
    def url(self) -> str:
        """The URL that the next request goes to."""
        return self._urls[0].url

    def add_urls(self, urls: Iterable[str]) -> None:
        """Adds further URLs of the same coordinator: when one does not answer, the next attempt uses the next."""
        for url in urls:
            parsed = _CoordinatorUrl.parse(url)
            if parsed not in self._urls:
                self._urls.append(parsed)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def call(self, method: str, path: str, body: Record | None, reply: type[R]) -> R:
        """Sends one signed request and returns the parsed answer; raises Refused or Unreachable."""
        content = body.model_dump_json().encode() if body is not None else b""
        response = self.send(method, path, content)
        try:
            return reply.parse(response.content)
        except Rejected as rejected:
            raise Unreachable(
                f"{method} {self.url}{path}: cannot parse the answer: {rejected.detail}"
            ) from None

    def send(self, method: str, path: str, content: bytes = b"") -> httpx2.Response:
        """Sends one signed request and returns the raw answer; raises Refused or Unreachable."""
        return _check_success(f"{method} {path}", self._send(method, path, content))

    def _sign(self, to: _CoordinatorUrl, method: str, path: str, content: bytes = b"") -> dict[str, str]:
        full_path, _, query = (to.prefix + path).partition("?")
        target = Target(method=method, authority=to.authority, path=full_path, query=query)
        return sign_request(self.key, target, content, now_s=time.time())

    def _send(self, method: str, path: str, content: bytes = b"") -> httpx2.Response:
        to = self._urls[0]
        headers = self._sign(to, method, path, content)
        if content:
            headers["Content-Type"] = "application/json"
        with self._reaching(to, method, path):
            return self._http.request(method, to.url + path, content=content, headers=headers)

    @contextmanager
    def _reaching(self, to: _CoordinatorUrl, method: str, path: str) -> Iterator[None]:
        """Raises Unreachable if the request in the block fails, and makes the next attempt use the next URL."""
        try:
            yield
        except httpx2.HTTPError as error:
            self._urls = [*self._urls[1:], self._urls[0]]  # one assignment: other threads may read the list
            raise Unreachable(f"{method} {to.url}{path}: {type(error).__name__}: {error}") from None

    def fetch_object(self, sha256: str) -> bytes:
        """Returns the bytes of this digest, from the coordinator or the store it redirects to.

        Raises ValueError if the bytes have another digest.
        """
        what = f"GET /v1/objects/{sha256}"
        response = self._send("GET", f"/v1/objects/{sha256}")
        if response.status_code == 307:
            # The URL itself is the permission: the store must not get our signature.
            response = self._send_to_store("GET", response.headers.get("location", ""))
            if not response.is_success:
                raise Unreachable(f"{what}: the object store answers HTTP {response.status_code}")
        data = _check_success(what, response).content
        if (found := hashlib.sha256(data).hexdigest()) != sha256:
            raise ValueError(f"object {sha256}: received {len(data)} bytes of another digest, {found}")
        return data

    def fetch_object_until(self, what: str, sha256: str, *, deadline_s: float) -> bytes:
        """Calls `fetch_object` with the retries of `call_until`."""
        return self._until(what, lambda: self.fetch_object(sha256), deadline_s)

    def download(self, sha256: str, path: Path) -> None:
        """Writes the coordinator's file of this digest to `path` piece by piece: a data set may not fit into memory.

        Raises ValueError if its bytes have another digest.
        """
        to, object_path, digest = self._urls[0], f"/v1/objects/{sha256}", hashlib.sha256()
        signed = self._sign(to, "GET", object_path)
        with (
            self._reaching(to, "GET", object_path),
            self._http.stream("GET", to.url + object_path, headers=signed) as response,
        ):
            if not response.is_success:
                response.read()
                _check_success(f"GET {object_path}", response)
            with write_atomically(path) as file:
                for piece in response.iter_bytes(1 << 20):
                    digest.update(piece)
                    file.write(piece)
                if digest.hexdigest() != sha256:
                    raise ValueError(
                        f"object {sha256}: received bytes of another digest, {digest.hexdigest()}"
                    )

    def download_until(self, what: str, sha256: str, path: Path, *, deadline_s: float) -> None:
        """Calls `download` with the retries of `call_until`."""
        self._until(what, lambda: self.download(sha256, path), deadline_s)

    def put_upload(self, upload: Upload, data: bytes) -> None:
        """Uploads to the place that the coordinator chose. A URL cannot change the headers: they are computed here."""
        if not upload.url:
            self.put_bytes(upload.path, data)
            return
        headers = upload_headers(hashlib.sha256(data).hexdigest(), len(data))
        response = self._send_to_store("PUT", upload.url, data, headers)
        # 412: an earlier attempt arrived and its answer was lost. No other client knows this object's name.
        if not response.is_success and response.status_code != 412:
            raise Unreachable(
                f"PUT to the object store: HTTP {response.status_code}: {response.text[:200]!r}"
            )

    def _send_to_store(
        self, method: str, url: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        try:
            content = self._pieces(data) if data and self._upload_limit is not None else data or None
            return self._http.request(method, url, content=content, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            place = url.partition("?")[0][:200]
            raise Unreachable(f"{method} {place}: {type(error).__name__}: {error}") from None

    def put_bytes(self, path: str, data: bytes) -> None:
        """Uploads to a path of the coordinator, unsigned: the path itself is the permission."""
        to = self._urls[0]
        with self._reaching(to, "PUT", path):
            response = self._http.put(
                to.url + path, content=self._pieces(data), headers={"Content-Length": str(len(data))}
            )
        _check_success("PUT object", response)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the data in pieces, no faster than the limit of uploads."""
        size = 1 << 20 if self._upload_limit is None else self._upload_limit.piece_bytes
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            if self._upload_limit is not None:
                self._upload_limit.wait(len(piece))
            yield piece

    def call_until(
        self,
        what: str,
        method: str,
        path: str,
        body: Record | None,
        reply: type[R],
        *,
        deadline_s: float,
        heard: FailureReceiver = lambda failure: None,
    ) -> R:
        """Calls `call` and retries while the server is unreachable, fails, or answers that it is too early.

        Calls `heard` with every failure that is retried. Raises Refused for any other refusal.
        """
        return self._until(what, lambda: self.call(method, path, body, reply), deadline_s, heard)

    def _until(
        self,
        what: str,
        once: Callable[[], T],
        deadline_s: float,
        heard: FailureReceiver = lambda failure: None,
    ) -> T:
        def attempt() -> T:
            try:
                return once()
            except Unreachable as error:
                heard(error)
                raise NotYet(str(error)) from None
            except Refused as refused:
                if refused.code not in _RETRYABLE:
                    raise
                heard(refused)
                raise NotYet(refused.problem.detail, refused.problem.retry_after_s) from None

        return wait_for(what, attempt, deadline_s=deadline_s, log=self._log, stop=self.stop)


def fetch_files(client: SignedClient, digests: Iterable[str], folder: Path, *, deadline_s: float) -> None:
    """Downloads a task's data files into `folder`, named by their SHA-256, unless they are there already.

    Raises ValueError if a file has another digest. A new folder is closed to other users: in the sandbox of level `user`, programs
    run as one of them and could read the tests that grade them.
    """
    for digest in digests:
        if (folder / digest).exists():
            continue
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        client.download_until(f"the data file {digest[:16]}", digest, folder / digest, deadline_s=deadline_s)


def _check_success(what: str, response: httpx2.Response) -> httpx2.Response:
    if response.is_success:
        return response
    try:
        problem = ProblemDetails.parse(response.content)
    except Rejected:
        raise Unreachable(
            f"{what} at {response.url.scheme}://{response.url.netloc.decode()}: HTTP {response.status_code} "
            f"without a known problem: {response.text[:200]!r}"
        ) from None
    raise Refused(what, problem)


class Tickets:
    """Tickets that a member of a run shows to private relays. Call it for the Authorization header. Thread-safe."""

    def __init__(
        self, client: SignedClient, *, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client, self._log, self._clock = client, log, clock
        self._lock = threading.Lock()
        self._header = ""
        self._ask_at_s = float("-inf")

    def __call__(self) -> str:
        """Returns the header, renewed if it is due; "" without a ticket, which is enough for public relays."""
        with self._lock:
            if self._clock() >= self._ask_at_s and not self._client.stop.is_set():
                self._renew()
            return self._header

    def _renew(self) -> None:
        try:
            sealed = self._client.call("POST", "/v1/tickets", None, Sealed[Ticket])
        except (Unreachable, Refused) as reason:
            self._log.warning(f"cannot renew the ticket for relays, will retry: {reason}")
            self._ask_at_s = self._clock() + TICKET_PAUSE_S
            return
        self._header, self._ask_at_s = to_header(sealed), self._clock() + TICKET_S - TICKET_RENEW_S
