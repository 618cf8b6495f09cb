"""The loopback swarm as a fixture: a coordinator without work yet."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from honest_work import make_spec
from loopback import DEADLINE_S, Swarm, in_thread

from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.http.server import run_coordinator


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    spec, ready = make_spec(), threading.Event()
    config = CoordinatorConfig(
        groups_per_step=4, prompts_per_lease=2, eval_prompts=0, retry_s=0.05, try_relays=False
    )
    urls: list[str] = []

    def serve(stop: threading.Event) -> None:
        def on_ready(url: str) -> None:
            urls.append(url)
            ready.set()

        run_coordinator(config, spec, tmp_path, "127.0.0.1", 0, stop, on_ready)

    with in_thread(serve):
        assert ready.wait(DEADLINE_S), "the coordinator did not start"
        swarm = Swarm(tmp_path, urls[0])
        yield swarm
        swarm.close()
