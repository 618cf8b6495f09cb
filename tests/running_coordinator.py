"""A coordinator with a real server in a thread of the test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.background import BackgroundTask
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.http.server import Hosting, run_pool
from shoal.wire.run_spec import RunSpec

DEADLINE_S = 60.0


@contextmanager
def running_coordinator(
    folder: Path, spec: RunSpec, config: CoordinatorConfig | None = None, *, port: int = 0
) -> Iterator[str]:
    """Runs a coordinator in `folder` and yields its URL. An error of the coordinator fails the test."""
    run = Hosting(config=config or CoordinatorConfig(), spec=spec, dir=folder)
    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    serving = BackgroundTask("coordinator", lambda: run_pool([run], "127.0.0.1", port, stop, on_ready))
    try:
        assert ready.wait(DEADLINE_S), "the coordinator did not start"
        yield urls[0]
    finally:
        stop.set()
        assert serving.wait(DEADLINE_S), "the coordinator did not stop"
        serving.result()
