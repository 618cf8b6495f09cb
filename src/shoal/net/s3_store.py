"""An S3-compatible object store: workers upload to it and services read from it, by URLs that the coordinator signs.

An upload's URL is good for one name of ours, one size and one digest, once: the store compares. What it would not compare is
tried out when it is opened. Every request of our own is made by such a URL too.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import parse_qsl, urlsplit
from xml.etree import ElementTree

import httpx2

from shoal.net.object_store import Declared
from shoal.net.presign import Credentials, presign, upload_headers

TIMEOUT = httpx2.Timeout(20.0, connect=5.0)
READ_S = 300
"""How long a reader may use its URL."""
OWN_S = 60
"""How long the URLs of our own requests count."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"([A-Za-z0-9._-]+/)*")
_HINT = "s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME"


class StoreDown(Exception):
    """The store does not answer, or not as a store does. Trying again may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    endpoint: str
    region: str
    bucket: str
    prefix: str
    """Empty, or ends with a slash."""

    @classmethod
    def parse(cls, url: str) -> "S3Address":
        """Of s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME; endpoint and region are Amazon's unless they are given."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme != "s3" or options.keys() - {"endpoint", "region"}:
            raise ValueError(f"coordinator.store = {url!r}: expected {_HINT}")
        prefix = parts.path.strip("/")
        prefix = f"{prefix}/" if prefix else ""
        if not _BUCKET.fullmatch(parts.netloc) or not _PREFIX.fullmatch(prefix):
            raise ValueError(f"coordinator.store = {url!r}: bucket and prefix are letters, digits and ._-")
        region = options.get("region") or "us-east-1"
        endpoint = (options.get("endpoint") or f"https://s3.{region}.amazonaws.com").rstrip("/")
        if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", endpoint):
            raise ValueError(f"coordinator.store: endpoint={endpoint!r} must look like https://HOST:PORT")
        return cls(endpoint=endpoint, region=region, bucket=parts.netloc, prefix=prefix)


