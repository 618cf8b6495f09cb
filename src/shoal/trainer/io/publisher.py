"""Publishes versions: writes and signs their folders, serves them as the origin, and announces them to the coordinator.

Publication runs in the background while the next step trains, one version at a time and in order:

    main        step 7 ── wait ── snapshot ── start(7) ── take batch ── step 8 ── wait ── snapshot ── start(8)
    background                                └ write, encode, sign, wait for the checkpoint, serve, announce ┘

The background thread reads and writes files and runs numpy, zstd and BLAKE3, which release the interpreter's lock.
"""

import filecmp
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.background import BackgroundTask
from shoal.model.builtin import copy_all_but_weights
from shoal.model.weights import save_tensors
from shoal.net.http_client import Refused, SignedClient
from shoal.net.http_server import listen
from shoal.net.waiting import DeadlinePassed
from shoal.shardcast.publish import Base, publish
from shoal.shardcast.relay.relay_app import RelayServer
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.manifest import WEIGHTS_FILE, Manifest
from shoal.wire.messages import Announce, Recorded, StepReport
from shoal.wire.record import Sealed

EXIT_TIMEOUT_S = 5.0
"""How long a process that exits waits for a publication. The next process repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginAddress:
    """Where the origin listens (port 0 picks a free one), and the URL for relays if that differs."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    private: bool = False
    """Whether only members of the run may fetch, who show a ticket."""


class Publisher:
    """The origin of one run: writes versions, serves the newest, and announces each."""

    def __init__(
        self,
        store: VersionStore,
        *,
        model_folder: Path,
        run_key: Key,
        client: SignedClient,
        address: OriginAddress,
        deadline_s: float,
        log: Log,
    ) -> None:
        self._store = store
        self._model_folder = model_folder
        self._run_key = run_key
        self._client = client
        self._deadline_s = deadline_s
        self._log = log
        self._server = RelayServer(
            store, listen(address.host, address.port), log=log, private=address.private
        )
        self.origin_url = address.url or f"http://{_in_url(address.host)}:{self._server.port}"

    def start(self) -> None:
        """Starts to serve the versions that are in the store."""
        self._server.start()

    def close(self) -> None:
        self._store.close()
        self._server.close()

    def prepare(
        self, named: Iterable[tuple[str, Tensor]], version: int, *, shard_bytes: int, snapshot_every: int
    ) -> Path:
        """Writes and signs a version in a hidden folder, as a delta if the store has the version before it.

        The same weights always give the same signed manifest.
        """
        final = self._store.path(version)
        hidden = final.with_name(f".{final.name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        copy_all_but_weights(self._model_folder, hidden)
        # Not flushed to disk: after a power cut the checkpoint makes this version again.
        save_tensors(named, hidden / WEIGHTS_FILE, sync=False)
        folder = hidden
        if _same_files(hidden, final):
            shutil.rmtree(hidden)
            folder = final
        base = None
        if self._store.get(version - 1) is not None:
            base = Base(folder=self._store.path(version - 1), snapshot_every=snapshot_every)
        publish(
            folder,
            run=self._store.run,
            version=version,
            key=self._run_key,
            base=base,
            shard_bytes=shard_bytes,
        )
        return folder

    def serve(self, folder: Path, version: int) -> Sealed[Manifest]:
        """Renames the folder that `prepare` wrote to its final name and serves it."""
        final = self._store.path(version)
        if folder != final:
            shutil.rmtree(final, ignore_errors=True)
            folder.rename(final)
        return self._store.adopt(version)

    def announce(self, manifest: Sealed[Manifest], report: StepReport | None) -> None:
        """Announces a version to the coordinator, which accepts the same version again after a crash."""
        body = Announce(manifest=manifest, origin_url=self.origin_url, report=report)
        version = manifest.body.version
        try:
            self._client.call_until(
                f"the coordinator to take version {version}",
                "POST",
                "/v1/policies",
                body,
                Recorded,
                deadline_s=self._deadline_s,
            )
        except Refused as refused:
            if refused.code != "request.conflict":
                raise
            raise ValueError(
                f"the coordinator has another version {version} than this trainer made ({refused.problem.detail}); "
                "resume with the trainer folder that announced it, or start a new run"
            ) from None
        self._log.info(
            "version announced",
            version=version,
            bytes=manifest.body.payload_bytes,
            bytes_since_last=manifest.body.follow_bytes,
            origin=self.origin_url,
        )


class BackgroundPublication:
    """Publishes one version at a time in a thread. Call all methods from one thread."""

    def __init__(self) -> None:
        self._task: BackgroundTask[None] | None = None
        self._version = -1

    def start(self, version: int, publish: Callable[[], None]) -> None:
        """Starts to publish a version. Wait for the one before first."""
        assert self._task is None, f"wait for version {self._version} before version {version}"
        self._version = version
        self._task = BackgroundTask(f"publish-{version}", publish)

    def check(self) -> None:
        """Raises the error of a publication that has failed. Called during waits that such a publication would end."""
        if self._task is not None and self._task.done:
            self._task.result()

    def wait(self, deadline_s: float) -> None:
        """Waits until the version is published; raises the error if that failed."""
        if self._task is None:
            return
        if not self._task.wait(deadline_s):
            raise DeadlinePassed(
                f"waited {deadline_s:.0f} s for version {self._version} to be published; is its disk slow or full?"
            )
        self._task.result()
        self._task = None

    def close(self) -> None:
        """Waits a few seconds for a publication in progress."""
        if self._task is not None:
            self._task.wait(EXIT_TIMEOUT_S)


def _same_files(left: Path, right: Path) -> bool:
    """Returns whether `right` has every file of `left` with the same bytes: the version was published before."""
    return all(
        (right / path.name).is_file() and filecmp.cmp(path, right / path.name, shallow=False)
        for path in left.iterdir()
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
