"""Publishes versions: writes and signs their folders, serves them as the origin, and announces them to the coordinator.

Publication runs in the background while the next step trains, one version at a time and in order:

    main        step 7 ── start(7) ── take batch ── step 8: forward, backward ── wait for the capture ── update ── wait ── start(8)
    background            └ capture ────────────────────────┘ encode, hash, sign, serve, announce ────────────────┘

The capture compares the weights with the published file (weights_diff.py) and must end before the next update changes them. What
follows reads and writes host memory and files with numpy, zstd and BLAKE3, which release the interpreter's lock.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.files import DiskFull, explain_full_disk
from shoal.model.builtin import copy_all_but_weights
from shoal.model.plain_folder import link_newest
from shoal.model.weights import save_tensors
from shoal.net.http_client import Refused, SignedClient, Unreachable
from shoal.net.http_server import authority, listen
from shoal.shardcast.adapter_delta import (
    AdapterMatrices,
    decode_adapters,
    encode_adapters,
    is_adapter_payload,
)
from shoal.shardcast.archive import VersionArchive
from shoal.shardcast.file_image import ChangedWords, FileImage, file_hasher, restore_image
from shoal.shardcast.publish import SHARD_BYTES, SNAPSHOT_EVERY, ImageDelta, Signing, publish_image
from shoal.shardcast.relay.relay_app import RelayServer
from shoal.shardcast.store import VersionStore
from shoal.telemetry import Log
from shoal.trainer.io.recalibration import Recalibration
from shoal.trainer.io.weights_diff import WeightsDiff
from shoal.wire.keys import Key
from shoal.wire.ledger import Rederived
from shoal.wire.manifest import DELTA_SUFFIX, WEIGHTS_FILE, Manifest
from shoal.wire.messages import Announce, Info, Recorded, StepReport
from shoal.wire.proof_noise import LaterNoise, NoiseDoubt
from shoal.wire.record import Sealed

DOUBT_POLL_S = 3.0
"""How often a trainer asks whether work is in doubt."""
DISK_REMEDY = (
    "free some space there or use a larger disk, then start the trainer again: it continues where it was"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginAddress:
    """Where the origin listens (port 0 picks a free one), and the URL for relays if that differs."""

    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None
    private: bool = False
    """Whether only members of the run may fetch, who show a ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """How versions are written, and how long the coordinator may take to accept one."""

    deadline_s: float
    device: str = "cpu"
    """The device that holds the weights."""
    shard_bytes: int = SHARD_BYTES
    snapshot_every: int = SNAPSHOT_EVERY
    """Versions divisible by this are also sent whole, for nodes that join late."""
    last_version: int | None = None
    """The run's last version, which is also kept whole on this disk; None: no version is."""
    archive: bool = True
    """Whether the deltas of all versions are kept, in `archive` beside the store."""
    recalibration: Recalibration | None = None
    """Measures how far each version has moved, and repeats the calibration; None: neither."""


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
        settings: PublisherSettings,
        log: Log,
    ) -> None:
        self._store, self._recalibration = store, settings.recalibration
        self._model_folder = model_folder
        self._signing = Signing(run=store.run, key=run_key, shard_bytes=settings.shard_bytes)
        self._client = client
        self._settings = settings
        self._log = log
        self._archive = VersionArchive(store.folder.parent / "archive") if settings.archive else None
        self._diff: WeightsDiff | None = None
        """Holds the file of the newest version; None until a version is written or opened."""
        self._doubt_asked_s = float("-inf")
        self._server = RelayServer(
            store, listen(address.host, address.port), log=log, private=address.private
        )
        self.origin_url = address.url or f"http://{authority(address.host, self._server.port)}"

    def start(self) -> None:
        """Starts to serve the versions that are in the store."""
        archived = set() if self._archive is None else set(self._archive.versions())
        for version in set(self._store.complete()) - archived:  # a crash may have come before it was archived
            self._keep(version)
        self._server.start()

    def close(self) -> None:
        """Stops serving."""
        self._store.close()
        self._server.close()
        self._set_image(None)
        if self._recalibration is not None:
            self._recalibration.close()

    @property
    def newest(self) -> int | None:
        """The newest version that is served."""
        return max(self._store.complete(), default=None)

    def manifest(self, version: int) -> Sealed[Manifest] | None:
        """Returns the manifest of a version that is served."""
        stored = self._store.get(version)
        return None if stored is None else stored.sealed

    @property
    def diff(self) -> WeightsDiff:
        """Compares weights with the newest version's file. Write or open a version first."""
        assert self._diff is not None, "no version is open: call prepare_whole or open_version first"
        return self._diff

    def open_version(self, version: int) -> bool:
        """Reads the weights file of a served version into memory. Returns False if its files are lost or damaged."""
        image = restore_image(self._store, version, WEIGHTS_FILE)
        if image is not None:
            self._set_image(image)
        return image is not None

    def prepare_whole(self, named: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Writes and signs a version in a hidden folder, without a delta."""
        with explain_full_disk(self._store.folder, remedy=DISK_REMEDY):
            folder = self._new_folder(version)
            # Not flushed to disk: after a power cut the next process makes this version again.
            save_tensors(named, folder / WEIGHTS_FILE, sync=False)
            image = FileImage.read(folder / WEIGHTS_FILE)
            publish_image(folder, WEIGHTS_FILE, image, version=version, signing=self._signing, whole=True)
        self._set_image(image)
        return folder

    def prepare(
        self, changes: list[ChangedWords], version: int, adapters: Sequence[AdapterMatrices] = ()
    ) -> Path:
        """Writes and signs a version in a hidden folder, from the words that changed since the version before it.

        With `adapters` they are sent instead of the words, as long as version 0, to which they are added, is served.
        """
        first = self._store.get(0) if adapters else None
        before = first if first is not None else self._store.get(version - 1)
        assert before is not None, f"version {version - 1} is not served"
        image = self.diff.image
        if first is None:
            hasher = file_hasher()
            delta = ImageDelta(before.sealed.body, image.change(changes, hasher), hasher)
        else:
            image.replace(changes)
            delta = ImageDelta(before.sealed.body, [encode_adapters(adapters, image.num_bytes)])
        with explain_full_disk(self._store.folder, remedy=DISK_REMEDY):
            folder = self._new_folder(version)
            publish_image(
                folder,
                WEIGHTS_FILE,
                image,
                version=version,
                signing=self._signing,
                delta=delta,
                # A node that joins late fetches version 0 and the adapters.
                whole=first is None and version % self._settings.snapshot_every == 0,
            )
            if version == self._settings.last_version and not (folder / WEIGHTS_FILE).exists():
                image.write(folder / WEIGHTS_FILE)
        return folder

    def adapters(self, version: int) -> list[AdapterMatrices]:
        """Returns the adapters that a served version sends; none if it sends words."""
        payload = self._store.path(version) / (WEIGHTS_FILE + DELTA_SUFFIX)
        if not payload.is_file() or not is_adapter_payload(payload):
            return []
        return decode_adapters(payload.read_bytes(), self.diff.image.num_bytes)

    def serve(self, folder: Path, version: int) -> Sealed[Manifest]:
        """Renames the folder that was prepared to its final name and serves it."""
        final = self._store.path(version)
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        manifest = self._store.adopt(version)
        self._keep(version)
        return manifest

    def write_newest_whole(self) -> None:
        """Writes the newest version's whole file into its folder, for those who use it after the run has stopped."""
        if self._diff is None or self.newest is None:
            return
        path, manifest = self._store.path(self.newest) / WEIGHTS_FILE, self.manifest(self.newest)
        # A publication that failed has changed the image already.
        if (
            not path.exists()
            and manifest is not None
            and self._diff.image.digest() == manifest.body.weights_digest
        ):
            with suppress(DiskFull):
                self._diff.image.write(path)
                self._link_newest(self.newest)

    def _keep(self, version: int) -> None:
        """Adds a version that is served to the archive, and links to it as the newest if its weights are whole."""
        folder = self._store.path(version)
        with explain_full_disk(self._store.folder, remedy=DISK_REMEDY):
            if self._archive is not None and folder.exists():
                self._archive.add(folder, version)
            if version == self.newest and (folder / WEIGHTS_FILE).exists():
                self._link_newest(version)

    def _link_newest(self, version: int) -> None:
        link_newest(self._store.path(version), version, self._store.folder.parent)

    def _new_folder(self, version: int) -> Path:
        final = self._store.path(version)
        hidden = final.with_name(f".{final.name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
        copy_all_but_weights(self._model_folder, hidden)
        return hidden

    def _set_image(self, image: FileImage | None) -> None:
        if self._diff is not None:
            self._diff.close()
        self._diff = None if image is None else WeightsDiff(image, torch.device(self._settings.device))

    def announce(
        self,
        manifest: Sealed[Manifest],
        report: StepReport | None,
        rederived: Rederived | None = None,
    ) -> None:
        """Announces a version to the coordinator, which accepts the same version again after a crash.

        A calibration that was repeated meanwhile is announced with it.
        """
        version, later = manifest.body.version, None
        if self._recalibration is not None:
            later = self._recalibration.before_announcement(version, self.diff)
        self._send(manifest, report, rederived, later)
        self._log.info(
            "version announced",
            version=version,
            bytes=manifest.body.payload_bytes,
            bytes_since_last=manifest.body.follow_bytes,
            origin=self.origin_url,
        )

    def measure_distance(self, version: int) -> float | None:
        """Returns how far the weights of the version, just announced, are from those of the calibration; None if the run has none.

        Starts to measure its noise if that is due. Nobody waits for this: workers fetch the version meanwhile.
        """
        if self._recalibration is None or not self._recalibration.repeats:
            return None
        return self._recalibration.after_announcement(
            version, self.diff, self._ask_doubt() if version else None
        )

    def recalibrate(self) -> None:
        """Measures the newest version if work of it is in doubt, and announces it again with the new calibration.

        Called while the run waits for rollouts, which may all be void by the old calibration. Nothing may be publishing.
        """
        version, recalibration = self.newest, self._recalibration
        # No file is open while the versions since a checkpoint are made again.
        if recalibration is None or not recalibration.repeats or version is None or self._diff is None:
            return
        later, manifest = recalibration.take(version), self.manifest(version)
        if later is not None and manifest is not None:
            self._send(manifest, None, None, later)
        elif (doubt := self._ask_doubt()) is not None:
            recalibration.measure_if_due(version, self.diff, doubt)

    def _ask_doubt(self) -> NoiseDoubt | None:
        """Asks the coordinator, every few seconds at most, whether work is in doubt because of the calibration."""
        if time.monotonic() < self._doubt_asked_s + DOUBT_POLL_S:
            return None
        self._doubt_asked_s = time.monotonic()
        try:
            return self._client.call("GET", "/v1/info", None, Info).noise_doubt
        except (Refused, Unreachable):
            return None  # asked again soon

    def _send(
        self,
        manifest: Sealed[Manifest],
        report: StepReport | None,
        rederived: Rederived | None,
        later: LaterNoise | None,
    ) -> None:
        """Announces a version; `later` is a new calibration that judges its work."""
        version = manifest.body.version
        body = Announce(
            manifest=manifest, origin_url=self.origin_url, report=report, rederived=rederived, noise=later
        )
        try:
            self._client.call_until(
                f"the coordinator to take version {version}",
                "POST",
                "/v1/policies",
                body,
                Recorded,
                deadline_s=self._settings.deadline_s,
            )
        except Refused as refused:
            if self._recalibration is not None and later is not None and refused.code == "request.malformed":
                self._recalibration.refused(later, refused)
                self._send(manifest, report, rederived, None)
                return
            if refused.code != "request.conflict":
                raise
            raise ValueError(
                f"the coordinator has another version {version} than this trainer made ({refused.problem.detail}); "
                "resume with the trainer folder that announced it, or start a new run"
            ) from None
        if self._recalibration is not None:
            self._recalibration.announced(later)
