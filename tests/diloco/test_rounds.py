"""Tests of rounds between peers of one process: the protocol used over the internet, on socket pairs."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_swarm import in_threads, make_peer, mean_of_chunks, one_round, vector

from shoal.diloco.averaging.averager import AveragingGroup, Reduced, RoundFailed
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.averaging.reducer import CHUNK
from shoal.diloco.codec import CODECS, CodecName, decode, encode
from shoal.diloco.outer import Outer, OuterState, Vector, outer_step
from shoal.diloco.rounds import RoundOutcome, RoundResult


def rounds(
    peers: list[PeerAverager], state: OuterState, deltas: list[Vector], weights: list[float] | None = None
) -> list[RoundResult]:
    weights = weights or [1.0] * len(peers)
    return in_threads(
        [
            functools.partial(one_round, peer, state, delta, weight=weight)
            for peer, delta, weight in zip(peers, deltas, weights, strict=True)
        ]
    )


@pytest.mark.parametrize("codec", CODECS)
def test_all_peers_get_the_same_bits_of_the_weighted_mean(swarm: Any, codec: CodecName) -> None:
    _, peers, state = swarm(3, codec=codec)
    num = 2 * CHUNK + 777
    deltas, weights = [vector(seed, num) for seed in (1, 2, 3)], [1.0, 2.0, 5.0]
    results = rounds(peers, state, deltas, weights)
    assert [result.outcome for result in results] == [RoundOutcome.COMMITTED] * 3
    assert all(np.array_equal(result.average_N, results[0].average_N) for result in results)
    assert all(result.work == 8.0 for result in results)
    exact = np.average(np.stack(deltas), axis=0, weights=weights)
    tolerance = {"fp32": 1e-6, "fp16": 5e-3, "fp16-scaled": 5e-3, "int8": 0.06, "int4": 0.9}[codec]
    assert np.abs(results[0].average_N - exact).max() < tolerance


def test_average_equals_a_reference_computation_bit_for_bit(swarm: Any) -> None:
    _, peers, state = swarm(2, codec="int8")
    deltas = [vector(seed, 999) for seed in (1, 2)]
    results = rounds(peers, state, deltas, [1.0, 3.0])
    halves = [(0, 499), (499, 999)]
    expected = np.concatenate(
        [
            mean_of_chunks("int8", [encode("int8", d[a:b]) for d in deltas], [1.0, 3.0], b - a)
            for a, b in halves
        ]
    )
    assert np.array_equal(results[0].average_N, expected)


def test_outbound_only_peer_takes_part(swarm: Any) -> None:
    hub, peers, state = swarm(2)
    outbound = make_peer(hub, reachable=False)
    swarm.made.append(outbound)
    fetched = outbound.join(deadline_s=10)
    assert fetched is not None
    outbound.serve(fetched.state, step=0)
    deltas = [vector(seed) for seed in (1, 2, 3)]
    results = rounds([*peers, outbound], state, deltas)
    assert [result.outcome for result in results] == [RoundOutcome.COMMITTED] * 3
    assert np.allclose(results[2].average_N, np.mean(deltas, axis=0), atol=1e-6)


def test_new_peer_fetches_the_state_and_joins_the_next_round(swarm: Any) -> None:
    hub, peers, state = swarm(2)
    result = rounds(peers, state, [vector(1), vector(2)])[0]
    state = outer_step(state, result.average_N, Outer(), work=result.work)
    for peer in peers:
        peer.serve(state, step=100)
        peer.progress(phase=7, step=107)
    new_peer = make_peer(hub)
    swarm.made.append(new_peer)
    fetched = new_peer.join(deadline_s=10)
    assert fetched is not None and fetched.phase == 7 and fetched.step == 107
    assert new_peer.serve(fetched.state, step=107) == state.digest()
    results = rounds([*peers, new_peer], fetched.state, [vector(3), vector(4), vector(5)])
    assert all(result.outcome is RoundOutcome.COMMITTED and len(result.members) == 3 for result in results)


def test_round_does_not_wait_for_a_peer_that_left(swarm: Any) -> None:
    _, peers, state = swarm(3)
    peers[0].leave()
    started_s = time.monotonic()
    results = rounds(peers[1:], state, [vector(1), vector(2)])
    assert all(len(result.members) == 2 for result in results)
    assert time.monotonic() - started_s < 10


def test_peer_with_an_older_state_adopts_the_newer_one(swarm: Any) -> None:
    _, peers, state = swarm(3)
    alone = outer_step(state, vector(9), Outer(), work=1.0)
    group = outer_step(state, vector(8), Outer(), work=2.0)
    peers[0].serve(alone, step=0)
    for peer in peers[1:]:
        peer.serve(group, step=0)

    def behind() -> RoundResult:
        return one_round(peers[0], alone, vector(1))

    def member(at: int) -> RoundResult:
        result = one_round(peers[at], group, vector(at))
        peers[at].serve(outer_step(group, result.average_N, Outer(), work=result.work), step=0)
        return result

    calls: list[Callable[[], RoundResult]] = [behind, *(functools.partial(member, at) for at in (1, 2))]
    results = in_threads(calls)
    assert [result.outcome for result in results] == [
        RoundOutcome.ADOPTED,
        RoundOutcome.COMMITTED,
        RoundOutcome.COMMITTED,
    ]
    assert results[1].members == (peers[1].peer, peers[2].peer)
    fetched = results[0].fetched
    assert fetched is not None
    assert fetched.state.digest() == outer_step(group, results[1].average_N, Outer(), work=2.0).digest()


class WrongAverager:
    """An engine that reports a wrong average the first `num_wrong` times."""

    def __init__(self, inner: PeerAverager, num_wrong: int = 1) -> None:
        self._inner, self.left = inner, num_wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reduce(self, group: AveragingGroup, delta_N: Vector, *, deadline_s: float) -> Reduced:
        reduced = self._inner.reduce(group, delta_N, deadline_s=deadline_s)
        if not self.left:
            return reduced
        self.left -= 1
        return Reduced(average_N=reduced.average_N + 1, digest="0" * 64, num_bytes=reduced.num_bytes)


def test_wrong_average_is_never_committed(swarm: Any) -> None:
    _, peers, state = swarm(3)
    wrong: Any = WrongAverager(peers[1])
    results = rounds([peers[0], wrong, peers[2]], state, [vector(1), vector(2), vector(3)])
    assert [result.outcome for result in results] == [RoundOutcome.COMMITTED] * 3
    assert all(result.attempts == 2 for result in results)
    assert all(np.array_equal(result.average_N, results[0].average_N) for result in results)


@pytest.mark.parametrize("wrong_at", [0, 2])
def test_peer_that_is_always_wrong_costs_retries_but_not_the_round(swarm: Any, wrong_at: int) -> None:
    """Holds also if the wrong peer is the leader. That peer is left out and adopts the others' result."""
    _, peers, state = swarm(4)
    members: list[Any] = list(peers)
    members[wrong_at] = WrongAverager(peers[wrong_at], num_wrong=1000)

    def take(at: int) -> RoundResult:
        result = one_round(members[at], state, vector(at))
        if result.outcome is RoundOutcome.COMMITTED:
            members[at].serve(outer_step(state, result.average_N, Outer(), work=result.work), step=0)
        return result

    results = in_threads([functools.partial(take, at) for at in range(4)])
    correct = [result for at, result in enumerate(results) if at != wrong_at]
    assert [result.outcome for result in correct] == [RoundOutcome.COMMITTED] * 3
    assert all(len(result.members) == 3 and result.attempts == 3 for result in correct)
    assert all(np.array_equal(result.average_N, correct[0].average_N) for result in correct)
    assert results[wrong_at].outcome is RoundOutcome.ADOPTED


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_not_finite_are_never_committed(swarm: Any, codec: CodecName) -> None:
    """The others refuse the values and continue without that peer."""
    _, peers, state = swarm(2, codec=codec)
    not_finite = vector(2)
    not_finite[7], not_finite[500] = np.nan, np.inf
    results = in_threads(
        [
            functools.partial(one_round, peer, state, delta, deadline_s=1.5)
            for peer, delta in zip(peers, (vector(1), not_finite), strict=True)
        ]
    )
    assert results[0].outcome is RoundOutcome.COMMITTED and results[0].members == (peers[0].peer,)
    assert np.array_equal(results[0].average_N, decode(codec, encode(codec, vector(1)), 1000))
    assert any(f"{peers[1].peer}: its pseudo-gradient" in why for why in results[0].reasons)
    assert results[1].outcome is not RoundOutcome.COMMITTED


