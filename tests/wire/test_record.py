"""Records: strict parsing, one canonical form, and seals that are valid for one body, one key and one kind."""

import json

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.lease import Receipt
from shoal.wire.ledger import LedgerHead
from shoal.wire.messages import AskLease, Enrol, Heartbeat, RelayReport, Submit
from shoal.wire.record import Record, Sealed, canonical_json, seal

KEY = Key.from_seed(bytes(range(32)))
HEAD = LedgerHead(run="r", seq=7, hash="ab" * 32, time_s=1.5)


def test_a_good_body_parses() -> None:
    assert Heartbeat.parse(b'{"epoch": 3, "phase": "generating"}') == Heartbeat(epoch=3, phase="generating")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"epoch": 3}',
        b'{"epoch": 3, "phase": "x", "node": "someone else"}',
        b'{"epoch": "3", "phase": "x"}',
        b'{"epoch": 3.0, "phase": "x"}',
        b'{"epoch": true, "phase": "x"}',
        b'{"epoch": -1, "phase": "x"}',
        b'{"epoch": 9007199254740992, "phase": "x"}',
        b'{"epoch": 3, "phase": "\xff"}',
        b'{"epoch": 3, "phase": "\\ud800"}',
        b'{"epoch": 3, "phase": null}',
        b'{"epoch": 3, "phase": "x", "tokens_per_s": NaN}',
        b'{"epoch": 3, "phase": "x", "tokens_per_s": 1e400}',
        b'{"epoch": 3, "phase": "' + b"x" * 301 + b'"}',
    ],
)
def test_a_bad_body_is_refused_with_a_code(body: bytes) -> None:
    with pytest.raises(Rejected) as refusal:
        Heartbeat.parse(body)
    assert refusal.value.code == "request.malformed"
    assert refusal.value.detail.startswith("Heartbeat.")


def test_numbers_outside_of_json_and_database_ranges_are_refused() -> None:
    bodies: list[tuple[type[Record], str]] = [
        (AskLease, '{"epoch": 99999999999999999999}'),
        (Enrol, '{"protocol": 99999999999999999999, "software": "x"}'),
        (Submit, '{"epoch": 1, "num_bytes": 0, "sha256": "%s", "policy_version": 1}' % ("ab" * 32)),
        (Submit, '{"epoch": 1, "num_bytes": 1, "sha256": "%s", "policy_version": -1}' % ("ab" * 32)),
        (Submit, '{"epoch": 1, "num_bytes": 1, "sha256": "../../etc", "policy_version": 1}'),
        (RelayReport, '{"url": "http://h:1", "versions": [-1]}'),
        (RelayReport, '{"url": "file:///etc/passwd", "versions": []}'),
        (RelayReport, '{"url": "http://h:1/a b", "versions": []}'),
    ]
    for kind, body in bodies:
        with pytest.raises(Rejected, match=r"request\.malformed"):
            kind.parse(body)


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        HEAD.seq = 8


def test_canonical_form_follows_rfc_8785() -> None:
    # RFC 8785, section 3.2.3: keys sorted as UTF-16, numbers in the shortest form that parses to the same value.
    assert canonical_json({"b": 4.50, "a": 1e30, "\u20ac": "\u000f\n", "c": [True, None, 0.002]}) == (
        b'{"a":1e+30,"b":4.5,"c":[true,null,0.002],"\xe2\x82\xac":"\\u000f\\n"}'
    )
    assert HEAD.canonical() == b'{"hash":"%s","run":"r","seq":7,"time_s":1.5}' % (b"ab" * 32)


@pytest.mark.parametrize("value", [2**53, -(2**53), float("inf"), float("nan")])
def test_values_without_canonical_form_are_refused(value: float) -> None:
    with pytest.raises(Rejected, match=r"request\.malformed"):
        canonical_json({"value": value})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1e-4, 1e-7, 1e15, 1e16, 1e21, -0.0, 5.0, 2.0**53])
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_the_fast_encoder_writes_the_same_bytes_as_the_reference(value: object) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


def test_digest_does_not_depend_on_spelling() -> None:
    spelled = json.dumps({"time_s": 1.50, "run": "r", "hash": "ab" * 32, "seq": 7}, indent=4)
    assert LedgerHead.parse(spelled).digest() == HEAD.digest()


def test_a_seal_survives_the_wire() -> None:
    sent = seal(HEAD, KEY)
    assert type(sent) is Sealed[LedgerHead]
    received = Sealed[LedgerHead].parse(sent.model_dump_json())
    assert received == sent
    assert received.open(KEY.public) == HEAD


@pytest.mark.parametrize(
    "change",
    [
        {"run": "s"},
        {"seq": 8},
        {"hash": "ac" * 32},
        {"time_s": 1.25},
        {"seq": 2**53},  # has no canonical form at all
    ],
)
def test_a_changed_body_breaks_the_seal(change: dict[str, object]) -> None:
    sent = json.loads(seal(HEAD, KEY).model_dump_json())
    sent["body"].update(change)
    with pytest.raises(Rejected):
        Sealed[LedgerHead].parse(json.dumps(sent)).open(KEY.public)


def test_a_seal_by_another_key_is_refused() -> None:
    other = Key.generate()
    with pytest.raises(Rejected, match=r"request\.bad_signature.*expected"):
        seal(HEAD, other).open(KEY.public)
    # It is refused also if it names the right key.
    forged = seal(HEAD, other).model_copy(update={"key": KEY.public})
    with pytest.raises(Rejected, match="does not match the body"):
        forged.open(KEY.public)


def test_a_seal_of_one_kind_is_not_valid_for_another() -> None:
    class LedgerTail(LedgerHead):
        tag = "shoal/ledger-tail/1"

    sent = seal(HEAD, KEY)
    twin = Sealed[LedgerTail].parse(sent.model_dump_json())
    with pytest.raises(Rejected, match=r"request\.bad_signature"):
        twin.open(KEY.public)


def test_any_flipped_bit_of_a_sealed_record_is_refused() -> None:
    receipt = Receipt(
        lease_id="0123456789abcdef" * 2,
        node=KEY.public,
        sha256="cd" * 32,
        num_bytes=1000,
        policy_version=3,
        received_at_s=12.5,
        seq=40,
    )
    sent = seal(receipt, KEY).model_dump_json().encode()
    for index in range(len(sent)):
        changed = bytearray(sent)
        changed[index] ^= 1 << (index % 8)
        with pytest.raises(Rejected):
            Sealed[Receipt].parse(bytes(changed)).open(KEY.public)
