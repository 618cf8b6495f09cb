"""Fixtures of the averager's tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from local_swarm import in_threads, start_swarm

from shoal.diloco.averaging.peers import PeerAverager
from shoal.diloco.outer import OuterState
from shoal.diloco.transport.mesh import LocalHub


@pytest.fixture
def swarm() -> Iterator[Any]:
    """A function that starts a hub and peers, which leave at the end of the test."""
    made: list[PeerAverager] = []

    def start(num: int, **more: Any) -> tuple[LocalHub, list[PeerAverager], OuterState]:
        hub = LocalHub()
        peers, state = start_swarm(hub, num, **more)
        made.extend(peers)
        return hub, peers, state

    start.made = made  # type: ignore[attr-defined]
    yield start
    in_threads([peer.leave for peer in made])
