"""Delegations and proofs of work; docs/wire/request.md describes both.

With a delegation an owner, whose own key stays offline, vouches for a node's key for up to 30 days. A run may ask new nodes
for a proof of work.
"""

import hashlib
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import Sealable, Sealed, seal

LONGEST_S = 30 * 24 * 3600.0
"""Longest validity of a delegation. It bounds how long a stolen node key can be used."""


class Delegation(Sealable):
    """The owner's statement, sealed with its key, that `node` works for it in this period."""

    node: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    not_before_s: float
    not_after_s: float

    @classmethod
    def tag(cls) -> str:
        return "shoal/delegation/1"


def delegate(owner: Key, node: str, *, now_s: float, days: float = 30.0) -> Sealed[Delegation]:
    """Returns a delegation of `node`, sealed by the owner, that is valid for `days` from now."""
    lasts_s = days * 24 * 3600.0
    if not 0 < lasts_s <= LONGEST_S:
        raise ValueError(f"a delegation of {days:g} days is not possible; choose more than 0 and at most 30")
    return seal(Delegation(node=node, not_before_s=now_s, not_after_s=now_s + lasts_s), owner)


def read_delegation(path: Path) -> Sealed[Delegation]:
    """Reads the owner's file. Signature and period are not checked here; the coordinator checks them."""
    try:
        return Sealed[Delegation].parse(path.read_bytes())
    except Rejected as rejected:
        raise ValueError(
            f"{path} is not a delegation: {rejected.detail}; copy the owner's file there again, or delete it"
        ) from None


def check_delegation(sealed: Sealed[Delegation], node: str, *, now_s: float) -> str:
    """Returns the owner's key. Raises Rejected if the delegation does not cover `node` now."""
    body = sealed.open(sealed.key)
    if body.node != node:
        raise Rejected("request.revoked", f"the delegation is for node {body.node[:16]}, not {node[:16]}")
    if body.not_after_s - body.not_before_s > LONGEST_S:
        raise Rejected("request.revoked", "the delegation lasts longer than 30 days")
    if not body.not_before_s <= now_s + 300 or now_s >= body.not_after_s:
        raise Rejected(
            "request.revoked",
            f"the delegation is valid from {body.not_before_s:.0f} to {body.not_after_s:.0f}; now is {now_s:.0f}",
        )
    return sealed.key


def work_bits(run_key: str, node: str, nonce: str) -> int:
    """Returns the number of leading zero bits of SHA-256("shoal/work/1" newline run key newline node newline nonce).

    The hash contains run and node, so that a proof cannot be used for another node or in another run.
    """
    digest = hashlib.sha256(f"shoal/work/1\n{run_key}\n{node}\n{nonce}".encode()).digest()
    return 256 - int.from_bytes(digest, "big").bit_length()


def solve_work(run_key: str, node: str, bits: int) -> str:
    """Returns a nonce whose hash has at least `bits` leading zero bits. Takes about 2**bits attempts."""
    return next(f"{n:x}" for n in count() if work_bits(run_key, node, f"{n:x}") >= bits)
