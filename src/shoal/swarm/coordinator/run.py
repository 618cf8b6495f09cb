"""The coordinator as a process: open the folder, serve, keep house, leave."""

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.net.server import Server, listen
from shoal.swarm.coordinator.app import make_app
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.coordinator import Coordinator, newest_version, open_coordinator
from shoal.swarm.coordinator.housekeeping import keep_house, resume
from shoal.swarm.coordinator.issue import check_upload_limit
from shoal.telemetry import Log
from shoal.wire.run import RunSpec

_WILDCARDS = ("0.0.0.0", "::", "")


def run_coordinator(
    config: CoordinatorConfig,
    spec: RunSpec,
    dir: Path,
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the run in `dir` until `stop`. `on_ready` gets the URL once it answers (port 0 takes a free one).

    With PostgreSQL several may serve one run from one folder.
    """
    log = Log("coordinator")
    with contextlib.nullcontext() if config.database else alone_in(dir):
        coordinator = open_coordinator(config, spec, dir, log=log)
        try:
            check_upload_limit(coordinator)
            resume(coordinator)
            _serve(coordinator, host, port, stop, on_ready)
        finally:
            coordinator.close()


def _serve(
    coordinator: Coordinator,
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None,
) -> None:
    sock = listen(host, port)
    port = int(sock.getsockname()[1])
    authorities = known_authorities(host, port, coordinator.config.authorities)
    app = make_app(coordinator, authorities=authorities)
    server = Server(app, sock, on_close=app.feed.close)
    url = f"http://{_bracketed(host)}:{port}"
    with coordinator.database.read() as db:
        newest = newest_version(db)
    coordinator.log.info("serving", url=url, run=coordinator.spec.run, newest_version=newest)
    if authorities is None:
        coordinator.log.warning("any host name is taken in signed requests; set coordinator.authorities")
    server.start()
    try:
        if on_ready is not None:
            on_ready(url)
        keep_house(coordinator, stop, check=server.check)
    finally:
        server.close()


@contextmanager
def alone_in(dir: Path) -> Iterator[None]:
    """A second coordinator in the same folder is refused; the lock ends with the process, however it ends."""
    dir.mkdir(parents=True, exist_ok=True)
    with (dir / "coordinator.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"a coordinator is already running in {dir}; stop it first") from None
        yield


def known_authorities(host: str, port: int, named: tuple[str, ...]) -> frozenset[str] | None:
    """The names a signed request may be for; None (any) where they cannot be known."""
    if host in _WILDCARDS and not named:
        return None
    own = {f"{_bracketed(host)}:{port}", *(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))}
    return frozenset(name.lower() for name in own | set(named))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
