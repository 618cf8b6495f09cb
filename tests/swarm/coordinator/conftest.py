import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_swarm import CONFIG, LOG, SPEC, SmallSwarm

from shoal.swarm.coordinator.coordinator import open_coordinator


@pytest.fixture(scope="session")
def fresh_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with keys and empty tables, to be copied: making them takes longer than most tests."""
    dir = tmp_path_factory.mktemp("fresh") / "run"
    open_coordinator(CONFIG, SPEC, dir, log=LOG).close()
    return dir


@pytest.fixture
def swarm(fresh_run: Path, tmp_path: Path) -> Iterator[SmallSwarm]:
    """A coordinator with no policy, no relay and no node yet."""
    shutil.copytree(fresh_run, tmp_path / "run")
    swarm = SmallSwarm(tmp_path / "run")
    yield swarm
    swarm.close()
