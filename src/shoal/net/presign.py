"""Presigned requests of S3 (AWS Signature Version 4 in the query): whoever has the URL may make this one request.

Pure: keys, clock and names are arguments. Names here are made of characters that mean the same encoded and not, so there is
one spelling of each path.
"""

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

MAX_EXPIRES_S = 7 * 24 * 3600
"""The longest that stores take."""

_PLAIN_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


def upload_headers(sha256: str, num_bytes: int) -> dict[str, str]:
    """What an upload must say, and what its URL is signed over: so many bytes, of this digest, and only if nothing is there."""
    digest = base64.b64encode(bytes.fromhex(sha256)).decode("ascii")
    return {"content-length": str(num_bytes), "if-none-match": "*", "x-amz-checksum-sha256": digest}


def presign(
    credentials: Credentials,
    method: str,
    url: str,
    *,
    region: str,
    now_s: float,
    expires_s: int,
    headers: Mapping[str, str] | None = None,
) -> str:
    """`url` with a signature for `method`, for `expires_s` from `now_s`. `headers` (lower case) must be sent as they are."""
    parts = urlsplit(url)
    if not _PLAIN_PATH.fullmatch(parts.path):
        raise ValueError(f"the path {parts.path!r} of {url} needs encoding; use letters, digits and ._~-")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    signed = {"host": parts.netloc.lower(), **(headers or {})}
    names = ";".join(sorted(signed))
    query = dict(part.split("=", 1) for part in parts.query.split("&") if part)
    query |= {
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": _encode(f"{credentials.access_key}/{scope}"),
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(max(1, min(expires_s, MAX_EXPIRES_S))),
        "X-Amz-SignedHeaders": _encode(names),
    }
    if credentials.session_token:
        query["X-Amz-Security-Token"] = _encode(credentials.session_token)
    canonical_query = "&".join(f"{name}={value}" for name, value in sorted(query.items()))
    lines = "".join(f"{name}:{signed[name].strip()}\n" for name in sorted(signed))
    request = "\n".join((method, parts.path or "/", canonical_query, lines, names, "UNSIGNED-PAYLOAD"))
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = _hmac(_signing_key(credentials, stamp[:8], region), text).hex()
    return f"{parts.scheme}://{parts.netloc}{parts.path}?{canonical_query}&X-Amz-Signature={signature}"


def _signing_key(credentials: Credentials, day: str, region: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _encode(text: str) -> str:
    return quote(text, safe="-_.~")
