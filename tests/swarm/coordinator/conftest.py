from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import SmallSwarm


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[SmallSwarm]:
    """A coordinator with no policy, no relay and no node yet."""
    swarm = SmallSwarm(tmp_path / "run")
    yield swarm
    swarm.close()
