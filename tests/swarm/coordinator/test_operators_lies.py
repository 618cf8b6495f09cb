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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LedgerEvent]]:
    """The ledger of a finished run: a batch, and the held-out evaluations of two versions."""
    folder: Path = tmp_path_factory.mktemp("finished")
    config = CONFIG.model_copy(update={"eval_prompts": 2, "eval_samples": 2, "groups_per_step": 2})
    swarm = SmallSwarm(folder, config, SPEC.model_copy(update={"last_version": 1}))
    swarm.start()
    node = swarm.proven_node()
    held_out, train = swarm.work(node), swarm.work(node)
    assert (held_out.purpose, train.purpose) == ("eval", "train")
    swarm.batch(0)
    swarm.announce(1)
    swarm.work(node)
    found = swarm.ledger()
    swarm.close()
    assert replay(found).finished_version == 1
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


@pytest.mark.parametrize(
    ("kind", "body", "found"),
    [
        (
            "evaluation.completed",
            {"version": 77, "task": "sort", "rollouts": 0, "reward_mean": 0.5},
            "no accepted",
        ),
        ("verdict.given", {"output_tokens": 10**400}, "lacks a field or has one of the wrong type"),
        (
            "run.opened",
            {"spec": {"task": {"name": "sort"}, "more_tasks": [{"name": "add", "weight": "heavy"}]}},
            "wrong type",
        ),
    ],
)
def test_wrong_numbers_do_not_end_the_replay_with_a_traceback(
    finished: list[LedgerEvent], kind: str, body: dict[str, Any], found: str
) -> None:
    at = first(finished, kind)
    with pytest.raises(CorruptData, match=found):
        replay(changed(finished, at, with_body(at, **body)))


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


# -- identity of leases ------------------------------------------------------------------------------------


OTHER = "f" * 64


def with_another_node(events: list[LedgerEvent]) -> list[LedgerEvent]:
    enrolled = first(events, "node.enrolled")
    return changed(events, enrolled, enrolled, with_body(enrolled, node=OTHER))


def of_lease(events: list[LedgerEvent], kind: str, lease_id: str) -> LedgerEvent:
    return next(event for event in events if event.type == kind and event.body["lease_id"] == lease_id)


def test_a_lease_that_is_issued_and_credited_twice_is_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    lease_id = verdict.body["lease_id"]
    again = (of_lease(events, kind, lease_id) for kind in ("lease.issued", "submission.received"))
    with pytest.raises(CorruptData, match="is issued a second time"):
        replay(changed(events, verdict, verdict, *again, verdict))


def test_credit_for_another_nodes_work_is_found(events: list[LedgerEvent]) -> None:
    events = with_another_node(events)
    verdict = last(events, "verdict.given")
    with pytest.raises(CorruptData, match="was issued to another node than ffff"):
        replay(changed(events, verdict, with_body(verdict, node=OTHER)))


def test_blame_for_another_nodes_lapse_is_found(events: list[LedgerEvent]) -> None:
    events = with_another_node(events)
    verdict = last(events, "verdict.given")
    body = {"lease_id": verdict.body["lease_id"], "node": OTHER, "code": "void.expired", "detail": ""}
    with pytest.raises(CorruptData, match="was issued to another node than ffff"):
        replay(changed(events, verdict, verdict.model_copy(update={"type": "lease.void", "body": body})))


def test_a_second_submission_is_found(events: list[LedgerEvent]) -> None:
    """With another file the draw of checks would be another."""
    verdict = last(events, "verdict.given")
    received = of_lease(events, "submission.received", verdict.body["lease_id"])
    for place in (received, verdict):
        with pytest.raises(CorruptData, match="has a second submission, or one after its end"):
            replay(changed(events, place, place, with_body(received, sha256="0" * 64)))


def test_a_version_that_was_not_leased_is_found(events: list[LedgerEvent]) -> None:
    received = first(events, "submission.received")
    with pytest.raises(CorruptData, match=r"names version 77, leased are \(0,\)"):
        replay(changed(events, received, with_body(received, policy_version=77)))


# -- draws -------------------------------------------------------------------------------------------------


def test_a_draw_with_a_secret_that_nobody_committed_to_is_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    never = with_body(verdict, drawn=verdict.body["drawn"] | {"epoch": 10**6})
    with pytest.raises(CorruptData, match="epoch 1000000, which was not committed, or known already"):
        replay(changed(events, verdict, never))


