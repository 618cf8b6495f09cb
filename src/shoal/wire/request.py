"""Request signatures after RFC 9421, with Ed25519. docs/wire/request.md has a golden vector.

Signed: "@method" "@authority" "@path" "@query" "content-digest", and the parameters created, expires, nonce,
keyid, alg and tag. So a signature counts for one method, one host, one path with its query, one body, one
short time, once, and for nothing that is not a Shoal request.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.wire.codes import Rejected
from shoal.wire.keys import PUBLIC_KEY, Key, verify

TAG = "shoal/req/1"
COMPONENTS = ("@method", "@authority", "@path", "@query", "content-digest")
MAX_LIFETIME_S = 120
CLOCK_SKEW_S = 300
NONCE_KEPT_S = 2 * (MAX_LIFETIME_S + CLOCK_SKEW_S)
"""A nonce is remembered for longer than any signature that carries it can be valid."""

_COVERED = " ".join(f'"{name}"' for name in COMPONENTS)
_PARAMETERS = re.compile(
    r"\((?P<covered>[^()]*)\);created=(?P<created>[0-9]{1,12});expires=(?P<expires>[0-9]{1,12})"
    r';nonce="(?P<nonce>[0-9a-f]{32})";keyid="(?P<keyid>[0-9a-f]{64})";alg="(?P<alg>[a-z0-9-]{1,32})";tag="(?P<tag>[ -!#-~]{1,64})"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request is aimed at, as both sides see it."""

    method: str
    authority: str
    path: str
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Who signed a request, and the nonce to remember."""

    key: str
    nonce: str
    expires_s: int


def content_digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def sign_request(
    key: Key, target: Target, body: bytes, *, now_s: float, nonce: str | None = None, lifetime_s: int = 60
) -> dict[str, str]:
    """The headers that sign a request: Content-Digest, Signature-Input, Signature."""
    digest = content_digest(body)
    created = int(now_s)
    parameters = (
        f'({_COVERED});created={created};expires={created + lifetime_s};nonce="{nonce or secrets.token_hex(16)}"'
        f';keyid="{key.public}";alg="ed25519";tag="{TAG}"'
    )
    signature = base64.b64encode(bytes.fromhex(key.sign(signature_base(target, digest, parameters)))).decode()
    return {
        "Content-Digest": digest,
        "Signature-Input": f"sig1={parameters}",
        "Signature": f"sig1=:{signature}:",
    }


def verify_request(headers: Mapping[str, str], target: Target, body: bytes, *, now_s: float) -> Signer:
    """Who signed it, or Rejected. The caller must still refuse a nonce it has seen from this key."""
    digest, given_input, given = (
        _header(headers, name) for name in ("content-digest", "signature-input", "signature")
    )
    if not given_input or not given:
        raise Rejected(
            "request.unsigned", f"{target.method} {target.path} needs Signature-Input and Signature headers"
        )
    parameters = given_input.removeprefix("sig1=")
    match = _PARAMETERS.fullmatch(parameters) if given_input.startswith("sig1=") else None
    if match is None or match["covered"] != _COVERED or match["alg"] != "ed25519" or match["tag"] != TAG:
        raise Rejected(
            "request.bad_signature",
            f"Signature-Input must cover {_COVERED} with created, expires, nonce, keyid, alg ed25519 and tag {TAG}",
        )
    if digest != content_digest(body):
        raise Rejected(
            "request.wrong_digest",
            f"content-digest is {digest[:80]!r}, the body's is {content_digest(body)!r}",
        )
    if not verify(match["keyid"], signature_base(target, digest, parameters), _signature_hex(given)):
        raise Rejected(
            "request.bad_signature",
            f"the signature by {match['keyid'][:16]} does not fit {target.method} {target.authority}{target.path}",
        )
    _check_window(int(match["created"]), int(match["expires"]), now_s)
    return Signer(key=match["keyid"], nonce=match["nonce"], expires_s=int(match["expires"]))


def _header(headers: Mapping[str, str], name: str) -> str:
    """By its name in any case; servers' own mappings know it in lower case."""
    found = headers.get(name)
    if found is not None:
        return found
    return next((value for other, value in headers.items() if other.lower() == name), "")


def signature_base(target: Target, digest: str, parameters: str) -> bytes:
    """The bytes that are signed (RFC 9421, section 2.5)."""
    values = {
        "@method": target.method.upper(),
        "@authority": target.authority.lower(),
        "@path": target.path or "/",
        "@query": f"?{target.query}",
        "content-digest": digest,
    }
    lines = [f'"{name}": {values[name]}' for name in COMPONENTS]
    return "\n".join([*lines, f'"@signature-params": {parameters}']).encode()


def _check_window(created_s: int, expires_s: int, now_s: float) -> None:
    if expires_s - created_s > MAX_LIFETIME_S:
        raise Rejected(
            "request.expired",
            f"a signature may live {MAX_LIFETIME_S} s, this one asks for {expires_s - created_s} s",
        )
    if created_s > now_s + CLOCK_SKEW_S:
        raise Rejected(
            "request.expired",
            f"created {created_s - now_s:.0f} s in the future by the server's clock ({now_s:.0f})",
        )
    if expires_s + CLOCK_SKEW_S < now_s:
        raise Rejected(
            "request.expired", f"expired {now_s - expires_s:.0f} s ago by the server's clock ({now_s:.0f})"
        )


def _signature_hex(header: str) -> str:
    # The last letter carries four bits beside its own two: they must be 0, so that a signature has one spelling.
    match = re.fullmatch(r"sig1=:([A-Za-z0-9+/]{85}[AQgw]==):", header)
    return base64.b64decode(match[1]).hex() if match else ""


__all__ = [
    "NONCE_KEPT_S",
    "PUBLIC_KEY",
    "Signer",
    "Target",
    "content_digest",
    "sign_request",
    "signature_base",
    "verify_request",
]
