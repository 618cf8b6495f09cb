"""Tests of what one lying peer can do to the average of others: real peers of one process over socket pairs."""

import asyncio
import functools
import math
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_swarm import in_threads, make_peer, mean_of_chunks, one_round, vector

from shoal.diloco.averaging.averager import AveragingGroup, Ready, Reduced
from shoal.diloco.averaging.membership import ask_peer
from shoal.diloco.averaging.peer_messages import (
    Card,
    GroupReply,
    Hello,
    ReadyRequest,
    StateHeader,
    StateRequest,
    StateVersion,
)
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.averaging.reducer import CHUNK, PartReduction
from shoal.diloco.codec import CODECS, CodecName, encode
from shoal.diloco.outer import Outer, OuterState, Vector, outer_step
from shoal.diloco.robust import BadChunk, PartAverager, RobustSettings, declared_norm, upper_median
from shoal.diloco.rounds import RoundOutcome, RoundResult
from shoal.diloco.transport.mesh import LocalHub

NUM = 1000
HONEST = [vector(9, NUM) + vector(seed, NUM) for seed in (1, 2, 3)]
"""Updates with a cosine of about one half between any two, as sites of one run have."""


class Liar:
    """A peer that declares the norm of an honest update and sends other values."""

    def __init__(self, inner: PeerAverager, lie_N: Vector, *, declares: float | None = None) -> None:
        self._inner, self._lie_N, self._declares = inner, lie_N, declares

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin(self, ready: Ready, *, deadline_s: float) -> AveragingGroup:
        told = ready if self._declares is None else replace(ready, norm=self._declares)
        return self._inner.begin(told, deadline_s=deadline_s)

    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        return self._inner.reduce(group, self._lie_N, deadline_s=deadline_s)


def take_rounds(peers: list[Any], state: OuterState, deltas: list[Vector], **more: Any) -> list[RoundResult]:
    """Takes one round at all peers; each serves its new state, so that one that was left out can fetch it."""

    def take(at: int) -> RoundResult:
        weight = more.get("weights", [1.0] * len(peers))[at]
        result = one_round(peers[at], state, deltas[at], weight=weight)
        if result.outcome is RoundOutcome.COMMITTED:
            peers[at].serve(outer_step(state, result.average_N, Outer(), work=result.work), step=0)
        return result

    return in_threads([functools.partial(take, at) for at in range(len(peers))])


