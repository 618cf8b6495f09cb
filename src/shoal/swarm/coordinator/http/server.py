"""The coordinator as a process: open the folders, serve, keep house, leave. One run, or a pool of them."""

import contextlib
import fcntl
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.net.http_server import Server, listen
from shoal.net.s3_store import Credentials, S3Store
from shoal.swarm.coordinator.config import CoordinatorConfig
from shoal.swarm.coordinator.context import Coordinator, newest_version, open_coordinator
from shoal.swarm.coordinator.housekeeping import keep_house, resume
from shoal.swarm.coordinator.http.app import make_app
from shoal.swarm.coordinator.http.run_pool import Hosted, Pool
from shoal.swarm.coordinator.leases.object_cleanup import keep_sweeping
from shoal.swarm.coordinator.rules.planning import check_upload_limit
from shoal.telemetry import Log
from shoal.wire.run_spec import RunSpec

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """One run and where it lives."""

    config: CoordinatorConfig
    spec: RunSpec
    dir: Path
    credentials: Credentials | None = None
    """Of its object store, where it has one."""


def run_coordinator(  # noqa: PLR0913 - the whole of a process
    config: CoordinatorConfig,
    spec: RunSpec,
    dir: Path,
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
    *,
    credentials: Credentials | None = None,
) -> None:
    """Serve the run in `dir` until `stop`. `on_ready` gets the URL once it answers (port 0 takes a free one).

    With PostgreSQL several may serve one run from one folder.
    """
    hosting = Hosting(config=config, spec=spec, dir=dir, credentials=credentials)
    run_pool([hosting], host, port, stop, on_ready)


def run_pool(
    runs: Sequence[Hosting],
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """The same for several runs, each in its own folder."""
    names = [run.spec.run for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"runs of one coordinator must have names of their own: {', '.join(names)}")
    with contextlib.ExitStack() as stack:
        _collect_seldom()
        coordinators = [stack.enter_context(_opened(run)) for run in runs]
        for coordinator in coordinators:
            _sweep_beside(coordinator, stop)
        _serve(coordinators, host, port, stop, on_ready)


def _collect_seldom() -> None:
    """What a request leaves behind is gone with its last reference; looking for circles in it took a twentieth of the time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@contextmanager
def _opened(run: Hosting) -> Iterator[Coordinator]:
    with contextlib.nullcontext() if run.config.database else alone_in(run.dir):
        coordinator = open_coordinator(
            run.config, run.spec, run.dir, log=Log("coordinator"), credentials=run.credentials
        )
        try:
            check_upload_limit(coordinator)
            resume(coordinator)
            yield coordinator
        finally:
            coordinator.close()


def _sweep_beside(coordinator: Coordinator, stop: threading.Event) -> None:
    if isinstance(coordinator.store, S3Store):
        arguments = (coordinator, coordinator.store, stop)
        threading.Thread(target=keep_sweeping, args=arguments, name="sweep", daemon=True).start()


def _serve(
    coordinators: Sequence[Coordinator],
    host: str,
    port: int,
    stop: threading.Event,
    on_ready: Callable[[str], None] | None,
) -> None:
    sock = listen(host, port)
    port = int(sock.getsockname()[1])
    url = f"http://{_bracketed(host)}:{port}"
    pool = Pool([_host(coordinator, host, port, url) for coordinator in coordinators])
    server = Server(pool, sock, on_close=pool.close_feeds)
    server.start()
    try:
        if on_ready is not None:
            on_ready(url)
        keep_house(coordinators, stop, check=server.check)
    finally:
        server.close()


def _host(coordinator: Coordinator, host: str, port: int, url: str) -> Hosted:
    authorities = known_authorities(host, port, coordinator.config.authorities)
    with coordinator.database.read() as db:
        newest = newest_version(db)
    coordinator.log.info("serving", url=url, run=coordinator.spec.run, newest_version=newest)
    if authorities is None:
        coordinator.log.warning("any host name is taken in signed requests; set coordinator.authorities")
    return Hosted(coordinator, make_app(coordinator, authorities=authorities))


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
