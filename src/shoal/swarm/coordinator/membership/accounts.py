"""Accounts of nodes, owners and networks in the database: the leases that they lost and delivered, and the evidence about them.

The rules are pure functions (rules/lease_account.py, rules/cumulative_evidence.py). The rows are written in the transaction that ends
a lease, so they survive a restart, and coordinators that share a database share them.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select, update

from shoal.swarm.coordinator.context import Coordinator, Transaction
from shoal.swarm.coordinator.rules.cumulative_evidence import (
    NEW_NODE,
    NEW_NODES,
    Finding,
    NoiseWatch,
    RunEvidence,
    Sums,
)
from shoal.swarm.coordinator.rules.lease_account import (
    NETWORK,
    NODE,
    OWNER,
    AccountTerms,
    LeaseAccount,
    after_delivery,
    after_loss,
    decayed,
    delivers_more,
    most_open,
    wait_s,
    weight_of,
)
from shoal.swarm.coordinator.rules.lease_states import AWAITED
from shoal.swarm.coordinator.store.schema import WITHOUT_VERDICT, accounts, leases, nodes, verdicts
from shoal.swarm.coordinator.store.statements import Statement, TableStatements, given
from shoal.wire.codes import UNCERTAIN, Rejected
from shoal.wire.lease import Verdict

ACCOUNTS = TableStatements(accounts)
MAX_WAIT_S = 60.0
"""Longest wait that one answer asks for. The client asks again after it, and learns if the account has changed."""
OPEN_RETRIES = 20
"""How often a node asks during the time of one lease while its owner or network has too many open leases."""
FORGOTTEN = 20
"""Half-lives after which the account of a network is deleted."""
RUN = "run"
"""Name of the row with the run's baseline. That with the evidence about all new nodes is NEW_NODES."""
NOISE = "noise"
"""Name of the row with what is known about the noise since the newest calibration."""
MOST_COUNTED = 16
"""Most verdicts that `uncertain_in_a_row` reads."""
NO_FIT = "if the workers are honest, the calibration does not fit their kind of machine"

_COUNT = select(func.count()).select_from(leases).join(nodes, nodes.c.node == leases.c.node)
# Submitted ones too, until their verdict: new keys could otherwise submit junk faster than validators reject it.
_OPEN_OF_NETWORK = Statement(
    _COUNT.where(leases.c.network == given("name"), WITHOUT_VERDICT, nodes.c.accepted == 0)
)
_OPEN_OF_OWNER = Statement(_COUNT.where(nodes.c.owner == given("name"), leases.c.state.in_(AWAITED)))


@dataclass(frozen=True, slots=True)
class AccountRow:
    """An account as it is now, and where it is stored."""

    name: str
    terms: AccountTerms
    account: LeaseAccount
    evidence: str
    exists: bool


def _find(tx: Transaction, coordinator: Coordinator, name: str, terms: AccountTerms) -> AccountRow:
    """Returns an account, decayed until now. An account without a row has lost and delivered nothing."""
    row = ACCOUNTS.find(tx.db, name)
    if row is None:
        return AccountRow(name, terms, LeaseAccount(at_s=tx.now_s), "", exists=False)
    before = LeaseAccount(row.lost, row.delivered, row.at_s)
    account = decayed(before, tx.now_s, coordinator.config.half_life_s())
    return AccountRow(name, terms, account, row.evidence, exists=True)


def _store(tx: Transaction, row: AccountRow, account: LeaseAccount, evidence: str) -> None:
    values = {**asdict(account), "evidence": evidence}
    if row.exists:
        tx.update(ACCOUNTS, row.name, **values)
    else:
        tx.insert(ACCOUNTS, name=row.name, **values)


def _accounts_of(node: Row[Any], network: str) -> list[tuple[str, AccountTerms]]:
    """Returns the names of the accounts that a lease of a node belongs to."""
    found = [(f"node {node.node}", NODE)]
    if node.owner:
        found.append((f"owner {node.owner}", OWNER))
    if network:
        found.append((f"network {network}", NETWORK))
    return found


