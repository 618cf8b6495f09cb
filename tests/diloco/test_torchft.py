"""Tests of the torchft engine: a real lighthouse, peers in threads of one process."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from local_swarm import LOG, in_threads, one_round, vector

pytest.importorskip("torchft", reason="the extra `torchft` is not installed: make hivemind")
pytestmark = [pytest.mark.hivemind, pytest.mark.timeout(120)]

from shoal.diloco.averaging.torchft_averager import TorchftAverager  # noqa: E402
from shoal.diloco.outer import Outer, first_state, outer_step  # noqa: E402
from shoal.diloco.rounds import RoundOutcome, RoundResult  # noqa: E402


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


def make(lighthouse: str, **more: Any) -> TorchftAverager:
    return TorchftAverager(lighthouse, log=LOG, codec=more.pop("codec", "fp32"), **more)


def test_peers_agree_bit_for_bit_and_a_new_peer_joins(lighthouse: str) -> None:
    peers = [make(lighthouse, codec="int8") for _ in range(2)]
    assert in_threads([functools.partial(peer.join, deadline_s=20) for peer in peers]) == [None, None]
    state = first_state((vector(0),))
    for peer in peers:
        peer.serve(state, step=0)
    new_peer = make(lighthouse, codec="int8")

    def member(at: int) -> RoundResult:
        # The lighthouse answers at once when all of its last list ask again, so the new peer must have asked before.
        time.sleep(3)
        result = one_round(peers[at], state, vector(at + 1), weight=at + 1.0)
        peers[at].serve(outer_step(state, result.average_N, Outer(), work=result.work), step=0)
        return result

    calls: list[Callable[[], Any]] = [
        functools.partial(member, 0),
        functools.partial(member, 1),
        functools.partial(new_peer.join, deadline_s=20),
    ]
    first, second, fetched = in_threads(calls)
    assert first.outcome is second.outcome is RoundOutcome.COMMITTED
    assert np.array_equal(first.average_N, second.average_N)
    exact = (vector(1) + 2 * vector(2)) / 3
    assert np.abs(first.average_N - exact).max() < 0.05
    assert fetched is not None and fetched.state.round == 1
    new_peer.serve(fetched.state, step=0)
    results = in_threads(
        [
            functools.partial(one_round, peer, fetched.state, vector(at))
            for at, peer in enumerate([*peers, new_peer])
        ]
    )
    assert all(len(result.members) == 3 for result in results)
    for peer in [*peers, new_peer]:
        peer.leave()


@pytest.mark.parametrize(
    ("lighthouse", "host", "words"),
    [
        ("http://10.0.0.1:8710", "127.0.0.1", "this machine's own address"),
        ("http://127.0.0.1:8710", "0.0.0.0", "this machine's own address"),
        ("/ip4/127.0.0.1/tcp/1/p2p/Qm", "127.0.0.1", "not the address of a lighthouse"),
    ],
)
def test_address_that_peers_cannot_connect_to_is_refused(lighthouse: str, host: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(lighthouse, host=host)


def test_round_is_taken_alone_when_the_others_are_gone(lighthouse: str) -> None:
    peer, other = (make(lighthouse, min_peers=2, stop=threading.Event()) for _ in range(2))
    in_threads([functools.partial(each.join, deadline_s=20) for each in (peer, other)])
    other.leave()
    state = first_state((vector(0),))
    peer.serve(state, step=0)
    result = one_round(peer, state, vector(1), deadline_s=2.0)
    assert result.outcome is RoundOutcome.LOCAL
    peer.leave()
