"""Runs a relay: starts up, serves and mirrors until it is told to stop, shuts down.

                    coordinator
          run key, origin |  ^ complete versions, bytes sent
                          v  |
upstream -- shards --> [ mirror -> store -> app ] -- shards --> workers, other relays
"""

import threading
from pathlib import Path

from pydantic import Field, model_validator

from shoal.net.http_client import Refused, SignedClient, Tickets, Unreachable
from shoal.net.http_server import allow_open_files, authority, listen
from shoal.net.rate_limit import ServerLimits
from shoal.net.waiting import NotYet
from shoal.shardcast.relay.mirror import Mirror, UpstreamUrl
from shoal.shardcast.relay.relay_app import RelayServer
from shoal.shardcast.store import KEEP_VERSIONS, VersionStore
from shoal.telemetry import Log
from shoal.wire.delegation import RelayDelegation
from shoal.wire.keys import Key
from shoal.wire.messages import Info, Origin, RelayReport
from shoal.wire.record import Record, Sealed, Url

_WRONG_KEY_CODES = ("request.unknown_key", "request.not_allowed", "request.revoked", "request.bad_signature")
REPORT_EVERY_S = 5.0


class RelayConfig(Record):
    """Settings of a relay. With a coordinator only `folder` is needed; without one, also `run`, `run_key` and `upstreams`."""

    folder: Path
    coordinator: Url | None = None
    upstreams: tuple[Url, ...] = ()
    """Origins or relays to follow. Empty: the origin that the coordinator names."""
    run: str | None = None
    run_key: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    url: Url | None = None
    """The URL under which others reach this relay. None: that of the delegation, or http://host:port without one."""
    delegation: Sealed[RelayDelegation] | None = None
    """The operator's statement that the relay's key belongs to its URL. A coordinator takes no report without it."""
    keep_versions: int | None = Field(default=None, ge=1)
    """Number of versions to keep. None: as many as the run's terms say, so that leased versions are available."""
    max_bytes: int | None = Field(default=None, gt=0)
    """Limit of all versions on disk. Fewer than `keep_versions` are kept if they exceed it; the newest always stays."""
    max_connections: int = Field(default=2048, ge=1)
    max_connections_per_address: int = Field(default=512, ge=1)
    bytes_per_s_per_address: float | None = Field(default=None, gt=0)
    private: bool = False
    """Whether to serve only clients with a ticket from the run's coordinator."""
    deadline_s: float = Field(default=120.0, gt=0)
    """How long to wait for the coordinator at startup."""

    @model_validator(mode="after")
    def _enough(self) -> "RelayConfig":
        if self.coordinator is None and not (self.run and self.run_key and self.upstreams):
            raise ValueError("without a coordinator a relay needs run, run_key and upstreams")
        delegated = None if self.delegation is None else self.delegation.body.url
        if self.url is not None and delegated is not None and self.url.rstrip("/") != delegated:
            raise ValueError(
                f"url is {self.url}, but the delegation is for {delegated}; use that URL, or make another delegation"
            )
        if self.url is None and delegated is None and self.host in ("0.0.0.0", "::"):
            raise ValueError(
                f"host={self.host!r} means every address of this machine; set url to the one that others use"
            )
        return self


