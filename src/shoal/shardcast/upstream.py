"""One origin or relay as its client sees it: three questions, each asked once, each bounded in time and bytes."""

import functools
import ssl
import time
from collections.abc import Callable

import httpx

from shoal.shardcast.assembly import Shard
from shoal.wire.codes import Rejected
from shoal.wire.manifest import Manifest
from shoal.wire.messages import Problem
from shoal.wire.record import Sealed

STALL_S = 3.0
"""No byte for this long, over what the server was allowed to wait: it hangs."""
SHARD_WAIT_S = 2.0
"""How long the server may wait for a shard that is on its way to it, before it says that it is too early."""
ANSWER_DEADLINE_S = 60.0
"""For one answer in all: bytes that drip are no better than none."""
MAX_MANIFEST_BYTES = 16 << 20


class NotThere(Exception):
    """It answered, and does not have this, or not yet. Nobody's fault."""


class Broken(Exception):
    """No answer, half an answer, or nonsense."""


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()  # reading the certificates takes longer than a small fetch


def open_http() -> httpx.Client:
    return httpx.Client(verify=_tls(), follow_redirects=False, headers={"Accept-Encoding": "identity"})


def ask_latest(
    http: httpx.Client, url: str, *, after: int = -1, wait_s: float = 0.0
) -> Sealed[Manifest] | None:
    """The newest manifest there, unverified, as soon as it is newer than `after`; None if none came in time."""
    body = _ask(http, f"{url}/manifests/latest?after={after}&wait_s={wait_s:g}", wait_s)
    return _parse(url, body) if body else None


def ask_manifest(http: httpx.Client, url: str, version: int) -> Sealed[Manifest]:
    """The manifest of one version, unverified."""
    return _parse(url, _ask(http, f"{url}/manifests/{version}", 0.0))


def ask_shard(
    http: httpx.Client, url: str, version: int, shard: Shard, *, give_up: Callable[[], bool]
) -> bytearray:
    """As many bytes as the shard has, unverified."""
    where = f"{url}/versions/{version}/{shard.name}?wait_s={SHARD_WAIT_S:g}"
    headers = {"Range": f"bytes={shard.start}-{shard.stop - 1}"}
    late_s = time.monotonic() + ANSWER_DEADLINE_S
    data = bytearray()
    try:
        with http.stream("GET", where, headers=headers, timeout=_timeout(SHARD_WAIT_S)) as response:
            _check_status(response)
            for piece in response.iter_raw():
                data += piece
                if len(data) > shard.num_bytes or give_up() or time.monotonic() > late_s:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Broken(f"{type(error).__name__}: {error}") from None
    if len(data) != shard.num_bytes:
        raise Broken(
            f"{len(data)} bytes for shard {shard.index} of {shard.name}, which has {shard.num_bytes}"
        )
    return data


def _ask(http: httpx.Client, where: str, wait_s: float) -> bytes:
    late_s = time.monotonic() + ANSWER_DEADLINE_S
    body = b""
    try:
        with http.stream("GET", where, timeout=_timeout(wait_s)) as response:
            _check_status(response)
            for piece in response.iter_raw():
                body += piece
                if len(body) > MAX_MANIFEST_BYTES or time.monotonic() > late_s:
                    raise Broken(
                        f"a manifest of over {MAX_MANIFEST_BYTES} bytes, or {ANSWER_DEADLINE_S:.0f} s"
                    )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Broken(f"{type(error).__name__}: {error}") from None
    return body


def _check_status(response: httpx.Response) -> None:
    if response.is_success:
        return
    reason = f"HTTP {response.status_code}"
    if response.headers.get("content-type", "").startswith("application/problem+json"):
        try:
            reason = Problem.parse(next(response.iter_raw(4096), b"")).detail
        except Rejected:
            reason += " with a problem we cannot read"
    if response.status_code in (404, 425, 429, 503):
        raise NotThere(reason)
    raise Broken(reason)


def _parse(url: str, body: bytes) -> Sealed[Manifest]:
    try:
        return Sealed[Manifest].parse(body)
    except Rejected as rejected:
        raise Broken(f"not a manifest: {rejected.detail}") from None


def _timeout(wait_s: float) -> httpx.Timeout:
    return httpx.Timeout(STALL_S, read=wait_s + STALL_S)
