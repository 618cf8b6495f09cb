"""Request signatures as in RFC 9421, with Ed25519. docs/wire/request.md has a test vector.

A signature covers "@method" "@authority" "@path" "@query" "content-digest" and the parameters created, expires, nonce,
keyid, alg and tag. So it is valid once, for a short time, for one method, one host, one path with its query and one body,
and only for Shoal requests.
"""

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key, verify

TAG = "shoal/req/1"
COMPONENTS = ("@method", "@authority", "@path", "@query", "content-digest")
MAX_LIFETIME_S = 120
CLOCK_SKEW_S = 300
NONCE_KEPT_S = 2 * (MAX_LIFETIME_S + CLOCK_SKEW_S)
"""Seconds for which a nonce is stored: longer than any signature with it can be valid."""

_COVERED = " ".join(f'"{name}"' for name in COMPONENTS)
_PARAMETERS = re.compile(
    r"\((?P<covered>[^()]*)\);created=(?P<created>[0-9]{1,12});expires=(?P<expires>[0-9]{1,12})"
    r';nonce="(?P<nonce>[0-9a-f]{32})";keyid="(?P<keyid>[0-9a-f]{64})";alg="(?P<alg>[a-z0-9-]{1,32})";tag="(?P<tag>[ -!#-~]{1,64})"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Method, host, path and query of a request, as client and server both see them."""

    method: str
    authority: str
    path: str
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """The key that signed a request, and the nonce to store."""

    key: str
    nonce: str


def content_digest(body: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def sign_request(
    key: Key, target: Target, body: bytes, *, now_s: float, nonce: str | None = None, lifetime_s: int = 60
) -> dict[str, str]:
    """Returns the headers that sign a request: Content-Digest, Signature-Input, Signature."""
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
    """Returns the signer of a request; raises Rejected if the signature is not valid.

    The caller must still refuse a nonce that this key has used before.
    """
    return _verify(headers, target, content_digest(body), now_s)


def verify_head(headers: Mapping[str, str], target: Target, *, now_s: float) -> Signer:
    """Returns who signed a request whose body has not been read: the signature covers the digest that the head declares.

    For refusing a large body before it is read. `verify_request` must check the body afterwards.
    """
    return _verify(headers, target, None, now_s)


def _verify(headers: Mapping[str, str], target: Target, body_digest: str | None, now_s: float) -> Signer:
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
    if body_digest not in (None, digest):
        raise Rejected(
            "request.wrong_digest", f"content-digest is {digest[:80]!r}, but the body has {body_digest!r}"
        )
    if not verify(match["keyid"], signature_base(target, digest, parameters), _signature_hex(given)):
        raise Rejected(
            "request.bad_signature",
            f"the signature by {match['keyid'][:16]} does not match {target.method} {target.authority}{target.path}",
        )
    _check_window(int(match["created"]), int(match["expires"]), now_s)
    return Signer(key=match["keyid"], nonce=match["nonce"])


def _header(headers: Mapping[str, str], name: str) -> str:
    """Returns a header's value, ignoring the case of its name; empty if it is missing. Tries the name in lower case first."""
    found = headers.get(name)
    if found is not None:
        return found
    return next((value for other, value in headers.items() if other.lower() == name), "")


def signature_base(target: Target, digest: str, parameters: str) -> bytes:
    """Returns the bytes that are signed (RFC 9421, section 2.5)."""
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
    clock = f"by the server's clock ({now_s:.0f})"
    if expires_s - created_s > MAX_LIFETIME_S:
        problem = f"a signature may be valid for {MAX_LIFETIME_S} s, this one for {expires_s - created_s} s"
    elif created_s > now_s + CLOCK_SKEW_S:
        problem = f"created {created_s - now_s:.0f} s in the future {clock}"
    elif expires_s + CLOCK_SKEW_S < now_s:
        problem = f"expired {now_s - expires_s:.0f} s ago {clock}"
    else:
        return
    raise Rejected("request.expired", problem)


def _signature_hex(header: str) -> str:
    # The last letter has four unused bits. They must be 0, or one signature could be written in 16 ways.
    match = re.fullmatch(r"sig1=:([A-Za-z0-9+/]{85}[AQgw]==):", header)
    return base64.b64decode(match[1]).hex() if match else ""
