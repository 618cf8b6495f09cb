"""The publisher: a version's folder, its signed manifest, the origin that serves it, and the word to the coordinator."""

import filecmp
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.model.builtin import copy_all_but_weights
from shoal.model.weights import save_tensors
from shoal.net.http_client import Refused, SignedClient
from shoal.net.http_server import listen
from shoal.shardcast.publish import Base, publish
from shoal.shardcast.relay.relay_app import RelayServer
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.wire.keys import Key
from shoal.wire.manifest import WEIGHTS_FILE, Manifest
from shoal.wire.messages import Announce, Recorded, StepReport
from shoal.wire.record import Sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the origin listens (port 0: any free one), and how relays reach it if that differs."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    private: bool = False
    """Only for members of the run, who show a ticket."""


class Publisher:
    """The origin of one run: writes versions, serves the newest few, announces each."""

    def __init__(
        self,
        store: VersionStore,
        *,
        model_folder: Path,
        run_key: Key,
        client: SignedClient,
        address: Address,
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
        self._server.start()

    def close(self) -> None:
        self._store.close()
        self._server.close()

    def prepare(
        self, named: Iterable[tuple[str, Tensor]], version: int, *, shard_bytes: int, snapshot_every: int
    ) -> Path:
        """Write and sign a version where nobody sees it yet: as what changed since the one before, where that is here.

        Doing it again with the same weights gives the same signed manifest.
        """
        final = self._store.path(version)
        hidden = final.with_name(f".{final.name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        copy_all_but_weights(self._model_folder, hidden)
        save_tensors(
            named, hidden / WEIGHTS_FILE, sync=False
        )  # the checkpoint is what must survive; boot.py has the rest
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
        """Serve what `prepare` made."""
        final = self._store.path(version)
        if folder != final:
            shutil.rmtree(final, ignore_errors=True)
            folder.rename(final)
        return self._store.adopt(version)

    def announce(self, manifest: Sealed[Manifest], report: StepReport | None) -> None:
        """Tell the coordinator. It takes the same version again, so a crash before its answer does no harm."""
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
                "they belong to different runs, or a checkpoint is missing: resume with the trainer folder that "
                "announced it, or start a new run"
            ) from None
        self._log.info(
            "version announced",
            version=version,
            bytes=manifest.body.payload_bytes,
            bytes_since_last=manifest.body.follow_bytes,
            origin=self.origin_url,
        )


def _same_files(left: Path, right: Path) -> bool:
    """Whether `right` holds every file of `left` with the same bytes: then it is that version, published before."""
    return all(
        (right / path.name).is_file() and filecmp.cmp(path, right / path.name, shallow=False)
        for path in left.iterdir()
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
