"""Answers as text at the coordinator: kept with the verdict, found by filters with bounded work, thinned out when room is short."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from small_swarm import CONFIG, SPEC, Node, SmallSwarm

from shoal.swarm.coordinator.housekeeping import tidy
from shoal.swarm.coordinator.leases import transcripts
from shoal.wire.lease import Lease, Verdict
from shoal.wire.messages import LeaseStatus, ProblemDetails
from shoal.wire.page_data import RolloutPage
from shoal.wire.transcript import GroupText, SampleText, Transcript

MakeSwarm = Callable[..., SmallSwarm]


@pytest.fixture
def make_swarm(tmp_path: Path) -> Iterator[MakeSwarm]:
    with ExitStack() as opened:

        def make(**settings: Any) -> SmallSwarm:
            config = CONFIG.model_copy(update=settings)
            return opened.enter_context(closing(SmallSwarm(tmp_path / str(len(settings)), config)))

        yield make


def sample(text: str, reward: float) -> SampleText:
    return SampleText(
        reward=reward,
        outcome="right" if reward else "wrong",
        num_tokens=len(text),
        ended=True,
        pieces=tuple(text),
        logprobs=(-0.25,) * len(text),
    )


def told(lease: Lease, text: str = "abc", rewards: tuple[float, float] = (0.0, 1.0)) -> Verdict:
    """Returns a verdict whose answers have `text` and the number of their prompt."""
    groups = tuple(
        GroupText(
            expected=f"right{index}", samples=tuple(sample(f"{text}{index}", reward) for reward in rewards)
        )
        for index in range(len(lease.prompts))
    )
    return Verdict(
        lease_id=lease.lease_id,
        code="accepted",
        detail="fine",
        rewards=rewards * len(lease.prompts),
        output_tokens=3 * lease.num_rows,
        evidence={"z_draws": 0.5, "exponent_mismatches_max": 2, "sample_answer": "hidden"},
        transcript=Transcript(groups=groups).pack(),
    )


def work(swarm: SmallSwarm, node: Node, **values: Any) -> Lease:
    lease = node.deliver()
    swarm.claim()
    swarm.validator.call("POST", f"/v1/checks/{lease.lease_id}/verdict", told(lease, **values), LeaseStatus)
    return lease


def ask(swarm: SmallSwarm, **query: Any) -> RolloutPage:
    answer = swarm.public.get("/v1/rollouts", params={name: str(value) for name, value in query.items()})
    return RolloutPage.parse(answer.raise_for_status().content)


def test_groups_have_prompt_answers_and_the_reason_of_the_verdict(swarm: SmallSwarm) -> None:
    swarm.start()
    node = swarm.node()
    lease = work(swarm, node)
    page = ask(swarm)
    assert page.next is None and [group.group_id for group in page.groups] == [
        f"{lease.lease_id}-{index}" for index in range(2)
    ]
    first = page.groups[0]
    assert (first.prompt, first.expected) == (lease.prompts[0], "right0")
    assert (first.node, first.task, first.policy_version, first.state) == (node.id, "sort", 0, "ready")
    assert ["".join(one.pieces) for one in first.samples] == ["abc0", "abc0"]
    assert first.evidence == {"z_draws": 0.5, "exponent_mismatches_max": 2}
    # The ledger and the verdict's row stay small.
    assert "abc0" not in str(swarm.events("verdict.given")[0].body)


def test_filters(swarm: SmallSwarm) -> None:
    swarm.start()
    one, two = swarm.node(), swarm.node()
    work(swarm, one, text="needle")
    work(swarm, two, rewards=(0.5, 0.5))
    assert len(ask(swarm).groups) == 4
    assert {group.node for group in ask(swarm, node=two.id).groups} == {two.id}
    assert {group.node for group in ask(swarm, reward=1).groups} == {one.id}
    assert {group.node for group in ask(swarm, reward=0.5).groups} == {two.id}
    assert ask(swarm, reward=0.25).groups == ()
    assert [group.samples[0].pieces[-1] for group in ask(swarm, search="NEEDLE1").groups] == ["1"]
    assert ask(swarm, version=3).groups == () and len(ask(swarm, version=0).groups) == 4
    assert ask(swarm, task="other").groups == () and len(ask(swarm, task="sort").groups) == 4
    for wrong in ("reward=x", "reward=1e400", "version=-1", "before=x"):
        assert swarm.public.get(f"/v1/rollouts?{wrong}").status_code == 422


def test_one_request_does_bounded_work(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MAX_SCANNED", 2)
    swarm.start()
    node = swarm.node()
    work(swarm, node, text="needle")
    for _ in range(4):
        work(swarm, node, rewards=(0.5, 0.5))
    pages, before = [ask(swarm, reward=1)], 0
    while (before := pages[-1].next or 0) and len(pages) < 9:
        pages.append(ask(swarm, reward=1, before=before))
    assert [len(page.groups) for page in pages] == [0, 0, 2]
    monkeypatch.setattr(transcripts, "MAX_OPENED", 1)
    assert ask(swarm, search="needle").groups == () and ask(swarm, search="needle").next is not None


def test_held_out_answers_are_withheld_until_the_end(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(eval_prompts=2, eval_samples=2)
    swarm.start()
    node = swarm.proven_node()
    lease = work(swarm, node)
    assert lease.purpose == "eval"
    page = ask(swarm, held_out=1)
    assert page.groups == () and "when the run is finished" in page.withheld
    assert ask(swarm).groups == ()
    with swarm.coordinator.database.read() as db:
        found = transcripts.read_rollouts(db, transcripts.RolloutQuery(held_out=True))
    assert [group.held_out for group in found.groups] == [True, True] and found.groups[0].state == ""


def test_the_operator_may_show_them_at_once_or_keep_none(make_swarm: MakeSwarm) -> None:
    shown = make_swarm(eval_prompts=2, eval_samples=2, show_held_out=True)
    shown.start()
    work(shown, shown.proven_node())
    assert len(ask(shown, held_out=1).groups) == 2
    without = make_swarm(rollouts_mb=0)
    without.start()
    work(without, without.node())
    assert ask(without).groups == ()


def test_older_versions_are_thinned_out(swarm: SmallSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "RECENT_VERSIONS", 1)
    swarm.start()
    node = swarm.node()
    for version in range(1, SPEC.last_version + 1):
        for _ in range(2):
            work(swarm, node)
        swarm.batch(version - 1)
        swarm.announce(version)
    before = sorted({group.policy_version for group in ask(swarm, limit=64).groups})
    assert before == [0, 1, 2, 3]
    with swarm.coordinator.transaction() as tx:
        total = transcripts._total_bytes(tx.db)
        transcripts.prune(tx, total)
        assert transcripts._total_bytes(tx.db) == total
        transcripts.prune(tx, total - 1)
    assert sorted({group.policy_version for group in ask(swarm, limit=64).groups}) == [0, 2, 3]
    with swarm.coordinator.transaction() as tx:
        transcripts.prune(tx, total // 8)
        assert 0 < transcripts._total_bytes(tx.db) <= total // 8
        transcripts.prune(tx, 0)
    assert ask(swarm).groups == ()
    tidy(swarm.coordinator)


@pytest.mark.parametrize("name", ["task", "node", "search"])
def test_a_query_with_a_nul_character_is_malformed(swarm: SmallSwarm, name: str) -> None:
    """PostgreSQL cannot store it, so the question would fail there."""
    answer = swarm.public.get(f"/v1/rollouts?{name}=a%00b")
    assert ProblemDetails.parse(answer.content).code == "request.malformed"
