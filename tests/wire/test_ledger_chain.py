"""The ledger's chain: a test vector, and the detection of changed, dropped, added and moved events."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.wire.codes import CorruptData
from shoal.wire.keys import Key
from shoal.wire.ledger import GENESIS, LedgerEvent, LedgerHead, event_hash, verify_chain, verify_ledger
from shoal.wire.record import canonical_json, seal


def chain(length: int) -> list[LedgerEvent]:
    events: list[LedgerEvent] = []
    prev = GENESIS
    for seq in range(1, length + 1):
        fields: dict[str, Any] = {
            "seq": seq,
            "time_s": 1000.0 + seq / 4,
            "type": "lease.issued",
            "actor": "ab" * 32,
            "body": {"lease_id": f"{seq:032x}", "rows": 8, "notes": ["a", None, 0.5]},
            "prev": prev,
        }
        prev = event_hash(**fields)
        events.append(LedgerEvent(**fields, hash=prev))
    return events


def test_golden_hash() -> None:
    # SHA-256 of {"actor":"ab..","body":{"n":1},"prev":"00..","seq":1,"time_s":1.5,"type":"run.opened"}
    assert event_hash(1, 1.5, "run.opened", "ab" * 32, {"n": 1}, GENESIS) == (
        "4798c2a9de5cc168fd389aba5e9b02a09622eeb006c271503b2f6a8859683610"
    )


def test_an_honest_chain_verifies() -> None:
    events = chain(5)
    assert verify_chain(events) == (5, events[-1].hash)
    assert verify_chain([]) == (0, GENESIS)


def test_events_survive_the_wire() -> None:
    events = [LedgerEvent.parse(event.model_dump_json()) for event in chain(3)]
    assert verify_chain(events) == (3, events[-1].hash)


@given(
    st.recursive(
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(1 - 2**53, 2**53 - 1), st.lists
    )
)
@example(2.0**64)
@example([-(2.0**53), 2.0**53, 1e20, 1e21, -0.0])
def test_every_number_survives_storage(value: Any) -> None:
    """A database and the wire have the body as text; a float of 2**64 is written like an integer."""
    body = {"evidence": value}
    digest = event_hash(1, 1.0, "verdict.given", "ab" * 32, body, GENESIS)
    read = json.loads(canonical_json(body))
    event = LedgerEvent(
        seq=1, time_s=1.0, type="verdict.given", actor="ab" * 32, body=read, prev=GENESIS, hash=digest
    )
    assert verify_chain([event]) == (1, digest)
    assert verify_chain([LedgerEvent.parse(event.model_dump_json())]) == (1, digest)


@pytest.mark.parametrize(
    "change",
    [
        {"time_s": 1.0},
        {"type": "lease.ended"},
        {"actor": "cd" * 32},
        {"body": {"lease_id": f"{2:032x}", "rows": 9, "notes": ["a", None, 0.5]}},
        {"body": {}},
        {"body": {"rows": float("inf")}},
        {"hash": "00" * 32},
        {"prev": "11" * 32},
        {"seq": 3},
    ],
)
def test_a_changed_event_is_noticed(change: dict[str, Any]) -> None:
    events = chain(3)
    events[1] = events[1].model_copy(update=change)
    with pytest.raises(CorruptData):
        verify_chain(events)


def test_a_dropped_added_or_moved_event_is_noticed() -> None:
    events = chain(4)
    for broken in (
        events[1:],
        events[:1] + events[2:],
        [events[0], *events],
        [events[0], events[2], events[1]],
    ):
        with pytest.raises(CorruptData, match="was expected"):
            verify_chain(broken)


def test_a_rewritten_event_needs_every_later_one_rewritten() -> None:
    events = chain(3)
    fields = events[0].model_dump(exclude={"hash"}) | {"body": {"rows": 1}}
    events[0] = LedgerEvent(**fields, hash=event_hash(**fields))
    with pytest.raises(CorruptData, match="event 2 follows"):
        verify_chain(events)


def test_a_signed_head_vouches_for_the_whole_ledger() -> None:
    key, events = Key.from_seed(bytes(32)), chain(4)
    head = seal(LedgerHead(run="r", seq=4, hash=events[-1].hash, time_s=1.0), key)
    assert verify_ledger(events, head, key.public) == 4
    for other in (events[:3], [], chain(5)):
        with pytest.raises(CorruptData, match="the signed head says 4"):
            verify_ledger(other, head, key.public)
    with pytest.raises(CorruptData, match="is signed by"):
        verify_ledger(events, head, Key.generate().public)
