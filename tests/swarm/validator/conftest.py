"""Fixtures of the validator's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import Swarm, running_swarm

from shoal.swarm.validator.table_reader import TableReader


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """A loopback swarm: a coordinator without work yet."""
    with running_swarm(tmp_path) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def reader() -> Iterator[TableReader]:
    with TableReader() as reader:
        yield reader
