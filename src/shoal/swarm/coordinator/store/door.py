"""The door: what is asked of the database for all requests of a turn at once.

Who of their signers is a node, whose nonce is fresh, and heartbeats with which all is well: three statements for a turn instead of
three for a request. JSON carries the lists, since both databases read it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqlalchemy import text

from shoal.swarm.coordinator.context import Coordinator
from shoal.swarm.coordinator.membership.nodes import find_node
from shoal.swarm.coordinator.store.needs import Needs, read_ahead
from shoal.swarm.coordinator.store.sheet import NODES
from shoal.swarm.coordinator.store.statements import Statement
from shoal.swarm.coordinator.store.turn import Turn
from shoal.wire.messages import Heartbeat, Role
from shoal.wire.request import Signer

Caller = Literal["newcomer", "node", "banned"] | Role
"""`newcomer` is any key; `banned` lets even an ejected node through: to appeal."""

_SPEND = {
    "sqlite": Statement(
        text(
            "INSERT INTO nonces (key, nonce, seen_at_s)"
            " SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), :now_s FROM json_each(:pairs)"
            " WHERE true ON CONFLICT DO NOTHING RETURNING key, nonce"
        )
    ),
    "postgresql": Statement(
        text(
            "INSERT INTO nonces (key, nonce, seen_at_s)"
            " SELECT one->>0, one->>1, CAST(:now_s AS double precision) FROM json_array_elements(CAST(:pairs AS json)) AS given(one)"
            " ON CONFLICT DO NOTHING RETURNING key, nonce"
        )
    ),
}
# A delegated node takes the long way: its delegation must be looked at. So does one that comes back: the ledger says so.
# (Not "owner IS NULL": SQLite would look through its index of owners, all nodes for each heartbeat.)
_WELL = "live = 1 AND trust <> 'banned' AND coalesce(owner, '') = ''"
_BEAT = {
    "sqlite": Statement(
        text(
            "UPDATE nodes SET last_seen_s = :now_s, phase = json_extract(value, '$[2]'),"
            " policy_version = json_extract(value, '$[3]'), tokens_per_s = json_extract(value, '$[4]')"
            " FROM json_each(:beats) WHERE node = json_extract(value, '$[0]')"
            f" AND session_epoch = json_extract(value, '$[1]') AND {_WELL} RETURNING node"
        ),
        keeps_rows=True,  # but for what only the page shows
    ),
    "postgresql": Statement(
        text(
            "UPDATE nodes SET last_seen_s = :now_s, phase = one->>2,"
            " policy_version = CAST(one->>3 AS bigint), tokens_per_s = CAST(one->>4 AS double precision)"
            " FROM json_array_elements(CAST(:beats AS json)) AS given(one) WHERE node = one->>0"
            f" AND session_epoch = CAST(one->>1 AS bigint) AND {_WELL} RETURNING node"
        ),
        keeps_rows=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knock:
    """A signed request at the door."""

    signer: Signer
    allowed: frozenset[Caller]
    beat: Heartbeat | None = None
    """What it says, if it is a heartbeat."""
    needs: Needs | None = None
    """What it will ask of the tables."""


@dataclass(slots=True)
class Entered:
    """What the door has done in one turn."""

    asked: set[tuple[str, str]] = field(default_factory=set)
    """Key and nonce of those whose nonces were spent here."""
    fresh: set[tuple[str, str]] = field(default_factory=set)
    """Those of them that had not been spent before; each counts for one request."""
    beats: set[tuple[str, str]] = field(default_factory=set)
    """Of heartbeats that are done."""


def open_door(coordinator: Coordinator, turn: Turn, told: Sequence[Knock | Needs]) -> None:
    """Before the first request of a turn. Who must not come in leaves no trace; its own request says why."""
    knocks = [one for one in told if isinstance(one, Knock)]
    _meet(coordinator, turn, knocks)
    allowed = [knock for knock in knocks if caller_of(coordinator, turn, knock.signer.key) in knock.allowed]
    now_s, entered = coordinator.clock(), _entered(turn)
    _spend(turn, [knock.signer for knock in allowed], now_s)
    needs = [one for one in told if isinstance(one, Needs)]
    needs += [knock.needs for knock in allowed if knock.needs and _pair(knock.signer) in entered.fresh]
    read_ahead(coordinator, turn, needs)
    first = {
        knock.signer.key: knock
        for knock in reversed(allowed)
        if knock.beat is not None and _pair(knock.signer) in entered.fresh
    }
    if not first:
        return
    beats = [
        (key, knock.beat.epoch, knock.beat.phase, knock.beat.policy_version, knock.beat.tokens_per_s)
        for key, knock in first.items()
        if knock.beat is not None
    ]
    for row in _BEAT[turn.db.dialect.name].rows(turn.db, now_s=now_s, beats=json.dumps(beats)):
        pair = _pair(first[row.node].signer)
        entered.fresh.remove(pair)
        entered.beats.add(pair)


def caller_of(coordinator: Coordinator, turn: Turn, key: str) -> Caller:
    # A role's key is no node's, whatever the table says.
    role = coordinator.roles.get(key)
    return role or ("newcomer" if find_node(turn.db, key) is None else "node")


def takes_nonce(turn: Turn, signer: Signer, now_s: float) -> bool:
    """Whether the request's nonce was new; it is spent now."""
    entered, pair = _entered(turn), _pair(signer)
    if pair not in entered.asked:
        _spend(turn, [signer], now_s)  # somebody whom an earlier request of the turn made known
    if pair not in entered.fresh:
        return False
    entered.fresh.remove(pair)
    return True


def has_beaten(turn: Turn, signer: Signer) -> bool:
    """Whether the request was a heartbeat that is done."""
    beats, pair = _entered(turn).beats, _pair(signer)
    if pair not in beats:
        return False
    beats.remove(pair)
    return True


def _meet(coordinator: Coordinator, turn: Turn, knocks: Sequence[Knock]) -> None:
    NODES.fetch(turn.db, {knock.signer.key for knock in knocks} - coordinator.roles.keys())


def _spend(turn: Turn, signers: Sequence[Signer], now_s: float) -> None:
    pairs = [_pair(signer) for signer in signers]
    if not pairs:
        return
    entered = _entered(turn)
    entered.asked.update(pairs)
    spent = _SPEND[turn.db.dialect.name].rows(turn.db, now_s=now_s, pairs=json.dumps(pairs))
    entered.fresh.update((row.key, row.nonce) for row in spent)


def _entered(turn: Turn) -> Entered:
    found = turn.shared.get(Entered)
    if found is None:
        found = turn.shared[Entered] = Entered()
    assert isinstance(found, Entered)
    return found


def _pair(signer: Signer) -> tuple[str, str]:
    return signer.key, signer.nonce
