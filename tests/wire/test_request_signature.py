"""Signed requests: RFC 9421's Ed25519 vector, and every way to reuse a captured request for something else."""

import base64
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_private_key

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key, verify
from shoal.wire.request import (
    CLOCK_SKEW_S,
    MAX_LIFETIME_S,
    NONCE_KEPT_S,
    Target,
    content_digest,
    sign_request,
    signature_base,
    verify_request,
)

NOW_S = 1_700_000_000.0
KEY = Key.from_seed(bytes(range(32)))
TARGET = Target(method="POST", authority="swarm.example:8100", path="/v1/leases", query="wait=3")
BODY = b'{"epoch": 4}'
NONCE = "00112233445566778899aabbccddeeff"


def signed(target: Target = TARGET, body: bytes = BODY, now_s: float = NOW_S) -> dict[str, str]:
    return sign_request(KEY, target, body, now_s=now_s, nonce=NONCE)


def refusal(
    headers: dict[str, str], target: Target = TARGET, body: bytes = BODY, now_s: float = NOW_S
) -> str:
    with pytest.raises(Rejected) as caught:
        verify_request(headers, target, body, now_s=now_s)
    return caught.value.code


# -- RFC 9421, appendix B.2.6: Ed25519 over the request of B.2 ------------------------------------------------
RFC_KEY = "MC4CAQAwBQYDK2VwBCIEIJ+DYvh6SEqVTm50DFtMDoQikTmiCqirVv9mWG9qfSnF"
RFC_BASE = b'''"date": Tue, 20 Apr 2021 02:07:55 GMT
"@method": POST
"@path": /foo
"@authority": example.com
"content-type": application/json
"content-length": 18
"@signature-params": ("date" "@method" "@path" "@authority" "content-type" "content-length")\
;created=1618884473;keyid="test-key-ed25519"'''
RFC_SIGNATURE = "wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw=="


def test_rfc_9421_ed25519_vector() -> None:
    private = load_der_private_key(base64.b64decode(RFC_KEY), password=None)
    assert isinstance(private, Ed25519PrivateKey)
    key = Key(private)
    assert base64.b64encode(bytes.fromhex(key.sign(RFC_BASE))).decode() == RFC_SIGNATURE
    assert verify(key.public, RFC_BASE, base64.b64decode(RFC_SIGNATURE).hex())
    assert not verify(key.public, RFC_BASE.replace(b"/foo", b"/fop"), base64.b64decode(RFC_SIGNATURE).hex())


def test_our_signature_base_follows_the_rfc() -> None:
    # The derived components of the RFC's example request (B.2): POST /foo?param=Value&Pet=dog, Host: example.com.
    base = signature_base(
        Target(method="post", authority="Example.COM", path="/foo", query="param=Value&Pet=dog"),
        content_digest(b'{"hello": "world"}'),
        "()",
    )
    assert base == (
        b'"@method": POST\n'
        b'"@authority": example.com\n'
        b'"@path": /foo\n'
        b'"@query": ?param=Value&Pet=dog\n'
        b'"content-digest": sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:\n'
        b'"@signature-params": ()'
    )
    # Section 2.2.7: a missing query is a lone question mark; 2.2.6: an empty path is a slash.
    empty = signature_base(Target(method="GET", authority="h", path=""), content_digest(b""), "()")
    assert b'"@path": /\n"@query": ?\n' in empty


def test_a_signed_request_verifies_and_names_its_signer() -> None:
    signer = verify_request(signed(), TARGET, BODY, now_s=NOW_S)
    assert (signer.key, signer.nonce) == (KEY.public, NONCE)


def test_header_names_are_case_insensitive_and_other_headers_do_not_matter() -> None:
    headers = {name.upper(): value for name, value in signed().items()} | {"x-address": "somebody else"}
    assert verify_request(headers, TARGET, BODY, now_s=NOW_S).key == KEY.public


def test_every_request_has_a_fresh_nonce() -> None:
    first, second = (sign_request(KEY, TARGET, BODY, now_s=NOW_S) for _ in range(2))
    assert first["Signature-Input"] != second["Signature-Input"]


