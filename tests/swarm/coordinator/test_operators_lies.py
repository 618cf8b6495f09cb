"""An operator that writes a false ledger: `shoal ledger verify` finds what contradicts the run's own rules."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_swarm import CONFIG, SPEC, SmallSwarm

from shoal.net.http_client import Refused
from shoal.swarm.coordinator.ledger_replay import replay
from shoal.wire.codes import CorruptData
from shoal.wire.ledger import LedgerEvent


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LedgerEvent]]:
    """The ledger of a run with revealed epochs, a batch and a node that became trusted."""
    folder: Path = tmp_path_factory.mktemp("operator")
    config = CONFIG.model_copy(update={"leases_per_epoch": 2, "groups_per_step": 4})
    swarm = SmallSwarm(folder, config, SPEC.model_copy(update={"last_version": 50}))
    swarm.start()
    node = swarm.node()
    for _ in range(6):
        try:
            swarm.work(node)
        except Refused:  # enough work for the batch
            swarm.batch(0)
            swarm.announce(1)
    found = swarm.ledger()
    swarm.close()
    replay(found)
    yield found


def first(events: list[LedgerEvent], kind: str) -> LedgerEvent:
    return next(event for event in events if event.type == kind)


def last(events: list[LedgerEvent], kind: str) -> LedgerEvent:
    return next(event for event in reversed(events) if event.type == kind)


def with_body(event: LedgerEvent, **values: Any) -> LedgerEvent:
    return event.model_copy(update={"body": event.body | values})


def changed(events: list[LedgerEvent], at: LedgerEvent, *instead: LedgerEvent) -> list[LedgerEvent]:
    """Returns the ledger with other events in the place of one."""
    found = [one for event in events for one in (instead if event is at else (event,))]
    return [event.model_copy(update={"seq": index + 1}) for index, event in enumerate(found)]


def test_a_second_commitment_is_found(events: list[LedgerEvent]) -> None:
    committed, revealed = first(events, "epoch.committed"), first(events, "epoch.revealed")
    secret = bytes(32)
    again = with_body(committed, commitment=hashlib.sha256(secret).hexdigest())
    with pytest.raises(CorruptData, match="is committed a second time"):
        replay(changed(events, revealed, again, with_body(revealed, secret=secret.hex())))


def test_a_lease_before_the_commitment_of_its_epoch_is_found(events: list[LedgerEvent]) -> None:
    committed = first(events, "epoch.committed")
    late = changed(events, committed)
    with pytest.raises(CorruptData, match="whose secret is not committed, or known already"):
        replay(changed(late, last(late, "epoch.revealed"), committed, last(late, "epoch.revealed")))


def test_work_spared_against_the_terms_is_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    spared = with_body(
        verdict, checks="rewards", drawn=verdict.body["drawn"] | {"rate": 0.0, "checks": "rewards"}
    )
    with pytest.raises(CorruptData, match="was drawn at a rate of 0, its node's is 1"):
        replay(changed(events, verdict, spared))


def test_a_verdict_without_a_submission_is_found(events: list[LedgerEvent]) -> None:
    received = last(events, "submission.received")
    with pytest.raises(CorruptData, match="has a verdict without a submission"):
        replay(changed(events, received))


def test_more_tokens_than_were_leased_are_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    with pytest.raises(CorruptData, match="has 1000000000 tokens, at most 32 were leased"):
        replay(changed(events, verdict, with_body(verdict, output_tokens=10**9, credit=10**9)))


def test_a_group_that_was_never_leased_is_found(events: list[LedgerEvent]) -> None:
    batch = first(events, "batch.formed")
    lease = batch.body["group_ids"][0].rpartition("-")[0]
    with pytest.raises(CorruptData, match="is trained on, but its lease has 2 prompts"):
        replay(changed(events, batch, with_body(batch, group_ids=[f"{lease}-777"])))


def test_repeated_work_that_was_accepted_is_found(events: list[LedgerEvent]) -> None:
    issued, again = first(events, "lease.issued"), last(events, "lease.issued")
    with pytest.raises(CorruptData, match="repeats work that is accepted"):
        replay(changed(events, again, with_body(again, unit=issued.body["lease_id"])))


def test_credit_by_an_appeal_that_was_not_filed_is_found(events: list[LedgerEvent]) -> None:
    verdict, end = first(events, "verdict.given"), events[-1]
    body = {"lease_id": verdict.body["lease_id"], "node": verdict.body["node"], "reason": "friend"}
    decided = end.model_copy(
        update={"type": "appeal.decided", "body": body | {"upheld": True, "returned": 10**9}}
    )
    with pytest.raises(CorruptData, match="is decided twice, or was not filed"):
        replay(changed(events, end, end, decided))
    filed = end.model_copy(update={"type": "appeal.filed", "body": body | {"text": "please"}})
    with pytest.raises(CorruptData, match="is appealed twice, or was not rejected"):
        replay(changed(events, end, end, filed, decided))