def test_a_draw_with_a_secret_that_was_known_is_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    known = with_body(verdict, drawn=verdict.body["drawn"] | {"epoch": 1})
    with pytest.raises(CorruptData, match="epoch 1, which was not committed, or known already"):
        replay(changed(events, verdict, known))


def test_a_secret_that_is_committed_after_the_submission_is_found(events: list[LedgerEvent]) -> None:
    committed, verdict = first(events, "epoch.committed"), last(events, "verdict.given")
    late = with_body(committed, epoch=10**6)
    drawn = with_body(verdict, drawn=verdict.body["drawn"] | {"epoch": 10**6})
    with pytest.raises(CorruptData, match="epoch 1000000, which was not committed, or known already"):
        replay(changed(events, verdict, late, drawn))


def test_a_secret_that_is_kept_after_the_end_of_the_run_is_found(finished: list[LedgerEvent]) -> None:
    with pytest.raises(CorruptData, match="the run is finished, but the secret of epoch 1 is not revealed"):
        replay(changed(finished, last(finished, "epoch.revealed")))


# -- batches and results -----------------------------------------------------------------------------------


def test_a_group_that_is_trained_on_under_two_names_is_found(events: list[LedgerEvent]) -> None:
    batch = first(events, "batch.formed")
    lease, _, number = batch.body["group_ids"][0].rpartition("-")
    for name in (f"{lease}-0{number}", f"{lease}-+{number}", f"{lease}- {number}"):
        with pytest.raises(CorruptData, match="is not the id of a group"):
            replay(changed(events, batch, with_body(batch, group_ids=[*batch.body["group_ids"], name])))


def test_held_out_answers_that_are_trained_on_are_found(finished: list[LedgerEvent]) -> None:
    batch, held_out = first(finished, "batch.formed"), first(finished, "lease.issued")
    groups = [f"{held_out.body['lease_id']}-{index}" for index in range(2)]
    with pytest.raises(CorruptData, match="is trained on, but its lease is held-out work"):
        replay(changed(finished, batch, with_body(batch, group_ids=groups)))


def test_a_second_batch_of_a_version_is_found(events: list[LedgerEvent]) -> None:
    batch = first(events, "batch.formed")
    halves = [batch.body["group_ids"][:2], batch.body["group_ids"][2:]]
    with pytest.raises(CorruptData, match="the batch of version 0 is formed a second time"):
        replay(changed(events, batch, *(with_body(batch, group_ids=half) for half in halves)))


def test_a_batch_of_stale_groups_is_found(events: list[LedgerEvent]) -> None:
    batch = first(events, "batch.formed")
    with pytest.raises(CorruptData, match="by version 0 is in the batch of version 40; max_lag is 1"):
        replay(changed(events, batch, with_body(batch, version=40)))


def test_a_mean_reward_that_the_answers_do_not_have_is_found(finished: list[LedgerEvent]) -> None:
    batch, result = first(finished, "batch.formed"), last(finished, "evaluation.completed")
    with pytest.raises(CorruptData, match="mean reward of the batch of version 0 is recorded as"):
        replay(changed(finished, batch, with_body(batch, reward_mean=0.9)))
    with pytest.raises(CorruptData, match="the result of version 1 by 'sort' is recorded as"):
        replay(changed(finished, result, with_body(result, reward_mean=0.9)))
    with pytest.raises(CorruptData, match="has 400 rollouts, 4 were accepted"):
        replay(changed(finished, result, with_body(result, rollouts=400)))


def test_more_or_fewer_rewards_and_tokens_than_rows_are_found(events: list[LedgerEvent]) -> None:
    verdict = last(events, "verdict.given")
    for false in ({"rewards": [1.0]}, {"output_tokens": -1000, "credit": -1000}):
        with pytest.raises(CorruptData, match="of 4 rows has"):
            replay(changed(events, verdict, with_body(verdict, **false)))


def test_a_version_that_is_published_twice_is_found(events: list[LedgerEvent]) -> None:
    published = first(events, "policy.published")
    with pytest.raises(CorruptData, match="version 0 is published after version 0"):
        replay(changed(events, published, published, with_body(published, weights_digest="0" * 64)))