# -- lost and delivered leases ------------------------------------------------------------------------------


def count_end(tx: Transaction, coordinator: Coordinator, lease: Row[Any], node: Row[Any], code: str) -> None:
    """Adds the end of a lease to the accounts of its node, owner and network. `code` is `accepted` or why it did not count."""
    weight = weight_of(code)
    accepted = code == "accepted"
    if not accepted and not weight:
        return
    for name, terms in _accounts_of(node, lease.network):
        row = _find(tx, coordinator, name, terms)
        account = after_delivery(row.account, terms) if accepted else after_loss(row.account, weight)
        _store(tx, row, account, row.evidence)
        if code == UNCERTAIN and terms is NODE:
            _warn_of_uncertain_work(tx, coordinator, node, account)


def _warn_of_uncertain_work(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], account: LeaseAccount
) -> None:
    """Logs that a node gets no lease because of uncertain work: of an honest node that is a fault of the run, not of the node."""
    wait = wait_s(account, NODE, coordinator.config.half_life_s())
    if wait <= 0:
        return
    tx.after_commit(
        lambda: coordinator.log.warning(
            f"node {node.node[:16]} gets no lease for {wait:.0f} s: {account.lost:.1f} of its leases ended without valid work, the last "
            f"one void.uncertain; {NO_FIT}: measure rows of it with `shoal toploc prove` and `calibrate`, and start another run with "
            "calibration = FILE under [run] (docs/toploc.md, Calibration)"
        )
    )


def uncertain_in_a_row(db: Connection) -> int:
    """Returns how many of the newest verdicts are void.uncertain, without another one between them; MOST_COUNTED at most."""
    query = select(verdicts.c.code).order_by(verdicts.c.given_at_s.desc()).limit(MOST_COUNTED)
    return len(list(itertools.takewhile(lambda code: code == UNCERTAIN, db.execute(query).scalars())))


def account_of(tx: Transaction, coordinator: Coordinator, node: Row[Any]) -> LeaseAccount:
    """Returns the account of a node as it is now."""
    return _find(tx, coordinator, f"node {node.node}", NODE).account


def check_next_lease(
    tx: Transaction, coordinator: Coordinator, node: Row[Any], account: LeaseAccount
) -> None:
    """Raises Rejected if the node, its owner or its network lost too many leases or has too many open.

    A network limits only nodes that have not delivered more than they lost.
    """
    _check_losses(coordinator, account, NODE, "this node")
    if node.owner:
        row = _find(tx, coordinator, f"owner {node.owner}", OWNER)
        _check_losses(coordinator, row.account, OWNER, f"the nodes of owner {node.owner[:16]}")
        _check_open(tx.db, coordinator, row, _OPEN_OF_OWNER, node.owner, f"owner {node.owner[:16]}")
    if tx.network and not delivers_more(account, node.accepted):
        row = _find(tx, coordinator, f"network {tx.network}", NETWORK)
        _check_losses(coordinator, row.account, NETWORK, f"nodes in network {tx.network}")
        _check_open(
            tx.db, coordinator, row, _OPEN_OF_NETWORK, tx.network, f"new nodes in network {tx.network}"
        )


def _check_losses(coordinator: Coordinator, account: LeaseAccount, terms: AccountTerms, who: str) -> None:
    wait = wait_s(account, terms, coordinator.config.half_life_s())
    if wait > 0:
        raise Rejected(
            "request.too_early",
            f"leases of {who} that ended without valid work: {account.lost:.1f} not made up for; the next lease is in {wait:.0f} s, "
            "or after accepted work",
            retry_after_s=min(wait, MAX_WAIT_S),
        )


def _check_open(
    db: Connection, coordinator: Coordinator, row: AccountRow, count: Statement, key: str, who: str
) -> None:
    opened, most = int(count.value(db, name=key)), most_open(row.account, row.terms)
    if opened >= most:
        raise Rejected(
            "request.too_early",
            f"{opened} leases of {who} wait for a submission or a verdict, at most {most}; accepted work raises the limit",
            retry_after_s=max(coordinator.config.retry_s, coordinator.config.lease_s / OPEN_RETRIES),
        )


