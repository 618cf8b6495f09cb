"""Tests of the leader: which ready peers form a group, and when their votes commit it; and of the membership."""

import asyncio
import time

from shoal.diloco.averaging.leader import Ballot, Leader, choose_group, refused_peers
from shoal.diloco.averaging.membership import REFUSED_S, SUSPECT_S, Membership
from shoal.diloco.averaging.peer_messages import Card, ReadyRequest, StateVersion


def version(work: float, round: int = 1, digest: str = "a") -> StateVersion:
    return StateVersion(work=work, round=round, state_digest=digest * 64)


def request(
    peer: str,
    held: StateVersion,
    suspects: tuple[str, ...] = (),
    reachable: bool = True,
    wait_s: float = 1.0,
    refused: tuple[str, ...] = (),
) -> ReadyRequest:
    return ReadyRequest(
        peer=peer,
        reachable=reachable,
        standing=held,
        weight=1.0,
        suspects=suspects,
        refused=refused,
        wait_s=wait_s,
    )


def names(requests: tuple[ReadyRequest, ...]) -> list[str]:
    return [each.peer for each in requests]


def test_group_holds_the_state_with_most_work() -> None:
    choice = choose_group(
        [request("c", version(5)), request("a", version(5)), request("b", version(4, digest="b"))], []
    )
    assert names(choice.members) == ["a", "c"] and choice.behind == ("b",)


def refusals(**refused: str) -> set[str]:
    """Returns who is left out if each named peer refuses the peers in its text, one letter each."""
    return refused_peers(request(peer, version(1), refused=tuple(others)) for peer, others in refused.items())


def test_refused_peer_is_left_out_on_the_word_of_one_owner() -> None:
    """Only the owner of a part sees the values in it."""
    assert refusals(a="", b="d", c="", d="") == {"d"}
    assert refusals(a="b", b="") == {"b"}


def test_refusals_of_a_refused_peer_do_not_count() -> None:
    assert refusals(a="d", b="d", c="", d="ab") == {"d"}
    assert refusals(a="", b="", c="", d="abc") == set(), "more than half of the peers"
    assert refusals(a="x", b="", c="") == set(), "a peer that is not ready"


def card_of(peer: str, held: StateVersion | None, phase: int = 0) -> Card:
    return Card(peer=peer, reachable=True, standing=held, phase=phase, in_round=False)


def test_display_uses_directory_cards_but_rounds_use_only_the_peers_own() -> None:
    membership = Membership("me")
    membership.update_from_directory({"a": card_of("a", None)})
    said = card_of("a", version(5, round=5), phase=3)
    membership.record_card(said)
    listed = card_of("a", version(9, round=9))
    membership.update_from_directory({"a": listed})
    assert membership.latest_cards(1.0) == {"a": listed} and membership.alive(1.0) == {"a": said}
    membership.update_from_directory({"a": card_of("a", version(4, round=4))})
    assert membership.latest_cards(2.0) == {"a": said}, "the directory lags behind the peer itself"
    membership.update_from_directory({})
    assert not membership.latest_cards(20.0)


def test_state_in_a_directory_entry_does_not_count() -> None:
    """Anyone can write an entry in a peer's name; a false one with much work would keep all peers waiting for its state."""
    membership = Membership("me")
    membership.update_from_directory({"a": card_of("a", version(1e9))})
    assert membership.alive(1.0)["a"].standing is None


def test_new_peers_without_work_do_not_outvote_a_long_run() -> None:
    choice = choose_group(
        [request("a", version(0, 0)), request("b", version(0, 0)), request("c", version(900, 50))], []
    )
    assert names(choice.members) == ["c"] and choice.behind == ("a", "b")


def test_all_ready_peers_are_behind_if_an_absent_peer_has_a_newer_state() -> None:
    choice = choose_group([request("a", version(5)), request("b", version(5))], [version(7, 2)])
    assert not choice.members and choice.behind == ("a", "b")


def test_of_two_peers_that_cannot_reach_each_other_the_later_id_is_left_out() -> None:
    held = version(5)
    choice = choose_group([request("a", held, ("b",)), request("b", held, ("a",)), request("c", held)], [])
    assert names(choice.members) == ["a", "c"]
    assert names(choose_group([request("a", held), request("b", held, ("a",))], []).members) == ["b"]