class Relay:
    """One relay: a server, a mirror, and reports to the coordinator."""

    def __init__(self, config: RelayConfig, key: Key, *, log: Log, stop: threading.Event) -> None:
        self.config = config
        self._log, self._stop = log, stop
        self._report_now = threading.Event()
        self._reporter: threading.Thread | None = None
        self._accepted = False
        self._refused: Refused | None = None
        self._client = (
            SignedClient(config.coordinator, key, log=log, stop=stop) if config.coordinator else None
        )

    def startup(self) -> None:
        """Binds the port, reads the store, asks the coordinator about the run, and starts all threads."""
        config = self.config
        sock = listen(config.host, config.port)
        try:
            run, run_key, keep_versions = self._run_terms()
            self.store = VersionStore(
                config.folder, keep_versions, run=run, run_key=run_key, max_bytes=config.max_bytes
            )
        except BaseException:
            sock.close()
            raise
        limits = ServerLimits(
            connections=config.max_connections,
            connections_per_address=config.max_connections_per_address,
            bytes_per_s=config.bytes_per_s_per_address,
        )
        allow_open_files(2 * config.max_connections + 100, self._log)
        self._server = RelayServer(self.store, sock, log=self._log, limits=limits, private=config.private)
        self.app = self._server.app
        self._server.start()
        delegated = None if config.delegation is None else config.delegation.body.url
        self.url = delegated or config.url or f"http://{authority(config.host, self._server.port)}"
        if self._client is not None:
            self._report()  # before the mirror asks for a ticket, which only a known relay gets
        self._mirror = Mirror(
            self.store,
            [_fixed_url(url) for url in config.upstreams] or [self._origin_url],
            log=self._log,
            stop=self._stop,
            on_complete=lambda version: self._report_now.set(),
            ticket=None if self._client is None else Tickets(self._client, log=self._log),
        )
        self._mirror.start()
        if self._client is not None:
            self._reporter = threading.Thread(target=self._report_loop, name="reporter", daemon=True)
            self._reporter.start()
        self._log.info("serving", url=self.url, run=run, versions=list(self.store.complete()))

    def main_loop(self) -> None:
        """Runs until `stop` is set; raises if a thread ended or the coordinator does not accept the key."""
        while not self._stop.wait(0.2):
            if self._refused is not None:
                raise self._refused
            self._mirror.check()
            self._server.check()

    def shutdown(self) -> None:
        """Stops all threads. The mirror first: that ends the waits of requests, which would delay the server."""
        self._stop.set()
        self._report_now.set()
        self._mirror.close()
        self._server.close()
        if self._reporter is not None:
            self._reporter.join(1.0)
        if self._client is not None:
            self._client.close()
        self._log.info("stopped", bytes_sent=self.app.bytes_sent)

    # -- the coordinator --------------------------------------------------------------------------------

    def _run_terms(self) -> tuple[str, str, int]:
        """Returns the run's name, its key, and how many versions to keep."""
        run, run_key, keep_versions = self.config.run, self.config.run_key, self.config.keep_versions
        if self._client is not None and not (run and run_key):
            deadline_s = self.config.deadline_s
            info = self._client.call_until(
                "the coordinator", "GET", "/v1/info", None, Info, deadline_s=deadline_s
            )
            run, run_key = run or info.spec.run, run_key or info.run_key
            keep_versions = keep_versions or info.spec.keep_versions
        assert run and run_key, "RelayConfig requires a coordinator or both"
        return run, run_key, keep_versions or KEEP_VERSIONS

    def _origin_url(self) -> str:
        assert self._client is not None, "RelayConfig requires upstreams without a coordinator"
        try:
            return self._client.call("GET", "/v1/origin", None, Origin).url
        except Unreachable as error:
            raise NotYet(f"the coordinator is unreachable: {error}") from None
        except Refused as refused:
            raise NotYet(
                f"the coordinator names no origin: {refused.problem.detail}", refused.problem.retry_after_s
            ) from None

    def _report_loop(self) -> None:
        while not self._stop.is_set():
            self._report_now.clear()
            self._report()
            self._report_now.wait(REPORT_EVERY_S)

    def _report(self) -> None:
        assert self._client is not None
        report = RelayReport(
            url=self.url,
            versions=self.store.complete(),
            bytes_sent=self.app.bytes_sent,
            delegation=self.config.delegation,
        )
        try:
            self._client.send("POST", "/v1/relays", report.model_dump_json().encode())
            self._accepted = True
        except (Unreachable, Refused) as error:
            if isinstance(error, Refused) and error.code in _WRONG_KEY_CODES and not self._accepted:
                # Only another key helps: without reports no client learns of this relay.
                self._refused = error
            elif not self._stop.is_set():
                self._log.warning(f"report to the coordinator failed, will retry: {error}")


def run_relay(config: RelayConfig, *, key: Key, log: Log, stop: threading.Event) -> None:
    """Runs one relay until `stop` is set."""
    relay = Relay(config, key, log=log, stop=stop)
    relay.startup()
    try:
        relay.main_loop()
    finally:
        relay.shutdown()


def _fixed_url(url: str) -> UpstreamUrl:
    return lambda: url
