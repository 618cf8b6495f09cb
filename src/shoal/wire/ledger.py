"""The ledger: every change of state is an event that contains the hash of the event before it. The run key signs heads.

    hash = SHA-256(canonical JSON of the event without its hash)

An auditor who kept one signed head can detect any change to the events before it.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic import Field

from shoal.wire.codes import CorruptData, Rejected
from shoal.wire.record import Record, Sealable, Sealed, canonical_json

GENESIS = "0" * 64


class LedgerEvent(Record):
    seq: int
    time_s: float
    type: str
    """`noun.verb`: node.enrolled, lease.issued, submission.received, verdict.given, batch.formed, ..."""
    actor: str
    """Public key that caused the event."""
    body: dict[str, Any]
    prev: str
    hash: str


class LedgerHead(Sealable):
    tag = "shoal/ledger-head/1"
    run: str
    seq: int
    hash: str
    time_s: float


def event_hash(seq: int, time_s: float, type: str, actor: str, body: dict[str, Any], prev: str) -> str:
    return hash_of_text(seq, time_s, type, actor, canonical_json(body), prev)


def hash_of_text(seq: int, time_s: float, type: str, actor: str, body: bytes, prev: str) -> str:
    """Returns the hash of an event whose body is already canonical JSON. The body is inserted between `actor` and `prev`."""
    rest = canonical_json({"actor": actor, "prev": prev, "seq": seq, "time_s": time_s, "type": type})
    before, prev_key, after = rest.partition(b',"prev":')
    return hashlib.sha256(b'%b,"body":%b%b%b' % (before, body, prev_key, after)).hexdigest()


def verify_chain(events: Iterable[LedgerEvent]) -> tuple[int, str]:
    """Returns the number of events and the hash of the last one. Raises CorruptData at the first event that does not verify."""
    prev, seq = GENESIS, 0
    for seq, event in enumerate(events, start=1):
        if event.seq != seq:
            raise CorruptData(f"found ledger event {event.seq} where {seq} was expected")
        if event.prev != prev:
            raise CorruptData(f"ledger event {seq} follows {event.prev[:16]}, not {prev[:16]}")
        if _recomputed_hash(event) != event.hash:
            raise CorruptData(f"ledger event {seq} ({event.type}) was changed: its hash does not match")
        prev = event.hash
    return seq, prev


def _recomputed_hash(event: LedgerEvent) -> str | None:
    """Returns the hash of an event's content, or None if the content has no canonical JSON (an infinity, for example)."""
    try:
        body = _with_doubles(event.body)
        return event_hash(event.seq, event.time_s, event.type, event.actor, body, event.prev)
    except (Rejected, RecursionError, OverflowError):
        return None


def _with_doubles(value: Any) -> Any:
    """Returns JSON data with whole numbers past 2**53 as floats, which they were when they were written.

    RFC 8785 writes the float 2.0**64 without a point or an exponent, so Python reads an integer, which has no canonical JSON. A node
    could otherwise make a ledger that nobody can verify: the evidence against a made-up proof has such a number.
    """
    if isinstance(value, dict):
        return {key: _with_doubles(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_doubles(inner) for inner in value]
    if isinstance(value, int) and abs(value) >= 2**53:
        return float(value)
    return value


def verify_ledger(events: Iterable[LedgerEvent], head: Sealed[LedgerHead], run_key: str) -> int:
    """Returns the number of events if they are exactly those that the signed `head` covers. Raises CorruptData otherwise."""
    try:
        signed = head.open(run_key)
    except Rejected as rejected:
        raise CorruptData(rejected.detail) from None
    count, last = verify_chain(events)
    if (count, last) != (signed.seq, signed.hash):
        raise CorruptData(
            f"{count} events end in {last[:16]}, the signed head says {signed.seq} and {signed.hash[:16]}"
        )
    return count


class TokenCounts(Record):
    """Output tokens of accepted work, by what became of them. Refused and void work is not counted."""

    generated: int
    held_out: int
    """Those of the generated tokens that answer held-out problems."""
    checked: int
    """Those of the generated tokens that a validator computed again."""
    trained: int
    dropped: int
    """Tokens in groups without signal."""
    unused: int
    """Tokens in groups that went stale, were withdrawn, or wait."""


class Rederived(Record):
    """What a trainer that was restarted found when it made versions again, from its checkpoint and the same batches."""

    checkpoint_version: int = Field(ge=0)
    differing_words: int = Field(ge=0)
    """16-bit words of the announced weights that came out differently. The trainer continues from the announced ones."""