def test_bytes_of_a_round_are_chunks_sent_to_owners_plus_sums_sent_as_owner(swarm: Any) -> None:
    _, peers, state = swarm(4)
    num = 4 * CHUNK
    results = rounds(peers, state, [vector(seed, num) for seed in range(4)])
    for result in results:
        # Three quarters of a vector to the other owners, the own quarter's sums to three members, and frame headers.
        assert 2 * 3 * num <= result.num_bytes < 2 * 3 * num + 2000


def test_state_that_does_not_match_its_digest_is_refused(swarm: Any) -> None:
    """A new peer tries the next holder; it gets no state if all are damaged."""
    hub, peers, state = swarm(2)
    damaged = replace(state, momenta=(state.momenta[0] + np.float32(1e-3),))

    def damage(peer: PeerAverager) -> None:
        while (held := peer._served._held) is None:  # `serve` takes effect on the peer's own thread
            time.sleep(0.01)
        peer._served._held = damaged, held[1]

    damage(peers[0])
    for _ in range(3):  # holders are asked in random order
        new_peer = make_peer(hub)
        swarm.made.append(new_peer)
        fetched = new_peer.join(deadline_s=10)
        assert fetched is not None and fetched.state.digest() == state.digest()
    damage(peers[1])
    with pytest.raises(RoundFailed, match="does not match its digest"):
        swarm.made[-1].fetch(deadline_s=1.0)


def test_peer_with_other_shared_settings_does_not_join(swarm: Any) -> None:
    """No round with it could be committed."""
    hub, peers, state = swarm(2, shared="codec = int8")
    other = make_peer(hub, shared="codec = fp16")
    with pytest.raises(ValueError, match="has codec = int8, this one codec = fp16"):
        other.join(deadline_s=10)
    other.leave()
    assert [result.outcome for result in rounds(peers, state, [vector(1), vector(2)])] == [
        RoundOutcome.COMMITTED
    ] * 2


def test_round_is_taken_alone_after_the_deadline(swarm: Any) -> None:
    _, peers, state = swarm(1, min_peers=2)
    delta = vector(1)
    result = one_round(peers[0], state, delta, deadline_s=1.0)
    assert result.outcome is RoundOutcome.LOCAL and np.array_equal(result.average_N, delta)
    assert result.took_s < 10