@pytest.mark.parametrize(
    "other",
    [
        replace(TARGET, method="PUT"),
        replace(TARGET, authority="swarm.example:8101"),
        replace(TARGET, authority="evil.example"),
        replace(TARGET, path="/v1/leases/"),
        replace(TARGET, path="/v1/Leases"),
        replace(TARGET, path="/v1/%6ceases"),
        replace(TARGET, path="/v1//leases"),
        replace(TARGET, query="wait=4"),
        replace(TARGET, query=""),
        replace(TARGET, query="wait=3&wait=3"),
    ],
)
def test_a_signature_is_valid_for_one_target_only(other: Target) -> None:
    assert refusal(signed(), target=other) == "request.bad_signature"


def test_the_host_is_case_insensitive() -> None:
    upper = replace(TARGET, authority=TARGET.authority.upper())
    assert verify_request(signed(), upper, BODY, now_s=NOW_S).key == KEY.public


def test_a_changed_body_is_refused() -> None:
    assert refusal(signed(), body=BODY + b" ") == "request.wrong_digest"
    # With the digest corrected, the signature no longer matches.
    headers = signed() | {"Content-Digest": content_digest(BODY + b" ")}
    assert refusal(headers, body=BODY + b" ") == "request.bad_signature"


def test_missing_headers() -> None:
    for name in ("Signature", "Signature-Input"):
        assert refusal({k: v for k, v in signed().items() if k != name}) == "request.unsigned"
    assert refusal({}) == "request.unsigned"
    no_digest = {k: v for k, v in signed().items() if k != "Content-Digest"}
    assert refusal(no_digest) == "request.wrong_digest"


@pytest.mark.parametrize("name", ["Content-Digest", "Signature-Input", "Signature"])
def test_any_flipped_bit_of_any_header_is_refused(name: str) -> None:
    honest = signed()
    value = honest[name].encode()
    for index in range(len(value) * 7):
        changed = bytearray(value)
        changed[index // 7] ^= 1 << (index % 7)  # stays ASCII, as a header must
        with pytest.raises(Rejected) as caught:
            verify_request(honest | {name: changed.decode()}, TARGET, BODY, now_s=NOW_S)
        assert caught.value.code in ("request.bad_signature", "request.wrong_digest")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"@query" ', ""),  # covering less
        ('"@method" ', ""),
        ('"@method" "@authority"', '"@authority" "@method"'),
        ('alg="ed25519"', 'alg="hmac-sha256"'),
        ('tag="shoal/req/1"', 'tag="shoal/manifest/1"'),
        ("sig1=", "sig2="),
        (f'nonce="{NONCE}"', 'nonce="short"'),
    ],
)
def test_a_signature_with_other_parameters_is_refused(old: str, new: str) -> None:
    # Signed again after the change, so that only the changed parameter is wrong.
    digest = content_digest(BODY)
    given_input = signed()["Signature-Input"].replace(old, new)
    assert given_input != signed()["Signature-Input"]
    parameters = given_input.partition("=")[2]
    raw = bytes.fromhex(KEY.sign(signature_base(TARGET, digest, parameters)))
    headers = {
        "Content-Digest": digest,
        "Signature-Input": given_input,
        "Signature": f"sig1=:{base64.b64encode(raw).decode()}:",
    }
    assert refusal(headers) == "request.bad_signature"


def test_another_keys_signature_under_our_key_id_is_refused() -> None:
    mallory = sign_request(Key.generate(), TARGET, BODY, now_s=NOW_S, nonce=NONCE)
    headers = signed() | {"Signature": mallory["Signature"]}
    assert refusal(headers) == "request.bad_signature"


def test_the_time_window() -> None:
    edges = [NOW_S - CLOCK_SKEW_S, NOW_S, NOW_S + 60 + CLOCK_SKEW_S]
    for now_s in edges:
        assert verify_request(signed(), TARGET, BODY, now_s=now_s).key == KEY.public
    assert refusal(signed(), now_s=edges[0] - 1) == "request.expired"
    assert refusal(signed(), now_s=edges[-1] + 1) == "request.expired"


def test_the_lifetime_of_a_signature_is_limited() -> None:
    headers = sign_request(KEY, TARGET, BODY, now_s=NOW_S, lifetime_s=MAX_LIFETIME_S + 1)
    assert refusal(headers) == "request.expired"
    # A nonce is stored for longer than its signature can be valid.
    assert NONCE_KEPT_S > MAX_LIFETIME_S + 2 * CLOCK_SKEW_S