def test_suspicions_of_one_peer_leave_out_nobody_that_the_others_reach() -> None:
    """A liar that suspected all others would form a group alone, and the others would adopt its state."""
    held = version(5)

    def members(absent: int = 0, leader: tuple[str, ...] = (), **suspects: str) -> str:
        requests = [request(peer, held, tuple(others)) for peer, others in suspects.items()]
        choice = choose_group(requests, [held] * absent, leader="a", leader_suspects=leader)
        return "".join(names(choice.members))

    assert members(a="", b="", c="", d="abc") == "abcd"
    assert members(a="", b="", c="", d="ab") == "abcd"
    assert members(a="", b="", c="", d="b") == "abcd"
    assert members(a="", b="", c="b", d="b") == "acd", "two peers cannot reach it"
    assert members(a="", b="", c="", d="b", leader=("b",)) == "acd", "the leader cannot reach it either"
    assert members(b="", c="", d="", leader=("b",)) == "cd", "the leader takes no part itself"
    assert members(b="", leader=("b",)) == "b", "there would be no group at all"
    assert members(a="", b="d", c="d", d="abc") == "abc"
    assert members(a="", b="d", c="d", d="bc") == "abc", "the peer that most suspect is left out first"
    assert members(a="", d="a") == "d" and members(a="", d="a", absent=2) == "ad"


def test_outbound_only_peer_is_not_left_out_as_unreachable() -> None:
    held = version(5)
    choice = choose_group([request("a", held, ("b",)), request("b", held, reachable=False)], [])
    assert names(choice.members) == ["a", "b"]


def test_peer_is_suspected_after_two_timeouts_and_cleared_by_an_answer() -> None:
    membership = Membership("me")
    card = Card(peer="a", reachable=True, standing=None, phase=0, in_round=False)
    membership.record_card(card)
    membership.record_timeout("a", 0.0)
    assert not membership.suspected("a", 0.0) and list(membership.alive(0.0)) == ["a"]
    membership.record_timeout("a", 5.0)
    assert membership.suspected("a", 5.0) and not membership.alive(5.0)
    membership.record_card(card)
    membership.record_timeout("a", 6.0)
    assert not membership.suspected("a", 6.0), "an answer resets the count"


def test_leader_redirects_to_a_live_peer_with_an_earlier_id() -> None:
    """Peers that already wait are redirected too: the first id may have been suspected when they asked."""

    async def run() -> None:
        membership = Membership("b")
        leader = Leader(membership, _always_alive, gather_s=30.0, min_peers=2)
        waiting = asyncio.create_task(leader.ready(request("b", version(1), wait_s=30.0)))
        other = asyncio.create_task(leader.ready(request("c", version(1), ("a",), wait_s=30.0)))
        await asyncio.sleep(0)
        membership.record_card(Card(peer="a", reachable=True, standing=None, phase=0, in_round=False))
        membership.record_card(Card(peer="d", reachable=True, standing=None, phase=0, in_round=False))
        async with asyncio.timeout(20):
            answers = await asyncio.gather(waiting, other)
        assert [(answer.outcome, answer.leader) for answer in answers] == [("retry", "a")] * 2
        leader.stop()

    asyncio.run(run())


def test_leader_forms_the_group_within_half_of_the_wait() -> None:
    """A live peer that is not ready is left out in time for the others to finish their rounds."""

    async def run() -> None:
        membership = Membership("a")
        membership.record_card(Card(peer="z", reachable=True, standing=None, phase=0, in_round=False))
        leader = Leader(membership, _always_alive, gather_s=600.0, min_peers=2)
        waits = [leader.ready(request(peer, version(1), wait_s=4.0)) for peer in ("a", "b")]
        answers = await asyncio.gather(*waits)
        assert [answer.outcome for answer in answers] == ["group"] * 2
        (alone,) = await asyncio.gather(leader.ready(request("a", version(1), wait_s=2.0)))
        assert alone.outcome == "retry" and "1 of at least 2 peers" in alone.reason
        leader.stop()

    asyncio.run(run())


def test_short_wait_of_one_peer_does_not_close_the_group() -> None:
    """The group of a liar that asks with a short wait would not contain the peers that are ready a little later."""

    async def run() -> None:
        membership = Membership("a")
        for peer in ("b", "z"):
            membership.record_card(card(peer))
        leader = Leader(membership, _always_alive, gather_s=600.0, min_peers=1)
        leader.version = version(1)  # it takes part, so the group is not complete without it
        alone = await leader.ready(request("z", version(1), wait_s=0.6))
        assert alone.outcome == "retry" and "waited" in alone.reason
        waits = [asyncio.create_task(leader.ready(request("b", version(1), wait_s=30.0)))]
        short = await leader.ready(request("z", version(1), wait_s=0.6))
        assert short.outcome == "retry" and "waited" in short.reason
        for peer in ("a", "z"):
            waits.append(asyncio.create_task(leader.ready(request(peer, version(1), wait_s=30.0))))
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*waits)
        assert [answer.members for answer in answers] == [("a", "b", "z")] * 3
        leader.stop()

    asyncio.run(run())


async def _always_alive(peer: str) -> bool:
    return True