class S3Store:
    """Objects of one run under one prefix. Their names are the coordinator's random tokens: nobody else can know or choose one."""

    def __init__(self, address: S3Address, credentials: Credentials, *, folder: str) -> None:
        """`folder` keeps runs apart that share a prefix."""
        self._address, self._credentials = address, credentials
        self._prefix = f"{address.prefix}{folder}/"
        self._http = httpx2.Client(timeout=TIMEOUT, follow_redirects=False)

    def close(self) -> None:
        self._http.close()

    def upload_url(self, declared: Declared) -> str:
        """The same for the same declaration."""
        return self._sign(
            "PUT",
            self._object_url(declared.token),
            declared.asked_at_s,
            int(declared.expires_at_s - declared.asked_at_s),
            upload_headers(declared.sha256, declared.num_bytes),
        )

    def read_url(self, declared: Declared, now_s: float) -> str:
        return self._sign("GET", self._object_url(declared.token), now_s, READ_S)

    def holds(self, declared: Declared) -> bool:
        """Whether the store has it, complete. StoreDown if it does not say."""
        answer = self._ask("HEAD", token=declared.token, headers={"x-amz-checksum-mode": "ENABLED"})
        if answer.status_code == 404:
            return False
        _check(answer, f"HEAD {declared.token[:16]}")
        said = upload_headers(declared.sha256, declared.num_bytes)
        digest: str = answer.headers.get("x-amz-checksum-sha256", said["x-amz-checksum-sha256"])
        told = (answer.headers.get("content-length"), digest)
        return told == (said["content-length"], said["x-amz-checksum-sha256"])

    def remove(self, declared: Declared) -> None:
        """Nothing: the URL of an upload counts until its lease ends, whatever is removed before. A sweep takes what is left."""

    def delete(self, token: str) -> None:
        answer = self._ask("DELETE", token=token)
        if answer.status_code != 404:
            _check(answer, f"DELETE {token[:16]}")

    def tokens(self, *, older_than_s: float) -> Iterator[list[str]]:
        """Names of objects that were written before this time, by pages."""
        after = ""
        while True:
            query = f"list-type=2&prefix={_encoded(self._prefix)}"
            if after:
                query += f"&start-after={_encoded(after)}"
            answer = self._ask("GET", query=query)
            _check(answer, "a list of objects")
            keys, more = _parse_list(answer.content)
            yield [key.removeprefix(self._prefix) for key, at_s in keys if at_s < older_than_s]
            if not more or not keys:
                return
            after = keys[-1][0]

    def check(self) -> list[str]:
        """Try out what the store must do; what it does not do but we can live with, in words. ValueError if it will not serve."""
        data, other = b"Shoal asks whether this store compares", b"Shoal asks whether this store COMPARES"
        now_s = time.time()
        sha256 = hashlib.sha256(data).hexdigest()
        token = f"probe-{secrets.token_hex(16)}"
        probe = Declared(
            token=token, sha256=sha256, num_bytes=len(data), asked_at_s=now_s, expires_at_s=now_s + OWN_S
        )
        try:
            return self._try_out(probe, data, other)
        except StoreDown as error:
            raise ValueError(
                f"the object store {self._bucket_url()} does not serve: {error}; check endpoint, bucket and credentials"
            ) from None
        finally:
            self._clear(token)

    def _try_out(self, probe: Declared, data: bytes, other: bytes) -> list[str]:
        if self._put(probe, other).is_success:
            raise ValueError(
                f"the object store {self._bucket_url()} takes bytes that are not of the SHA-256 they are declared with "
                "(x-amz-checksum-sha256); use one that compares, or leave coordinator.store out"
            )
        _check(self._put(probe, data), "an upload")
        if not self.holds(probe):
            raise ValueError(
                f"the object store {self._bucket_url()} does not have what was just uploaded to it"
            )
        if self._put(probe, data).status_code in (409, 412):
            return []
        return ["takes an upload twice (If-None-Match); with its digest compared, only the same bytes again"]

    def _put(self, declared: Declared, data: bytes) -> httpx2.Response:
        headers = upload_headers(declared.sha256, declared.num_bytes)
        return self._send("PUT", self.upload_url(declared), data, headers)

    def _clear(self, token: str) -> None:
        try:
            self.delete(token)
        except StoreDown:
            return  # a probe that stays is swept with all else that nobody submitted

    def _ask(
        self, method: str, *, token: str | None = None, query: str = "", headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        """One request of our own: about an object, or about the bucket."""
        url = (
            self._bucket_url() + (f"?{query}" if query else "") if token is None else self._object_url(token)
        )
        return self._send(method, self._sign(method, url, time.time(), OWN_S, headers), headers=headers)

    def _send(
        self, method: str, url: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> httpx2.Response:
        try:
            return self._http.request(method, url, content=data or None, headers=headers)
        except httpx2.HTTPError as error:
            raise StoreDown(f"{method} {url.partition('?')[0]}: {type(error).__name__}: {error}") from None

    def _sign(
        self, method: str, url: str, now_s: float, expires_s: int, headers: dict[str, str] | None = None
    ) -> str:
        return presign(
            self._credentials,
            method,
            url,
            region=self._address.region,
            now_s=now_s,
            expires_s=expires_s,
            headers=headers,
        )

    def _object_url(self, token: str) -> str:
        return f"{self._bucket_url()}/{self._prefix}{token}"

    def _bucket_url(self) -> str:
        return f"{self._address.endpoint}/{self._address.bucket}"


def _check(answer: httpx2.Response, what: str) -> None:
    if not answer.is_success:
        raise StoreDown(f"{what}: HTTP {answer.status_code}: {_reason(answer)}")


def _parse_list(data: bytes) -> tuple[list[tuple[str, float]], bool]:
    try:
        root = ElementTree.fromstring(data)
        keys = [
            (
                entry.findtext("{*}Key") or "",
                datetime.fromisoformat(entry.findtext("{*}LastModified") or "").timestamp(),
            )
            for entry in root.iterfind("{*}Contents")
        ]
        return keys, root.findtext("{*}IsTruncated") == "true"
    except (ElementTree.ParseError, ValueError) as error:
        raise StoreDown(f"a list of objects that cannot be read: {error}") from None


def _reason(answer: httpx2.Response) -> str:
    code = re.search(r"<Code>([A-Za-z0-9]+)</Code>", answer.text)
    return code[1] if code else repr(answer.text[:120])


def _encoded(text: str) -> str:
    return text.replace("/", "%2F")
