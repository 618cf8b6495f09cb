"""An S3-compatible object store: workers upload to it and services read from it, by URLs that the coordinator signs.

The URL of an upload allows one name, one size and one digest, and only while the name is free: the store compares. A store
that does not compare is found by `check` when the coordinator opens it, and refused. boto3 signs and talks to the store;
it comes with the extra `s3` and is imported only here.
"""

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2

from shoal.net.object_store import Declared, upload_headers
from shoal.wire.codes import Rejected

CONNECT_S, READ_TIMEOUT_S = 5.0, 20.0
READ_URL_S = 300
"""How long a reader may use its URL."""
PROBE_URL_S = 60
MAX_URL_S = 7 * 24 * 3600
"""The longest lifetime of a signed URL that stores accept."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"([A-Za-z0-9._-]+/)*")
_ADDRESS_FORM = "s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME"


class StoreDown(Exception):
    """The store did not answer, or answered with an error. A retry may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An access key of the store. Without one, boto3 looks for credentials (environment, profile, instance role)."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Address:
    """Where a run's objects are: a prefix in a bucket of a store."""

    endpoint: str
    region: str
    bucket: str
    prefix: str
    """Empty, or ends with a slash."""

    @classmethod
    def parse(cls, url: str) -> "S3Address":
        """Parses s3://BUCKET/PREFIX?endpoint=https://HOST&region=NAME; endpoint and region default to Amazon's."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.scheme != "s3" or options.keys() - {"endpoint", "region"}:
            raise ValueError(f"coordinator.store = {url!r}: expected {_ADDRESS_FORM}")
        prefix = parts.path.strip("/")
        prefix = f"{prefix}/" if prefix else ""
        if not _BUCKET.fullmatch(parts.netloc) or not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"coordinator.store = {url!r}: bucket and prefix may have letters, digits and ._- only"
            )
        region = options.get("region") or "us-east-1"
        endpoint = (options.get("endpoint") or f"https://s3.{region}.amazonaws.com").rstrip("/")
        if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+", endpoint):
            raise ValueError(f"coordinator.store: endpoint={endpoint!r} must look like https://HOST:PORT")
        return cls(endpoint=endpoint, region=region, bucket=parts.netloc, prefix=prefix)

    @property
    def bucket_url(self) -> str:
        """The bucket, for messages."""
        return f"{self.endpoint}/{self.bucket}"


class S3Store:
    """Objects of one run under one prefix. Their names are random tokens of the coordinator, which cannot be guessed."""

    def __init__(self, address: S3Address, credentials: Credentials | None, *, folder: str) -> None:
        """`folder` separates runs that share a prefix. Raises ValueError without boto3 or without credentials."""
        self._address = address
        self._prefix = f"{address.prefix}{folder}/"
        self._s3 = _connect(address, credentials)
        self._http = httpx2.Client(timeout=httpx2.Timeout(READ_TIMEOUT_S, connect=CONNECT_S))

    def close(self) -> None:
        """Closes the connections to the store."""
        self._http.close()
        self._s3.close()

    def upload_url(self, declared: Declared) -> str:
        """Returns a URL for one upload of the declared bytes, valid until the declaration expires."""
        headers = upload_headers(declared.sha256, declared.num_bytes)
        conditions = {
            "ContentLength": declared.num_bytes,
            "ChecksumSHA256": headers["x-amz-checksum-sha256"],
            "IfNoneMatch": headers["if-none-match"],
        }
        return self._sign("put_object", declared.token, declared.expires_at_s - time.time(), conditions)

    def read_url(self, declared: Declared) -> str:
        """Returns a URL that reads the object, for READ_URL_S."""
        return self._sign("get_object", declared.token, READ_URL_S, {})

    def holds(self, declared: Declared) -> bool:
        """Returns whether the store has the object, complete; raises StoreDown if the store does not answer."""
        found = self._call("head_object", Key=self._prefix + declared.token, ChecksumMode="ENABLED")
        if found is None:
            return False
        digest = upload_headers(declared.sha256, declared.num_bytes)["x-amz-checksum-sha256"]
        # Some stores do not report the digest. They compared it when the object was uploaded, see `check`.
        return bool(
            found["ContentLength"] == declared.num_bytes and found.get("ChecksumSHA256", digest) == digest
        )

    def remove(self, declared: Declared) -> None:
        """Does nothing: the upload URL stays valid until its lease ends, so a cleanup deletes the object after that."""

    def delete(self, token: str) -> None:
        """Deletes an object; succeeds if there is none."""
        self._call("delete_object", Key=self._prefix + token)

    def tokens(self, *, older_than_s: float) -> Iterator[list[str]]:
        """Yields the names of objects that were written before this time, page by page."""
        last: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", Prefix=self._prefix, **last) or {}
            objects = page.get("Contents", [])
            yield [
                found["Key"].removeprefix(self._prefix)
                for found in objects
                if found["LastModified"].timestamp() < older_than_s
            ]
            if not page.get("IsTruncated") or not objects:
                return
            last = {"StartAfter": objects[-1]["Key"]}

    def check(self) -> list[str]:
        """Probes whether the store compares what uploads declare.

        Returns warnings about deviations that do no harm; raises ValueError if the store cannot be used.
        """
        data, other = b"Shoal asks whether this store compares", b"Shoal asks whether this store COMPARES"
        now_s = time.time()
        probe = Declared(
            token=f"probe-{secrets.token_hex(16)}",
            sha256=hashlib.sha256(data).hexdigest(),
            num_bytes=len(data),
            asked_at_s=now_s,
            expires_at_s=now_s + PROBE_URL_S,
        )
        try:
            return self._probe(probe, data, other)
        except (StoreDown, Rejected) as error:
            raise ValueError(
                f"the object store {self._address.bucket_url} cannot be used: {error}; "
                "check endpoint, bucket and credentials"
            ) from None
        finally:
            # If this fails, the cleanup of objects that were never submitted deletes it later.
            with contextlib.suppress(StoreDown):
                self.delete(probe.token)

    def _probe(self, probe: Declared, data: bytes, other: bytes) -> list[str]:
        if self._put(probe, other).is_success:
            raise ValueError(
                f"the object store {self._address.bucket_url} accepts bytes that do not match their declared SHA-256 "
                "(x-amz-checksum-sha256); use a store that compares, or leave coordinator.store out"
            )
        answer = self._put(probe, data)
        if not answer.is_success:
            raise StoreDown(f"an upload: HTTP {answer.status_code}: {_error_code(answer)}")
        if not self.holds(probe):
            raise ValueError(
                f"the object store {self._address.bucket_url} does not have what was just uploaded to it"
            )
        if self._put(probe, data).status_code in (409, 412):
            return []
        return [
            "accepts an upload twice (If-None-Match is ignored); harmless, because it compares the digest and "
            "so accepts the same bytes only"
        ]

    def _put(self, declared: Declared, data: bytes) -> httpx2.Response:
        """Uploads as a worker does: by the signed URL, without credentials."""
        url = self.upload_url(declared)
        try:
            return self._http.put(
                url, content=data, headers=upload_headers(declared.sha256, declared.num_bytes)
            )
        except httpx2.HTTPError as error:
            raise StoreDown(f"PUT {url.partition('?')[0]}: {type(error).__name__}: {error}") from None

    def _sign(self, operation: str, token: str, lifetime_s: float, conditions: dict[str, Any]) -> str:
        from botocore.exceptions import BotoCoreError

        params = {"Bucket": self._address.bucket, "Key": self._prefix + token, **conditions}
        expires_s = max(1, min(int(lifetime_s), MAX_URL_S))
        try:
            url: str = self._s3.generate_presigned_url(operation, Params=params, ExpiresIn=expires_s)
        except BotoCoreError as error:  # credentials of an instance role that cannot be renewed now
            raise Rejected(
                "request.failed", f"cannot sign for the object store: {error}", retry_after_s=2.0
            ) from None
        return url

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Makes one request with our own credentials; returns None for "no such object"."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = getattr(self._s3, operation)(Bucket=self._address.bucket, **arguments)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = error.response.get("Error", {}).get("Code")
            if status == 404 and operation in ("head_object", "delete_object"):
                return None
            raise StoreDown(f"{operation}: HTTP {status}: {code}") from None
        except BotoCoreError as error:
            raise StoreDown(f"{operation}: {type(error).__name__}: {error}") from None
        return answer


def _connect(address: S3Address, credentials: Credentials | None) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise ValueError(
            "coordinator.store is an S3 store, which needs boto3: pip install 'shoal-rl[s3]'"
        ) from None
    # BUCKET.HOST for Amazon's own endpoints, HOST/BUCKET for all others.
    amazon = address.endpoint.endswith(".amazonaws.com") and "." not in address.bucket
    config = Config(
        signature_version="s3v4",
        s3={"addressing_style": "virtual" if amazon else "path"},
        connect_timeout=CONNECT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": 2, "mode": "standard"},
        # Without these, boto3 signs a CRC32 of its own into uploads, which not every store knows.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        session = boto3.session.Session(
            aws_access_key_id=credentials.access_key if credentials else None,
            aws_secret_access_key=credentials.secret_key if credentials else None,
            aws_session_token=(credentials.session_token or None) if credentials else None,
        )
        found = session.get_credentials()
    except BotoCoreError as error:
        raise ValueError(f"credentials of coordinator.store: {error}") from None
    if found is None:
        raise ValueError(
            "coordinator.store needs credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or run on a machine with an instance role"
        )
    return session.client("s3", region_name=address.region, endpoint_url=address.endpoint, config=config)


def _error_code(answer: httpx2.Response) -> str:
    code = re.search(r"<Code>([A-Za-z0-9]+)</Code>", answer.text)
    return code[1] if code else repr(answer.text[:120])