def test_claim_of_a_peer_that_withholds_its_state_does_not_count() -> None:
    """Otherwise all others would be told in every round to fetch a state that nobody sends."""

    async def run() -> None:
        membership = Membership("a")
        leader = Leader(membership, _always_alive, gather_s=0.01, min_peers=1)
        leader.version = version(5)

        async def outcomes(*, liar_is_ready: bool) -> list[str]:
            membership.record_card(card_of("z", version(1e300, 99)))
            requests = [request("a", version(5)), request("b", version(5))]
            requests += [request("z", version(1e300, 99))] if liar_is_ready else []
            waits = [asyncio.create_task(leader.ready(each)) for each in requests]
            async with asyncio.timeout(20):
                return [answer.outcome for answer in await asyncio.gather(*waits[:2])]

        assert await outcomes(liar_is_ready=False) == ["behind"] * 2
        membership.record_fetch("z", time.monotonic(), failed=True)
        assert await outcomes(liar_is_ready=False) == ["behind"] * 2, "its machine may be busy"
        membership.record_fetch("z", time.monotonic(), failed=True)
        for liar_is_ready in (False, True):
            assert await outcomes(liar_is_ready=liar_is_ready) == ["group"] * 2
        membership.record_fetch("z", time.monotonic(), failed=False)
        assert await outcomes(liar_is_ready=False) == ["behind"] * 2
        leader.stop()

    asyncio.run(run())


def test_peers_behind_a_group_that_does_not_vote_are_told_to_fetch_its_state() -> None:
    """If the group's peer claims a state that it does not hold, they find out while there is time for another attempt."""

    async def run() -> None:
        leader = Leader(Membership("a"), _always_alive, gather_s=0.01, min_peers=1)
        waits = [
            asyncio.create_task(leader.ready(request(peer, held, wait_s=8.0)))
            for peer, held in (("a", version(5)), ("b", version(5)), ("z", version(1e300, 99)))
        ]
        answers = await asyncio.gather(*waits)
        assert [answer.outcome for answer in answers] == ["behind", "behind", "group"]
        assert answers[0].at_least == 99
        leader.stop()

    asyncio.run(run())


def test_failed_fetches_are_forgotten_and_a_lie_is_not_cleared_by_a_hello() -> None:
    membership = Membership("me")
    for _ in range(2):
        membership.record_fetch("a", 0.0, failed=True)
    assert membership.withholds_state("a", 1.0) and not membership.withholds_state("a", REFUSED_S + 1)
    membership.record_card(card("a"))
    membership.suspect_lie("a", 0.0)
    membership.record_card(card("a"))
    assert membership.suspects(1.0) == ("a",) and membership.leader(1.0, self_reachable=True) == "me"
    assert membership.leader(SUSPECT_S + 1, self_reachable=True) == "a"


def test_only_reachable_members_own_a_part() -> None:
    held = version(5)
    group = choose_group([request("a", held, reachable=False), request("b", held)], []).reply()
    assert group.members == ("a", "b") and group.owners == ("b",)


def test_ballot_commits_only_if_all_digests_agree() -> None:
    ballot = Ballot(("a", "b", "c"))
    for peer in ("a", "b", "not-a-member"):
        ballot.vote(peer, "d1")
    assert not ballot.ended.is_set()
    ballot.vote("c", "d1")
    assert ballot.commit
    ballot.vote("c", "d2")
    ballot.fail("c is gone")
    assert ballot.commit, "others may have been told to commit"
    for last in ("d2", ""):
        lost = Ballot(("a", "b"))
        lost.vote("a", "d1")
        lost.vote("b", last)
        assert lost.ended.is_set() and not lost.commit and "b" in lost.failure


def card(peer: str, reachable: bool = True) -> Card:
    return Card(peer=peer, reachable=reachable, standing=None, phase=0, in_round=False)


def test_membership_drops_peers_that_left_and_suspects_for_a_while() -> None:
    membership = Membership("b")
    membership.update_from_directory({peer: card(peer) for peer in ("a", "b", "c")})
    assert membership.alive(0.0).keys() == {"a", "c"} and membership.leader(0.0, self_reachable=True) == "a"
    membership.suspect("a", 0.0)
    assert membership.leader(1.0, self_reachable=True) == "b" and membership.suspects(1.0) == ("a",)
    assert membership.leader(1.0, self_reachable=False) == "c"
    assert membership.leader(SUSPECT_S + 1, self_reachable=True) == "a"
    membership.remove("a")
    membership.update_from_directory({"a": card("a"), "c": card("c")})
    assert "a" not in membership.alive(SUSPECT_S + 1)
    membership.record_card(card("a"))
    assert "a" in membership.alive(0.0)
