"""Helpers that start peers in one process, each with its own thread, connected by socket pairs."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from shoal.diloco.averaging.averager import Averager, AveragerSettings, Ready
from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.codec import CodecName, Coded, decode
from shoal.diloco.outer import OuterState, Vector, first_state
from shoal.diloco.robust import PartAverager, RobustSettings
from shoal.diloco.rounds import RoundResult, take_round
from shoal.diloco.transport.mesh import LocalHub
from shoal.telemetry import Log

T = TypeVar("T")
LOG = Log("test")


def vector(seed: int, num_values: int = 1000) -> Vector:
    return np.random.default_rng(seed).standard_normal(num_values).astype(np.float32)


def mean_of_chunks(
    codec: CodecName,
    coded: list[Coded],
    weights: list[float],
    num_values: int,
    settings: RobustSettings | None = None,
) -> Vector:
    """Returns the decoded average of one chunk of every member, whose norms are not bounded."""
    members, norms = [f"peer-{at}" for at in range(len(coded))], [1e30] * len(coded)
    averager = PartAverager(codec, members, weights, norms, settings or RobustSettings())
    return decode(codec, averager.average(coded, num_values), num_values)


def make_peer(
    hub: LocalHub, *, codec: CodecName = "fp32", reachable: bool = True, **more: Any
) -> PeerAverager:
    settings: dict[str, Any] = {"gather_s": 30.0, "announce_s": 0.2, "stall_s": 5.0, **more}
    return PeerAverager(
        hub.mesh(reachable=reachable), log=LOG, codec=codec, settings=AveragerSettings(**settings)
    )


def in_threads(calls: list[Callable[[], T]]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(110) for future in [pool.submit(call) for call in calls]]


def start_swarm(hub: LocalHub, num: int, **more: Any) -> tuple[list[PeerAverager], OuterState]:
    """Returns peers that know each other and hold the same state."""
    peers = [make_peer(hub, **more) for _ in range(num)]
    for peer in peers:
        assert peer.join(deadline_s=10) is None
    state = first_state((vector(0),))
    for peer in peers:
        peer.serve(state, step=0)
    return peers, state


def ready(state: OuterState, weight: float = 1.0) -> Ready:
    return Ready(round=state.round, work=state.work, digest=state.digest(), weight=weight)


def one_round(
    peer: Averager, state: OuterState, delta_N: Vector, *, weight: float = 1.0, deadline_s: float = 20.0
) -> RoundResult:
    return take_round(
        peer, ready(state, weight), delta_N, deadline_s=deadline_s, log=LOG, stop=threading.Event()
    )