def forget_networks(tx: Transaction, half_life_s: float) -> None:
    """Deletes the accounts of networks in which nothing happened for long. Housekeeping calls it once a minute."""
    old = accounts.c.at_s < tx.now_s - FORGOTTEN * half_life_s
    tx.write(delete(accounts).where(accounts.c.name.like("network %"), old))


# -- evidence -----------------------------------------------------------------------------------------------


def add_evidence(
    tx: Transaction,
    coordinator: Coordinator,
    node: Row[Any],
    verdict: Verdict,
    *,
    version: int,
    earlier: Sequence[Sums],
) -> Finding | None:
    """Adds a verdict on work of a version to the evidence. Returns what the evidence finds instead, if anything.

    `earlier`: the scores of the same work, as often as it was uncertain before.
    """
    keys = [name for name, _ in _accounts_of(node, network="")]
    rows, evidence = _read_evidence(tx, coordinator, keys)
    found = evidence.add(
        keys,
        verdict.code,
        verdict.evidence,
        version=version,
        now_s=tx.now_s,
        is_new=node.accepted < NEW_NODE,
        earlier=earlier,
    )
    _write_evidence(tx, rows, evidence)
    return found


def noise_watch(db: Connection) -> NoiseWatch:
    """Returns what is known about the noise since the newest calibration."""
    row = ACCOUNTS.find(db, NOISE)
    return _parse_watch("" if row is None else row.evidence)


def note_calibration(tx: Transaction, coordinator: Coordinator, measured: int, risen: Sequence[str]) -> None:
    """Begins to watch the noise by a new calibration. If that shows a rise, evidence and losses that the rise explains are taken back."""
    keys: list[str] = []
    if risen:
        others = (accounts.c.evidence != "", accounts.c.name.not_in((RUN, NEW_NODES, NOISE)))
        keys += tx.db.execute(select(accounts.c.name).where(*others)).scalars()
    rows, evidence = _read_evidence(tx, coordinator, keys)
    evidence.calibrated(measured, tx.now_s, risen)
    _write_evidence(tx, rows, evidence)
    if risen:
        lost = (accounts.c.name.like("node %"), accounts.c.lost > 0)
        tx.write(update(accounts).where(*lost).values(lost=0.0))


def _read_evidence(
    tx: Transaction, coordinator: Coordinator, keys: Sequence[str]
) -> tuple[dict[str, AccountRow], RunEvidence]:
    """Returns the rows with the evidence about these nodes and owners and about the run, and what they contain."""
    rows = {name: _find(tx, coordinator, name, NODE) for name in (RUN, NEW_NODES, NOISE, *keys)}
    run, new_nodes, *sums = (_parse(rows[name].evidence) for name in (RUN, NEW_NODES, *keys))
    watch = _parse_watch(rows[NOISE].evidence)
    return rows, RunEvidence(run, new_nodes, dict(zip(keys, sums, strict=True)), watch)


def _write_evidence(tx: Transaction, rows: dict[str, AccountRow], evidence: RunEvidence) -> None:
    """Writes the rows whose evidence has changed."""
    sums = {RUN: evidence.baseline, NEW_NODES: evidence.new_nodes} | evidence.sums
    after = {name: json.dumps(one) if one else "" for name, one in sums.items()}
    after[NOISE] = "" if evidence.watch == NoiseWatch() else json.dumps(asdict(evidence.watch))
    for name, row in rows.items():
        if after[name] != row.evidence:
            _store(tx, row, row.account, after[name])


def _parse_watch(text: str) -> NoiseWatch:
    return NoiseWatch(**json.loads(text)) if text else NoiseWatch()


def _parse(text: str) -> Sums:
    return dict(json.loads(text)) if text else {}
