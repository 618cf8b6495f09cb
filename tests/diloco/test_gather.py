"""Which ready peers make a group, and when their votes count."""

import asyncio

from shoal.diloco.averaging.gather import Ballot, choose
from shoal.diloco.averaging.leader import Leader
from shoal.diloco.averaging.peer_messages import Card, ReadyAsk, Standing
from shoal.diloco.averaging.roster import SUSPECT_S, Roster


def standing(work: float, round: int = 1, digest: str = "a") -> Standing:
    return Standing(work=work, round=round, state_digest=digest * 64)


def ask(
    peer: str,
    held: Standing,
    suspects: tuple[str, ...] = (),
    reachable: bool = True,
    wait_s: float = 1.0,
) -> ReadyAsk:
    return ReadyAsk(
        peer=peer, reachable=reachable, standing=held, weight=1.0, suspects=suspects, wait_s=wait_s
    )


def names(asks: tuple[ReadyAsk, ...]) -> list[str]:
    return [each.peer for each in asks]


def test_those_with_most_work_behind_their_state_make_the_group() -> None:
    choice = choose([ask("c", standing(5)), ask("a", standing(5)), ask("b", standing(4, digest="b"))], [])
    assert names(choice.members) == ["a", "c"] and choice.behind == ("b",)


def card_of(peer: str, held: Standing | None, phase: int = 0) -> Card:
    return Card(peer=peer, reachable=True, standing=held, phase=phase, in_round=False)


def test_a_view_has_the_directory_s_news_and_rounds_have_only_what_peers_said() -> None:
    roster = Roster("me")
    roster.read({"a": card_of("a", None)}, now_s=0.0)
    said = card_of("a", standing(5, round=5), phase=3)
    roster.heard(said)
    listed = card_of("a", standing(9, round=9))
    roster.read({"a": listed}, now_s=1.0)
    assert roster.shown(1.0) == {"a": listed} and roster.alive(1.0) == {"a": said}
    roster.read({"a": card_of("a", standing(4, round=4))}, now_s=2.0)
    assert roster.shown(2.0) == {"a": said}, "the directory lags"
    roster.read({}, now_s=20.0)
    assert not roster.shown(20.0)


def test_a_long_run_is_not_outvoted_by_newcomers_without_work() -> None:
    choice = choose([ask("a", standing(0, 0)), ask("b", standing(0, 0)), ask("c", standing(900, 50))], [])
    assert names(choice.members) == ["c"] and choice.behind == ("a", "b")


def test_if_somebody_elsewhere_is_further_all_here_are_behind() -> None:
    choice = choose([ask("a", standing(5)), ask("b", standing(5))], [standing(7, 2)])
    assert not choice.members and choice.behind == ("a", "b")


def test_of_two_that_cannot_reach_each_other_the_later_goes() -> None:
    held = standing(5)
    choice = choose([ask("a", held, ("b",)), ask("b", held, ("a",)), ask("c", held)], [])
    assert names(choice.members) == ["a", "c"]
    assert names(choose([ask("a", held), ask("b", held, ("a",))], []).members) == ["b"]


def test_who_only_reaches_out_is_not_left_out_for_not_being_reached() -> None:
    held = standing(5)
    choice = choose([ask("a", held, ("b",)), ask("b", held, reachable=False)], [])
    assert names(choice.members) == ["a", "b"]


def test_one_silence_is_no_suspicion_and_an_answer_ends_it() -> None:
    roster = Roster("me")
    card = Card(peer="a", reachable=True, standing=None, phase=0, in_round=False)
    roster.heard(card)
    roster.missed("a", 0.0)
    assert not roster.suspected("a", 0.0) and list(roster.alive(0.0)) == ["a"]
    roster.missed("a", 5.0)
    assert roster.suspected("a", 5.0) and not roster.alive(5.0)
    roster.heard(card)
    roster.missed("a", 6.0)
    assert not roster.suspected("a", 6.0), "counted anew since it answered"


def test_who_is_asked_but_knows_of_an_earlier_peer_sends_on_to_it() -> None:
    """Also those who wait here already: it may have been taken for gone when they came."""

    async def run() -> None:
        roster = Roster("b")
        leader = Leader(roster, _lives, gather_s=30.0, min_peers=2)
        waiting = asyncio.create_task(leader.ready(ask("b", standing(1), wait_s=30.0)))
        other = asyncio.create_task(leader.ready(ask("c", standing(1), ("a",), wait_s=30.0)))
        await asyncio.sleep(0)
        roster.heard(Card(peer="a", reachable=True, standing=None, phase=0, in_round=False))
        roster.heard(Card(peer="d", reachable=True, standing=None, phase=0, in_round=False))
        async with asyncio.timeout(20):
            answers = await asyncio.gather(waiting, other)
        assert [(answer.outcome, answer.leader) for answer in answers] == [("retry", "a")] * 2
        leader.stop()

    asyncio.run(run())


def test_a_leader_keeps_nobody_longer_than_half_its_wait() -> None:
    """One who lives but is not ready: the others make a group without it, in time for their rounds."""

    async def run() -> None:
        roster = Roster("a")
        roster.heard(Card(peer="z", reachable=True, standing=None, phase=0, in_round=False))
        leader = Leader(roster, _lives, gather_s=600.0, min_peers=2)
        asks = [leader.ready(ask(peer, standing(1), wait_s=4.0)) for peer in ("a", "b")]
        answers = await asyncio.gather(*asks)
        assert [answer.outcome for answer in answers] == ["group"] * 2
        (alone,) = await asyncio.gather(leader.ready(ask("a", standing(1), wait_s=2.0)))
        assert alone.outcome == "retry" and "1 of at least 2 peers" in alone.reason
        leader.stop()

    asyncio.run(run())


async def _lives(peer: str) -> bool:
    return True


def test_only_reachable_members_own_a_part() -> None:
    held = standing(5)
    group = choose([ask("a", held, reachable=False), ask("b", held)], []).answer()
    assert group.members == ("a", "b") and group.owners == ("b",)


def test_a_ballot_commits_when_all_agree_and_never_otherwise() -> None:
    ballot = Ballot(("a", "b", "c"))
    for peer in ("a", "b", "stranger"):
        ballot.vote(peer, "d1")
    assert not ballot.decided
    ballot.vote("c", "d1")
    assert ballot.commit
    for last in ("d2", ""):
        lost = Ballot(("a", "b"))
        lost.vote("a", "d1")
        lost.vote("b", last)
        assert lost.decided and not lost.commit and "b" in lost.lost


def card(peer: str, reachable: bool = True) -> Card:
    return Card(peer=peer, reachable=reachable, standing=None, phase=0, in_round=False)


def test_a_roster_forgets_the_gone_and_the_suspected_for_a_while() -> None:
    roster = Roster("b")
    roster.read({peer: card(peer) for peer in ("a", "b", "c")}, 0.0)
    assert roster.alive(0.0).keys() == {"a", "c"} and roster.leader(0.0, me_reachable=True) == "a"
    roster.suspect("a", 0.0)
    assert roster.leader(1.0, me_reachable=True) == "b" and roster.suspects(1.0) == ("a",)
    assert roster.leader(1.0, me_reachable=False) == "c"
    assert roster.leader(SUSPECT_S + 1, me_reachable=True) == "a"
    roster.left("a")
    roster.read({"a": card("a"), "c": card("c")}, 0.0)
    assert "a" not in roster.alive(SUSPECT_S + 1)
    roster.heard(card("a"))
    assert "a" in roster.alive(0.0)
