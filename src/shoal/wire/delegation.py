"""Owner keys: an owner, whose key stays offline, vouches for a node's key for a while. And the proof of work that a run
may ask of newcomers. docs/wire/request.md has both."""

import hashlib
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import Sealable, Sealed, seal

LONGEST_S = 30 * 24 * 3600.0
"""A node's key that is lost must not count for ever."""


class Delegation(Sealable):
    """Sealed by the owner's key: `node` works for me, from then until then."""

    node: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    not_before_s: float
    not_after_s: float

    @classmethod
    def tag(cls) -> str:
        return "shoal/delegation/1"


def delegate(owner: Key, node: str, *, now_s: float, days: float = 30.0) -> Sealed[Delegation]:
    lasts_s = days * 24 * 3600.0
    if not 0 < lasts_s <= LONGEST_S:
        raise ValueError(f"a delegation of {days:g} days; it may last 30 at most")
    return seal(Delegation(node=node, not_before_s=now_s, not_after_s=now_s + lasts_s), owner)


def read_delegation(path: Path) -> Sealed[Delegation]:
    """As the owner's file has it, unchecked: the coordinator checks it."""
    try:
        return Sealed[Delegation].parse(path.read_bytes())
    except Rejected as rejected:
        raise ValueError(
            f"{path} is no delegation: {rejected.detail}; put the owner's file there again, or delete it"
        ) from None


def check_delegation(sealed: Sealed[Delegation], node: str, *, now_s: float) -> str:
    """The owner's key, if it vouches for `node` now; else Rejected."""
    word = sealed.open(sealed.key)
    if word.node != node:
        raise Rejected("request.revoked", f"the delegation is for node {word.node[:16]}, not {node[:16]}")
    if word.not_after_s - word.not_before_s > LONGEST_S:
        raise Rejected("request.revoked", "the delegation lasts longer than 30 days")
    if not word.not_before_s <= now_s + 300 or now_s >= word.not_after_s:
        raise Rejected(
            "request.revoked",
            f"the delegation counts from {word.not_before_s:.0f} to {word.not_after_s:.0f}, now is {now_s:.0f}",
        )
    return sealed.key


def work_bits(run_key: str, node: str, nonce: str) -> int:
    """Leading zero bits of SHA-256("shoal/work/1" newline run key newline node newline nonce). Bound to run and node."""
    digest = hashlib.sha256(f"shoal/work/1\n{run_key}\n{node}\n{nonce}".encode()).digest()
    return 256 - int.from_bytes(digest, "big").bit_length()


def solve_work(run_key: str, node: str, bits: int) -> str:
    """A nonce with at least `bits` zero bits; takes about 2**bits tries."""
    return next(f"{n:x}" for n in count() if work_bits(run_key, node, f"{n:x}") >= bits)