def honest_results(results: list[RoundResult], *, members: int) -> RoundResult:
    """Checks that the first three peers committed the same bits, and returns the result of one."""
    assert [result.outcome for result in results[:3]] == [RoundOutcome.COMMITTED] * 3
    assert all(len(result.members) == members for result in results[:3])
    assert all(np.array_equal(result.average_N, results[0].average_N) for result in results[:3])
    return results[0]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_bad_values_are_refused_and_their_peer_is_left_out(
    swarm: Any, codec: CodecName, value: float
) -> None:
    """One value is enough; the liar declares the norm of an honest update."""
    _, peers, state = swarm(4, codec=codec)
    lie_N = vector(4, NUM)
    lie_N[NUM // 3] = value
    liar = Liar(peers[3], lie_N, declares=declared_norm(HONEST[0]))
    results = take_rounds([*peers[:3], liar], state, [*HONEST, lie_N])
    result = honest_results(results, members=3)
    assert np.abs(result.average_N - np.mean(HONEST, axis=0)).max() < (1e-5 if codec == "fp32" else 0.06)
    reasons = [why for each in results[:3] for why in each.reasons]
    assert any(f"{peers[3].peer}: its pseudo-gradient" in why for why in reasons)
    assert results[3].outcome is RoundOutcome.ADOPTED
    assert result.attempts <= 3


def test_refused_peer_costs_no_attempt_of_the_next_round(swarm: Any) -> None:
    _, peers, state = swarm(4)
    lie_N = np.full(NUM, np.nan, np.float32)
    liar = Liar(peers[3], lie_N, declares=1.0)
    result = take_rounds([*peers[:3], liar], state, [*HONEST, lie_N])[0]
    state = outer_step(state, result.average_N, Outer(), work=result.work)
    peers[3].serve(state, step=0)
    assert honest_results(take_rounds([*peers[:3], liar], state, [*HONEST, lie_N]), members=3).attempts == 1


@pytest.mark.parametrize("average", ["mean", "trimmed"])
@pytest.mark.parametrize("factor", [-1e30, -100.0, 1e6])
def test_update_of_one_liar_of_four_is_bounded(swarm: Any, average: str, factor: float) -> None:
    """The liar declares its true norm, so it takes part, scaled down to three times the median norm."""
    robust = RobustSettings(average=average)  # type: ignore[arg-type]
    _, peers, state = swarm(4, robust=robust)
    lie_N = np.float32(factor) * np.mean(HONEST, axis=0)
    results = take_rounds(peers, state, [*HONEST, lie_N])
    result = honest_results(results, members=4)
    norms = [declared_norm(each) for each in HONEST]
    without_liar = np.sum(HONEST, axis=0) / 4
    if average == "mean":
        moved = float(np.linalg.norm(result.average_N - without_liar))
        assert moved == pytest.approx(3 * max(norms) / 4, rel=0.01)
    else:
        # Every coordinate stays within what the honest peers sent.
        assert (result.average_N <= np.max(HONEST, axis=0) + 1e-5).all()
        assert (result.average_N >= np.min(HONEST, axis=0) - 1e-5).all()
        mean_N = np.mean(HONEST, axis=0)
        cosine = result.average_N @ mean_N / np.linalg.norm(mean_N) / np.linalg.norm(result.average_N)
        assert cosine > 0.7


def test_weight_of_one_liar_of_four_is_bounded(swarm: Any) -> None:
    """A peer states its own number of samples. Claiming many would push the others out of the mean."""
    _, peers, state = swarm(4)
    lie_N = -HONEST[0]
    results = take_rounds(peers, state, [*HONEST, lie_N], weights=[1.0, 1.0, 1.0, 1e12])
    expected = (np.sum(HONEST, axis=0) + 3 * lie_N) / 6
    assert np.abs(honest_results(results, members=4).average_N - expected).max() < 1e-5
    assert results[0].work == 6.0


@pytest.mark.parametrize("lie", [math.nan, 1e6])
def test_owner_that_sends_impossible_sums_is_left_out(
    swarm: Any, lie: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every member gets the same wrong sums, so their digests are equal; the declared norms show it."""
    _, peers, state = swarm(4)
    put, wrong = PartReduction.put, encode("fp32", np.full(NUM // 4, lie, np.float32))

    def corrupted(part: PartReduction, peer: str, at: int, coded: Any) -> None:
        put(part, peer, at, coded)
        if peers[3]._reducer._parts and part in peers[3]._reducer._parts.values():
            part._sums = [(wrong, digest) for _, digest in part._sums]

    monkeypatch.setattr(PartReduction, "put", corrupted)
    results = take_rounds(peers, state, [*HONEST, vector(4, NUM)])
    result = honest_results(results, members=3)
    assert np.abs(result.average_N - np.mean(HONEST, axis=0)).max() < 1e-5
    assert any(peers[3].peer in why for each in results[:3] for why in each.reasons)


def test_stranger_takes_no_part_where_peers_are_admitted_by_id(swarm: Any) -> None:
    admit = frozenset({"local-001", "local-002", "local-003"})
    hub, peers, state = swarm(3, admit=admit)
    stranger = make_peer(hub)
    swarm.made.append(stranger)
    assert stranger.join(deadline_s=5) is None, "nobody tells it the state"
    newer = outer_step(state, vector(9), Outer(), work=1e9)
    stranger.serve(newer, step=0)
    in_threads([functools.partial(one_round, stranger, newer, vector(9, NUM), deadline_s=1.0)])
    result = honest_results(take_rounds(peers, state, HONEST), members=3)
    assert np.abs(result.average_N - np.mean(HONEST, axis=0)).max() < 1e-5
    assert not any(stranger.peer in peer.peers() for peer in peers)


def test_peer_that_is_not_admitted_by_its_own_file_does_not_start() -> None:
    peer = make_peer(LocalHub(), admit=frozenset({"local-777"}))
    with pytest.raises(ValueError, match="local-001, is not in `admit`"):
        peer.join(deadline_s=5)
    peer.leave()


def test_factors_weights_and_medians() -> None:
    robust = RobustSettings(max_norm_ratio=3.0)
    assert robust.norm_factors([1.0, 1.0, 2.0, 30.0]) == (1.0, 1.0, 1.0, 0.2)
    assert robust.bounded_weights([1.0, 2.0, 100.0]) == (1.0, 2.0, 6.0)
    assert robust.norm_factors([1.0, 1e9]) == (1.0, 1.0), "two peers have no majority"
    assert robust.norm_factors([0.0, 0.0, 5.0]) == (1.0, 1.0, 1.0), "new peers have not moved yet"
    assert upper_median([]) == 0.0 and upper_median([0.0, 3.0, 1.0, 2.0]) == 2.0
    assert declared_norm(np.full(4, 1e30, np.float32)) == pytest.approx(2e30)
    assert declared_norm(np.full(4, 1e-30, np.float32)) == pytest.approx(2e-30)
    with pytest.raises(ValueError, match="at least 1"):
        RobustSettings(max_norm_ratio=0.5)


def test_trimmed_mean_by_coordinate() -> None:
    values = np.array([[1, 5, 0], [2, 6, 0], [3, -100, 0], [1000, 7, 0]], np.float32)
    coded = [encode("fp32", row) for row in values]
    back = mean_of_chunks("fp32", coded, [1.0, 1.0, 3.0, 1.0], 3, RobustSettings(average="trimmed"))
    assert back.tolist() == pytest.approx([(2 + 3 * 3) / 4, 5.5, 0.0])
    assert [RobustSettings(average="trimmed").num_trimmed(num) for num in (1, 2, 3, 4, 8, 12)] == [
        0,
        0,
        1,
        1,
        2,
        3,
    ]
    assert RobustSettings().num_trimmed(8) == 0


@pytest.mark.parametrize("codec", CODECS)
def test_honest_values_are_within_their_declared_norm_in_every_codec(codec: CodecName) -> None:
    """Also the worst case of int4: values of half a step are rounded up to a step."""
    step = np.full(1280, 0.5001, np.float32)
    step[::128] = 7.0
    for values in (vector(1, 1280), vector(2, 1280) ** 9, step):
        averager = PartAverager(codec, ["a"], [1.0], [declared_norm(values)], RobustSettings())
        averager.average([encode(codec, values)], len(values))
    with pytest.raises(BadChunk, match="a: its pseudo-gradient has a norm of"):
        PartAverager(codec, ["a"], [1.0], [1e-3], RobustSettings()).average([encode(codec, step)], len(step))


def test_liar_that_suspects_all_others_forms_no_group_alone(swarm: Any) -> None:
    """All others would adopt its state."""
    _, peers, state = swarm(4)
    others, ask = tuple(peer.peer for peer in peers[:3]), peers[3]._ask_leader

    def lie(leader: str, request: ReadyRequest, deadline_s: float) -> Any:
        return ask(leader, request.model_copy(update={"suspects": others}), deadline_s)

    peers[3]._ask_leader = lie
    results = take_rounds(peers, state, [*HONEST, vector(4, NUM)])
    assert honest_results(results, members=4).attempts == 1


NEWEST = StateVersion(work=1e300, round=99, state_digest="f" * 64)
"""A state that no peer holds."""


def on_loop(peer: PeerAverager, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, peer._loop).result(20)


def answer(liar: PeerAverager, card: Card, header: StateHeader | None = None) -> None:
    """Lets a peer answer every hello with `card`, and requests for its state with `header`, or not at all."""
    truthful = liar._reply

    async def reply(request: Any, stream: Any) -> None:
        if isinstance(request, Hello):
            await stream.send(card.canonical())
        elif isinstance(request, StateRequest):
            await (asyncio.sleep(100) if header is None else stream.send(header.canonical()))
        else:
            await truthful(request, stream)

    liar._reply = reply  # type: ignore[method-assign]


def card_of(peer: str, standing: StateVersion | None = None) -> Card:
    return Card(peer=peer, reachable=True, standing=standing, phase=0, in_round=False)


@pytest.mark.parametrize("named", ["local-002", "local-000"])
def test_card_of_another_peer_is_refused(swarm: Any, named: str) -> None:
    """It could take over what a peer says of itself, or add a leader that does not exist."""
    _, peers, _ = swarm(3)
    answer(peers[2], card_of(named, NEWEST))
    assert on_loop(peers[0], peers[0]._discovery.hello(peers[2].peer)) is None
    known = peers[0].peers()
    assert list(known) == [peers[1].peer], "the liar is suspected"
    assert known[peers[1].peer].standing != NEWEST


@pytest.mark.parametrize(
    "lie",
    [
        {"owners": ()},
        {"owners": ("local-009",)},
        {"owners": ("local-002", "local-002")},
        {"weights": (1.0,)},
        {"weights": (5.0, 5.0, 5.0)},
        {"norms": ()},
        {"norms": (-1.0, -1.0, -1.0)},
        {"members": ("local-002", "local-002", "local-002")},
        {"outcome": "behind", "at_least": 2**53 - 1},
    ],
)
def test_leader_with_a_false_reply_is_replaced(swarm: Any, lie: dict[str, Any]) -> None:
    """The next id leads. No site may crash, and none may lose its round."""
    _, peers, state = swarm(4)
    ids = tuple(peer.peer for peer in peers[1:])
    norms = tuple(declared_norm(delta) for delta in HONEST)
    told = {
        "outcome": "group",
        "id": "ab" * 16,
        "members": ids,
        "owners": ids,
        "weights": (1.0,) * 3,
        "norms": norms,
    }

    async def ready(request: ReadyRequest) -> GroupReply:
        return GroupReply(**(told | lie))

    peers[0]._leader.ready = ready
    results = take_rounds(peers[1:], state, HONEST)
    result = honest_results(results, members=3)
    assert any("false reply of the leader local-001" in why for why in result.reasons)


def test_state_that_is_claimed_and_not_served_does_not_stop_rounds(swarm: Any) -> None:
    _, peers, state = swarm(4, stall_s=2.0, gather_s=1.0)
    claim = card_of(peers[3].peer, NEWEST)
    answer(peers[3], claim)
    for peer in peers[:3]:
        on_loop(peers[3], ask_peer(peers[3]._mesh, peer.peer, Hello(card=claim), Card, 5))
    honest_results(take_rounds(peers[:3], state, HONEST), members=3)


def test_new_peer_fetches_the_next_newest_state(swarm: Any) -> None:
    hub, peers, state = swarm(3, stall_s=0.5)
    answer(peers[2], card_of(peers[2].peer, NEWEST))
    new_peer = make_peer(hub, stall_s=0.5)
    swarm.made.append(new_peer)
    fetched = new_peer.join(deadline_s=20)
    assert fetched is not None and fetched.state.digest() == state.digest()


def test_state_older_than_its_card_is_refused(swarm: Any) -> None:
    """A peer that adopted it would repeat rounds that the others have taken."""
    hub, peers, _ = swarm(2)
    card = card_of(peers[1].peer, NEWEST)
    peers[1]._served.card = lambda peer, reachable: card
    new_peer = make_peer(hub)
    swarm.made.append(new_peer)
    assert new_peer.join(deadline_s=20) is not None
    assert list(new_peer._membership._failed_fetches) == [peers[1].peer]


@pytest.mark.parametrize("known", [None, (NUM,)])
@pytest.mark.parametrize("length", [-1, 10**12, 2**53 - 1])
def test_newcomer_refuses_a_state_of_impossible_size(
    swarm: Any, length: int, known: tuple[int, ...] | None
) -> None:
    hub, peers, state = swarm(3)
    header = StateHeader.model_construct(standing=NEWEST, lengths=(length,), phase=0, step=0)
    answer(peers[2], card_of(peers[2].peer, NEWEST), header)
    new_peer = make_peer(hub, stall_s=0.5)
    swarm.made.append(new_peer)
    fetched = new_peer.join(deadline_s=20, lengths=known)
    assert fetched is not None and fetched.state.digest() == state.digest()


def test_newcomer_with_another_model_than_the_swarm_is_told_at_once(swarm: Any) -> None:
    hub, _, _ = swarm(2)
    new_peer = make_peer(hub)
    swarm.made.append(new_peer)
    with pytest.raises(ValueError, match="trains another model"):
        new_peer.join(deadline_s=100, lengths=(NUM + 1,))


def test_one_peer_with_other_settings_does_not_keep_newcomers_away(swarm: Any) -> None:
    hub, peers, state = swarm(3, shared="v1")
    answer(peers[2], card_of(peers[2].peer, NEWEST).model_copy(update={"shared": "v2"}))
    new_peer = make_peer(hub, shared="v1")
    swarm.made.append(new_peer)
    fetched = new_peer.join(deadline_s=20)
    assert fetched is not None and fetched.state.digest() == state.digest()
    assert peers[2].peer in new_peer._membership.refused(0.0)


@pytest.mark.parametrize("extra", [-4, 1, 1 << 20])
def test_chunk_of_a_wrong_size_is_refused_when_it_arrives(extra: int) -> None:
    """Kept until the other members' chunks are there, such chunks would fill the owner's memory."""
    refused: list[str] = []
    averager = PartAverager("fp32", ("a", "b"), (1.0, 1.0), (1.0, 1.0), RobustSettings())
    part = PartReduction(averager, ("a", "b"), [CHUNK] * 2, refused.append)
    part.put("b", 1, bytes(4 * CHUNK + extra))
    assert refused == ["b"] and "b: its pseudo-gradient has a chunk of" in part.failed
    assert not any(part._received)
