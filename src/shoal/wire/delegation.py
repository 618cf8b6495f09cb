"""Delegations and proofs of work; docs/wire/request.md describes both.

With a delegation an owner, whose own key stays offline, vouches for a node's key for up to 30 days. In the same way the operator
vouches that a key is the relay at a URL. A run may ask new nodes for a proof of work.
"""

import hashlib
import time
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.files import write_bytes_atomically
from shoal.wire.codes import Rejected
from shoal.wire.keys import Key
from shoal.wire.record import Sealable, Sealed, Url, seal

LONGEST_S = 30 * 24 * 3600.0
"""Longest validity of a node's delegation. It bounds how long a stolen node key can be used."""
RELAY_DAYS = 365.0
"""Validity of a relay's delegation. A newer one for the same URL ends it: a stolen key is replaced that way."""
RELAY_DELEGATION_FILE = "delegation.json"
"""The delegation's name beside the relay's key."""


class Delegation(Sealable):
    """The owner's statement, sealed with its key, that `node` works for it in this period."""

    tag = "shoal/delegation/1"
    node: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    not_before_s: float
    not_after_s: float


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
    _check_period(body, now_s)
    return sealed.key


# -- relays -----------------------------------------------------------------------------------------------


class RelayDelegation(Sealable):
    """The operator's statement, sealed with relay.key, that the key `relay` is the relay at `url` in this period."""

    tag = "shoal/relay-delegation/1"
    relay: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    url: Url
    not_before_s: float
    not_after_s: float


def delegate_relay(
    operator: Key, relay: str, url: str, *, now_s: float, days: float = RELAY_DAYS
) -> Sealed[RelayDelegation]:
    """Returns the delegation of the key `relay` for `url`, valid for `days` from now."""
    if not days > 0:
        raise ValueError(f"a delegation of {days:g} days is not possible; choose more than 0")
    until_s = now_s + days * 24 * 3600.0
    body = RelayDelegation(relay=relay, url=url.rstrip("/"), not_before_s=now_s, not_after_s=until_s)
    return seal(body, operator)


def write_relay_key(operator: Key, url: str, folder: Path, *, days: float = RELAY_DAYS) -> Path:
    """Writes a relay's key into `folder`, unless it is there, and its delegation for `url`; returns the key's path."""
    path = folder / "relay.key"
    relay = Key.load_or_create(path)
    sealed = delegate_relay(operator, relay.public, url, now_s=time.time(), days=days)
    write_bytes_atomically(folder / RELAY_DELEGATION_FILE, sealed.model_dump_json().encode() + b"\n")
    return path


def read_relay_delegation(key: Path) -> Sealed[RelayDelegation]:
    """Reads the delegation beside a relay's key. The coordinator checks signature and period."""
    path = key.with_name(RELAY_DELEGATION_FILE)
    remedy = "make key and delegation with `shoal identity relay URL`, and copy both files"
    try:
        return Sealed[RelayDelegation].parse(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"no {path}: a relay needs a delegation of its key and URL; {remedy}") from None
    except Rejected as rejected:
        raise ValueError(f"{path} is not a relay's delegation: {rejected.detail}; {remedy}") from None


def check_relay_delegation(
    sealed: Sealed[RelayDelegation], *, operator: str, relay: str, url: str, now_s: float
) -> RelayDelegation:
    """Returns the delegation's body. Raises Rejected unless the operator delegated this key for this URL now."""
    body = sealed.open(operator)
    if (body.relay, body.url) != (relay, url):
        raise Rejected(
            "request.not_allowed",
            f"the delegation is for relay {body.relay[:16]} at {body.url}, not for {relay[:16]} at {url}",
        )
    _check_period(body, now_s)
    return body


def _check_period(body: Delegation | RelayDelegation, now_s: float) -> None:
    """Raises Rejected if a delegation is not valid now. Its beginning may be up to 300 s ahead: clocks differ."""
    if not body.not_before_s <= now_s + 300 or now_s >= body.not_after_s:
        raise Rejected(
            "request.revoked",
            f"the delegation is valid from {body.not_before_s:.0f} to {body.not_after_s:.0f}; now is {now_s:.0f}",
        )


# -- proofs of work ---------------------------------------------------------------------------------------


def work_bits(run_key: str, node: str, nonce: str) -> int:
    """Returns the number of leading zero bits of SHA-256("shoal/work/1" newline run key newline node newline nonce).

    The hash contains run and node, so that a proof cannot be used for another node or in another run.
    """
    digest = hashlib.sha256(f"shoal/work/1\n{run_key}\n{node}\n{nonce}".encode()).digest()
    return 256 - int.from_bytes(digest, "big").bit_length()


def solve_work(run_key: str, node: str, bits: int) -> str:
    """Returns a nonce whose hash has at least `bits` leading zero bits. Takes about 2**bits attempts."""
    return next(f"{n:x}" for n in count() if work_bits(run_key, node, f"{n:x}") >= bits)
